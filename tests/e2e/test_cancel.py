"""A cancel sticks wherever the answer stands: one terminal event, the node hears of it, the lane is free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import (
    Answer,
    Reading,
    complete,
    context_of,
    generate,
    open_session,
    open_session_on,
    pb_reason,
    read_all,
)
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.refused import refusal_of

CANCELLED = pb.CancelGenerationResponse.OUTCOME_CANCELLED
ALREADY_FINISHED = pb.CancelGenerationResponse.OUTCOME_ALREADY_FINISHED
HELD = pb.CancelGenerationResponse.OUTCOME_HELD


async def cancel(server: HeadServer, generation_id: str) -> pb.CancelGenerationResponse:
    return await server.fleet.CancelGeneration(pb.CancelGenerationRequest(generation_id=generation_id))


async def cancel_reading(server: HeadServer, reading: Reading, *, tokens: int | None = None) -> Answer:
    """Cancel what is being read; the answer ends as cancelled, in the same way for both sides."""
    reply = await cancel(server, reading.answer.generation_id)
    answer = await reading.end()
    assert reply.outcome == CANCELLED
    assert reply.finished == answer.finished
    assert answer.reason == "CANCELLED"
    assert answer.finished.output_tokens == len(answer.tokens)
    if tokens is not None:
        assert len(answer.tokens) == tokens
    # Once more changes nothing.
    again = await cancel(server, answer.generation_id)
    assert (again.outcome, again.finished) == (CANCELLED, answer.finished)
    return answer


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.02)


async def run_of(node: NodeProcess, generation_id: str) -> stub_pb.JournalEntry | None:
    runs = [run for run in await node.journal(kind="generate") if run.generation_id == generation_id]
    assert len(runs) <= 1
    return runs[0] if runs else None


async def was_heard(node: NodeProcess, answer: Answer) -> stub_pb.JournalEntry:
    """Until the node has heard that the answer is not wanted and its lane is free; what it did for it."""

    async def heard() -> bool:
        run = await run_of(node, answer.generation_id)
        assert run is not None
        return run.HasField("cancel_seen_ms") and run.HasField("ended_ms")

    await eventually(heard)
    run = await run_of(node, answer.generation_id)
    assert run is not None
    assert run.outcome == "CANCELLED"
    return run


async def test_a_cancel_while_the_request_waits_at_the_head(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--decode-rate", "50")
    server = await world.head(node)
    running = Reading(complete(server, prompt(10), 100))
    await running.until_tokens(1)
    waiting = Reading(complete(server, prompt(11), 20))
    await waiting.until(lambda answer: answer.events)
    answer = await cancel_reading(server, waiting, tokens=0)
    assert (answer.started, answer.finished.attempts) == ([], 0)
    assert await run_of(node, answer.generation_id) is None
    assert (await running.end()).tokens == expected(prompt(10), 100)


@pytest.mark.parametrize("world", ["plain", "link"], indirect=True)  # two heads dial one node
async def test_a_cancel_while_the_request_waits_on_a_node_that_another_head_keeps_busy(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--decode-rate", "50")
    other_head = await world.head(node, head_id="head-2")
    running = Reading(complete(other_head, prompt(10), 150))
    await running.until_tokens(1)
    server = await world.head(node)
    waiting = Reading(complete(server, prompt(11), 20))
    await waiting.until(lambda answer: answer.started)

    async def queued() -> bool:
        return (await node.holdings()).queue_depth == 1

    await eventually(queued)
    answer = await cancel_reading(server, waiting, tokens=0)
    run = await was_heard(node, answer)
    assert run.tokens_sent == 0
    assert not await queued()
    assert (await running.end()).tokens == expected(prompt(10), 150)


async def test_a_cancel_in_a_prefill_of_five_seconds_ends_it(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--prefill-rate", "400")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(2000), 20))

    async def prefilling() -> bool:
        return (await node.holdings()).lanes_active == 1

    await eventually(prefilling)
    answer = await cancel_reading(server, reading, tokens=0)
    run = await was_heard(node, answer)
    assert run.ended_ms - run.at_ms < 5000
    # The lane is free at once.
    assert (await read_all(complete(server, prompt(9), 6))).tokens == expected(prompt(9), 6)


async def test_a_cancel_in_the_middle_of_a_stream_keeps_what_was_said(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--decode-rate", "20")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    reading = Reading(generate(server, session_id, 200, extend_context=True))
    await reading.until_tokens(5)
    answer = await cancel_reading(server, reading)
    assert answer.tokens == expected(prompt(10), len(answer.tokens))
    run = await was_heard(node, answer)
    assert run.tokens_sent <= len(answer.tokens) + 4
    assert await context_of(server, session_id) == [*prompt(10), *answer.tokens]
    again = await read_all(generate(server, session_id, 6))
    assert again.tokens == expected([*prompt(10), *answer.tokens], 6)


async def test_a_cancel_while_the_answer_has_lost_its_node_and_waits_for_another(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "50")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(10), 200))
    await reading.until_tokens(5)
    await node.kill()
    await until(lambda: not server.head.ready, "the node is down")
    answer = await cancel_reading(server, reading)
    assert answer.tokens == expected(prompt(10), len(answer.tokens))
    assert answer.moves == []
    # What was cancelled does not come to life with the node.
    await node.start()
    await until(lambda: server.head.ready, "the node is back")
    assert (await read_all(complete(server, prompt(9), 6))).tokens == expected(prompt(9), 6)
    assert await run_of(node, answer.generation_id) is None


async def test_a_cancel_while_a_frozen_node_is_given_time_reaches_it_when_it_wakes(world: World) -> None:
    node, other = await world.start_nodes(2, "--decode-rate", "50")
    server = await world.head(node, other)
    session_id = await open_session_on(server, node, prompt(10))
    reading = Reading(generate(server, session_id, 200))
    await reading.until_tokens(5)
    node.freeze()
    answer = await cancel_reading(server, reading)
    assert answer.tokens == expected(prompt(10), len(answer.tokens))
    node.thaw()
    await was_heard(node, answer)
    assert await run_of(other, answer.generation_id) is None


async def test_a_cancel_that_races_with_the_last_token_is_told_as_it_ended(world: World) -> None:
    node = await world.node("node-1", "--lanes", "8", "--decode-rate", "500")
    server = await world.head(node)
    outcomes = set()

    async def race(salt: int) -> None:
        session_id = await open_session(server, prompt(10, salt))
        reading = Reading(generate(server, session_id, 3))
        await reading.until_tokens(salt % 4)
        if not salt % 4:
            await reading.until(lambda answer: answer.events)
        reply = await cancel(server, reading.answer.generation_id)
        answer = await reading.end()
        assert answer.tokens == expected(prompt(10, salt), len(answer.tokens))
        assert reply.finished == answer.finished
        if answer.reason == "CANCELLED":
            assert reply.outcome == CANCELLED
        else:
            assert (answer.reason, len(answer.tokens)) == ("LENGTH", 3)
            assert reply.outcome == ALREADY_FINISHED
        outcomes.add(answer.reason)
        again = await read_all(generate(server, session_id, 3))
        assert (again.tokens, again.reason) == (expected(prompt(10, salt), 3), "LENGTH")

    for start in range(0, 48, 8):
        await asyncio.gather(*(race(start + i) for i in range(8)))
    assert outcomes == {"CANCELLED", "LENGTH"}


async def test_a_cancel_before_the_request_holds(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    reply = await cancel(server, "my-answer")
    assert reply.outcome == HELD
    assert not reply.HasField("finished")
    answer = await read_all(generate(server, session_id, 10, "my-answer"))
    assert (answer.generation_id, answer.reason, answer.tokens) == ("my-answer", "CANCELLED", [])
    assert (answer.started, answer.finished.attempts) == ([], 0)
    assert await node.journal(kind="generate") == []
    assert (await cancel(server, "my-answer")).outcome == CANCELLED
    # It held for that one request only.
    assert (await read_all(generate(server, session_id, 10))).tokens == expected(prompt(10), 10)


async def test_a_cancel_of_what_has_ended_says_how_and_of_what_never_was_says_so(world: World) -> None:
    server = await world.head(await world.node("node-1"))
    answer = await read_all(complete(server, prompt(10), 4))
    reply = await cancel(server, answer.generation_id)
    assert (reply.outcome, pb_reason(reply.finished)) == (ALREADY_FINISHED, "LENGTH")
    assert reply.finished == answer.finished
    unknown = pb.CancelGenerationRequest(generation_id="gen-0123456789abcdef01234567")
    refusal = await refusal_of(server.fleet.CancelGeneration(unknown))
    assert refusal.what == ("NOT_FOUND", "GENERATION_NOT_FOUND")


async def test_finishing_a_session_cancels_its_answer(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "20")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    reading = Reading(generate(server, session_id, 200))
    await reading.until_tokens(3)
    await server.fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))
    answer = await reading.end()
    assert answer.reason == "CANCELLED"
    run = await run_of(node, answer.generation_id)
    assert run is not None

    async def nothing_held() -> bool:
        held = await node.holdings()
        return not held.holdings and not held.lanes_active

    await eventually(nothing_held)
