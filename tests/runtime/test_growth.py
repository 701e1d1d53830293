"""What is done once a tick, or for one placement, is no more work with ten times the sessions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.head import Head
from tests.runtime.fakes import FakeNode, head_of, hello, simulate

MODEL = "m"
NODES = 20


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python and C functions that `work` makes: what it does, whatever the machine."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def step_through(work: Any) -> None:
    """Run a coroutine to its end; it waits for nothing but its turn."""
    try:
        while True:
            work.send(None)
    except StopIteration:
        return


async def head_with(sessions: int) -> Head:
    head = await head_of({f"n{number}:1": FakeNode(hello(f"n{number}")) for number in range(NODES)})
    for number in range(sessions):
        await head.create_session(f"s{number}", SessionSpec(model=MODEL), [1, 2, 3], None)
    return head


WORK: dict[str, Callable[[Head, str], object]] = {
    "a tick": lambda head, _: step_through(head.tender.tick(asyncio.get_running_loop().time())),
    "a scrape": lambda head, _: step_through(head.gauges()),
    "what watchers are shown": lambda head, _: head.operators.list_nodes(),
    "a placement": lambda head, its: head.fleet.choose(head.fleet.session_demand(head.sessions.get(its))),
    "a page of sessions": lambda head, _: head.list_sessions(50, "25", None, ""),
    "a session that ends": lambda head, its: head.sessions.remove(head.sessions.get(its)),
}


@pytest.mark.parametrize("what", WORK)
def test_it_is_no_more_work_with_ten_times_the_sessions(what: str) -> None:
    counted: dict[int, list[int]] = {100: [], 1_000: []}

    async def story() -> None:
        for sessions, counts in counted.items():
            head = await head_with(sessions)
            WORK[what](head, "s7")  # what happens once is not counted
            counts.append(calls_of(lambda head=head: WORK[what](head, "s8")))  # type: ignore[misc]
            await head.stop(0)

    simulate(story)
    few, many = counted.values()
    assert all(count > 0 for count in few)
    assert max(many) <= max(few) + 20, counted
