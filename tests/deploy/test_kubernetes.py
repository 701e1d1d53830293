"""The Kubernetes manifests: valid by Kubernetes' own schemas, and true to the programs that they run."""

from __future__ import annotations

import copy
import re
from pathlib import Path, PurePath

import kubernetes_validate
import pytest

from fleet_service import __version__, addresses, app
from fleet_service.config import FleetConfig
from tests.commandlines import unknown_words
from tests.deploy.manifests import (
    COMPONENTS,
    FOLDER,
    KUBECTL,
    KUSTOMIZATION,
    Object,
    command_line,
    container_of,
    container_ports,
    flag,
    matches,
    mounts,
    named,
    of_kind,
    pod_of,
    probes,
    rendered,
    selected,
    settings_of,
    written,
)

OLDEST = "1.30"
"""The first with preStop's `sleep`."""
MIB = 1024 * 1024
TOKEN_BYTES = 4
HEAD_BYTES = 512 * MIB
"""What a head takes beside its tokens, with room to spare."""
KEPT_CONTEXT_BYTES, KEPT_OUTPUT_BYTES = 5, 64
"""Of a token on disk, at most; an answer's has part of what belongs to the answer."""
DNS_KEPT_S = 30
"""How long a cluster's DNS keeps its answers, as it is usually set."""
PORTS = {
    "callers": addresses.CALLERS_PORT,
    "admin": addresses.ADMIN_PORT,
    "join": addresses.JOIN_PORT,
    "metrics": addresses.METRICS_PORT,
    "node": addresses.NODE_PORT,
}

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")

OBJECTS = written()
HEAD = named(OBJECTS, "StatefulSet", "fleet-head")
NODE = named(OBJECTS, "StatefulSet", "fleet-node")
both = pytest.mark.parametrize("workload", [HEAD, NODE], ids=["head", "node"])


def validate(each: Object, version: str) -> None:
    kubernetes_validate.validate(each, version, strict=True)


def wrong_with(each: Object, version: str) -> str:
    """What the schema says against it; "" = nothing."""
    try:
        validate(each, version)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


# --------------------------------------------------------------------------------------------- the schemas


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("each", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_every_object_is_valid(each: Object, version: str) -> None:
    assert wrong_with(each, version) == ""


def test_a_field_that_does_not_exist_is_noticed() -> None:
    wrong = copy.deepcopy(HEAD)
    pod_of(wrong)["terminationGrace"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGrace"):
        validate(wrong, OLDEST)


@needs_kubectl
@pytest.mark.parametrize(
    "components", [(), ("tls",), COMPONENTS], ids=lambda names: "+".join(names) or "plain"
)
def test_what_kustomize_makes_of_them_is_valid(tmp_path: Path, components: tuple[str, ...]) -> None:
    objects = rendered(tmp_path / "overlay", *components)
    for each in objects:
        if each["kind"] != "ServiceMonitor":  # of the Prometheus operator, which has schemas of its own
            validate(each, OLDEST)
    assert {each["metadata"].get("namespace", "fleet") for each in objects} == {"fleet"}
    settings = named(objects, "StatefulSet", "fleet-head")
    (config,) = of_kind(objects, "ConfigMap")
    assert mounts(settings)["/etc/fleet/config"]["configMap"]["name"] == config["metadata"]["name"]
    assert config["data"] == {"fleet.toml": (FOLDER / "fleet.toml").read_text(encoding="utf-8")}


# ------------------------------------------------------------------------------- settings, flags, secrets


def check_settings(objects: list[Object]) -> FleetConfig:
    """Flags and variables exist, the settings are accepted, and the files they name are mounted."""
    head, node = (named(objects, "StatefulSet", name) for name in ("fleet-head", "fleet-node"))
    assert [word for each in (head, node) for word in unknown_words(command_line(each))] == []
    loaded = settings_of(head)
    assert loaded.unused_variables == ()
    paths = [each.value for each in loaded.settings() if each.name.endswith("_file") and each.value]
    assert len(paths) >= 2
    paths += [flag(command_line(head), "--config")]
    for workload, needed in ((head, paths), (node, [w for w in command_line(node) if w.startswith("/")])):
        assert [path for path in needed if str(PurePath(path).parent) not in mounts(workload)] == []
    return loaded.config


def test_the_settings_are_ones_and_their_files_are_mounted() -> None:
    config = check_settings(OBJECTS)
    assert not config.insecure_no_auth
    assert (config.log.format, config.head.fleet_id) == ("json", "default")


@needs_kubectl
def test_with_tls_every_listener_and_link_has_it(tmp_path: Path) -> None:
    objects = rendered(tmp_path / "overlay", "tls")
    config = check_settings(objects)
    assert all(each.files() for each in (config.callers_tls, config.admin_tls, config.join_tls))
    assert config.node_tls.enabled
    words = command_line(named(objects, "StatefulSet", "fleet-node"))
    assert {"--tls-cert", "--tls-key"} <= set(words)
    name = addresses.split_name(config.nodes[0])[0]
    assert config.node_tls.server_name == name
    for workload in of_kind(objects, "StatefulSet"):
        assert [name for name, probe in probes(workload) if "grpc" in probe] == []


@both
def test_secrets_are_for_the_owner_alone_and_followed_when_they_change(workload: Object) -> None:
    secrets = [volume["secret"] for volume in mounts(workload).values() if "secret" in volume]
    assert secrets
    assert {secret["defaultMode"] for secret in secrets} == {0o400}
    # By their group, since they belong to root.
    assert pod_of(workload)["securityContext"]["fsGroup"]
    places = [place for place, volume in mounts(workload).items() if "claim" not in volume]
    mounted = [each for each in container_of(workload)["volumeMounts"] if each["mountPath"] in places]
    assert all(each["readOnly"] and "subPath" not in each for each in mounted)


def test_the_page_about_them_makes_each_secret_with_the_keys_that_are_read() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    made = dict(re.findall(r"create secret generic (\S+) --from-file=(\S+?)(?:=\S+)?$", text, re.MULTILINE))
    config = settings_of(HEAD).config
    read = {
        volume["secret"]["secretName"]: PurePath(path).name
        for path in (config.token_file, config.access_file)
        for mount, volume in mounts(HEAD).items()
        if PurePath(path).parent == PurePath(mount)
    }
    assert made == read
    assert PurePath(flag(command_line(NODE), "--token-file")).name == made["fleet-token"]


# ------------------------------------------------------------------------------ ports, names and selectors


def test_the_ports_are_the_usual_ones_everywhere() -> None:
    listen = settings_of(HEAD).config.listen
    told = {name: addresses.split_address(getattr(listen, name))[1] for name in container_ports(HEAD)}
    told["node"] = addresses.split_address(flag(command_line(NODE), "--listen"))[1]
    assert told == PORTS
    assert container_ports(HEAD) | container_ports(NODE) == PORTS
    # Within the pod, so no port of the container's.
    assert listen.page == f"127.0.0.1:{addresses.PAGE_PORT}"
    annotations = HEAD["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(addresses.METRICS_PORT)


@pytest.mark.parametrize("service", of_kind(OBJECTS, "Service"), ids=lambda each: each["metadata"]["name"])
def test_every_service_leads_to_a_port_of_one_workload(service: Object) -> None:
    (workload,) = selected(OBJECTS, service["spec"]["selector"])
    for port in service["spec"]["ports"]:
        assert container_ports(workload)[port["targetPort"]] == port["port"]


def test_each_port_has_a_service_and_only_nodes_are_without_an_address() -> None:
    services = of_kind(OBJECTS, "Service")
    targets = [port["targetPort"] for service in services for port in service["spec"]["ports"]]
    assert sorted(targets) == sorted(PORTS)
    headless = [s["metadata"]["name"] for s in services if s["spec"].get("clusterIP") == "None"]
    assert headless == ["fleet-nodes"]
    # None of them leads into the cluster from outside by itself.
    assert {service["spec"].get("type", "ClusterIP") for service in services} == {"ClusterIP"}


def test_the_head_looks_up_the_nodes_headless_service() -> None:
    (entry,) = settings_of(HEAD).config.nodes
    name, port = addresses.split_name(entry)
    service = named(OBJECTS, "Service", name)
    assert service["spec"]["clusterIP"] == "None"
    assert [each["port"] for each in service["spec"]["ports"]] == [port]
    assert selected(OBJECTS, service["spec"]["selector"]) == [NODE]
    # Pods that are not ready are not to be found: that is what keeps new work off them.
    assert not service["spec"].get("publishNotReadyAddresses")


@both
def test_every_workload_selects_its_own_pods_and_names_a_service(workload: Object) -> None:
    selector = workload["spec"]["selector"]["matchLabels"]
    assert selected(OBJECTS, selector) == [workload]
    named(OBJECTS, "Service", workload["spec"]["serviceName"])


def test_maintenance_may_take_one_node_and_is_not_held_up_by_the_head() -> None:
    (budget,) = of_kind(OBJECTS, "PodDisruptionBudget")
    assert selected(OBJECTS, budget["spec"]["selector"]["matchLabels"]) == [NODE]
    assert budget["spec"]["maxUnavailable"] == 1 < NODE["spec"]["replicas"]


def test_each_workload_is_closed_but_for_the_ports_it_serves() -> None:
    for workload in (HEAD, NODE):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        (policy,) = [
            each["spec"]
            for each in of_kind(OBJECTS, "NetworkPolicy")
            if matches(each["spec"]["podSelector"]["matchLabels"], labels)
        ]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        opened = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
        assert sorted(opened) == sorted(container_ports(workload))
        assert all(rule["from"] for rule in policy["ingress"])
        # Head and node let each other through in both directions.
        other = NODE if workload is HEAD else HEAD
        reached = [
            port["port"]
            for rule in policy["egress"]
            for peer in rule["to"]
            if matches(
                peer.get("podSelector", {}).get("matchLabels", {}),
                other["spec"]["template"]["metadata"]["labels"],
            )
            for port in rule["ports"]
        ]
        assert reached == (["node"] if workload is HEAD else ["join"])
        assert set(reached) <= set(container_ports(other))


@needs_kubectl
def test_the_monitor_finds_the_metrics_under_the_job_of_the_alerts(tmp_path: Path) -> None:
    objects = rendered(tmp_path / "overlay", "monitoring")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    (service,) = [s for s in of_kind(objects, "Service") if matches(selector, s["metadata"]["labels"])]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "fleet-head"
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert (endpoint["port"], port["port"]) == (port["name"], addresses.METRICS_PORT)


# ------------------------------------------------------------------------------- life and death of a pod


def test_what_the_head_keeps_is_on_a_volume_that_outlives_its_pod() -> None:
    store = settings_of(HEAD).config.store
    assert store.durability == "strict"
    volume = mounts(HEAD)[store.folder]
    # Of one machine at a time, as the head is one.
    assert volume["claim"]["accessModes"] == ["ReadWriteOnce"]
    (mounted,) = [each for each in container_of(HEAD)["volumeMounts"] if each["name"] == volume["name"]]
    assert mounted == {"name": volume["name"], "mountPath": store.folder}
    # A new volume is root's; its group may write to it.
    pod = pod_of(HEAD)["securityContext"]
    assert pod["fsGroup"] == pod["runAsGroup"]
    # Kept unless somebody deletes it, as the page about them says how.
    assert "persistentVolumeClaimRetentionPolicy" not in HEAD["spec"]
    claim = f"{volume['name']}-{HEAD['metadata']['name']}-0"
    assert f"`{claim}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_all_that_the_head_may_keep_fits_onto_its_volume() -> None:
    config = settings_of(HEAD).config
    size = mounts(HEAD)[config.store.folder]["claim"]["resources"]["requests"]["storage"]
    assert size.endswith("Gi")
    context, output = config.head.max_total_context_tokens, config.head.max_finished_tokens
    needed = KEPT_CONTEXT_BYTES * context + KEPT_OUTPUT_BYTES * output
    assert 2 * needed <= int(size.removesuffix("Gi")) * 1024 * MIB


def test_the_head_has_the_time_to_end_in_order() -> None:
    config = settings_of(HEAD).config
    needed_s = config.shutdown_grace_s + app._FLUSH_S
    # The last spans may take 2 s, and Python some to end.
    assert pod_of(HEAD)["terminationGracePeriodSeconds"] >= needed_s + 5


def test_a_node_gets_no_new_work_before_it_is_told_to_end() -> None:
    sleep_s = container_of(NODE)["lifecycle"]["preStop"]["sleep"]["seconds"]
    known_after_s = DNS_KEPT_S + 1.2 * settings_of(HEAD).config.links.dns_refresh_s
    assert sleep_s > known_after_s
    grace_s = float(flag(command_line(NODE), "--grace"))
    assert pod_of(NODE)["terminationGracePeriodSeconds"] >= sleep_s + grace_s + 5


def test_there_is_one_head_at_a_time() -> None:
    # A StatefulSet ends a pod before it starts the next of that name; a Deployment does only when told to.
    assert (HEAD["kind"], HEAD["spec"]["replicas"]) == ("StatefulSet", 1)


def test_all_that_the_head_may_hold_fits_into_its_memory() -> None:
    limits = settings_of(HEAD).config.head
    tokens = limits.max_total_context_tokens + limits.max_finished_tokens
    limit = container_of(HEAD)["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert TOKEN_BYTES * tokens + HEAD_BYTES <= int(limit.removesuffix("Gi")) * 1024 * MIB


@both
def test_a_pod_may_do_no_more_than_it_needs(workload: Object) -> None:
    pod, container = pod_of(workload), container_of(workload)
    assert pod["automountServiceAccountToken"] is False
    # Variables that the platform makes for services would look like settings.
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} == set(container["resources"]["requests"])
    # Held back by a limit, a head would take its nodes for silent, or a node be taken for it.
    assert set(container["resources"]["limits"]) == {"memory"}


@both
def test_the_image_is_that_of_this_version(workload: Object) -> None:
    (image,) = KUSTOMIZATION["images"]
    assert container_of(workload)["image"] == image["name"]
    assert image["newTag"] == __version__
