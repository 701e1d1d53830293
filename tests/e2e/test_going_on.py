"""What a lost node or link leaves as it was: a sampled answer's draws, its place, the form of its reply."""

from __future__ import annotations

import asyncio

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.types_pb2 import SamplingParams
from node_stub.reference import reference_tokens
from tests.e2e.callers import (
    Reading,
    context_of,
    cordon,
    generate,
    open_session,
    open_session_on,
    read_all,
    uncordon,
)
from tests.e2e.harness import MODEL, HeadServer, NodeProcess, World, expected, prompt

N = 40
DIES = ("--fault", "after-tokens=17:die")


async def doomed_and_survivor(world: World, *flags: str) -> tuple[NodeProcess, NodeProcess, HeadServer]:
    doomed, survivor = await asyncio.gather(world.node("doomed", *flags), world.node("survivor"))
    return doomed, survivor, await world.head(doomed, survivor)


async def open_sampled(
    server: HeadServer, elsewhere: NodeProcess, sampling: SamplingParams, session_id: str
) -> None:
    """A session with such draws, not on `elsewhere`."""
    await cordon(server, elsewhere)
    spec = pb.SessionSpec(model=MODEL.name, sampling=sampling)
    await server.fleet.CreateSession(
        pb.CreateSessionRequest(session_id=session_id, spec=spec, token_ids=prompt(20))
    )
    await uncordon(server, elsewhere)


async def test_a_sampled_answer_goes_on_with_the_draws_of_its_seed(world: World) -> None:
    _, survivor, server = await doomed_and_survivor(world, *DIES)
    await open_sampled(server, survivor, SamplingParams(temperature=0.8, seed=42), "sampled")
    answer = await read_all(generate(server, "sampled", N, sampling=SamplingParams(seed=43)))
    assert answer.tokens == reference_tokens(MODEL, 43, prompt(20), N)
    (move,) = answer.moves
    assert move.to_node == "survivor"
    # The seed was one for that answer; the next has the session's own again.
    again = await read_all(generate(server, "sampled", N))
    assert again.tokens == reference_tokens(MODEL, 42, prompt(20), N)


async def test_a_sampled_answer_without_a_seed_keeps_the_one_it_was_given(world: World) -> None:
    doomed, survivor, server = await doomed_and_survivor(world)
    await open_sampled(server, survivor, SamplingParams(temperature=0.8), "sampled")
    undisturbed = await read_all(generate(server, "sampled", N))
    assert undisturbed.tokens != expected(prompt(20), N)
    reading = Reading(generate(server, "sampled", N))
    await reading.until_tokens(10)
    await doomed.kill()
    answer = await reading.end()
    assert answer.tokens == undisturbed.tokens
    assert [move.to_node for move in answer.moves] == ["survivor"]


async def test_an_answer_asked_for_in_one_reply_tells_of_its_move(world: World) -> None:
    doomed, _, server = await doomed_and_survivor(world, *DIES)
    session_id = await open_session_on(server, doomed, prompt(20))
    spec = pb.GenerationSpec(max_new_tokens=N, extend_context=True)
    reply = await server.fleet.GenerateAll(pb.GenerateAllRequest(session_id=session_id, spec=spec))
    assert list(reply.token_ids) == expected(prompt(20), N)
    (move,) = reply.moves
    assert (move.from_node, move.to_node) == ("doomed", "survivor")
    assert 0 < move.next_index <= 17
    assert await context_of(server, session_id) == [*prompt(20), *reply.token_ids]


@pytest.mark.parametrize("inline", ["--inline", "--no-inline"])
async def test_after_a_dropped_link_the_session_is_bound_anew_on_the_same_node(
    world: World, inline: str
) -> None:
    points = ["after-assign", "after-append", "after-generate", "after-tokens=1", "after-tokens=20"]
    # One after another on one node: each drop breaks every call of the connection.
    node = await world.node("node-1", inline, "--no-resume")
    server = await world.head(node)
    for salt, point in enumerate(points):
        name, _, tokens = point.partition("=")
        fault = stub_pb.Fault(
            point=f"FAULT_POINT_{name.upper().replace('-', '_')}",
            action=stub_pb.FAULT_ACTION_DROP_LINK,
            after_tokens=int(tokens or 0),
            times=1,
        )
        await node.faults(fault)
        session_id = await open_session(server, prompt(20, salt))
        answer = await read_all(generate(server, session_id, N, extend_context=True))
        assert answer.tokens == expected(prompt(20, salt), N), point
        (move,) = answer.moves
        assert (move.from_node, move.to_node) == ("node-1", "node-1")
        assert move.next_index <= int(tokens or 0)
        assert move.cause == pb.MOVE_CAUSE_LINK_LOST
        assert move.epoch > answer.started[0].epoch
        assert await context_of(server, session_id) == [*prompt(20, salt), *answer.tokens]
        again = await read_all(generate(server, session_id, 4))
        assert again.tokens == expected([*prompt(20, salt), *answer.tokens], 4)
        assert again.finished.attempts == 1
