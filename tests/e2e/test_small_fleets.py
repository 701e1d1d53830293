"""Small fleets on an ordinary day: nodes that come late, hang up, are dead, or serve different models."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from node_stub.reference import StubModel
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.e2e.callers import Reading, complete, generate, open_session, open_session_on, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import LocalNode, local_node, local_nodes
from tests.e2e.refused import refusal_of

OTHER = StubModel("other-model")
IDLE_S = 0.3


async def node_of(server: HeadServer, session_id: str) -> str:
    return (await server.fleet.GetSession(pb.GetSessionRequest(session_id=session_id))).session.node


async def placed(server: HeadServer, count: int) -> list[str]:
    ids = [await open_session(server, prompt(8, salt)) for salt in range(count)]
    return [await node_of(server, session_id) for session_id in ids]


async def usable(server: HeadServer, name: str, *, is_so: bool = True) -> None:
    def as_told() -> bool:
        node = server.head.fleet.find(name)
        return (node is not None and node.usable) == is_so

    await until(as_told, f"{name} is {'up' if is_so else 'down'}")


@pytest.mark.parametrize("world", ["join"], indirect=True)
async def test_nodes_that_dial_in_are_one_node_each_and_serve_on_all_their_lanes(world: World) -> None:
    server = await world.head()
    assert list((await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes) == []
    await local_node(world, "box-a", lanes=1)
    await usable(server, "box-a")
    (known,) = (await server.fleet.ListModels(pb.ListModelsRequest())).models
    assert (known.model.name, known.nodes_up) == (MODEL.name, 1)
    first = await read_all(complete(server, prompt(32), 8))
    assert (first.started[0].node, first.tokens) == ("box-a", expected(prompt(32), 8))
    three = await local_node(world, "box-c", lanes=3)
    await usable(server, "box-c")
    listed = (await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes
    assert sorted((node.name, node.lanes) for node in listed) == [("box-a", 1), ("box-c", 3)]
    ids = [await open_session_on(server, three, prompt(24, salt)) for salt in range(3)]
    answers = await asyncio.gather(*(read_all(generate(server, each, 40)) for each in ids))
    assert [answer.tokens for answer in answers] == [expected(prompt(24, salt), 40) for salt in range(3)]
    assert (await three.holdings()).peak_lanes_active == 3


@pytest.mark.parametrize("world", ["plain", "link"], indirect=True)
async def test_a_node_that_hangs_up_on_idle_connections_keeps_its_head(world: World) -> None:
    settings = StubSettings(identity="impatient", models=[(MODEL, 4096)], idle_timeout_s=IDLE_S)
    node = await LocalNode(StubNode(settings)).start()
    world.nodes.append(node)
    server = await world.head(node)
    session_id = await open_session(server, prompt(8))
    first = await read_all(generate(server, session_id, 8))
    known = server.head.fleet.nodes[0]
    link, epoch = known.link, first.started[0].epoch
    await asyncio.sleep(3 * IDLE_S)
    again = await read_all(generate(server, session_id, 8))
    assert again.tokens == first.tokens == expected(prompt(8), 8)
    append = pb.AppendTokensRequest(session_id=session_id, token_ids=prompt(4, salt=1))
    await asyncio.sleep(3 * IDLE_S)
    await server.fleet.AppendTokens(append)
    grown = await read_all(generate(server, session_id, 8))
    assert grown.tokens == expected(prompt(8) + prompt(4, salt=1), 8)
    assert {again.started[0].epoch, grown.started[0].epoch} == {epoch}
    assert known.link is link
    assert known.failures == {}


@pytest.mark.parametrize("policy", ["load-aware", "least-loaded", "round-robin"])
async def test_a_dead_node_wins_nothing_and_takes_part_once_it_is_back(world: World, policy: str) -> None:
    dead = await local_node(world, "dead")
    await local_node(world, "live")
    await dead.kill()
    server = await world.head(*world.nodes, policy=policy)
    assert await placed(server, 4) == ["live"] * 4
    answer = await read_all(complete(server, prompt(12), 10))
    assert (answer.started[0].node, answer.tokens) == ("live", expected(prompt(12), 10))
    await dead.start()
    await usable(server, "dead")
    assert "dead" in await placed(server, 4)


async def test_each_model_s_sessions_go_to_its_node_and_the_other_one_is_not_blamed(world: World) -> None:
    await local_node(world, "node-a")
    await local_node(world, "node-b", models={OTHER.name: 4096})
    server = await world.head(*world.nodes, policy="round-robin")
    for model, name in ((MODEL, "node-a"), (OTHER, "node-b")) * 2:
        answer = await read_all(complete(server, prompt(12), 8, model=model.name))
        assert (answer.started[0].node, answer.tokens) == (name, expected(prompt(12), 8, model))
    assert [(node.usable, node.failures) for node in server.head.fleet.nodes] == [(True, {})] * 2


async def test_twelve_sessions_on_three_nodes_each_answer_from_their_own(world: World) -> None:
    nodes = await local_nodes(world, 3)
    server = await world.head(*nodes, policy="least-loaded")
    ids = [await open_session(server, prompt(10, salt)) for salt in range(12)]
    where = [await node_of(server, session_id) for session_id in ids]
    assert Counter(where) == {"node-1": 4, "node-2": 4, "node-3": 4}
    answers = await asyncio.gather(*(read_all(generate(server, each, 12)) for each in ids))
    assert [answer.tokens for answer in answers] == [expected(prompt(10, salt), 12) for salt in range(12)]
    assert [answer.started[0].node for answer in answers] == where


async def test_tokens_are_streamed_as_they_come_and_add_up_to_the_answer(world: World) -> None:
    node = await local_node(world, "node-1", decode_rate=50.0)
    server = await world.head(node)
    arrived: list[int] = []
    answer = await read_all(
        complete(server, prompt(20), 40), lambda so_far: arrived.append(len(so_far.tokens))
    )
    assert answer.tokens == expected(prompt(20), 40)
    assert (answer.reason, answer.finished.output_tokens) == ("LENGTH", 40)
    assert len({count for count in arrived if count}) >= 2


async def test_another_head_that_uses_the_same_session_id_gets_its_own_answer(world: World) -> None:
    """The first one has stopped and left its session there; the other may have begun in the same second."""
    node = await local_node(world, "node-1")
    spec = pb.SessionSpec(model=MODEL.name)
    for context in (prompt(8), prompt(8, salt=1)):
        server = await world.head(node)
        create = pb.CreateSessionRequest(session_id="same", spec=spec, token_ids=context)
        await server.fleet.CreateSession(create)
        for _ in range(3):
            answer = await read_all(generate(server, "same", 4))
            assert answer.tokens == expected(context, 4)
        other = await read_all(complete(server, prompt(5), 4))
        assert other.tokens == expected(prompt(5), 4)
        if context == prompt(8):
            world.heads.remove(server)
            await server.stop()
            assert [held.session_id for held in (await node.holdings()).holdings] == ["same"]


async def test_a_silent_peer_of_a_node_keeps_no_head_from_it(world: World) -> None:
    node = await local_node(world, "node-1")
    host, _, port = node.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        server = await world.head(node)
        answer = await read_all(complete(server, prompt(8), 8))
        assert answer.tokens == expected(prompt(8), 8)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_finished_session_is_gone_and_holds_nothing(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(8))
    await read_all(generate(server, session_id, 8))
    await server.fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))
    gone = ("NOT_FOUND", "SESSION_NOT_FOUND")
    assert (await refusal_of(generate(server, session_id, 8))).what == gone
    ask = pb.GetSessionRequest(session_id=session_id)
    assert (await refusal_of(server.fleet.GetSession(ask))).what == gone
    known = server.head.fleet.nodes[0]
    await until(lambda: not known.outbox, "the revoke was answered")
    assert (await node.holdings()).holdings == []


async def test_half_a_million_tokens_asked_for_end_at_a_cancel_after_a_few(world: World) -> None:
    settings = StubSettings(
        identity="node-1", models=[(MODEL, 4_000_000)], engine=EngineSettings(2, 500.0, 0.0)
    )
    node = await LocalNode(StubNode(settings)).start()
    world.nodes.append(node)
    server = await world.head(node, max_new_tokens_limit=1_000_000)
    reading = Reading(complete(server, prompt(8), 500_000))
    await reading.until_tokens(5)
    ask = pb.CancelGenerationRequest(generation_id=reading.answer.generation_id)
    await server.fleet.CancelGeneration(ask)
    answer = await reading.end()
    assert answer.reason == "CANCELLED"
    assert 5 <= len(answer.tokens) < 500_000
    assert answer.tokens == expected(prompt(8), len(answer.tokens))
