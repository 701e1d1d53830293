"""Where the newest tokens may be lost, no reader gets a stream that contradicts what it was given."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import Finished, FinishReason, Timings
from fleet_service.runtime.head import Head
from fleet_service.runtime.records import BranchCut, GenerationEnded, Saved, TermRaised
from fleet_service.runtime.recovery import branch_after, term_after
from tests.runtime.fakes import simulate
from tests.runtime.test_recovery import CONTEXT, KnownContext, restarted, saved

KEPT = 2
"""Tokens of the answer that are kept."""


def torn(*, torn: bool = True, branch: int = 0, cuts: tuple[BranchCut, ...] = ()) -> Saved:
    """An answer of two tokens, of which readers may have been given more."""
    left = saved()
    left.torn, left.branch = torn, branch
    left.generations["g"].cuts = list(cuts)
    return left


def refused(head: Head, from_index: int, branch: int) -> tuple[Reason, str]:
    with pytest.raises(FleetError) as refusal:
        head.find_generation("g").attach(from_index, branch)
    return refusal.value.reason, refusal.value.metadata["nextIndex"]


def test_a_reader_beyond_what_is_kept_is_told_what_is_sure_and_one_before_goes_on() -> None:
    async def story() -> None:
        journal = KnownContext(CONTEXT)
        head = await restarted(journal, torn())
        branch = head.fleet.term
        assert (head.branch, journal.records[0]) == (branch, BranchCut("g", branch, KEPT))
        assert refused(head, KEPT + 1, 0) == (Reason.DATA_LOSS, str(KEPT))
        assert head.find_generation("g").attach(KEPT, 0).branch == branch
        # Who has read what this head gives is as sure as any.
        head.find_generation("g").deliver([5, 6], 0.0)
        assert head.find_generation("g").attach(KEPT + 2, branch).branch == branch
        assert refused(head, KEPT + 1, 0) == (Reason.DATA_LOSS, str(KEPT))
        await head.stop(0.0)

    simulate(story)


def test_of_several_losses_the_first_that_a_reader_has_not_seen_counts() -> None:
    async def story() -> None:
        head = await restarted(KnownContext(CONTEXT), torn(branch=4, cuts=(BranchCut("g", 3, 1),)))
        assert refused(head, KEPT, 0) == (Reason.DATA_LOSS, "1")
        assert head.find_generation("g").attach(1, 0).branch == head.branch
        assert refused(head, KEPT + 1, 3) == (Reason.DATA_LOSS, str(KEPT))
        assert head.find_generation("g").attach(KEPT, 3).branch == head.branch
        await head.stop(0.0)

    simulate(story)


def test_a_reader_of_an_answer_that_was_lost_whole_is_sure_of_nothing_in_another_of_its_id() -> None:
    async def story() -> None:
        left = torn(torn=False, branch=4)
        left.generations["g"].started = replace(left.generations["g"].started, branch=4)
        head = await restarted(KnownContext(CONTEXT), left)
        assert refused(head, 1, 0) == (Reason.DATA_LOSS, "0")
        assert head.find_generation("g").attach(0, 0).branch == 4
        assert head.find_generation("g").attach(KEPT, 4).branch == 4
        await head.stop(0.0)

    simulate(story)


def test_a_start_that_was_cut_short_after_the_new_branch_was_taken_is_made_up_for() -> None:
    async def story() -> None:
        journal = KnownContext(CONTEXT)
        head = await restarted(journal, torn(torn=False, branch=1))
        assert (head.branch, journal.records[0]) == (1, BranchCut("g", 1, KEPT))
        await head.stop(0.0)

    simulate(story)


def test_a_start_that_lost_nothing_begins_no_branch() -> None:
    async def story() -> None:
        journal = KnownContext(CONTEXT)
        head = await restarted(journal, torn(torn=False, branch=1, cuts=(BranchCut("g", 1, KEPT),)))
        assert head.branch == 1
        assert not [each for each in journal.records if isinstance(each, BranchCut)]
        await head.stop(0.0)

    simulate(story)


def test_an_answer_that_had_ended_is_whole_whatever_was_lost_besides() -> None:
    async def story() -> None:
        left = torn()
        finished = Finished(FinishReason.LENGTH, len(CONTEXT), KEPT, 1, Timings(0.0, 0.1, 0.2, 0.1))
        left.generations["g"].ended = GenerationEnded(
            "g", finished, left.generations["g"].started.accepted_at
        )
        journal = KnownContext(array("I", CONTEXT))
        head = await restarted(journal, left, finished_kept_s=1e6)
        assert head.find_generation("g").attach(KEPT, 0).branch == 0
        assert not [each for each in journal.records if isinstance(each, BranchCut)]
        await head.stop(0.0)

    simulate(story)


def test_a_term_that_was_raised_is_not_given_again() -> None:
    async def story() -> None:
        journal = KnownContext()
        head = await restarted(journal, Saved())
        head.fleet.raise_term_above(head.fleet.last_epoch + (5 << 32), 0)
        assert TermRaised(head.fleet.term) in journal.records
        assert term_after(Saved(term=1, raised_term=head.fleet.term), 0) == head.fleet.term + 1
        await head.stop(0.0)

    simulate(story)


def test_a_branch_begins_where_the_end_may_be_lost() -> None:
    assert [branch_after(Saved(branch=3, torn=torn), 9) for torn in (False, True)] == [3, 9]


def test_two_starts_on_one_copy_are_two_branches() -> None:
    """The second knows nothing of the first, whose readers come to it all the same."""

    async def story() -> None:
        branches = []
        for _ in range(2):
            head = await restarted(KnownContext(CONTEXT), torn())
            branches.append(head.branch)
            await head.stop(0.0)
            await asyncio.sleep(1.0)
        assert branches[0] < branches[1]
        head = await restarted(KnownContext(CONTEXT), torn())
        assert refused(head, KEPT, branches[1]) == (Reason.DATA_LOSS, "0")
        await head.stop(0.0)

    simulate(story)
