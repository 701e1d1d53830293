"""Two fleets: a node works for one of them, and the other's head is told so where its operators look."""

from __future__ import annotations

import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import Reading, complete, generate, open_session, read_all
from tests.e2e.harness import HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import local_node
from tests.e2e.refused import refusal_of

DIALED = pytest.mark.parametrize("world", ["plain", "link"], indirect=True)
N = 200


async def shown(server: HeadServer) -> admin_pb.Node:
    (node,) = (await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes
    return node


async def refused_for(server: HeadServer, *words: str) -> None:
    """The head lists its one node as down, and says why; callers are told that no node is there."""
    node = await shown(server)
    assert node.state == admin_pb.NODE_STATE_DOWN
    for word in ("same fleet id", *words):
        assert word in node.state_detail, node.state_detail
    assert (await refusal_of(complete(server, prompt(5), 4))).code in ("UNAVAILABLE", "NOT_FOUND")


@DIALED
async def test_a_node_that_works_for_a_fleet_refuses_the_head_of_another(world: World) -> None:
    node = await local_node(world, "node-1", decode_rate=100.0)
    ours = await world.head(node, fleet_id="ours")
    session_id = await open_session(ours, prompt(20))
    reading = Reading(generate(ours, session_id, N, extend_context=True))
    await reading.until_tokens(5)
    theirs = await world.head(node, fleet_id="theirs", head_id="head-2")
    await refused_for(theirs, "ours", "theirs", "works for")
    answer = await reading.end()
    assert (answer.tokens, answer.moves) == (expected(prompt(20), N), [])
    # A session at rest is work as well.
    await refused_for(theirs, "ours")
    assert [held.session_id for held in (await node.holdings()).holdings] == [session_id]


@DIALED
async def test_a_node_takes_up_work_for_another_fleet_once_its_own_has_let_it_go(world: World) -> None:
    node = await local_node(world, "node-1")
    ours = await world.head(node, fleet_id="ours")
    session_id = await open_session(ours, prompt(20))
    await read_all(generate(ours, session_id, 4))
    theirs = await world.head(node, fleet_id="theirs", head_id="head-2")
    await refused_for(theirs, "ours")
    await ours.fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))
    await ours.admin.RemoveNode(admin_pb.RemoveNodeRequest(node="node-1"))
    (known,) = theirs.head.fleet.nodes
    await until(lambda: known.usable, "the other head has the node")
    answer = await read_all(complete(theirs, prompt(9), 8))
    assert answer.tokens == expected(prompt(9), 8)


@DIALED
async def test_a_node_started_for_a_fleet_refuses_the_head_of_another_though_it_is_idle(world: World) -> None:
    node = await world.node("node-1", "--fleet-id", "ours")
    theirs = await world.head(node, fleet_id="theirs")
    await refused_for(theirs, "ours", "theirs", "--fleet-id")
    ours = await world.head(node, fleet_id="ours", head_id="head-2")
    assert (await read_all(complete(ours, prompt(9), 8))).tokens == expected(prompt(9), 8)


@pytest.mark.parametrize("world", ["join"], indirect=True)
async def test_a_node_of_another_fleet_that_dials_in_stays_out_and_says_why(world: World) -> None:
    server = await world.head(fleet_id="theirs")
    node = await local_node(world, "stranger", fleet_id="ours")
    await until(lambda: bool(node.stub.told), "the node has told of its refusal")
    line = node.stub.told[0]  # it dials again, and may have told of that by now
    assert "cannot join" in line
    assert "fleet id" in line
    assert list((await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes) == []
