"""What counts as progress of a run, and when a node that makes none is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fleet_service.domain.commands import Phase, Run
from fleet_service.domain.events import FinishReason
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import RunSink
from fleet_service.runtime.stall import CONFIRM_STALL_S, MAX_PREFILL_STALLS, StallWatch
from tests.runtime.fakes import MODEL, FakeNode, Speak, head_of, hello, simulate
from tests.sim.loop import SimLoop

STALL_S = 3.0
EACH_S = 0.5
"""A node that only pretends says something this often."""

Tell = Callable[[StallWatch], Coroutine[Any, Any, None]]


def stalled_after(
    what: Tell,
    *,
    prompt_tokens: int = 0,
    rate: int = 100,
    wait_s: float = 1000.0,
) -> float | None:
    """When the watch gave up, in virtual seconds from its start; None when it had not by `wait_s`."""
    found: list[float] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        gave_up = asyncio.Event()

        def stalled(detail: str) -> None:
            assert detail.startswith("no progress for")
            found.append(loop.time())
            gave_up.set()

        watch = StallWatch(loop, STALL_S, prompt_tokens, lambda: rate)
        watch.start(stalled)
        tells = asyncio.create_task(what(watch))
        await asyncio.wait({asyncio.ensure_future(gave_up.wait())}, timeout=wait_s)
        tells.cancel()
        watch.stop()

    SimLoop(1).drive(story())
    return found[0] if found else None


def tell(*moments: tuple[float, Phase | None]) -> Tell:
    """Enter a phase at each moment (virtual seconds); None stands for a token."""

    async def telling(watch: StallWatch) -> None:
        loop = asyncio.get_running_loop()
        for at_s, phase in moments:
            await asyncio.sleep(at_s - loop.time())
            if phase is None:
                watch.token(loop.time())
            else:
                watch.enter(phase, loop.time())

    return telling


def again_and_again(*phases: Phase) -> Tell:
    async def telling(watch: StallWatch) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for phase in phases:
                watch.enter(phase, loop.time())
                await asyncio.sleep(EACH_S)

    return telling


def test_silence_is_a_stall_once_it_is_confirmed() -> None:
    assert stalled_after(tell()) == STALL_S + CONFIRM_STALL_S


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_the_same_phase_again_is_no_progress(phase: Phase) -> None:
    assert stalled_after(again_and_again(phase)) == STALL_S + CONFIRM_STALL_S


@pytest.mark.parametrize(
    "phases",
    [
        (Phase.QUEUED, Phase.PREFILL),
        (Phase.PREFILL, Phase.QUEUED),
        (Phase.DECODE, Phase.QUEUED),
        (Phase.PREFILL, Phase.DECODE),
        (Phase.QUEUED, Phase.PREFILL, Phase.DECODE),
        (Phase.DECODE, Phase.PREFILL, Phase.QUEUED),
    ],
)
def test_going_back_and_forth_among_phases_is_no_progress(phases: tuple[Phase, ...]) -> None:
    given_up_s = stalled_after(again_and_again(*phases))
    assert given_up_s is not None
    assert given_up_s <= len(phases) * EACH_S + STALL_S + CONFIRM_STALL_S


def test_each_new_phase_and_each_token_is_progress() -> None:
    steady = [(2.0, Phase.PREFILL), (4.0, Phase.DECODE), *((6.0 + 2 * i, None) for i in range(50))]
    assert stalled_after(tell(*steady)) == 104.0 + STALL_S + CONFIRM_STALL_S


def test_a_run_that_the_node_put_back_in_its_queue_for_long_goes_on() -> None:
    preempted = [(1.0, None), (2.0, Phase.QUEUED), (50.0, Phase.PREFILL), (52.0, Phase.DECODE), (54.0, None)]
    assert stalled_after(tell(*preempted)) == 54.0 + STALL_S + CONFIRM_STALL_S
    in_prefill = [(1.0, Phase.PREFILL), (2.0, Phase.QUEUED), (50.0, Phase.PREFILL), (52.0, None)]
    assert stalled_after(tell(*in_prefill)) == 52.0 + STALL_S + CONFIRM_STALL_S


def test_waiting_in_the_node_s_own_queue_is_no_stall() -> None:
    assert stalled_after(tell((0.0, Phase.QUEUED))) is None
    # It ends with the queue.
    given_up_s = stalled_after(tell((0.0, Phase.QUEUED), (500.0, Phase.PREFILL)))
    assert given_up_s is not None
    assert 500 + STALL_S <= given_up_s <= 500 + 2 * STALL_S + CONFIRM_STALL_S


def test_a_prefill_is_given_the_time_its_prompt_takes() -> None:
    given_up_s = stalled_after(tell((0.0, Phase.PREFILL)), prompt_tokens=1000)
    assert given_up_s == STALL_S + 20.0 + CONFIRM_STALL_S


def test_a_node_that_reports_an_absurd_rate_is_not_waited_for_without_end() -> None:
    given_up_s = stalled_after(tell((0.0, Phase.PREFILL)), prompt_tokens=1_000_000, rate=1)
    assert given_up_s == STALL_S * (1 + MAX_PREFILL_STALLS) + CONFIRM_STALL_S


@pytest.mark.parametrize("first", [None, Phase.DECODE])
def test_the_prefill_s_time_ends_with_the_first_token(first: Phase | None) -> None:
    given_up_s = stalled_after(tell((0.0, Phase.PREFILL), (1.0, first)), prompt_tokens=1000)
    assert given_up_s == 1.0 + STALL_S + CONFIRM_STALL_S


@pytest.mark.parametrize("at_s", [1.0, STALL_S + CONFIRM_STALL_S / 2])
def test_what_came_while_the_head_itself_stood_still_is_heard_before_it_judges(at_s: float) -> None:
    """At `at_s` the head stops for long; the token that waited for it is read a moment after."""

    async def telling(watch: StallWatch) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        await asyncio.sleep(at_s)
        loop.stand_still(100.0)
        await asyncio.sleep(CONFIRM_STALL_S / 2)
        watch.token(loop.time())

    heard_s = at_s + 100.0 + CONFIRM_STALL_S / 2
    assert stalled_after(telling) == pytest.approx(heard_s + STALL_S + CONFIRM_STALL_S)


def test_a_stall_is_noticed_though_the_head_stood_still_meanwhile() -> None:
    async def telling(watch: StallWatch) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        await asyncio.sleep(1.0)
        loop.stand_still(100.0)

    assert stalled_after(telling) == 101.0 + CONFIRM_STALL_S


# The whole way: what a caller gets beside a node that pretends to work


async def says_all(command: Run, sink: RunSink) -> None:
    """An honest run: the tokens are their own indexes and ten."""
    for index in range(command.first_index, command.first_index + command.max_new_tokens):
        await asyncio.sleep(0.01)
        sink.on_step(command.epoch, index, [10 + index], None, None, None)


async def repeats_a_phase(command: Run, sink: RunSink) -> None:
    while True:
        sink.on_step(command.epoch, command.first_index, [], Phase.PREFILL, None, None)
        await asyncio.sleep(EACH_S)


async def repeats_an_old_token(command: Run, sink: RunSink) -> None:
    while True:
        sink.on_step(command.epoch, 0, [10], None, None, None)
        await asyncio.sleep(EACH_S)


async def alternates_phases(command: Run, sink: RunSink) -> None:
    while True:
        for phase in (Phase.QUEUED, Phase.PREFILL):
            sink.on_step(command.epoch, command.first_index, [], phase, None, None)
            await asyncio.sleep(EACH_S)


async def is_put_back_in_the_queue(command: Run, sink: RunSink) -> None:
    while True:
        for phase in (Phase.PREFILL, Phase.QUEUED):
            sink.on_step(command.epoch, command.first_index, [], phase, None, None)
            await asyncio.sleep(EACH_S)


async def sends_empty_steps(command: Run, sink: RunSink) -> None:
    while True:
        sink.on_step(command.epoch, command.first_index, [], None, None, None)
        await asyncio.sleep(EACH_S)


async def ended(generation: Generation) -> None:
    reader = generation.attach(0)
    while generation.finished is None:
        await reader.read()
    reader.close()


async def a_completion(head: Head, tokens: int) -> Generation:
    return await head.complete(SessionSpec(MODEL), [3, 4, 5], GenerationSpec(tokens), "", None)


@pytest.mark.parametrize(
    "pretends",
    [
        repeats_a_phase,
        repeats_an_old_token,
        alternates_phases,
        is_put_back_in_the_queue,
        sends_empty_steps,
    ],
)
def test_a_node_that_only_pretends_to_work_is_left_for_one_that_does(pretends: Speak) -> None:
    async def story() -> None:
        liar, good = FakeNode(hello("liar"), speak=pretends), FakeNode(hello("good"), speak=says_all)
        head = await head_of({"liar:1": liar, "good:1": good}, generation_stall_s=STALL_S)
        head.operators.cordon_node("good", "")
        generation = await a_completion(head, 8)
        head.operators.uncordon_node("good")
        await ended(generation)
        assert generation.finished is not None
        assert generation.finished.reason is FinishReason.LENGTH
        assert list(generation.log.slice(0)) == [10 + index for index in range(8)]
        assert generation.finished.attempts == 2
        assert generation.finished.timings.total_s < 5 * STALL_S
        await asyncio.sleep(5)
        assert [node.reservations for node in head.fleet.nodes] == [0, 0]
        assert dict(head.fleet.nodes[0].failures) == {"stalled": 1}
        await head.stop(0)

    simulate(story)
