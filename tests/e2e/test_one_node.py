"""One node: exact answers, three ways to ask, one terminal event, lanes never exceeded."""

from __future__ import annotations

import asyncio

from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import complete, generate, open_session, read_all
from tests.e2e.harness import World, expected, prompt


async def test_answers_are_exact_whichever_way_they_are_asked_for(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node)
    context = prompt(32)
    for n in (8, 16):
        completed = await read_all(complete(server, context, n))
        session_id = await open_session(server, context)
        generated = await read_all(generate(server, session_id, n))
        at_once = await server.fleet.GenerateAll(
            pb.GenerateAllRequest(session_id=session_id, spec=pb.GenerationSpec(max_new_tokens=n))
        )
        assert completed.tokens == generated.tokens == list(at_once.token_ids) == expected(context, n)
        assert completed.reason == generated.reason == "LENGTH"
        assert (completed.first_index, completed.finished.output_tokens) == (0, n)
        assert completed.started[0].node == "node-1"
        assert completed.finished.context_tokens == 32
        assert completed.finished.attempts == 1


async def test_four_sessions_at_once_on_four_nodes_are_all_exact(world: World) -> None:
    nodes = await world.start_nodes(4)
    server = await world.head(*nodes)
    answers = await asyncio.gather(*(read_all(complete(server, prompt(20, salt), 16)) for salt in range(4)))
    assert [answer.tokens for answer in answers] == [expected(prompt(20, salt), 16) for salt in range(4)]
    assert {answer.started[0].node for answer in answers} == {node.identity for node in nodes}


async def test_never_more_generations_on_a_node_than_it_has_lanes(world: World) -> None:
    node = await world.node("node-1", "--lanes", "4")
    server = await world.head(node)
    answers = await asyncio.gather(*(read_all(complete(server, prompt(14, salt), 24)) for salt in range(8)))
    assert [answer.tokens for answer in answers] == [expected(prompt(14, salt), 24) for salt in range(8)]
    held = await node.holdings()
    assert held.peak_lanes_active == 4
