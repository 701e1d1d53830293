"""What operators do and see: nodes added, removed, probed and listed, models counted."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from node_stub.reference import StubModel
from tests.e2e.callers import Reading, complete, generate, open_session, open_session_on, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import local_node, local_nodes
from tests.e2e.refused import refusal_of

OTHER = StubModel("other-model")


async def listed(server: HeadServer) -> dict[str, admin_pb.Node]:
    answer = await server.admin.ListNodes(admin_pb.ListNodesRequest())
    assert answer.books_balance
    assert [node.name for node in answer.nodes] == sorted(node.name for node in answer.nodes)
    return {node.name: node for node in answer.nodes}


async def remove(server: HeadServer, node: str) -> admin_pb.Node:
    return (await server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node=node))).node


async def add(server: HeadServer, address: str) -> admin_pb.Node:
    return (await server.admin.AddNode(admin_pb.AddNodeRequest(address=address))).node


def closed_port() -> str:
    """An address where nobody listens."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


async def test_a_node_added_takes_work_at_once(world: World) -> None:
    server = await world.head()
    assert (await refusal_of(complete(server, prompt(10), 4))).what == ("NOT_FOUND", "MODEL_NOT_FOUND")
    node = await local_node(world, "node-1")
    shown = await add(server, node.address)
    assert (shown.name, shown.address, shown.state) == ("node-1", node.address, admin_pb.NODE_STATE_UP)
    answer = await read_all(complete(server, prompt(10), 4))
    assert answer.tokens == expected(prompt(10), 4)


async def test_a_node_that_is_down_can_be_added_and_joins_when_it_comes_up(world: World) -> None:
    node = await local_node(world, "node-1")
    await node.kill()
    server = await world.head()
    shown = await add(server, node.address)
    assert (shown.name, shown.state) == (node.address, admin_pb.NODE_STATE_DOWN)
    assert shown.state_detail
    error = await refusal_of(complete(server, prompt(10), 4))
    assert error.what == ("UNAVAILABLE", "NO_ELIGIBLE_NODE")
    await node.start()
    await until(lambda: server.head.ready, "the node is up")
    assert "node-1" in await listed(server)
    answer = await read_all(complete(server, prompt(10), 4))
    assert answer.tokens == expected(prompt(10), 4)


async def test_what_a_removed_node_runs_goes_on_elsewhere(world: World) -> None:
    first, second = await local_nodes(world, 2)
    server = await world.head(first, second)
    running = await open_session_on(server, first, prompt(10, 1))
    idle = await open_session_on(server, first, prompt(10, 2))
    await read_all(generate(server, idle, 4))
    reading = Reading(generate(server, running, 60))
    await reading.until_tokens(3)
    gone = await remove(server, "node-1")
    assert (gone.name, gone.running, gone.sessions) == ("node-1", 1, 2)
    answer = await reading.end()
    (moved,) = answer.moves
    assert moved.cause == pb.MOVE_CAUSE_NODE_REMOVED
    assert (moved.from_node, moved.to_node) == ("node-1", "node-2")
    assert answer.tokens == expected(prompt(10, 1), 60)
    assert list(await listed(server)) == ["node-2"]
    assert (await read_all(generate(server, idle, 4))).started[0].node == "node-2"
    assert [entry.outcome for entry in await first.journal(running, "generate")] != ["LENGTH"]


async def test_a_removed_node_holds_nothing_of_the_fleet_any_more(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    for salt in range(3):
        await read_all(generate(server, await open_session(server, prompt(10, salt)), 4))
    await remove(server, "node-1")
    held = await node.holdings()
    assert [holding.session_id for holding in held.holdings if not holding.fenced] == []
    assert held.kv_blocks_used == 0


async def test_a_removed_node_can_be_added_again(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    await read_all(generate(server, session_id, 4))
    await remove(server, "node-1")
    assert (await refusal_of(generate(server, session_id, 4))).what == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert (await add(server, node.address)).state == admin_pb.NODE_STATE_UP
    answer = await read_all(generate(server, session_id, 4))
    assert (answer.tokens, answer.moves) == (expected(prompt(10), 4), [])


async def test_a_probe_says_of_each_node_asked_what_it_answered(world: World) -> None:
    up = await local_node(world, "up")
    down = await local_node(world, "down")
    server = await world.head(up, down)
    await down.kill()
    request = admin_pb.ProbeNodesRequest(nodes=["down", up.address, "up"])
    first, second, third = (await server.admin.ProbeNodes(request)).probes
    assert (first.name, first.address, first.reachable) == ("down", down.address, False)
    assert "cannot connect" in first.detail
    for probe in (second, third):
        assert (probe.name, probe.reachable, probe.detail, probe.identity) == ("up", True, "", "up")
        assert [model.name for model in probe.models] == [MODEL.name]
    everything = (await server.admin.ProbeNodes(admin_pb.ProbeNodesRequest())).probes
    assert sorted(probe.name for probe in everything) == ["down", "up"]


async def test_a_probe_of_what_is_no_node_says_so(world: World) -> None:
    server = await world.head()
    await add(server, server.address)  # its own callers' listener: it speaks gRPC, but is no node
    (probe,) = (await server.admin.ProbeNodes(admin_pb.ProbeNodesRequest())).probes
    assert not probe.reachable
    assert "no fleet node" in probe.detail


async def test_the_list_shows_what_a_node_is_and_does(world: World) -> None:
    node = await local_node(world, "node-1", lanes=3, labels={"zone": "eu"})
    server = await world.head(node)
    await open_session(server, prompt(10))
    readings = [Reading(complete(server, prompt(20, salt), 4000)) for salt in range(4)]
    known = server.head.fleet.nodes[0]
    await until(
        lambda: known.report is not None and known.report.lanes_active == 3, "the node reported three lanes"
    )
    shown = (await listed(server))["node-1"]
    assert (shown.address, shown.state) == (node.address, admin_pb.NODE_STATE_UP)
    assert (shown.state_detail, shown.cordoned, shown.reports_stale) == ("", False, False)
    assert dict(shown.labels) == {"zone": "eu"}
    assert list(shown.features) == [
        admin_pb.NODE_FEATURE_INLINE_BIND,
        admin_pb.NODE_FEATURE_LINK,
        admin_pb.NODE_FEATURE_RESUME,
        admin_pb.NODE_FEATURE_RECONCILE,
    ]
    assert (shown.lanes, shown.running, shown.queued, shown.reservations) == (3, 3, 1, 4)
    assert (shown.sessions, shown.outbox, dict(shown.failures)) == (5, 0, {})
    (model,) = shown.models
    assert (model.name, model.revision, model.vocab_size) == (MODEL.name, MODEL.revision, MODEL.vocab_size)
    assert list(model.eos_token_ids) == [MODEL.eos_token_id]
    assert model.max_context_tokens == 32_768
    report = shown.report
    assert (report.max_lanes, report.lanes_active, report.own_lanes_active) == (3, 3, 3)
    assert (report.queue_depth, report.own_queue_depth) == (0, 0)
    assert report.kv_blocks_used >= 6
    assert shown.incarnation
    assert shown.last_seen_time.seconds > 1_600_000_000
    await asyncio.gather(*(reading.leave() for reading in readings))


async def test_another_address_with_the_same_identity_is_refused_and_told_why(world: World) -> None:
    one = await local_node(world, "twin")
    other = await local_node(world, "twin")
    server = await world.head(one)
    shown = await add(server, other.address)
    assert shown.state == admin_pb.NODE_STATE_DOWN
    assert "twin is in use" in shown.state_detail
    assert one.address in shown.state_detail
    answer = await read_all(complete(server, prompt(10), 4))
    assert answer.tokens == expected(prompt(10), 4)
    assert len(await one.journal(kind="generate")) == 1


async def test_a_node_that_moved_to_another_address_keeps_its_name_and_cordon(world: World) -> None:
    old = await local_node(world, "mover")
    new = await local_node(world, "mover")
    server = await world.head(old)
    await server.admin.CordonNode(admin_pb.CordonNodeRequest(node="mover", note="moving"))
    await old.kill()
    known = server.head.fleet.nodes[0]
    await until(lambda: known.state.value == "down", "the old one is down")
    shown = await add(server, new.address)
    assert (shown.name, shown.address, shown.state) == ("mover", new.address, admin_pb.NODE_STATE_UP)
    assert (shown.cordoned, shown.cordon_note) == (True, "moving")
    nodes = await listed(server)
    assert nodes[old.address].state == admin_pb.NODE_STATE_DOWN
    assert not nodes[old.address].models


async def test_models_are_listed_with_their_nodes_and_widest_window(world: World) -> None:
    await local_node(world, "narrow", models={MODEL.name: 1000, OTHER.name: 500})
    await local_node(world, "wide", models={MODEL.name: 2000})
    gone = await local_node(world, "gone", models={MODEL.name: 9000})
    server = await world.head(*world.nodes)
    await gone.kill()
    await until(lambda: sum(node.usable for node in server.head.fleet.nodes) == 2, "one is down")
    models = (await server.fleet.ListModels(pb.ListModelsRequest())).models
    told = [
        (each.model.name, each.model.max_context_tokens, each.nodes_up, each.nodes_known) for each in models
    ]
    assert told == [(OTHER.name, 500, 1, 1), (MODEL.name, 2000, 2, 3)]


async def test_the_books_balance_through_a_crowd_of_comings_and_goings(world: World) -> None:
    nodes = await local_nodes(world, 3, lanes=2)
    server = await world.head(*nodes)
    readings = [Reading(complete(server, prompt(10, salt), 30)) for salt in range(12)]
    await readings[0].until_tokens(1)
    for reading in readings[::3]:
        await reading.leave()
    await remove(server, "node-2")
    await listed(server)
    for salt, reading in enumerate(readings):
        if salt % 3:
            assert (await reading.end()).tokens == expected(prompt(10, salt), 30)
