"""What a run holds for its head, and for how long: bounds that no head can make the node exceed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from node_stub.engine import Finish, Phase
from node_stub.journal import Entry
from node_stub.keeper import Keeper
from node_stub.rules import Admission, Model, Owner, Sampling
from node_stub.runs import Run, Step


def run_of(name: str = "g", buffer_tokens: int = 16, on_overflow: Callable[[Run], None] | None = None) -> Run:
    admission = Admission("s", 1, name, Model("m"), array("I"), 0, 1_000, 0, Sampling(), 1, b"", 0)
    entry = Entry("generate", "s", 1, 0, "running")
    overflow = on_overflow or (lambda _: None)
    run = Run(admission, Owner("f", "h", 0), entry, lambda: 0, lambda _: None, overflow, buffer_tokens)
    run.resumable = True
    return run


def send(run: Run) -> Step | None:
    step = run.take(None, with_finish=True)
    if step:
        run.note_sent(step)
    return step


def test_half_a_buffer_unsent_holds_the_engine_until_most_of_it_is_sent() -> None:
    run = run_of()
    held = []
    for token in range(9):
        run.on_tokens([token])
        held.append(run.job.held)
    assert held == [False] * 8 + [True]
    for limit in (4, 5):
        step = run.take(limit, with_finish=True)
        assert step
        run.note_sent(step)
        held.append(run.job.held)
    assert held[-2:] == [True, False], "until four are left"


def test_a_stalled_run_stays_stalled_however_much_is_sent() -> None:
    run = run_of()
    run.stall()
    run.on_tokens(range(12))
    send(run)
    assert run.job.held


def test_an_engine_that_cannot_be_held_overflows_the_buffer_once() -> None:
    told: list[Run] = []
    run = run_of(on_overflow=told.append)
    run.on_tokens(range(16))
    assert told == []
    run.on_tokens([16])
    run.on_tokens([17])
    assert told == [run]


def test_a_run_nobody_sends_goes_on_at_the_cost_of_what_was_sent() -> None:
    told: list[Run] = []
    run = run_of(on_overflow=told.append)
    run.on_tokens(range(8))
    send(run)
    run.detach()
    for token in range(8, 20):
        run.on_tokens([token])
    assert not run.job.held
    assert not run.has_index(3), "sent long ago"
    assert run.has_index(4)
    assert told == []
    run.rewind(4)
    step = send(run)
    assert step
    assert (step.first_index, list(step.token_ids)) == (4, list(range(4, 20)))


def test_what_is_acknowledged_is_let_go_and_nothing_else() -> None:
    run = run_of()
    run.on_phase(Phase.DECODE)
    run.on_tokens(range(8))
    send(run)
    assert run.acknowledge(5)
    assert not run.has_index(4)
    assert run.has_index(5)
    assert run.acknowledge(3), "an old one changes nothing"
    assert run.has_index(5)
    assert not run.acknowledge(9), "never sent"
    run.on_end(Finish.LENGTH)
    last = send(run)
    assert last
    assert last.finish is Finish.LENGTH
    assert run.delivered
    run.rewind(5)
    again = send(run)
    assert again
    assert (list(again.token_ids), again.finish) == ([5, 6, 7], Finish.LENGTH)


async def test_kept_runs_expire_in_order_and_the_oldest_makes_room() -> None:
    expired: asyncio.Queue[str] = asyncio.Queue()
    keeper = Keeper(0.1, 2, lambda run: expired.put_nowait(run.admission.generation_id))
    first, second, third = (run_of(name) for name in ("first", "second", "third"))
    keeper.keep(first)
    keeper.keep(second)
    assert expired.empty()
    keeper.keep(third)
    assert expired.get_nowait() == "first"
    keeper.keep(second)  # anew: now it is the last
    assert [await expired.get(), await expired.get()] == ["third", "second"]
    keeper.keep(first)
    keeper.release(first)
    assert keeper.get(first.key) is None
    keeper.keep(second)
    assert await expired.get() == "second"
    assert keeper.runs == {}
    keeper.close()
