"""A reader leaves, returns or is slow: the answer does what its caller chose, no other reader feels it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from tests.e2e.callers import (
    Answer,
    Reading,
    complete,
    context_of,
    events_of,
    generate,
    open_session,
    read_all,
)
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt
from tests.e2e.refused import refusal_of

CANCEL = pb.ON_DISCONNECT_CANCEL
CONTINUE = pb.ON_DISCONNECT_CONTINUE
NO_LOOKAHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


def attach(server: HeadServer, generation_id: str, from_index: int = 0) -> object:
    request = pb.AttachGenerationRequest(generation_id=generation_id, from_index=from_index)
    return server.fleet.AttachGeneration(request)


async def ended_run(node: NodeProcess) -> stub_pb.JournalEntry:
    """The node's one run, once it has left its lane."""
    async with asyncio.timeout(30):
        while True:
            (run,) = await node.journal(kind="generate")
            if run.HasField("ended_ms"):
                return run
            await asyncio.sleep(0.02)


async def test_the_node_stops_within_a_token_or_two_when_the_caller_leaves(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "5")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(10), 100))
    await reading.until_tokens(3)
    answer = await reading.leave()
    run = await ended_run(node)
    assert run.outcome == "CANCELLED"
    assert run.HasField("cancel_seen_ms")
    assert run.tokens_sent <= len(answer.tokens) + 2
    ended = await read_all(attach(server, answer.generation_id))
    assert ended.reason == "CANCELLED"
    assert ended.tokens[: len(answer.tokens)] == answer.tokens


async def test_with_continue_the_answer_runs_on_and_the_rest_can_be_fetched(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    reading = Reading(generate(server, session_id, 60, on_disconnect=CONTINUE, extend_context=True))
    await reading.until_tokens(5)
    had = await reading.leave()
    rest = await read_all(attach(server, had.generation_id, len(had.tokens)))
    assert rest.first_index == len(had.tokens)
    assert [*had.tokens, *rest.tokens] == expected(prompt(10), 60)
    assert rest.reason == "LENGTH"
    # And once more when all is over, from the start and from the very end.
    assert (await read_all(attach(server, had.generation_id))).tokens == expected(prompt(10), 60)
    end_only = await read_all(attach(server, had.generation_id, 60))
    assert (end_only.tokens, end_only.finished) == ([], rest.finished)
    refusal = await refusal_of(attach(server, had.generation_id, 61))
    assert refusal.what == ("OUT_OF_RANGE", "INDEX_OUT_OF_RANGE")
    assert await context_of(server, session_id) == [*prompt(10), *expected(prompt(10), 60)]
    assert (await ended_run(node)).outcome == "LENGTH"


async def test_an_answer_without_readers_outlives_its_node_too(world: World) -> None:
    nodes = await world.start_nodes(2, "--decode-rate", "100")
    server = await world.head(*nodes)
    reading = Reading(complete(server, prompt(10), 80, on_disconnect=CONTINUE))
    await reading.until_tokens(5)
    had = await reading.leave()
    (first,) = [node for node in nodes if node.identity == had.started[0].node]
    await first.kill()
    rest = await read_all(attach(server, had.generation_id, len(had.tokens)))
    assert [*had.tokens, *rest.tokens] == expected(prompt(10), 80)
    assert [move.from_node for move in rest.moves] == [first.identity]


async def test_without_readers_it_ends_after_the_orphan_timeout(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "20")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(10), 400, on_disconnect=CONTINUE, orphan_timeout_ms=700))
    await reading.until_tokens(2)
    had = await reading.leave()
    run = await ended_run(node)
    assert run.outcome == "CANCELLED"
    assert run.cancel_seen_ms - run.at_ms >= 700
    ended = await read_all(attach(server, had.generation_id))
    assert ended.reason == "CANCELLED"
    assert ended.finished.timings.total_ms >= 700


async def test_a_reader_that_comes_back_within_the_grace_saves_the_answer(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(10), 60, on_disconnect=CANCEL, disconnect_grace_ms=20_000))
    await reading.until_tokens(5)
    had = await reading.leave()
    rest = await read_all(attach(server, had.generation_id, len(had.tokens)))
    assert [*had.tokens, *rest.tokens] == expected(prompt(10), 60)
    assert rest.reason == "LENGTH"


async def test_a_reader_that_stays_away_longer_than_the_grace_loses_it(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "20")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(10), 400, disconnect_grace_ms=500))
    await reading.until_tokens(2)
    had = await reading.leave()
    run = await ended_run(node)
    assert run.outcome == "CANCELLED"
    # It went on for the time of grace.
    assert run.cancel_seen_ms - run.at_ms >= 500
    assert (await read_all(attach(server, had.generation_id))).reason == "CANCELLED"


@pytest.mark.parametrize("on_disconnect", [CANCEL, CONTINUE], ids=["cancel", "continue"])
async def test_a_readers_own_deadline_counts_as_its_leaving(
    world: World, on_disconnect: pb.OnDisconnect
) -> None:
    node = await world.node("node-1", "--decode-rate", "40")
    server = await world.head(node)
    request = pb.CompleteRequest(
        session=pb.SessionSpec(model="stub-model"),
        token_ids=prompt(10),
        spec=pb.GenerationSpec(max_new_tokens=80, on_disconnect=on_disconnect),
    )
    reading = Reading(server.fleet.Complete(request, timeout=1.0))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await reading.end()
    had = reading.answer
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < len(had.tokens) < 80
    run = await ended_run(node)
    ended = await read_all(attach(server, had.generation_id))
    assert ended.tokens[: len(had.tokens)] == had.tokens
    if on_disconnect == CANCEL:
        assert (run.outcome, ended.reason) == ("CANCELLED", "CANCELLED")
    else:
        assert (run.outcome, ended.reason) == ("LENGTH", "LENGTH")
        assert ended.tokens == expected(prompt(10), 80)


async def test_a_reader_that_leaves_takes_nothing_from_another(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    leaving = Reading(complete(server, prompt(10), 60))
    await leaving.until_tokens(3)
    staying = Reading(attach(server, leaving.answer.generation_id))
    await staying.until_tokens(5)
    await leaving.leave()
    answer = await staying.end()
    assert (answer.tokens, answer.reason) == (expected(prompt(10), 60), "LENGTH")


async def test_a_reader_that_stalls_for_five_seconds_holds_up_nobody_and_gets_the_same(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "500")
    server = await world.head(node)
    n = 2500
    # It takes next to nothing ahead of its reader, so that what waits for it waits at the head.
    slow_fleet = FleetServiceStub(server.new_channel(*NO_LOOKAHEAD))
    request = pb.CompleteRequest(
        session=pb.SessionSpec(model="stub-model"),
        token_ids=prompt(10),
        spec=pb.GenerationSpec(max_new_tokens=n),
    )
    stalled = Answer()
    events = events_of(slow_fleet.Complete(request))
    stalled.take(await anext(events))
    # The other reads while this one stalls, until it has all; that takes five seconds.
    quick = await read_all(attach(server, stalled.generation_id))
    assert quick.finished.timings.total_ms >= 4900
    async for event in events:
        stalled.take(event)
    assert quick.tokens == stalled.tokens == expected(prompt(10), n)
    assert quick.reason == "LENGTH"
    assert quick.finished == stalled.finished
    # Nothing was kept for the slow one token by token: but for a few, it gets all in one message.
    assert max(batch_sizes(stalled)) > n * 0.8
    assert len(batch_sizes(stalled)) < n * 0.2


def batch_sizes(answer: Answer) -> list[int]:
    """Tokens in each message."""
    kinds = (event.WhichOneof("event") for event in answer.events)
    return [
        len(event.tokens.token_ids)
        for event, kind in zip(answer.events, kinds, strict=True)
        if kind == "tokens"
    ]
