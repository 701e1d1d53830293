"""The image's recipe and the compose file: they name files, flags and ports that there are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_service import __version__
from fleet_service.addresses import ADMIN_PORT, CALLERS_PORT, METRICS_PORT, NODE_PORT, split_address
from fleet_service.config import StoreConfig
from fleet_service.config_sources import load
from fleet_service.keeping import folder_of
from tests.commandlines import unknown_words

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
PROMETHEUS = ROOT / "deploy" / "prometheus"


def copied() -> list[str]:
    """The files and folders of the checkout that go into the build."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    return [name for line in lines for name in line.split()]


# ------------------------------------------------------------------------------------------------ the image


def test_the_image_has_all_that_the_wheel_is_built_of(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("_gen", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=source, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.whl"))


def test_what_the_image_copies_is_not_ignored() -> None:
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert sorted(rule.removeprefix("!") for rule in rules if rule.startswith("!")) == sorted(copied())


def test_the_image_runs_the_head_as_nobody_in_particular() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert stages == ["python:3.11-slim", "python:3.11-slim"]
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["65532:65532"]
    assert re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE) == ['["fleet"]']
    assert re.findall(r"^STOPSIGNAL (.*)$", DOCKERFILE, re.MULTILINE) == ["SIGTERM"]
    # Arguments of a build stay in the image's history.
    assert not re.search(r"^(ARG|ADD)\b", DOCKERFILE, re.MULTILINE)


# ---------------------------------------------------------------------------------------------- the compose


def words_of(service: dict[str, Any]) -> list[str]:
    return [*service.get("entrypoint", ["fleet"]), *service["command"]]


def flags_of(service: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [word.partition("=") for word in service["command"] if word.startswith("--")]
    return [(name, value) for name, _, value in pairs]


def test_the_commands_know_their_flags() -> None:
    assert sorted(OURS) == ["head", "node-1", "node-2"]
    assert [unknown_words(words_of(service)) for service in OURS.values()] == [[], [], []]


def test_the_head_s_flags_make_settings_that_are_accepted() -> None:
    flags = flags_of(SERVICES["head"])
    given = dict(flags) | {"--node": ",".join(value for name, value in flags if name == "--node")}
    names = {
        "--listen": "listen.callers",
        "--admin-listen": "listen.admin",
        "--metrics-listen": "listen.metrics",
        "--node": "nodes",
        "--otlp-endpoint": "telemetry.otlp_endpoint",
        "--insecure-no-auth": "insecure_no_auth",
        "--data-dir": "store.folder",
    }
    values = {names[flag]: (flag, value or True) for flag, value in given.items()}
    config = load(flags=values, environ={}).config
    listen = config.listen
    ports = [split_address(address)[1] for address in (listen.callers, listen.admin, listen.metrics)]
    assert ports == [CALLERS_PORT, ADMIN_PORT, METRICS_PORT]
    nodes = [split_address(node) for node in config.nodes]
    assert nodes == [(name, NODE_PORT) for name in OURS if name != "head"]
    assert config.telemetry.otlp_endpoint.removeprefix("http://").partition(":")[0] in SERVICES
    stop_s = int(SERVICES["head"]["stop_grace_period"].removesuffix("s"))
    assert stop_s >= config.shutdown_grace_s + 5


def test_what_the_head_keeps_outlives_its_container() -> None:
    folder = dict(flags_of(SERVICES["head"]))["--data-dir"]
    (volume,) = [each for each in SERVICES["head"]["volumes"] if each.endswith(f":{folder}")]
    assert volume.partition(":")[0] in COMPOSE["volumes"]
    # It is the only place that the head can write to, and a new volume gets its owner from the image.
    assert SERVICES["head"]["read_only"]
    (user,) = re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE)
    assert f"RUN install -d -o {user} -g {user} -m 0700 {folder}\n" in DOCKERFILE


def test_without_a_setting_a_head_of_the_image_keeps_what_it_has_in_the_same_folder() -> None:
    environ = dict(re.findall(r"^ENV (STATE_DIRECTORY)=(\S+)$", DOCKERFILE, re.MULTILINE))
    folder = folder_of(StoreConfig(), "head-1", environ)
    assert str(folder) == dict(flags_of(SERVICES["head"]))["--data-dir"]


def test_nodes_listen_where_the_head_dials_and_keep_their_names() -> None:
    for name in ("node-1", "node-2"):
        assert split_address(dict(flags_of(SERVICES[name]))["--listen"])[1] == NODE_PORT
        assert SERVICES[name]["hostname"] == name


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    # Nobody is asked who he is, so they must not.
    assert "--insecure-no-auth" in SERVICES["head"]["command"]


def test_containers_depend_on_ones_that_there_are_and_mount_folders_that_exist() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for volume in service.get("volumes", ()):
            folder, _, rest = volume.partition(":")
            if folder not in COMPOSE["volumes"]:
                assert (ROOT / "deploy" / folder).is_dir()
                assert rest.endswith(":ro")
        if "build" in service:
            assert service["image"] == f"fleet-head:{__version__}"
            assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_prometheus_finds_the_head_where_its_file_says() -> None:
    assert SERVICES["prometheus"]["network_mode"] == "service:head"
    targets = re.findall(r'targets: \["(.*)"\]', (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert targets == [dict(flags_of(SERVICES["head"]))["--metrics-listen"]]
    assert any(port.endswith(":9090") for port in SERVICES["head"]["ports"])


def test_jaeger_is_the_release_that_the_other_ways_to_start_it_use() -> None:
    text = (ROOT / "deploy" / "jaeger" / "container").read_text(encoding="utf-8")
    assert shlex.split(text.splitlines()[-1])[-1] == SERVICES["jaeger"]["image"]


def compose_plugin() -> bool:
    docker = shutil.which("docker")
    command = [docker or "", "compose", "version"]
    return docker is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not compose_plugin(), reason="docker compose is not installed")
def test_docker_compose_takes_the_file() -> None:
    command = ["docker", "compose", "-f", "deploy/compose.yaml", "config", "--quiet"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
