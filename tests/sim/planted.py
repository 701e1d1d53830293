"""Bugs to plant in the head, one at a time, to prove that the simulation finds such bugs.

Each is a context manager that replaces a method of the runtime or the domain while it is open: the kind of
slip that a careful reader may miss and that only shows under faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fleet_service.domain.commands import Append, Phase, Refusal, RunFinish
from fleet_service.domain.events import Finished
from fleet_service.domain.failures import FAILURE_RULES, Failure, FailureClass
from fleet_service.domain.output_rules import OutputRules
from fleet_service.runtime.attempt import Attempt
from fleet_service.runtime.driver import Driver
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.keeper import NodeKeeper
from fleet_service.runtime.ledger import RequestLedger
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import NodeLink, RunHandle
from fleet_service.runtime.reservation import Reservation
from fleet_service.runtime.session import Binding
from fleet_service.runtime.tokenlog import Cursor, TokenLog
from tests.sim.planted_ahead import PLANTED_AHEAD
from tests.sim.planted_fleet import PLANTED_IN_FLEET
from tests.sim.planted_store import PLANTED_IN_STORE
from tests.sim.planting import replaced


@contextmanager
def old_indexes_are_not_dropped() -> Iterator[None]:
    """Rule 1: tokens that come again under old indexes are taken for new ones."""
    right = Attempt._take_tokens

    def wrong(self: Attempt, first_index: int, token_ids: Sequence[int], now_s: float) -> bool:
        return right(self, max(first_index, self.generation.log.received), token_ids, now_s)

    with replaced(Attempt, "_take_tokens", wrong):
        yield


@contextmanager
def a_gap_is_closed_up() -> Iterator[None]:
    """Rule 1: what follows a gap is taken as if nothing were missing."""
    right = Attempt._take_tokens

    def wrong(self: Attempt, first_index: int, token_ids: Sequence[int], now_s: float) -> bool:
        return right(self, min(first_index, self.generation.log.received), token_ids, now_s)

    with replaced(Attempt, "_take_tokens", wrong):
        yield


@contextmanager
def the_epoch_of_tokens_is_ignored() -> Iterator[None]:
    """Rule 2: tokens of an older binding are taken for those of this one."""
    right = Attempt.on_step

    def wrong(
        self: Attempt,
        epoch: int,
        first_index: int,
        token_ids: Sequence[int],
        phase: Phase | None,
        finish: RunFinish | None,
        refusal: Refusal | None,
    ) -> None:
        right(self, self.epoch, first_index, token_ids, phase, finish, refusal)

    with replaced(Attempt, "on_step", wrong):
        yield


@contextmanager
def the_context_is_not_sent_again() -> Iterator[None]:
    """Rule 3: bound anew after a failure, the session's context is taken to be there already."""
    right = Attempt._owed_appends

    def wrong(self: Attempt) -> list[Append]:
        return [] if self.generation.attempts > 1 else right(self)

    with replaced(Attempt, "_owed_appends", wrong):
        yield


@contextmanager
def output_joins_the_context_on_failover() -> Iterator[None]:
    """Rules 3 and 6: what was generated so far is sent as context, and as prefix."""
    right = Attempt._owed_appends

    def wrong(self: Attempt) -> list[Append]:
        self.generation.session.context.append(self.generation.log.slice(0))
        return right(self)

    with replaced(Attempt, "_owed_appends", wrong):
        yield


@contextmanager
def every_attempt_has_the_whole_time() -> Iterator[None]:
    """Rule 4: the deadline starts anew with each attempt."""
    right = Driver._one_attempt

    async def wrong(self: Driver, reservation: Reservation) -> Failure:
        generation = self._generation
        if generation.attempts:
            wall_s = generation.deadline_s - generation.accepted_s
            generation.deadline_s = generation._loop.time() + wall_s
        return await right(self, reservation)

    with replaced(Driver, "_one_attempt", wrong):
        yield


@contextmanager
def a_cancel_while_queued_is_lost() -> Iterator[None]:
    """Rule 5: before the first dispatch there is nothing to cancel, it says."""
    right = Generation.cancel

    def wrong(self: Generation) -> bool:
        return right(self) if self.attempts else False

    with replaced(Generation, "cancel", wrong):
        yield


@contextmanager
def the_last_decision_wins() -> Iterator[None]:
    """Rule 5: a finish that comes after a cancel replaces it."""
    right = TokenLog.finish

    def lenient(self: TokenLog, event: Finished) -> None:
        self.finished = None
        right(self, event)

    def undecided(self: Generation) -> Finished | None:
        return None if self.rules.remaining == 0 else self.log.finished

    with (
        replaced(TokenLog, "finish", lenient),
        replaced(Generation, "finished", property(undecided)),
    ):
        yield


@contextmanager
def nodes_are_not_told_of_the_end() -> Iterator[None]:
    """Rule 5: what was decided runs on at its node."""
    right = Attempt.__init__

    class Forgetful:
        def __init__(self, link: NodeLink) -> None:
            self._link = link

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

        def run(self, *arguments: Any) -> RunHandle:
            self._link.run(*arguments)
            return _Unclosable()

    def wrong(self: Attempt, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self._link = Forgetful(self._link)

    with replaced(Attempt, "__init__", wrong):
        yield


class _Unclosable:
    def close(self) -> None:
        return


@contextmanager
def stop_state_is_lost_over_the_seam() -> Iterator[None]:
    """Rule 6: a stop sequence that begins before a failover and ends after it is not seen."""
    right = Attempt.__init__

    def wrong(self: Attempt, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self.generation.rules._tail = []

    with replaced(Attempt, "__init__", wrong):
        yield


@contextmanager
def only_the_node_says_eos() -> Iterator[None]:
    """Rule 6: a delivered EOS whose finish never came is continued elsewhere."""
    right = OutputRules.__init__

    def wrong(self: OutputRules, _eos: frozenset[int], *arguments: Any) -> None:
        right(self, frozenset(), *arguments)

    with replaced(OutputRules, "__init__", wrong):
        yield


@contextmanager
def a_callers_error_counts_against_the_node() -> Iterator[None]:
    """Rule 7: a context too long for a node is its failure."""
    rule = FAILURE_RULES[FailureClass.CONTEXT_TOO_LONG]
    changed = replace(rule, counts_against_node=True)
    FAILURE_RULES[FailureClass.CONTEXT_TOO_LONG] = changed
    try:
        yield
    finally:
        FAILURE_RULES[FailureClass.CONTEXT_TOO_LONG] = rule


@contextmanager
def a_failed_attempt_keeps_its_reservation() -> Iterator[None]:
    """Rule 9: the count of an attempt that failed is never given back."""
    right = Driver._one_attempt

    async def wrong(self: Driver, reservation: Reservation) -> Failure:
        failure = await right(self, reservation)
        reservation.released = True
        return failure

    with replaced(Driver, "_one_attempt", wrong):
        yield


@contextmanager
def a_session_leaves_without_a_revoke() -> Iterator[None]:
    """Rule 10: what moves, parks or finishes is never revoked at its old node."""

    def wrong(self: Binding, session_id: str) -> None:
        if self.life == self.node.life:
            self.node.sessions -= 1

    with replaced(Binding, "dropped", wrong):
        yield


@contextmanager
def a_revoke_is_settled_unanswered() -> Iterator[None]:
    """Rule 10: a revoke that was sent is thought to be done, answered or not."""
    right = NodeKeeper._settles

    def wrong(self: NodeKeeper, revoke: Any, answer: Any) -> Any:
        answered = right(self, revoke, answer)
        self._node.settle_revoke(revoke)
        return answered

    with replaced(NodeKeeper, "_settles", wrong):
        yield


@contextmanager
def a_late_reader_gets_a_token_twice() -> Iterator[None]:
    """Rule 1: who attaches at an index gets the token before it as well."""
    right = Cursor.__init__

    def wrong(self: Cursor, log: TokenLog, from_index: int) -> None:
        right(self, log, max(0, from_index - 1))

    with replaced(Cursor, "__init__", wrong):
        yield


@contextmanager
def a_request_id_is_forgotten() -> Iterator[None]:
    """Rule 1: the same request again starts a second generation."""
    right = RequestLedger.once

    async def wrong(self: RequestLedger, _key: Any, make: Any) -> Any:
        return await right(self, None, make)

    with replaced(RequestLedger, "once", wrong):
        yield


@contextmanager
def waiting_attempts_stay_on_a_dead_node() -> Iterator[None]:
    """Rule 8: what waits for a lane of a node that went down goes on waiting."""

    def wrong(self: Node) -> None:
        return

    with replaced(Node, "_evict_waiting", wrong):
        yield


@contextmanager
def a_broken_link_is_noticed_by_silence_only() -> Iterator[None]:
    """Rule 8: runs on a link that broke are left to the stall timer."""
    right = Attempt._fail

    def wrong(self: Attempt, failure: Failure) -> None:
        if failure.kind is not FailureClass.LINK_LOST:
            right(self, failure)

    with replaced(Attempt, "_fail", wrong):
        yield


PLANTED: tuple[Callable[[], Any], ...] = (
    old_indexes_are_not_dropped,
    a_gap_is_closed_up,
    the_epoch_of_tokens_is_ignored,
    the_context_is_not_sent_again,
    output_joins_the_context_on_failover,
    every_attempt_has_the_whole_time,
    a_cancel_while_queued_is_lost,
    the_last_decision_wins,
    nodes_are_not_told_of_the_end,
    stop_state_is_lost_over_the_seam,
    only_the_node_says_eos,
    a_callers_error_counts_against_the_node,
    a_failed_attempt_keeps_its_reservation,
    a_session_leaves_without_a_revoke,
    a_revoke_is_settled_unanswered,
    a_late_reader_gets_a_token_twice,
    a_request_id_is_forgotten,
    waiting_attempts_stay_on_a_dead_node,
    a_broken_link_is_noticed_by_silence_only,
    *PLANTED_IN_FLEET,
    *PLANTED_IN_STORE,
    *PLANTED_AHEAD,
)
