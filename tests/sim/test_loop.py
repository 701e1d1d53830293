"""The simulation's event loop: virtual time, order by seed, and the ends that a stuck program comes to."""

from __future__ import annotations

import asyncio

import pytest

from tests.sim.loop import HangError, SimLoop, StepLimitError, TimeLimitError


async def _busy_program(trace: list[str]) -> int:
    """Use what ordinary asyncio code uses."""
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
    go = asyncio.Event()
    lock = asyncio.Lock()

    async def produce(name: str, count: int) -> None:
        await go.wait()
        for number in range(count):
            await queue.put(number)
            trace.append(f"{name} put {number}")

    async def consume(name: str) -> None:
        while await queue.get() >= 0:
            async with lock:
                await asyncio.sleep(0.1)
            trace.append(f"{name} got at {asyncio.get_running_loop().time():.1f}")

    async with asyncio.TaskGroup() as group:
        consumers = [asyncio.create_task(consume(f"c{number}")) for number in range(3)]
        for number in range(4):
            group.create_task(produce(f"p{number}", 5))
        go.set()
    for _ in consumers:
        await queue.put(-1)
    await asyncio.gather(*consumers)
    try:
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()
    except TimeoutError:
        trace.append("timed out")
    return len(trace)


def _trace(seed: int) -> list[str]:
    trace: list[str] = []
    SimLoop(seed).drive(_busy_program(trace))
    return trace


def test_the_same_seed_gives_the_same_order() -> None:
    assert _trace(7) == _trace(7)


def test_other_seeds_give_other_orders_of_the_same_work() -> None:
    traces = [_trace(seed) for seed in range(20)]
    assert len({tuple(trace) for trace in traces}) == 20
    assert (
        len({tuple(sorted(line.split(" at ")[0].lstrip("c012") for line in trace)) for trace in traces}) == 1
    )


def test_without_disorder_callbacks_run_in_the_order_they_were_made_ready() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        for number in range(50):
            asyncio.get_running_loop().call_soon(seen.append, number)
        await asyncio.sleep(0.001)
        return seen

    assert SimLoop(1, disorder=0.0).drive(main()) == list(range(50))
    assert SimLoop(1).drive(main()) != list(range(50))


def test_time_jumps_to_the_next_timer_and_never_goes_back() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def sleeper(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            times.append(loop.time())

        await asyncio.gather(*(sleeper(delay_s) for delay_s in (86_400.0, 5.0, 0.25, 0.0)))
        return times

    assert SimLoop(3).drive(main()) == [0.0, 0.25, 5.0, 86_400.0]


def test_cancelled_timers_do_not_move_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            loop.call_later(50.0, lambda: None).cancel()
        await asyncio.sleep(1.0)
        return loop.time()

    assert SimLoop(3).drive(main()) == 1.0


def test_a_program_that_waits_for_nothing_is_a_hang_with_its_stacks() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.gather(wait_for_godot(), asyncio.sleep(5.0))

    with pytest.raises(HangError, match=r"(?s)nothing to do at 5\.000 s.*wait_for_godot"):
        SimLoop(1).drive(main())


def test_a_program_that_spins_meets_the_step_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StepLimitError):
        SimLoop(1, max_steps=1000).drive(main())


def test_a_program_that_only_ticks_meets_the_time_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(TimeLimitError):
        SimLoop(1, max_time_s=60.0).drive(main())


def test_while_the_head_is_stopped_only_the_nodes_side_goes_on() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)

        def tick(side: str, left: int) -> None:
            seen.append((side, loop.time()))
            if left:
                loop.call_later(1.0, tick, side, left - 1)

        loop.call_later(1.0, tick, "node", 5, context=loop.node_side)
        loop.call_later(1.0, tick, "head", 1)
        loop.stop_head(4.5)
        await asyncio.sleep(0.5)
        seen.append(("main", loop.time()))
        await asyncio.sleep(10.0)

    SimLoop(1).drive(main())
    assert [at_s for side, at_s in seen if side == "node"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert sorted(at_s for side, at_s in seen if side != "node") == [4.5, 4.5, 5.5]


def test_an_exception_that_nobody_caught_is_kept() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)

    loop = SimLoop(1)
    loop.drive(main())
    assert len(loop.unhandled) == 1
    assert "ZeroDivisionError" in loop.unhandled[0]


def test_leftover_tasks_are_cancelled_at_the_end() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        asyncio.get_running_loop().set_debug(False)
        main.task = asyncio.create_task(forever())  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)

    SimLoop(1).drive(main())
    assert ended == ["cancelled"]
