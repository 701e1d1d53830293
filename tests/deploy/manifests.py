"""The Kubernetes manifests as objects, and how they hang together."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fleet_service.config_sources import Loaded, load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
COMPONENTS = ("tls", "monitoring")
CONFIG_VOLUME = "config"

Object = dict[str, Any]

KUBECTL = shutil.which("kubectl")


def documents(path: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


(KUSTOMIZATION,) = documents(FOLDER / "kustomization.yaml")


def written() -> list[Object]:
    """The objects that the files hold."""
    return [each for name in KUSTOMIZATION["resources"] for each in documents(FOLDER / name)]


def rendered(overlay: Path, *components: str) -> list[Object]:
    """What `kubectl apply -k` would send with these components, by kubectl. `overlay`: a new folder."""
    assert KUBECTL is not None
    overlay.mkdir()
    kustomization = {
        "resources": [_from(overlay, FOLDER)],
        "components": [_from(overlay, FOLDER / name) for name in components],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    done = subprocess.run(
        [KUBECTL, "kustomize", str(overlay)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _from(start: Path, end: Path) -> str:
    """kubectl takes relative paths only."""
    return os.path.relpath(end.resolve(), start.resolve())


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pod_of(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Object) -> Object:
    container: Object
    (container,) = pod_of(workload)["containers"]
    return container


def command_line(workload: Object) -> list[str]:
    """What runs in the container; the image's entry point is `fleet`."""
    container = container_of(workload)
    return [*container.get("command", ["fleet"]), *container["args"]]


def flag(words: list[str], name: str) -> str:
    """The value that follows a flag."""
    return words[words.index(name) + 1]


def mounts(workload: Object) -> dict[str, Object]:
    """Each volume by where it is mounted; those that are claimed for each pod have a `claim`."""
    volumes = {each["name"]: each for each in pod_of(workload)["volumes"]}
    for claim in workload["spec"].get("volumeClaimTemplates", ()):
        volumes[claim["metadata"]["name"]] = {"name": claim["metadata"]["name"], "claim": claim["spec"]}
    return {each["mountPath"]: volumes[each["name"]] for each in container_of(workload)["volumeMounts"]}


def container_ports(workload: Object) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container_of(workload)["ports"]}


def matches(selector: Object, labels: Object) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def selected(objects: list[Object], selector: Object) -> list[Object]:
    """The workloads whose pods a selector chooses."""
    return [
        each
        for each in of_kind(objects, "StatefulSet")
        if matches(selector, each["spec"]["template"]["metadata"]["labels"])
    ]


def probes(workload: Object) -> Iterator[tuple[str, Object]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield name, container_of(workload)[name]


def settings_of(head: Object) -> Loaded:
    """The settings the head's container runs with. Raises ConfigError."""
    environ = {each["name"]: each["value"] for each in container_of(head).get("env", ())}
    return load(file=FOLDER / Path(flag(command_line(head), "--config")).name, environ=environ)
