"""max_wall is kept whatever happens meanwhile: the answer ends in time, and what was delivered stands."""

from __future__ import annotations

import asyncio

from tests.e2e.callers import Answer, Reading, complete, context_of, generate, open_session_on, read_all
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt


def check_in_time(answer: Answer, wall_ms: int, tokens: int | None = None) -> None:
    """It ended by the clock: not before its time, and not after that of another attempt besides."""
    assert answer.reason == "WALL_CLOCK"
    assert wall_ms <= answer.finished.timings.total_ms < wall_ms + 2000
    assert answer.finished.output_tokens == len(answer.tokens)
    if tokens is not None:
        assert len(answer.tokens) == tokens


async def cancelled_on(node: NodeProcess, session_id: str) -> None:
    """Until the node knows that the session's only run there is not wanted any more."""
    async with asyncio.timeout(30):
        while True:
            (run,) = await node.journal(session_id, "generate")
            if run.HasField("cancel_seen_ms") and run.HasField("ended_ms"):
                return
            await asyncio.sleep(0.02)


async def lanes_free(server: HeadServer, node: NodeProcess) -> None:
    """Until nothing runs or waits on the node."""
    async with asyncio.timeout(30):
        while True:
            held = await node.holdings()
            if not held.lanes_active and not held.queue_depth:
                return
            await asyncio.sleep(0.02)


async def test_two_seconds_are_two_seconds_though_two_nodes_stall_one_after_the_other(world: World) -> None:
    first, second = await asyncio.gather(
        world.node("first", "--fault", "after-tokens=4:stall"),
        world.node("second", "--fault", "after-tokens=3:stall"),
    )
    server = await world.head(first, second, generation_stall_s=1.05)
    session_id = await open_session_on(server, first, prompt(20))
    answer = await read_all(generate(server, session_id, 40, max_wall_ms=2000, extend_context=True))
    check_in_time(answer, 2000, tokens=7)
    assert answer.tokens == expected(prompt(20), 7)
    assert [(move.to_node, move.next_index) for move in answer.moves] == [("second", 4)]
    assert await context_of(server, session_id) == [*prompt(20), *answer.tokens]
    for node in (first, second):
        await cancelled_on(node, session_id)
        await lanes_free(server, node)
        await node.faults()
    # The session is none the worse for it.
    again = await read_all(generate(server, session_id, 6))
    assert again.tokens == expected([*prompt(20), *answer.tokens], 6)


async def test_the_clock_runs_while_a_request_waits_for_a_lane(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--decode-rate", "20")
    server = await world.head(node)
    running = Reading(complete(server, prompt(10), 400))
    await running.until_tokens(1)
    answer = await read_all(complete(server, prompt(12), 4, max_wall_ms=600))
    check_in_time(answer, 600, tokens=0)
    assert (answer.started, answer.finished.attempts) == ([], 0)
    # All of it but what acceptance took.
    assert 500 <= answer.finished.timings.queued_ms <= answer.finished.timings.total_ms
    assert len(await node.journal(kind="generate")) == 1
    await running.leave()


async def test_the_clock_runs_in_prefill_and_ends_it(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--prefill-rate", "200")
    server = await world.head(node)
    session_id = await open_session_on(server, node, prompt(2000))
    answer = await read_all(generate(server, session_id, 4, max_wall_ms=700))
    check_in_time(answer, 700, tokens=0)
    await cancelled_on(node, session_id)
    await lanes_free(server, node)


async def test_the_clock_runs_while_a_silent_node_is_waited_for(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    session_id = await open_session_on(server, node, prompt(20))
    reading = Reading(generate(server, session_id, 400, max_wall_ms=1000))
    await reading.until_tokens(5)
    node.freeze()
    answer = await reading.end()
    check_in_time(answer, 1000)
    assert answer.tokens == expected(prompt(20), len(answer.tokens))
    node.thaw()
    await cancelled_on(node, session_id)


async def test_the_clock_runs_while_there_is_no_node_left(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(20), 400, max_wall_ms=1000))
    await reading.until_tokens(5)
    await node.kill()
    answer = await reading.end()
    check_in_time(answer, 1000)
    assert answer.tokens == expected(prompt(20), len(answer.tokens))
    assert answer.moves == []
