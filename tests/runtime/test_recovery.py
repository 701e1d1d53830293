"""What a head makes of what an earlier run left, where that is not as one would wish."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from fleet_service.domain.context import crc32_of
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import Finished, FinishReason, MoveCause, Moved, Timings
from fleet_service.domain.failures import AttemptBudget, Failure, FailureClass, GiveUp, TryAgain
from fleet_service.domain.specs import GenerationSpec, Sampling, SessionSpec
from fleet_service.runtime.head import Head
from fleet_service.runtime.journal import NoJournal
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.node import Node
from fleet_service.runtime.records import (
    ContextExtended,
    GenerationEnded,
    GenerationStarted,
    Record,
    Saved,
    SavedGeneration,
    SavedSession,
    SessionBound,
    SessionKept,
)
from fleet_service.runtime.recovery import marks_of, term_after
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.store import StoreError, StoreTrouble
from tests.runtime.fakes import UNIX_S, FakeDialer, simulate

CONTEXT = array("I", [1, 2, 3])
TOKENS = array("I", [7, 8])


class KnownContext(NoJournal):
    """A journal that writes nothing and knows one context, if any."""

    keeps = True

    def __init__(self, context: array[int] | None = None) -> None:
        self.records: list[Record] = []
        self._context = context

    def put(self, *records: Record) -> None:
        self.records += records

    async def context(self, session_id: str) -> array[int]:
        if self._context is None:
            raise StoreError(StoreTrouble.CORRUPT, "it cannot be read")
        return self._context


def saved(*, left_s: float = 60.0, ephemeral: bool = False, runs: bool = True) -> Saved:
    """A session with one answer of which two tokens came."""
    spec = SessionSpec(model="m")
    kept = SessionKept("s", 1, "", spec, Sampling(), UNIX_S - 50, UNIX_S - 40, ephemeral=ephemeral)
    started = GenerationStarted(
        "g",
        "s",
        "",
        GenerationSpec(max_new_tokens=100, extend_context=True),
        Sampling(),
        100,
        (),
        len(CONTEXT),
        UNIX_S - 30,
        UNIX_S + left_s,
    )
    generations = {"g": SavedGeneration(started, token_ids=TOKENS[:])} if runs else {}
    sessions = {"s": SavedSession(kept, len(CONTEXT), crc32_of(CONTEXT))}
    return Saved(term=5, sessions=sessions, generations=generations)


async def restarted(journal: KnownContext, left: Saved, **settings: Any) -> Head:
    loop = asyncio.get_running_loop()
    head = Head(
        HeadSettings(**settings),
        dialer=FakeDialer({}),
        rng=random.Random(3),
        wall_clock=lambda: UNIX_S + loop.time(),
        kept=Kept(journal, left),
    )
    await head.start([])
    return head


def finished_of(head: Head) -> Finished:
    finished = head.find_generation("g").finished
    assert finished is not None
    return finished


def is_away(head: Head) -> bool:
    return head.sessions.get("s").context.is_away


def test_an_answer_whose_context_cannot_be_read_ends_with_an_error_and_the_head_serves() -> None:
    async def story() -> None:
        head = await restarted(KnownContext(), saved())
        error = finished_of(head).error
        assert error is not None
        assert error.reason is Reason.CONTEXT_LOST
        await head.stop(0.0)

    simulate(story)


def test_an_answer_whose_time_ran_out_meanwhile_extends_its_context_though_that_is_not_read() -> None:
    async def story() -> None:
        journal = KnownContext()
        head = await restarted(journal, saved(left_s=-1.0))
        assert finished_of(head).reason is FinishReason.WALL_CLOCK
        extended = [each for each in journal.records if isinstance(each, ContextExtended)]
        whole = CONTEXT + TOKENS
        assert extended == [ContextExtended("s", len(CONTEXT), TOKENS, crc32_of(whole))]
        view = head.get_session("s")
        assert (view.context_length, view.context_crc32) == (len(whole), crc32_of(whole))
        await head.stop(0.0)

    simulate(story)


def test_an_answer_that_ended_is_forgotten_in_its_time_whatever_the_restarts() -> None:
    async def story() -> None:
        left = saved()
        ended = Finished(FinishReason.LENGTH, 3, 2, 1, Timings(0.0, 0.1, 0.2, 0.1, 0.2))
        left.generations["g"].ended = GenerationEnded("g", ended, UNIX_S - 50)
        head = await restarted(KnownContext(CONTEXT[:]), left, finished_kept_s=60.0)
        now_s = asyncio.get_running_loop().time()
        head.generations.forget_old(now_s + 5, 10)
        assert finished_of(head) == ended
        head.generations.forget_old(now_s + 15, 10)
        with pytest.raises(FleetError):
            head.find_generation("g")
        await head.stop(0.0)

    simulate(story)


def test_the_session_of_an_answer_that_had_ended_is_not_kept() -> None:
    async def story() -> None:
        head = await restarted(KnownContext(CONTEXT[:]), saved(ephemeral=True, runs=False))
        assert len(head.sessions) == 0
        await head.stop(0.0)

    simulate(story)


def test_a_session_expires_by_its_last_use_whatever_the_restarts() -> None:
    async def story() -> None:
        head = await restarted(KnownContext(CONTEXT[:]), saved(runs=False), session_expiry_s=60.0)
        assert head.get_session("s").last_used_at == UNIX_S - 40
        now_s = asyncio.get_running_loop().time()
        assert head.sessions.expire(now_s + 15, 10) == 0
        assert head.sessions.expire(now_s + 25, 10) == 1
        await head.stop(0.0)

    simulate(story)


def test_a_context_that_was_read_leaves_the_memory_again() -> None:
    async def story() -> None:
        head = await restarted(KnownContext(CONTEXT[:]), saved(runs=False), idle_unbind_s=10.0)
        assert list(await head.context_of("s")) == list(CONTEXT)
        assert not is_away(head)
        head.sessions.unbind_idle(asyncio.get_running_loop().time() + 1, 10)
        assert is_away(head)
        await head.stop(0.0)

    simulate(story)


def test_a_new_term_is_above_every_epoch_that_was_given() -> None:
    left = saved()
    left.sessions["s"].bound = SessionBound("s", "a", "run-1", (90 << 32) + 4)
    assert term_after(left, 20) == 91
    left.term = 95
    assert term_after(left, 20) == 96
    assert term_after(left, 120) == 120


def moves(*causes: MoveCause, index: int = 4) -> list[Moved]:
    return [Moved(f"n-{i}", f"n-{i + 1}", cause, index, 0.1, i) for i, cause in enumerate(causes)]


@pytest.mark.parametrize(
    "before, reason",
    [
        (moves(MoveCause.LINK_LOST), Reason.POISON_REQUEST),
        (moves(MoveCause.STALLED, MoveCause.STALLED), Reason.ATTEMPTS_EXHAUSTED),
        (moves(MoveCause.LINK_LOST, index=3), None),
        (moves(MoveCause.HEAD_RESTARTED, MoveCause.HEAD_RESTARTED, MoveCause.DRAIN), None),
    ],
)
def test_failed_attempts_without_a_token_count_over_a_restart(
    before: Sequence[Moved], reason: Reason | None
) -> None:
    budget = AttemptBudget()
    budget.taken_up(4, before)
    step = budget.after(Failure(FailureClass.LINK_LOST, "n-9"), 4)
    if reason is None:
        assert isinstance(step, TryAgain)
    else:
        assert isinstance(step, GiveUp)
        assert step.cause.reason is reason


@pytest.mark.parametrize("cause", [MoveCause.SESSION_LOST, MoveCause.NODE_SILENT, MoveCause.STALLED])
def test_moves_that_may_have_cost_no_attempt_end_no_answer_after_a_restart(cause: MoveCause) -> None:
    async def story() -> None:
        left = saved()
        left.generations["g"].marks = [(len(TOKENS), each) for each in moves(*[cause] * 3, index=len(TOKENS))]
        head = await restarted(KnownContext(CONTEXT), left)
        await asyncio.sleep(5.0)
        finished = head.find_generation("g").finished
        counts = cause is MoveCause.STALLED
        assert (finished is not None and finished.error is not None) == counts
        if finished is not None and finished.error is not None:
            assert finished.error.reason is Reason.ATTEMPTS_EXHAUSTED
        await head.stop(0.0)

    simulate(story)


def test_an_order_taken_back_is_taken_back_by_both_names_of_a_node() -> None:
    node = Node("127.0.0.1:1", HeadSettings(), lambda: 0.0)
    node.cordon("ann", "why", 5.0)
    assert [(each.node, each.mark) for each in marks_of(node)] == [("127.0.0.1:1", "cordon")]
    node.name = "identity"
    node.uncordon()
    assert [(each.node, each.mark) for each in marks_of(node)] == [("identity", ""), ("127.0.0.1:1", "")]
