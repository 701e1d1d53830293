"""Bugs to plant in what is told before it is kept, in the branches that say so, and in revokes that are owed.

As in planted.py, each replaces a method of the runtime while it is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fleet_service.runtime import head as head_module
from fleet_service.runtime import journal as journal_module
from fleet_service.runtime import recovery
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.head import Head
from fleet_service.runtime.journal import StoreJournal
from fleet_service.runtime.node import Node
from fleet_service.runtime.records import BranchCut, RevokeOwed, Saved, SavedGeneration
from fleet_service.runtime.recovery import Recovery
from fleet_service.runtime.session import Session
from fleet_service.runtime.tokenlog import Reader, TokenLog
from tests.sim.planting import replaced


@contextmanager
def attach_ignores_the_branch() -> Iterator[None]:
    """Branches: a reader goes on behind tokens that are lost."""
    right = Generation.attach

    def wrong(self: Generation, from_index: int = 0, branch: int = 0) -> Reader:
        return right(self, from_index, self.log.branch)

    with replaced(Generation, "attach", wrong):
        yield


@contextmanager
def nothing_is_cut_at_a_torn_start() -> Iterator[None]:
    """Branches: the next head takes what is kept for all there was."""

    def wrong(saved: Saved, _term: int) -> int:
        return saved.branch

    with replaced(head_module, "branch_after", wrong):
        yield


@contextmanager
def a_head_does_not_say_that_it_tells_ahead() -> Iterator[None]:
    """Branches: its store is never torn."""
    with replaced(StoreJournal, "tells_ahead", False):
        yield


@contextmanager
def the_cut_lies_one_token_too_far() -> Iterator[None]:
    """Branches: a token is taken for sure that is lost."""
    right = TokenLog.cut

    def wrong(self: TokenLog, branch: int) -> BranchCut:
        right(self, branch)
        self._cuts[-1] = BranchCut(self.generation_id, branch, self.received + 1)
        return self._cuts[-1]

    with replaced(TokenLog, "cut", wrong):
        yield


@contextmanager
def a_cut_is_not_written() -> Iterator[None]:
    """Branches: the head after the next knows no more what was lost."""
    right = StoreJournal.put

    def wrong(self: StoreJournal, *records: Any) -> None:
        right(self, *(each for each in records if not isinstance(each, BranchCut)))

    with replaced(StoreJournal, "put", wrong):
        yield


@contextmanager
def only_the_first_start_cuts() -> Iterator[None]:
    """Branches: a head is killed between its term and its first batch, and the next one cuts nothing."""
    torn: list[bool] = []
    right_after, right_restore = recovery.branch_after, Generations.restore

    def wrong_after(saved: Saved, term: int) -> int:
        torn[:] = [saved.torn]
        return right_after(saved, term)

    def wrong_restore(self: Generations, saved: SavedGeneration, session: Session) -> Generation:
        branch = self._branch
        self._branch = branch if torn[0] else 0
        try:
            return right_restore(self, saved, session)
        finally:
            self._branch = branch

    with replaced(head_module, "branch_after", wrong_after), replaced(Generations, "restore", wrong_restore):
        yield


@contextmanager
def a_branch_begins_without_what_is_lost_as_a_whole() -> Iterator[None]:
    """Branches: who read a generation that is lost reads on in the next one under its id."""

    def wrong(self: TokenLog, branch: int) -> int | None:
        return min((cut.index for cut in self._cuts if cut.branch > branch), default=None)

    with replaced(TokenLog, "sure_index", wrong):
        yield


@contextmanager
def all_is_told_while_nothing_can_be_kept() -> Iterator[None]:
    """Durability: while the store is in trouble, all that is told may be lost."""

    def wrong(self: StoreJournal) -> bool:
        return self.tells_ahead

    with replaced(StoreJournal, "_at_once", property(wrong)):
        yield


@contextmanager
def what_was_told_is_written_late() -> Iterator[None]:
    """Durability: more may be lost than what was told in the last moments."""
    with replaced(journal_module, "RELAXED_S", 0.3):
        yield


@contextmanager
def a_head_that_ends_leaves_the_rest_unwritten() -> Iterator[None]:
    """Durability: a head that ends in order loses nothing."""
    right = Head.stop

    async def writes_no_more(self: Head, grace_s: float) -> None:
        if isinstance(self.journal, StoreJournal):
            await gives_up(self.journal)
        await right(self, grace_s)

    async def gives_up(self: StoreJournal) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    with replaced(Head, "stop", writes_no_more), replaced(StoreJournal, "stop", gives_up):
        yield


@contextmanager
def the_next_head_takes_owed_revokes_for_delivered() -> Iterator[None]:
    """Rule 9: a node that cannot tell what it holds goes on holding what an earlier head had it free."""

    def wrong(self: Recovery, node: Node) -> list[RevokeOwed]:
        return [replace(owed, settled=True) for owed in self._revokes.pop(node.name, [])]

    with replaced(Recovery, "owed_to", wrong):
        yield


@contextmanager
def what_is_owed_is_not_written() -> Iterator[None]:
    """Rule 9: the head dies, and nobody knows that a node is owed a revoke."""

    def wrong(_: Head, __: Node, ___: str, ____: int, _____: bool) -> None:
        return

    with replaced(Head, "_owed", wrong):
        yield


PLANTED_AHEAD: Sequence[Any] = (
    attach_ignores_the_branch,
    nothing_is_cut_at_a_torn_start,
    a_head_does_not_say_that_it_tells_ahead,
    the_cut_lies_one_token_too_far,
    a_cut_is_not_written,
    only_the_first_start_cuts,
    a_branch_begins_without_what_is_lost_as_a_whole,
    all_is_told_while_nothing_can_be_kept,
    what_was_told_is_written_late,
    a_head_that_ends_leaves_the_rest_unwritten,
    the_next_head_takes_owed_revokes_for_delivered,
    what_is_owed_is_not_written,
)
