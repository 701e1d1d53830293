"""What the checks know of each generation: what was asked, what befell it, and whether its end is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleet_service.domain.events import Finished, FinishReason
from fleet_service.domain.specs import GenerationSpec, OnDisconnect
from fleet_service.runtime.generation import FIRST_READER_S
from fleet_service.runtime.records import SavedGeneration
from node_stub.reference import StubModel
from tests.sim.reference import Expected, expected_output

if TYPE_CHECKING:
    from tests.sim.transcripts import Transcript


@dataclass(slots=True)
class Plan:
    """A generation as its caller means it. `seed` is the one that counts; None = the head draws one."""

    session_label: str
    model: StubModel
    context: tuple[int, ...]
    spec: GenerationSpec
    seed: int | None
    revision_open: bool  # the first node's revision is to be the session's
    wall_s: float
    grace_s: float
    selector: bool = False  # whether labels are asked for
    windows: frozenset[int] = frozenset()  # of the nodes that serve the model, in tokens
    replay_never: bool = False
    cancelled_before: bool = False  # its cancel came before it was asked for
    cancelled_behind_s: float = 0.0  # by the clock, so much behind, of a head that holds it for a while
    engine_fails_at: int | None = None
    kills_at: int | None = None

    @property
    def max_new_tokens(self) -> int:
        assert self.spec.max_new_tokens is not None
        return self.spec.max_new_tokens


@dataclass(slots=True)
class Record:
    """One generation from its acceptance on. Times are virtual seconds."""

    generation_id: str
    session_id: str
    plan: Plan
    accepted_s: float
    seed: int | None
    model: StubModel | None  # None while its revision is not known
    limit: int  # of new tokens: as asked for, or what was left in the first node's window
    finished: Finished | None = None
    finished_s: float = 0.0
    cancel_asked_s: float | None = None
    cancel_waits_s: float | None = None  # of the head that has it: since when it must have heeded a cancel
    session_finished_s: float | None = None
    readers_open: int = 0
    readers_seen: int = 0
    abandoned_s: float | None = None
    attempts: int = 0
    placed_s: float = -1.0
    placed_at_once: int = 0
    failures: list[tuple[str, str, int]] = field(default_factory=list)  # node, class, tokens had by then
    failed_before: int = 0  # how many of them were under earlier heads, which may have kept only some
    epochs: set[int] = field(default_factory=set)  # that runs of it were asked for under
    admitted: list[tuple[str, int]] = field(default_factory=list)  # node, first index
    kills: list[tuple[int, int]] = field(default_factory=list)  # first index of the run, index it died at
    engine_failures: int = 0
    strikes: Counter[str] = field(default_factory=Counter)  # faults that hit a run of it
    life: int = 1  # the number of the head that has it; 0 = none does
    taken_up_s: float | None = None  # by the head that has it, from an earlier one
    tries_again: bool = False  # that head has not tried it yet
    behind_s: float = 0.0  # of the clock of the head that accepted it
    late_s: float = 0.0  # how much more that of the head which has it is behind
    first_life: int = 1  # of the head that accepted it
    told: list[tuple[float, int]] = field(default_factory=list)  # when readers had its tokens up to where
    losses: list[tuple[int, int]] = field(default_factory=list)  # the life after each, tokens that were left
    lost: bool = False  # with the head that had it
    first_reader: Transcript | None = None
    end_lost: bool = False  # its end was undone, and nobody has heard of another
    _expected: Expected | None = None

    @property
    def deadline_s(self) -> float:
        """By the clock of the head that has it; never more than its whole time from when that took it up."""
        due_s = self.accepted_s + self.plan.wall_s
        if self.taken_up_s is None:
            return due_s
        latest_s = self.taken_up_s + self.plan.wall_s
        return max(min(due_s + self.late_s, latest_s), self.taken_up_s)

    @property
    def patience_s(self) -> float:
        """How long it goes on with nobody to read; after the death of a head, readers have time to return."""
        back = self.taken_up_s is not None and self.readers_seen == 0
        return max(self.plan.grace_s, FIRST_READER_S) if back else self.plan.grace_s

    def breaks_off(self, saved: SavedGeneration) -> None:
        """Its head is dead; what is kept of it is `saved`, and what was decided and not kept is undone."""
        if saved.ended is None:
            self.end_lost |= self.finished is not None
            self.finished = None
        self.life = self.readers_open = self.readers_seen = 0
        self.abandoned_s = None
        self.attempts = saved.attempts
        self.failed_before = len(self.failures)
        self.kills.clear()

    def taken_up(self, life: int, now_s: float, behind_s: float) -> None:
        """The next head has it."""
        self.life, self.taken_up_s, self.late_s = life, now_s, behind_s - self.behind_s
        self.cancel_waits_s = None
        self.tries_again = True
        if self.finished is None and not self.runs_on_alone:
            self.abandoned_s = now_s

    def sure_index(self, life: int) -> int | None:
        """Up to where what that head gave is right as long as the generation is there; None = in all."""
        if life < self.first_life:
            return 0
        return min((left for later, left in self.losses if later > life), default=None)

    @property
    def expected(self) -> Expected | None:
        """None while the seed or the revision is not known."""
        if self._expected is None and self.seed is not None and self.model is not None:
            plan = self.plan
            self._expected = expected_output(self.model, self.seed, plan.context, self.limit, plan.spec.stop)
        return self._expected

    @property
    def runs_on_alone(self) -> bool:
        return self.plan.spec.on_disconnect is OnDisconnect.CONTINUE

    def cancel_is_due(self, now_s: float) -> bool:
        """Whether anybody gave cause to end it as CANCELLED."""
        left_alone = self.abandoned_s is not None
        if self.abandoned_s is not None and self.taken_up_s is not None and self.readers_seen == 0:
            left_alone = now_s >= self.abandoned_s + self.patience_s - 0.002
        return self.cancel_asked_s is not None or self.session_finished_s is not None or left_alone


def right_end(record: Record, finished: Finished, now_s: float) -> str | None:
    """What is wrong with a generation's end, as far as it tells itself; None = nothing (rules 4-6)."""
    plan, expected = record.plan, record.expected
    count = finished.output_tokens
    if finished.context_tokens != len(plan.context):
        return f"says {finished.context_tokens} context tokens of {len(plan.context)}"
    if (finished.error is not None) != (finished.reason is FinishReason.ERROR):
        return f"{finished.reason} with error {finished.error}"
    if expected is not None and count > len(expected.token_ids):
        return f"went on past its end: {count} tokens of {len(expected.token_ids)}"
    complete = (expected is not None and count == len(expected.token_ids)) or record.limit == 0
    match finished.reason:
        case FinishReason.CANCELLED:
            return None if record.cancel_is_due(now_s) else "CANCELLED, and nobody asked for it"
        case FinishReason.WALL_CLOCK:
            return None if now_s >= record.deadline_s - 0.002 else "WALL_CLOCK before its time"
        case FinishReason.ERROR:
            return "ERROR, and every token had been delivered" if complete and count else None
    if record.limit == 0:
        return None if finished.reason is FinishReason.LENGTH else f"{finished.reason} of no tokens"
    if expected is None:
        return f"{finished.reason}, and no node was asked"
    if finished.reason is FinishReason.LENGTH and len(plan.context) + count in plan.windows:
        return None
    if not complete:
        return f"{finished.reason} after {count} of {len(expected.token_ids)} tokens"
    if (finished.reason, finished.stop_index) != (expected.reason, expected.stop_index):
        return (
            f"{finished.reason} (stop {finished.stop_index}), "
            f"right is {expected.reason} (stop {expected.stop_index})"
        )
    return None
