"""Bugs to plant in what outlives a head: the journal, what is taken up of it, and what nodes still hold.

As in planted.py, each replaces a method of the runtime while it is open.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fleet_service.domain.commands import HeldSession
from fleet_service.domain.events import Finished
from fleet_service.runtime import head as head_module
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.head import Head
from fleet_service.runtime.journal import StoreJournal, WrittenLog
from fleet_service.runtime.node import Node
from fleet_service.runtime.operators import Operators
from fleet_service.runtime.records import ContextExtended, GenerationEnded, Record, Saved, SessionBound
from fleet_service.runtime.recovery import Recovery
from fleet_service.runtime.session import Session
from fleet_service.runtime.tokenlog import TokenLog
from fleet_service.runtime.views import NodeInfo
from tests.sim.planting import replaced


@contextmanager
def a_token_is_shown_before_its_commit() -> Iterator[None]:
    """Durability: readers get what may yet be lost."""
    right = StoreJournal.has_tokens

    def wrong(self: StoreJournal, tokens: WrittenLog) -> None:
        right(self, tokens)
        tokens.show(tokens.received)

    with replaced(StoreJournal, "has_tokens", wrong):
        yield


@contextmanager
def an_end_is_shown_before_its_commit() -> Iterator[None]:
    """Durability: the terminal event may be another one after a restart."""
    right = StoreJournal.end

    def wrong(self: StoreJournal, tokens: WrittenLog) -> None:
        right(self, tokens)
        tokens.show(tokens.received, end=True)

    with replaced(StoreJournal, "end", wrong):
        yield


@contextmanager
def an_answer_is_given_before_its_commit() -> Iterator[None]:
    """Durability: what a caller was told did happen is not there after a restart."""

    async def wrong(_: StoreJournal, **__: bool) -> None:
        return

    with replaced(StoreJournal, "settled", wrong):
        yield


@contextmanager
def a_term_is_not_above_the_saved_one() -> Iterator[None]:
    """Fencing: a head that starts within the same second as the last one has its term."""

    def wrong(saved: Saved, unix_s: int) -> int:
        return max(unix_s, saved.term)

    with replaced(head_module, "term_after", wrong):
        yield


@contextmanager
def _taken_up_with(change: Any) -> Iterator[None]:
    right = TokenLog.restore

    def wrong(
        self: TokenLog, token_ids: array[int], marks: Any, cuts: Any, finished: Finished | None
    ) -> None:
        right(self, token_ids if finished is not None else change(token_ids), marks, cuts, finished)

    with replaced(TokenLog, "restore", wrong):
        yield


@contextmanager
def a_generation_begins_at_index_zero_again() -> Iterator[None]:
    """Rule 1: what was delivered before the head died is delivered once more."""
    with _taken_up_with(lambda _ids: array("I")):
        yield


@contextmanager
def a_generation_is_taken_up_one_index_late() -> Iterator[None]:
    """Rule 1: a token is made up at the seam."""
    with _taken_up_with(lambda ids: ids + ids[-1:]):
        yield


@contextmanager
def a_session_is_bound_again_whatever_its_epoch() -> Iterator[None]:
    """Rule 2: what a node holds under another epoch than the one that was kept, if any, is taken for it."""
    right = Session.adopt

    def wrong(self: Session, node: Node, held: HeldSession, own_term: int) -> bool:
        self.was_bound = SessionBound(self.session_id, node.name, node.incarnation, held.epoch)
        return right(self, node, held, own_term)

    with replaced(Session, "adopt", wrong):
        yield


@contextmanager
def a_run_that_was_not_kept_is_taken_up() -> Iterator[None]:
    """Rule 3: a generation's id comes again, and the node goes on with what it meant before."""

    def wrong(_: Head, held: HeldSession) -> HeldSession:
        return held

    with replaced(Head, "_unless_unknown", wrong):
        yield


@contextmanager
def what_a_node_has_kept_is_begun_anew() -> Iterator[None]:
    """Failures: a head that is back sees nothing that its nodes still run, and pays a prefill for each."""

    def wrong(_: Session, __: Node, ___: HeldSession, ____: int) -> bool:
        return False

    with replaced(Session, "adopt", wrong):
        yield


@contextmanager
def what_joins_a_context_is_not_written() -> Iterator[None]:
    """Rule 6: of a context, only what it began with is kept."""
    right = StoreJournal.put

    def wrong(self: StoreJournal, *records: Record) -> None:
        right(
            self, *(each for each in records if not isinstance(each, ContextExtended) or not each.base_length)
        )

    with replaced(StoreJournal, "put", wrong):
        yield


@contextmanager
def a_finish_is_written_before_the_context_it_extends() -> Iterator[None]:
    """Durability: the two are of two batches, and the head may die between them."""
    right = StoreJournal._keep

    async def wrong(self: StoreJournal, batch: list[Record]) -> bool:
        ends = (number for number, each in enumerate(batch, start=1) if isinstance(each, GenerationEnded))
        end = next(ends, len(batch))
        return await right(self, batch[:end]) and (end == len(batch) or await right(self, batch[end:]))

    with replaced(StoreJournal, "_keep", wrong):
        yield


@contextmanager
def the_next_head_forgets_request_ids() -> Iterator[None]:
    """Rule 1: the same request, asked of the next head, is carried out again."""

    async def wrong(_: StoreJournal, __: str, ___: str) -> None:
        return None

    with replaced(StoreJournal, "answered", wrong):
        yield


@contextmanager
def the_next_head_forgets_cancels() -> Iterator[None]:
    """Rule 5: a cancel that came before its generation does not outlive the head."""

    def wrong(_: Generations, __: Any) -> None:
        return

    with replaced(Generations, "restore_cancel", wrong):
        yield


@contextmanager
def every_head_gives_the_whole_time() -> Iterator[None]:
    """Rule 4: the deadline starts anew with each head."""
    right = Generation.__init__

    def wrong(self: Generation, *arguments: Any, wall_s: float | None = None, **named: Any) -> None:
        right(self, *arguments, **named)

    with replaced(Generation, "__init__", wrong):
        yield


@contextmanager
def readers_get_no_time_to_return() -> Iterator[None]:
    """Failures: what nobody reads in the moment the head is back is cancelled."""
    right = Generation._nobody_reads

    def wrong(self: Generation, *, first: bool) -> None:
        right(self, first=first and self.accepted_s == self.begun_s)

    with replaced(Generation, "_nobody_reads", wrong):
        yield


@contextmanager
def a_session_for_one_answer_outlives_it() -> Iterator[None]:
    """Rule 9: the head died between the answer and the end of its session."""

    def wrong(_: Recovery, __: Saved) -> None:
        return

    with replaced(Recovery, "_finish_answered", wrong):
        yield


@contextmanager
def a_node_that_comes_back_is_cordoned_again() -> Iterator[None]:
    """Operators: the cordon of an earlier head was ended while the node was away, and is carried out."""
    right = Operators.uncordon_node

    def wrong(self: Operators, ref: str) -> NodeInfo:
        before = dict(self._orders)
        info = right(self, ref)
        self._orders.clear()
        self._orders.update(before)
        return info

    with replaced(Operators, "uncordon_node", wrong):
        yield


PLANTED_IN_STORE: Sequence[Any] = (
    a_token_is_shown_before_its_commit,
    an_end_is_shown_before_its_commit,
    an_answer_is_given_before_its_commit,
    a_term_is_not_above_the_saved_one,
    a_generation_begins_at_index_zero_again,
    a_generation_is_taken_up_one_index_late,
    a_session_is_bound_again_whatever_its_epoch,
    a_run_that_was_not_kept_is_taken_up,
    what_a_node_has_kept_is_begun_anew,
    what_joins_a_context_is_not_written,
    a_finish_is_written_before_the_context_it_extends,
    the_next_head_forgets_request_ids,
    the_next_head_forgets_cancels,
    every_head_gives_the_whole_time,
    readers_get_no_time_to_return,
    a_session_for_one_answer_outlives_it,
    a_node_that_comes_back_is_cordoned_again,
)
