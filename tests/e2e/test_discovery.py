"""Nodes found by a DNS name: real nodes on several loopback addresses, and a resolver the test changes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet_service.links.resolver import SystemResolver
from fleet_service.runtime.protocols import ResolveError
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.e2e.callers import Reading, complete, generate, open_session, open_session_on, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import LocalNode
from tests.e2e.refused import refusal_of
from tests.ports import quiet_port


@dataclass
class Pods:
    """Nodes pod-1, pod-2 … at 127.0.0.1, 127.0.0.2 … of one port, and what their name is said to have."""

    port: int
    hosts: list[str] = field(default_factory=list)
    failure: str = ""
    asked: int = 0

    @property
    def entry(self) -> str:
        return f"dns:///pods.example:{self.port}"

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        assert (name, port) == ("pods.example", self.port)
        self.asked += 1
        if self.failure:
            raise ResolveError(self.failure)
        return [f"{host}:{port}" for host in self.hosts]

    async def start(self, world: World, number: int, host: str = "") -> LocalNode:
        """Start pod `number`, on all its machine's addresses when `host` says so, and list it."""
        settings = StubSettings(
            address=f"{host or f'127.0.0.{number}'}:{self.port}",
            identity=f"pod-{number}",
            models=[(MODEL, 4096)],
            engine=EngineSettings(4, 200.0, 0.0),
        )
        node = await LocalNode(StubNode(settings)).start()
        world.nodes.append(node)
        self.hosts.append(f"127.0.0.{number}")
        return node


@pytest.fixture
def pods() -> Pods:
    return Pods(quiet_port())


def names(server: HeadServer) -> set[str]:
    return {node.name for node in server.head.fleet.nodes if node.usable}


async def listed(server: HeadServer) -> admin_pb.ListNodesResponse:
    return await server.admin.ListNodes(admin_pb.ListNodesRequest())


async def test_a_fleet_grows_and_shrinks_with_its_name_and_no_token_is_lost(world: World, pods: Pods) -> None:
    await pods.start(world, 1)
    second = await pods.start(world, 2)
    server = await world.head(pods.entry, resolver=pods, policy="round-robin")
    assert names(server) == {"pod-1", "pod-2"}
    await pods.start(world, 3)
    await until(lambda: names(server) == {"pod-1", "pod-2", "pod-3"}, "the third is up")
    session_id = await open_session_on(server, second, prompt(10))
    reading = Reading(generate(server, session_id, 200))
    await reading.until_tokens(5)
    pods.hosts.remove("127.0.0.2")
    known = server.head.fleet.find("pod-2")
    assert known is not None
    await until(lambda: known.unlisted, "the second gets no new work")
    placed = [await read_all(complete(server, prompt(8, salt), 4)) for salt in range(4)]
    assert {each.started[0].node for each in placed} == {"pod-1", "pod-3"}
    answer = await reading.end()
    assert (answer.tokens, answer.moves) == (expected(prompt(10), 200), [])
    # Its session goes on where there is room for new work.
    again = await read_all(generate(server, session_id, 4))
    assert again.started[0].node in {"pod-1", "pod-3"}
    await second.kill()
    await until(lambda: server.head.fleet.find("pod-2") is None, "the second is forgotten")
    assert {node.name for node in (await listed(server)).nodes} == {"pod-1", "pod-3"}


async def test_a_fleet_lives_on_while_its_dns_is_down_and_says_so(world: World, pods: Pods) -> None:
    await pods.start(world, 1)
    second = await pods.start(world, 2)
    server = await world.head(pods.entry, resolver=pods)
    pods.failure = "the DNS server gives no answer"
    asked = pods.asked
    await until(lambda: pods.asked > asked + 3, "it was looked up in vain")
    await second.kill()
    await until(lambda: names(server) == {"pod-1"}, "the second is down")
    answer = await read_all(complete(server, prompt(10), 8))
    assert answer.tokens == expected(prompt(10), 8)
    told = await listed(server)
    assert len(told.nodes) == 2
    (name,) = told.names
    assert (name.name, name.failure) == (pods.entry, pods.failure)
    assert list(name.addresses) == [f"127.0.0.{n}:{pods.port}" for n in (1, 2)]
    assert name.resolved_time.seconds > 1_600_000_000
    pods.failure = ""
    await second.start()
    await until(lambda: names(server) == {"pod-1", "pod-2"}, "the second is back")
    await until(lambda: not server.head.operators.list_names()[0].failure, "the name is looked up again")


async def test_a_node_that_a_name_lists_by_two_addresses_is_one_node(world: World, pods: Pods) -> None:
    node = await pods.start(world, 1, host="0.0.0.0")
    pods.hosts.append("127.0.0.2")
    server = await world.head(pods.entry, resolver=pods)
    await until(lambda: len(server.head.fleet.nodes) == 1, "one node is left of the two addresses")
    told = await listed(server)
    assert [node.name for node in told.nodes] == ["pod-1"]
    (other,) = told.names[0].other_ways
    assert {other, told.nodes[0].address} == set(told.names[0].addresses)
    await read_all(complete(server, prompt(10), 4))
    assert len(await node.journal(kind="generate")) == 1


async def test_a_name_is_added_and_removed_like_a_node(world: World, pods: Pods) -> None:
    await pods.start(world, 1)
    await pods.start(world, 2)
    server = await world.head(resolver=pods)
    added = await server.admin.AddNode(admin_pb.AddNodeRequest(address=pods.entry))
    assert not added.HasField("node")
    assert (added.name.name, len(added.name.addresses)) == (pods.entry, 2)
    assert {(node.name, node.found_by) for node in (await listed(server)).nodes} == {
        ("pod-1", pods.entry),
        ("pod-2", pods.entry),
    }
    twice = server.admin.AddNode(admin_pb.AddNodeRequest(address=pods.entry))
    assert (await refusal_of(twice)).what == ("ALREADY_EXISTS", "NODE_ALREADY_EXISTS")
    wrong = server.admin.AddNode(admin_pb.AddNodeRequest(address="dns://10.0.0.1/pods.example"))
    assert (await refusal_of(wrong)).what == ("INVALID_ARGUMENT", "INVALID_FIELD")
    await open_session(server, prompt(10))
    removed = await server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node=pods.entry))
    assert (removed.HasField("node"), removed.name.name) == (False, pods.entry)
    told = await listed(server)
    assert (list(told.nodes), list(told.names)) == ([], [])
    unknown = server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node=pods.entry))
    assert (await refusal_of(unknown)).what == ("NOT_FOUND", "NODE_NOT_FOUND")


async def test_a_found_node_that_is_removed_stays_away(world: World, pods: Pods) -> None:
    await pods.start(world, 1)
    await pods.start(world, 2)
    server = await world.head(pods.entry, resolver=pods)
    await server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node="pod-2"))
    asked = pods.asked
    await until(lambda: pods.asked > asked + 3, "it was looked up again")
    told = await listed(server)
    assert [node.name for node in told.nodes] == ["pod-1"]
    assert list(told.names[0].removed) == [f"127.0.0.2:{pods.port}"]


async def test_a_node_of_this_machine_is_found_by_the_name_localhost(world: World) -> None:
    addresses = await SystemResolver().resolve("localhost", quiet_port())
    port = int(addresses[0].rpartition(":")[2])
    settings = StubSettings(address=f"localhost:{port}", identity="here", models=[(MODEL, 4096)])
    node = await LocalNode(StubNode(settings)).start()
    world.nodes.append(node)
    server = await world.head(f"dns:///localhost:{port}", resolver=SystemResolver())
    await until(lambda: [node.name for node in server.head.fleet.nodes] == ["here"], "it is one node")
    answer = await read_all(complete(server, prompt(10), 4))
    assert (answer.started[0].node, answer.tokens) == ("here", expected(prompt(10), 4))
    (name,) = (await listed(server)).names
    assert sorted(name.addresses) == sorted(addresses)


async def test_an_address_of_a_name_where_nobody_listens_is_a_node_that_is_down(
    world: World, pods: Pods
) -> None:
    await pods.start(world, 1)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.2", pods.port))
        pods.hosts.append("127.0.0.2")
        server = await world.head(pods.entry, resolver=pods)
        (down,) = [node for node in (await listed(server)).nodes if node.name != "pod-1"]
    assert (down.address, down.state) == (f"127.0.0.2:{pods.port}", admin_pb.NODE_STATE_DOWN)
    assert down.state_detail
    assert down.found_by == pods.entry
