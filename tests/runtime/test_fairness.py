"""Much work at once, and that others have their turn meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from fleet_service.runtime.fairness import Turnstile, in_turns


async def turns_while(work: asyncio.Future[None] | asyncio.Task[None]) -> int:
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_a_few_things_are_done_at_once_and_others_have_their_turn_between_many() -> None:
    async def go_through(count: int, seen: list[int]) -> None:
        async for item in in_turns(range(count), 10):
            seen.append(item)  # noqa: PERF401 - one at a time is the point

    for count, others in ((10, 1), (101, 11)):
        seen: list[int] = []
        assert await turns_while(asyncio.create_task(go_through(count, seen))) == others
        assert seen == list(range(count))


async def test_who_comes_alone_to_a_turnstile_does_not_wait() -> None:
    turnstile = Turnstile()
    through = turnstile.through()
    with pytest.raises(StopIteration):
        through.send(None)


async def test_those_who_come_together_go_through_one_by_one_in_order() -> None:
    turnstile = Turnstile()
    turn, came = 0, []

    async def come(number: int) -> None:
        await turnstile.through()
        came.append((turn, number))

    tasks = [asyncio.create_task(come(number)) for number in range(5)]
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert [number for _, number in came] == list(range(5))
    assert len({at for at, _ in came}) == 5


async def test_one_that_gives_up_waiting_keeps_nobody_from_going_through() -> None:
    turnstile = Turnstile()
    for cancelled_after in range(4):
        tasks = [asyncio.create_task(turnstile.through()) for _ in range(4)]
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            await turnstile.through()
        assert not any(task.cancelled() for task in (tasks[0], tasks[3]))
