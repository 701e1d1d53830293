"""The manifests' commands run for real, with their own settings, and their probes are answered."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.processes import Children, command_of
from fleet_service.api.server import FLEET_SERVICE
from tests.certificates import Authority
from tests.deploy.manifests import (
    FOLDER,
    KUBECTL,
    Object,
    command_line,
    container_of,
    container_ports,
    named,
    probes,
    rendered,
    written,
)
from tests.ports import quiet_port

SERVING = health_pb2.HealthCheckResponse.SERVING
PATIENCE_S = 60.0
SECRETS = "/etc/fleet"
VOLUME = "/var/lib/fleet"
TLS_NAME = "fleet-nodes"


@dataclass(frozen=True)
class Running:
    """Where a head's listeners are."""

    callers: str
    metrics: str


class Cluster:
    """Runs what the containers of the manifests run. `secrets` is what they have at /etc/fleet.

    What is to be at /var/lib/fleet is in `volume`.
    """

    def __init__(self, objects: list[Object], children: Children, secrets: Path) -> None:
        self.head = named(objects, "StatefulSet", "fleet-head")
        self.node = named(objects, "StatefulSet", "fleet-node")
        self._children = children
        self._secrets = secrets
        self.volume = secrets.with_name("volume")

    async def make_secrets(self) -> None:
        """As the page about the manifests tells to."""
        for folder in ("token", "access", "config"):
            (self._secrets / folder).mkdir()
        text = (FOLDER / "fleet.toml").read_text(encoding="utf-8")
        (self._secrets / "config" / "fleet.toml").write_text(self._placed(text), encoding="utf-8")
        add = ["access", "add", "frontend", "--may", "call", "--file", f"{SECRETS}/access/access.toml"]
        for words in (["token", "--file", f"{SECRETS}/token/token"], add):
            run, _ = await self._children.start(
                "secret", [command_of("fleet"), *map(self._placed, words)], ""
            )
            assert await run.process.wait() == 0

    async def start_head(self, node_at: str) -> Running:
        """Beyond ports and the node's address, which a cluster gives, all is as the manifests say."""
        places = [f"--{name}listen=127.0.0.1:0" for name in ("", "admin-", "join-", "metrics-", "page-")]
        line = await self._start(self.head, [*places, f"--node={node_at}"], "fleet: serving")
        words = line.replace(",", "").split()
        at = words[words.index("metrics") + 2]
        return Running(callers=words[words.index("callers") + 2], metrics=at)

    async def start_node(self, address: str) -> None:
        await self._start(self.node, [f"--listen={address}"], "fleet-node: ")

    async def _start(self, workload: Object, more: list[str], ready: str) -> str:
        program, *words = map(self._placed, command_line(workload))
        variables = [f"{each['name']}={each['value']}" for each in container_of(workload).get("env", ())]
        # The manifests say where it keeps what it has.
        variables = ["--unset=FLEET_STORE__FOLDER", *map(self._placed, variables)]
        command = ["env", *variables, command_of(program), *words, *more]
        _, line = await self._children.start(workload["metadata"]["name"], command, ready)
        return line

    def _placed(self, text: str) -> str:
        return text.replace(SECRETS, str(self._secrets)).replace(VOLUME, str(self.volume))


async def health(address: str, service: str, credentials: grpc.ChannelCredentials | None = None) -> int:
    async with _channel(address, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return int(answer.status)


async def until_serving(address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
    """Until the head has a node that it can use."""
    async with asyncio.timeout(PATIENCE_S), _channel(address, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=FLEET_SERVICE))
        async for answer in watch:
            if answer.status == SERVING:
                break
        watch.cancel()


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", TLS_NAME)])


async def answers(workload: Object, ports: dict[str, str]) -> dict[str, int]:
    """What each probe is told. `ports`: where each port of the container really is."""
    names = {number: name for name, number in container_ports(workload).items()}
    return {
        name: await health(ports[names[probe["grpc"]["port"]]], probe["grpc"]["service"])
        for name, probe in probes(workload)
    }


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    async with Children(tmp_path) as children:
        yield children


async def test_a_head_is_ready_without_nodes_and_usable_once_a_node_is(
    children: Children, tmp_path: Path
) -> None:
    secrets, node_at = tmp_path / "secrets", f"127.0.0.1:{quiet_port()}"
    secrets.mkdir()
    cluster = Cluster(written(), children, secrets)
    await cluster.make_secrets()
    head = await cluster.start_head(node_at)
    all_serving = dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), SERVING)
    assert await answers(cluster.head, {"callers": head.callers}) == all_serving
    assert await health(head.callers, FLEET_SERVICE) != SERVING

    await cluster.start_node(node_at)
    assert await answers(cluster.node, {"node": node_at}) == all_serving
    await until_serving(head.callers)
    assert (cluster.volume / "head.db").is_file()


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
async def test_with_tls_the_head_believes_the_nodes_by_the_name_of_their_service(
    children: Children, tmp_path: Path
) -> None:
    secrets, node_at = tmp_path / "secrets", f"127.0.0.1:{quiet_port()}"
    # One certificate serves as both secrets here, and has no address.
    tls = secrets / "tls"
    tls.mkdir(parents=True)
    authority = Authority(tls)
    pair = authority.issue("tls", TLS_NAME)
    pair.cert.rename(tls / "tls.crt")
    (tls / "ca.crt").write_bytes(authority.ca.read_bytes())
    cluster = Cluster(rendered(tmp_path / "overlay", "tls"), children, secrets)
    await cluster.make_secrets()
    await cluster.start_node(node_at)
    head = await cluster.start_head(node_at)
    await until_serving(head.callers, grpc.ssl_channel_credentials((tls / "ca.crt").read_bytes()))

    for name, probe in probes(cluster.head):
        assert probe["httpGet"] == {"port": "metrics", "path": "/metrics"}, name
    url = head.metrics.removesuffix("/metrics") + "/metrics"
    answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=PATIENCE_S)
    with answer:
        assert answer.status == 200
