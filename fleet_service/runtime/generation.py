"""One generation: its log, its readers, its deadline and the one decision that ends it.

Who drives it through nodes is driver.py; who reads it is tokenlog.Reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import Accepted, ErrorCause, Finished, FinishReason, Timings
from fleet_service.domain.output_rules import OutputEnd, OutputRules
from fleet_service.domain.specs import GenerationSpec, OnDisconnect, Qos, Sampling
from fleet_service.runtime.journal import Journal
from fleet_service.runtime.observer import GenerationTrace
from fleet_service.runtime.session import Session
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.tokenlog import Follower, Reader, TokenLog, comes_back

log = structlog.get_logger(__name__)

FollowerT = TypeVar("FollowerT", bound=Follower)

# How long an accepted generation under CANCEL waits for its first reader.
FIRST_READER_S = 10.0
EARLY_S = 0.001
"""A timer may ring that much too early."""


class Generation:
    """A generation from acceptance to its terminal event, and for a while after.

    `on_decided` is called once, in the step that decides.
    """

    def __init__(  # noqa: PLR0913 - each by its name
        self,
        generation_id: str,
        session: Session,
        spec: GenerationSpec,
        settings: HeadSettings,
        *,
        sampling: Sampling,
        rules: OutputRules,
        trace: GenerationTrace,
        on_decided: Callable[[Generation], None],
        journal: Journal | None = None,
        branch: int = 0,
        wall_s: float | None = None,
        age_s: float = 0.0,
    ) -> None:
        """`age_s` and `wall_s`: how old it is and what is left of its time, when an earlier run began it."""
        self.generation_id = generation_id
        self.session = session
        self.session_id = session.session_id
        self.spec = spec
        self.sampling = sampling
        self.rules = rules
        self.trace = trace
        self.log = TokenLog(Accepted(generation_id, session.session_id), journal, branch)
        self.context_tokens = len(session.context)
        loop = asyncio.get_running_loop()
        taken_up = wall_s is not None
        self.begun_s = loop.time()
        """When this run of the head took it in hand."""
        self.accepted_s = self.begun_s - age_s
        if wall_s is None:
            wall_s = settings.default_wall_s if spec.max_wall_s is None else spec.max_wall_s
        self.deadline_s = self.begun_s + wall_s
        self.attempts = 0
        self.node = ""  # that of the last attempt
        self.barred: frozenset[str] = frozenset()  # nodes that its failures so far leave out
        self.min_window_tokens = 0  # a window that refused it
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._settings = settings
        self._on_decided = on_decided
        self._readers: dict[Follower, None] = {}  # in the order they came
        self._queued_s = 0.0
        self._left = False
        self._waits_from_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._longest_gap_s = 0.0
        self._patience_s = 0.0
        self._nobody_until_s: float | None = None  # while nobody reads
        # One timer for that and the deadline; what is put off leaves it as it is.
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_s = 0.0
        if taken_up:  # its readers come back once the head serves
            self._wake_by(self.deadline_s)
        else:
            self._nobody_reads(first=True)

    @property
    def left(self) -> bool:
        """The head's next run goes on with it."""
        return self._left

    def leave(self) -> None:
        """The head ends, and its next run goes on with it: nothing decides it any more."""
        self._left = True
        self._sleep()
        if self.task is not None:
            self.task.cancel()
        for reader in list(self._readers):
            reader.leave()

    def waits_for_readers(self) -> None:
        """They may come back from now on, as to one that has just begun."""
        if not self._readers and self.finished is None:
            self._somebody_reads()
            self._nobody_reads(first=True)

    def was_decided(self, finished: Finished) -> None:
        """An earlier run of the head decided it."""
        self._sleep()
        self.attempts = finished.attempts

    @property
    def finished(self) -> Finished | None:
        return self.log.finished

    @property
    def qos(self) -> Qos:
        return self.spec.qos or self.session.spec.qos

    def expected_output_tokens(self) -> int:
        """What remains to be expected, for placement; never more than may still come."""
        wanted = (
            self.spec.expected_output_tokens
            or self.session.spec.expected_output_tokens
            or self._settings.expected_output_tokens
        )
        return max(1, min(wanted - self.log.received, self.rules.remaining))

    # Output

    def deliver(self, token_ids: Sequence[int], now_s: float) -> None:
        """Add the next tokens; decides the generation when they end it. Nothing after the decision."""
        log = self.log
        if log.finished is not None or self._left:
            return
        taken, end = self.rules.accept(token_ids)
        if taken:
            if not log.received:
                self._first_token_s = now_s
                self.trace.first_token()
            elif self._last_token_s and now_s - self._last_token_s > self._longest_gap_s:
                self._longest_gap_s = now_s - self._last_token_s
            self._last_token_s = now_s
            log.append(token_ids if taken == len(token_ids) else token_ids[:taken])
        if end is not None:
            self.decide_end(end)

    def decide_end(self, end: OutputEnd) -> None:
        self.decide(end.reason, stop_index=end.stop_index)

    def decide(
        self, reason: FinishReason, *, stop_index: int | None = None, error: ErrorCause | None = None
    ) -> bool:
        """End the generation. The first decision wins; False when there was one already."""
        if self.finished is not None or self._left:
            return False
        self._sleep()
        self.waits_no_more()
        finished = Finished(
            reason=reason,
            context_tokens=self.context_tokens,
            output_tokens=self.log.received,
            attempts=self.attempts,
            timings=self._timings(),
            stop_index=stop_index,
            error=error,
        )
        self._on_decided_first(finished)
        return True

    def _on_decided_first(self, finished: Finished) -> None:
        task = self.task
        if task is not None and task is not _current_task(self._loop):
            task.cancel()
        self.log.finish(finished)
        self.trace.finished(finished)
        self._on_decided(self)

    def cancel(self) -> bool:
        """The caller's cancel; False when the generation had ended."""
        return self.decide(FinishReason.CANCELLED)

    def fail(self, error: FleetError) -> None:
        """End with ERROR and a refusal as its cause."""
        cause = ErrorCause(
            error.reason, error.message, {**error.metadata, "nextIndex": str(self.log.received)}
        )
        self.decide(FinishReason.ERROR, error=cause)

    def remaining_wall_s(self) -> float:
        return max(0.0, self.deadline_s - self._loop.time())

    def _wake_by(self, due_s: float) -> None:
        if self._timer is not None:
            if self._wakes_s <= due_s:
                return
            self._timer.cancel()
        self._wakes_s = due_s
        self._timer = self._loop.call_at(due_s, self._woken)

    def _woken(self) -> None:
        """Something may be due: the deadline, or the end of the patience with readers."""
        self._timer = None
        now_s, nobody_until_s = self._loop.time() + EARLY_S, self._nobody_until_s
        if self.deadline_s <= now_s:
            self.decide(FinishReason.WALL_CLOCK)
        elif nobody_until_s is None:
            self._wake_by(self.deadline_s)
        elif nobody_until_s <= now_s:
            self._nobody_came()
        else:
            self._wake_by(min(nobody_until_s, self.deadline_s))

    def _sleep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timings(self) -> Timings:
        self.waits_no_more()
        first = self._first_token_s
        return Timings(
            queued_s=self._queued_s,
            first_token_s=None if first is None else first - self.accepted_s,
            total_s=self._loop.time() - self.accepted_s,
            longest_gap_s=self._longest_gap_s,
            last_token_s=None if first is None else self._last_token_s - self.accepted_s,
        )

    def waits_for_lane(self) -> None:
        """From now on, until waits_no_more() or the decision."""
        self._waits_from_s = self._loop.time()

    def waits_no_more(self) -> None:
        if self._waits_from_s is not None:
            waited_s = self._loop.time() - self._waits_from_s
            self._queued_s += waited_s
            self._waits_from_s = None
            self.trace.waited(waited_s)

    # Readers

    def attach(self, from_index: int = 0, branch: int = 0) -> Reader:
        """A reader from `from_index` on; what it has before is of that branch.

        Raises FleetError INDEX_OUT_OF_RANGE, DATA_LOSS, LIMIT_EXCEEDED or HEAD_DRAINING.
        """
        self._check_attach(from_index, branch)
        return self._reads(Reader(self.log, from_index, self._reader_gone))

    def follow(self, from_index: int, branch: int, on_news: Callable[[], None]) -> Follower:
        """As `attach`, of one who is told of news by a callback."""
        self._check_attach(from_index, branch)
        return self._reads(Follower(self.log, from_index, self._reader_gone, on_news))

    def _check_attach(self, from_index: int, branch: int) -> None:
        if self._left:
            raise comes_back(from_index)
        sure = self.log.sure_index(branch)
        if sure is not None and from_index > sure:
            raise FleetError(
                Reason.DATA_LOSS,
                f"the head lost what it had of generation {self.generation_id} from index {sure} on, and what"
                " is there now may differ from what you have; attach there, without the rest",
                metadata={
                    "generationId": self.generation_id,
                    "nextIndex": str(sure),
                    "branch": str(self.log.branch),
                },
            )
        if from_index > self.log.visible:
            raise FleetError(
                Reason.INDEX_OUT_OF_RANGE,
                f"generation {self.generation_id} has {self.log.visible} tokens; attach there or below",
                metadata={"fromIndex": str(from_index), "tokens": str(self.log.visible)},
            )
        limit = self._settings.max_readers_per_generation
        if len(self._readers) >= limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"generation {self.generation_id} has {limit} readers, the most it may have",
                metadata={"limit": "max_readers_per_generation", "value": str(limit)},
                retry_after_s=1.0,
            )

    def _reads(self, reader: FollowerT) -> FollowerT:
        self._readers[reader] = None
        self._somebody_reads()
        return reader

    def _reader_gone(self, reader: Follower) -> None:
        self._readers.pop(reader, None)
        if not self._readers and self.finished is None and not self._left:
            self._nobody_reads(first=False)

    def _somebody_reads(self) -> None:
        self._nobody_until_s = None

    def _nobody_reads(self, *, first: bool) -> None:
        spec, settings = self.spec, self._settings
        if spec.on_disconnect is OnDisconnect.CONTINUE:
            patience_s = _given(spec.orphan_timeout_s, settings.default_orphan_timeout_s)
        else:
            patience_s = _given(spec.disconnect_grace_s, settings.default_disconnect_grace_s)
            if first:
                patience_s = max(patience_s, FIRST_READER_S)
        if patience_s <= 0:
            self.cancel()
        else:
            self._patience_s = patience_s
            self._nobody_until_s = self._loop.time() + patience_s
            self._wake_by(min(self._nobody_until_s, self.deadline_s))

    def _nobody_came(self) -> None:
        log.info(
            "nobody_reads",
            generation=self.generation_id,
            waited_s=self._patience_s,
            tokens=self.log.received,
        )
        self.cancel()


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _current_task(loop: asyncio.AbstractEventLoop) -> asyncio.Task[object] | None:
    return asyncio.current_task(loop)
