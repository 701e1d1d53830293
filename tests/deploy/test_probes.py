"""The probes of the manifests, asked of a head and a node that run with the manifests' own settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.processes import Children, command_of
from fleet_service.api.server import FLEET_SERVICE
from tests.deploy.manifests import FOLDER, Object, command_line, container_ports, named, probes, written
from tests.ports import quiet_port

OBJECTS = written()
HEAD = named(OBJECTS, "StatefulSet", "fleet-head")
NODE = named(OBJECTS, "StatefulSet", "fleet-node")
SERVING = health_pb2.HealthCheckResponse.SERVING
PATIENCE_S = 60.0


async def health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return int(answer.status)


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


@pytest.fixture
async def token(children: Children, tmp_path: Path) -> Path:
    made = tmp_path / "token"
    run, _ = await children.start("token", [command_of("fleet"), "token", "--file", str(made)], "")
    assert await run.process.wait() == 0
    return made


@pytest.fixture
async def access(children: Children, tmp_path: Path) -> Path:
    made = tmp_path / "access.toml"
    add = [command_of("fleet"), "access", "add", "frontend", "--may", "call", "--file", str(made)]
    run, _ = await children.start("access", add, "")
    assert await run.process.wait() == 0
    return made


def replaced(words: list[str], **values: str) -> list[str]:
    """A command line with other values for some flags."""
    for name, value in values.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = value
    return words


async def test_a_head_is_ready_without_nodes_and_usable_once_a_node_is(
    children: Children, token: Path, access: Path
) -> None:
    node_at = f"127.0.0.1:{quiet_port()}"
    words = replaced(command_line(HEAD), config=str(FOLDER / "fleet.toml"))
    # Beyond what only a cluster has, everything is as the manifests say.
    words += ["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--join-listen=127.0.0.1:0"]
    words += [
        "--metrics-listen=127.0.0.1:0",
        f"--node={node_at}",
        f"--token-file={token}",
        f"--set=access_file={access}",
    ]
    _, line = await children.start("head", [command_of("fleet"), *words[1:]], "fleet: serving")
    said = line.replace(",", "").split()
    callers = said[said.index("callers") + 2]
    assert await answers(HEAD, {"callers": callers}) == dict.fromkeys(dict(probes(HEAD)), SERVING)
    assert await health(callers, FLEET_SERVICE) != SERVING

    words = replaced(command_line(NODE), listen=node_at, token_file=str(token))
    await children.start("node", [command_of(words[0]), *words[1:]], "fleet-node: ")
    assert await answers(NODE, {"node": node_at}) == dict.fromkeys(dict(probes(NODE)), SERVING)
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(callers) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=FLEET_SERVICE))
        async for answer in watch:
            if answer.status == SERVING:
                break
        watch.cancel()
