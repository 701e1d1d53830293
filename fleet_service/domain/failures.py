"""What a failed attempt means for its node, and what follows for its generation (design: Failures).

The table says, per failure class, whose fault it is and what it costs; AttemptBudget decides what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from fleet_service.domain.commands import Refusal, RefusalCode
from fleet_service.domain.epochs import CREDIBLE_TERMS_AHEAD, term_of
from fleet_service.domain.errors import Reason
from fleet_service.domain.events import ErrorCause, MoveCause, Moved

MAX_ATTEMPTS_WITHOUT_PROGRESS = 3
MAX_ENGINES_TRIED = 2
MAX_NODES_LEFT = 10
"""Nodes that may be stopped in order under one request at the same token before that counts: in a fleet that
is stopped node by node faster than it prefills, a request would else go on until its time is over."""
MAX_LOSSES_AT_ONE_INDEX = 2


class FailureClass(Enum):
    """How an attempt failed."""

    LINK_LOST = "link_lost"
    NODE_SILENT = "node_silent"
    STALLED = "stalled"
    COMMAND_TIMEOUT = "command_timeout"
    UNKNOWN_SESSION = "unknown_session"
    FENCED = "fenced"
    CONTEXT_MISMATCH = "context_mismatch"
    STALE_EPOCH = "stale_epoch"
    OWNER_CHANGED = "owner_changed"
    CONTEXT_TOO_LONG = "context_too_long"
    CONSTRAINT = "constraint"
    BUSY = "busy"
    ENGINE_ERROR = "engine_error"
    INDEX_GAP = "index_gap"
    PROTOCOL = "protocol"
    NODE_FAULT = "node_fault"
    EVICTED = "evicted"
    REBALANCED = "rebalanced"
    REMOVED = "removed"
    DRAINED = "drained"
    NO_ANSWER = "no_answer"


class Avoid(Enum):
    """How the next placement treats the node that failed."""

    NO = "no"  # its own state says whether it can be used
    PREFER_OTHERS = "prefer_others"
    NEVER = "never"  # for this generation, until it makes progress


@dataclass(frozen=True, slots=True)
class FailureRule:
    """One row of the table.

    counts_against_node: shows in the node's failure counters; a caller's own fault never does.
    counts_as_attempt: one of the three without progress.
    rebinds: the same node is tried once more, bound anew. loses_node: the node died or went silent under it.
    keeps_binding: the node was not asked, or said that it did nothing.
    """

    cause: MoveCause
    counts_against_node: bool
    counts_as_attempt: bool
    rebinds: bool = False
    loses_node: bool = False
    keeps_binding: bool = False
    avoid: Avoid = Avoid.NO


FAILURE_RULES: dict[FailureClass, FailureRule] = {
    FailureClass.LINK_LOST: FailureRule(MoveCause.LINK_LOST, True, True, loses_node=True),
    FailureClass.NODE_SILENT: FailureRule(MoveCause.NODE_SILENT, True, True, loses_node=True),
    FailureClass.STALLED: FailureRule(MoveCause.STALLED, True, True, avoid=Avoid.PREFER_OTHERS),
    FailureClass.COMMAND_TIMEOUT: FailureRule(MoveCause.STALLED, True, True, avoid=Avoid.PREFER_OTHERS),
    FailureClass.UNKNOWN_SESSION: FailureRule(MoveCause.SESSION_LOST, False, True, rebinds=True),
    FailureClass.FENCED: FailureRule(MoveCause.SESSION_LOST, False, False, rebinds=True),
    FailureClass.CONTEXT_MISMATCH: FailureRule(MoveCause.SESSION_LOST, False, True, rebinds=True),
    FailureClass.STALE_EPOCH: FailureRule(MoveCause.SESSION_LOST, False, True, rebinds=True),
    FailureClass.OWNER_CHANGED: FailureRule(MoveCause.SESSION_LOST, False, True),
    FailureClass.CONTEXT_TOO_LONG: FailureRule(MoveCause.NO_ROOM, False, False),
    FailureClass.CONSTRAINT: FailureRule(MoveCause.ENGINE_ERROR, False, True),
    FailureClass.BUSY: FailureRule(MoveCause.NO_ROOM, False, False, keeps_binding=True),
    FailureClass.ENGINE_ERROR: FailureRule(MoveCause.ENGINE_ERROR, True, True, avoid=Avoid.NEVER),
    FailureClass.INDEX_GAP: FailureRule(MoveCause.PROTOCOL_ERROR, True, True, avoid=Avoid.PREFER_OTHERS),
    FailureClass.PROTOCOL: FailureRule(MoveCause.PROTOCOL_ERROR, True, True, avoid=Avoid.PREFER_OTHERS),
    FailureClass.NODE_FAULT: FailureRule(MoveCause.ENGINE_ERROR, True, True, avoid=Avoid.PREFER_OTHERS),
    FailureClass.EVICTED: FailureRule(MoveCause.NODE_SILENT, False, False, keeps_binding=True),
    FailureClass.REBALANCED: FailureRule(MoveCause.REBALANCED, False, False, keeps_binding=True),
    # Asked whether it lives before it is given what failed elsewhere, it did not say so.
    FailureClass.NO_ANSWER: FailureRule(
        MoveCause.NODE_SILENT, False, False, keeps_binding=True, avoid=Avoid.PREFER_OTHERS
    ),
    FailureClass.REMOVED: FailureRule(MoveCause.NODE_REMOVED, False, False),
    # Its node is being drained, and another one has kept a place for it.
    FailureClass.DRAINED: FailureRule(MoveCause.DRAIN, False, False),
}

_OF_REFUSAL: dict[RefusalCode, FailureClass] = {
    RefusalCode.UNKNOWN_SESSION: FailureClass.UNKNOWN_SESSION,
    RefusalCode.STALE_EPOCH: FailureClass.STALE_EPOCH,
    RefusalCode.FENCED: FailureClass.FENCED,
    RefusalCode.REPLAYED: FailureClass.STALE_EPOCH,
    RefusalCode.CONTEXT_MISMATCH: FailureClass.CONTEXT_MISMATCH,
    RefusalCode.CONTEXT_TOO_LONG: FailureClass.CONTEXT_TOO_LONG,
    RefusalCode.CONSTRAINT: FailureClass.CONSTRAINT,
    RefusalCode.BUSY: FailureClass.BUSY,
    RefusalCode.ENGINE_ERROR: FailureClass.ENGINE_ERROR,
    RefusalCode.UNRECOGNISED: FailureClass.NODE_FAULT,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt's end that did not end its generation.

    `window_tokens` is the refusing node's window with CONTEXT_TOO_LONG, else 0. `same_run_is_back`: the link
    broke, and the same incarnation of the node was there again at once. `node_left`: it had said that it is
    being stopped, so that nothing about this speaks against the request. `detail` is for logs.
    """

    kind: FailureClass
    node: str
    detail: str = ""
    window_tokens: int = 0
    retry_after_s: float = 0.0
    same_run_is_back: bool = False
    node_left: bool = False

    @property
    def rule(self) -> FailureRule:
        return FAILURE_RULES[self.kind]


def failure_of_refusal(refusal: Refusal, node: str, *, own_term: int) -> Failure:
    """A node's refusal as a failure. A current epoch of a higher term means another head owns the session.

    A term too far ahead of the head's own is not credible: then the node is at fault.
    """
    kind = _OF_REFUSAL[refusal.code]
    ahead = term_of(refusal.current_epoch) - own_term
    if kind is FailureClass.STALE_EPOCH and ahead > 0:
        kind = FailureClass.OWNER_CHANGED if ahead <= CREDIBLE_TERMS_AHEAD else FailureClass.NODE_FAULT
    return Failure(
        kind,
        node,
        detail=refusal.detail or refusal.code.value,
        window_tokens=refusal.max_context_tokens,
        retry_after_s=refusal.retry_after_s,
    )


_LOSSES = frozenset({MoveCause.LINK_LOST, MoveCause.NODE_SILENT})
_COUNTED_CAUSES = _LOSSES | {
    MoveCause.STALLED,
    MoveCause.SESSION_LOST,
    MoveCause.ENGINE_ERROR,
    MoveCause.PROTOCOL_ERROR,
}


class Where(Enum):
    """Where the next attempt goes."""

    SAME_NODE = "same_node"  # bound anew, if it can still be used
    ANYWHERE = "anywhere"  # by placement, `avoid` and `min_window_tokens` respected


@dataclass(frozen=True, slots=True)
class TryAgain:
    """A further attempt. `never` bars nodes; `prefer_not` only where others can take it."""

    where: Where
    never: frozenset[str]
    prefer_not: frozenset[str]
    min_window_tokens: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The generation ends with finish ERROR and this cause."""

    cause: ErrorCause


@dataclass(slots=True)
class AttemptBudget:
    """Counts what a generation's attempts cost since it last made progress (design rule 7).

    `replay_allowed` False: nothing that was delivered may be continued by another attempt.
    """

    replay_allowed: bool = True
    _index: int = 0
    _without_progress: int = 0
    _losses: int = 0
    _left: int = 0
    _engines_failed: set[str] = field(default_factory=set)
    _too_narrow: set[str] = field(default_factory=set)
    _prefer_not: set[str] = field(default_factory=set)
    _rebound: set[str] = field(default_factory=set)
    _min_window_tokens: int = 0

    def after(self, failure: Failure, index: int) -> TryAgain | GiveUp:
        """What follows `failure` with `index` tokens delivered so far."""
        if index > self._index:
            self._progress(index)
        rule = failure.rule
        self._left += failure.node_left
        if rule.counts_as_attempt and (not failure.node_left or self._left > MAX_NODES_LEFT):
            self._without_progress += 1
        lost = rule.loses_node and not failure.same_run_is_back and not failure.node_left
        if lost:
            self._losses += 1
        if failure.kind is FailureClass.ENGINE_ERROR:
            self._engines_failed.add(failure.node)
        if rule.avoid is Avoid.PREFER_OTHERS:
            self._prefer_not.add(failure.node)
        if failure.kind is FailureClass.CONTEXT_TOO_LONG:
            # What is generated only grows, so progress does not make it fit.
            self._min_window_tokens = max(self._min_window_tokens, failure.window_tokens)
            self._too_narrow.add(failure.node)
        cause = self._reason_to_stop(failure, index)
        return GiveUp(cause) if cause is not None else self._next(failure)

    def taken_up(self, index: int, moves: Sequence[Moved]) -> None:
        """An earlier run of the head came to `index`; `moves` are those that readers were told of."""
        self._index = index
        here = [move for move in moves if move.next_index == index and move.cause in _COUNTED_CAUSES]
        self._without_progress = len(here)
        self._losses = sum(move.cause in _LOSSES and move.from_node != move.to_node for move in here)

    def _progress(self, index: int) -> None:
        self._index = index
        self._without_progress = 0
        self._losses = self._left = 0
        for memory in (self._engines_failed, self._prefer_not, self._rebound):
            memory.clear()

    def _reason_to_stop(self, failure: Failure, index: int) -> ErrorCause | None:
        at = {"nextIndex": str(index)}
        if failure.kind is FailureClass.OWNER_CHANGED:
            return ErrorCause(Reason.OWNER_CHANGED, "another head owns the session now; attach there", at)
        if failure.kind is FailureClass.CONSTRAINT:
            return ErrorCause(
                Reason.CONSTRAINT_UNSATISFIABLE, "the engine cannot satisfy what the request asks of it", at
            )
        if not self.replay_allowed and index > 0:
            return ErrorCause(
                Reason.NODE_LOST,
                "the node could not go on, and the session does not allow another to continue",
                at | {"failure": failure.kind.value},
            )
        if len(self._engines_failed) >= MAX_ENGINES_TRIED:
            return ErrorCause(Reason.ENGINE_ERROR, "the engines of two nodes failed on this request", at)
        if self._losses >= MAX_LOSSES_AT_ONE_INDEX:
            return ErrorCause(
                Reason.POISON_REQUEST, "two nodes were lost on this request at the same token", at
            )
        if self._without_progress >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
            return ErrorCause(
                Reason.ATTEMPTS_EXHAUSTED,
                f"{MAX_ATTEMPTS_WITHOUT_PROGRESS} attempts failed without adding a token",
                at | {"failure": failure.kind.value},
            )
        return None

    def _next(self, failure: Failure) -> TryAgain:
        again = False
        if failure.rule.rebinds or failure.same_run_is_back:
            if failure.node in self._rebound:
                self._prefer_not.add(failure.node)
            else:
                self._rebound.add(failure.node)
                again = True
        return TryAgain(
            Where.SAME_NODE if again else Where.ANYWHERE,
            never=frozenset(self._engines_failed | self._too_narrow),
            prefer_not=frozenset(self._prefer_not),
            min_window_tokens=self._min_window_tokens,
        )

    def only_option_failed(self) -> ErrorCause | None:
        """The cause when no node is left that an engine error does not bar; None when nothing is barred."""
        if not self._engines_failed:
            return None
        return ErrorCause(
            Reason.ENGINE_ERROR,
            "the node's engine failed on this request, and no other node can take it",
            {"nextIndex": str(self._index)},
        )
