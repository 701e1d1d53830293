"""One generation on its way to the head: what its engine made, waiting to be sent, and how it ends."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from node_stub.engine import Finish, Job, Phase
from node_stub.journal import Entry
from node_stub.rules import Admission, Code, Owner, Refusal

DEFAULT_BUFFER_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a run. A finish or a refusal is its last."""

    first_index: int
    token_ids: Sequence[int] = ()
    phase: Phase | None = None
    finish: Finish | None = None
    refusal: Refusal | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.refusal is not None


class RunTrace(Protocol):
    """One run, watched. Told of its turns, never of tokens."""

    def phase(self, phase: Phase) -> None:
        """It enters a phase."""

    def ended(self, outcome: str, tokens: int) -> None:
        """It left the engine with a finish's or a refusal's name, having made `tokens` for the head."""


class Run:
    """Takes what the engine says (a JobSink) and hands it out in messages, at the sender's own pace.

    The first to end it wins: the engine, a cancel or the wall clock; and over all of them, as long as the
    last message has not gone out, a refusal from the node rules.

    It holds at most `buffer_tokens`: what is not sent, and of a run that can be resumed what was sent and
    not acknowledged, the newest of it. While somebody sends, half a buffer not sent holds the engine back;
    a buffer that overflows all the same is told to `on_overflow`, once.
    """

    def __init__(
        self,
        admission: Admission,
        owner: Owner,
        entry: Entry,
        now_ms: Callable[[], int],
        on_left: Callable[[Run], None],
        on_overflow: Callable[[Run], None],
        buffer_tokens: int = DEFAULT_BUFFER_TOKENS,
    ) -> None:
        self.admission = admission
        self.entry = entry
        self.job = Job(admission, owner, self)
        self.sent = 0
        """Tokens sent, the same as `entry.tokens_sent`."""
        self.struck: set[int] = set()
        """Faults that this run has had (see Faults.take)."""
        self.delivered = False
        """Its last message has been sent."""
        self.dropped = False
        """The connection is to be dropped without a word."""
        self.deadline: asyncio.TimerHandle | None = None
        """Ends it when its time is up."""
        self.epoch_lie = 0
        """Added to the epoch that its messages name."""
        self.resumable = False
        """What was sent is kept until acknowledged, so that it can be sent again."""
        self.on_news: Callable[[], None] | None = None
        """Called whenever there may be something to send; None = nobody is there to send it."""
        self.on_taken: Callable[[], None] | None = None
        """Called when another sender takes it over; None = it has none."""
        self.trace: RunTrace | None = None
        self._buffer_tokens = buffer_tokens
        self._last_token = 0
        self._last_phase: Phase | None = None
        self._skipped = 0
        self._to_skip = 0
        self._now_ms = now_ms
        self._on_left = on_left
        self._on_overflow = on_overflow
        self._overflowed = False
        self._detached = False
        self._stalled = False
        self._phases: list[Phase] = []
        self._tokens = array("I")
        # Sent and not acknowledged: the ids just before `next_index`.
        self._kept = array("I")
        self._wanted: Finish | None = None
        self._finish: Finish | None = None
        self._refusal: Refusal | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()

    @property
    def key(self) -> tuple[str, int, str]:
        return (self.admission.session_id, self.admission.epoch, self.admission.generation_id)

    @property
    def ended(self) -> bool:
        """Nothing more will come of it."""
        return self._finish is not None or self._refusal is not None

    @property
    def refused(self) -> bool:
        """It ends, or has ended, with a refusal."""
        return self._refusal is not None

    @property
    def next_index(self) -> int:
        """Index of the next token to send."""
        return self.admission.first_index + self.sent + self._skipped

    # ---------------------------------------------------------------------------------- from the engine

    def on_phase(self, phase: Phase) -> None:
        self._phases.append(phase)
        if self.trace:
            self.trace.phase(phase)
        self._signal()

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)
        waiting = len(self._tokens)
        if waiting > self._buffer_tokens // 2 or waiting + len(self._kept) > self._buffer_tokens:
            self._bound()
        self._signal()

    def on_end(self, finish: Finish, detail: str = "") -> None:
        self.entry.ended_ms = self._now_ms()
        if finish is Finish.ERROR:
            self.refuse(Refusal(Code.ENGINE_ERROR, detail=detail))
        elif not self.ended:
            self._finish = self._wanted if finish is Finish.CANCELLED and self._wanted else finish
            self.entry.outcome = self._finish.name
        if self.trace:
            self.trace.ended(self.entry.outcome, self.sent + len(self._tokens))
        self._signal()
        self._on_left(self)

    # ------------------------------------------------------------------------------------- from the node

    def want(self, finish: Finish) -> None:
        """It is about to be cancelled at the engine: for this reason, if none came before."""
        self._wanted = self._wanted or finish
        self._stop.set()

    def refuse(self, refusal: Refusal) -> None:
        """End it with a refusal; what was not yet sent, a finish included, is dropped."""
        if self._refusal is None:
            self._refusal, self._finish = refusal, None
            self.entry.outcome = refusal.code.name
            del self._tokens[:]
            self._phases.clear()
        self._stop.set()
        self._signal()

    def drop(self) -> None:
        """Its connection is to be dropped."""
        self.dropped = True
        self._stop.set()
        self._signal()

    def stall(self) -> None:
        """Keep its lane and generate nothing more."""
        self._stalled = True
        self._hold()

    def forget_prompt(self) -> None:
        """Its engine is done with it; only its output may still be asked for."""
        self.admission = replace(self.admission, prompt_token_ids=array("I"))
        self.job.admission = self.admission

    def detach(self) -> None:
        """Nobody sends any more; it runs on, into its buffer."""
        self.on_news = self.on_taken = None
        self._detached = True
        self._bound()

    def has_index(self, index: int) -> bool:
        """Whether `rewind` can go there."""
        return 0 <= self.next_index - index <= len(self._kept)

    def rewind(self, index: int) -> None:
        """A new sender begins: `index` is the next to send. It must be one that the buffer has."""
        back = self.next_index - index
        if back and self._refusal is None:
            self._tokens = self._kept[-back:] + self._tokens
        del self._kept[:]
        self.sent -= back
        self.entry.tokens_sent = self.sent
        # What the lost sender may have told last, the next tells again.
        phases = self._phases or ([self._last_phase] if self._last_phase else [])
        self._phases = [] if self.ended else phases[-1:]
        self.delivered = self._detached = False
        self._hold()
        self._signal()

    def acknowledge(self, index: int) -> bool:
        """All before `index` is safe with the head. False: it was never sent."""
        if index > self.next_index:
            return False
        first_kept = self.next_index - len(self._kept)
        del self._kept[: max(0, index - first_kept)]
        return True

    # ------------------------------------------------------------------------------------- to the sender

    @property
    def has_news(self) -> bool:
        """Whether there may be something to send."""
        return self._ready.is_set()

    async def ready(self) -> None:
        """Return when there is something to send."""
        await self._ready.wait()

    async def stopped(self) -> None:
        """Return when a cancel, a refusal or a drop wants it to stop."""
        await self._stop.wait()

    def take(self, limit: int | None, *, with_finish: bool) -> Step | None:
        """The next message: at most up to `limit` tokens sent in all, the finish only when it may go along.

        None when nothing is left to send now.
        """
        if self._refusal:
            return Step(self.next_index, refusal=self._refusal)
        self._skip()
        room = len(self._tokens) if limit is None else max(0, limit - self.sent)
        phase = self._phases.pop(0) if self._phases else None
        # Only DECODE travels with tokens; a phase before it is news of its own.
        tokens = self._tokens[:room] if phase in (None, Phase.DECODE) else ()
        index = self.next_index
        del self._tokens[: len(tokens)]
        below_limit = limit is None or self.sent + len(tokens) < limit
        last = not self._tokens and not self._phases and with_finish and below_limit
        finish = self._finish if last else None
        if not self._tokens and not self._phases and self._finish is None:
            self._ready.clear()
        if not tokens and phase is None and finish is None:
            return None
        return Step(index, tokens, phase, finish)

    def note_sent(self, step: Step) -> None:
        """`step` has been sent."""
        self.delivered = step.is_last
        self._last_phase = step.phase or self._last_phase
        if step.token_ids:
            self.sent += len(step.token_ids)
            self.entry.tokens_sent = self.sent
            self._last_token = step.token_ids[-1]
            if self.resumable:
                self._kept.extend(step.token_ids)
                self._trim()
            if self.job.held:
                self._hold()
        if self.delivered:
            self._ready.clear()

    def repeat(self) -> Step:
        """The last token sent, once more, under its old index."""
        return Step(self.next_index - 1, (self._last_token,))

    def skip_token(self) -> None:
        """Lose the next token: its index will be missing."""
        self._to_skip += 1

    @property
    def all_tokens_sent(self) -> bool:
        """The engine has finished and only the finish is left to send."""
        return self._finish is not None and not self._tokens and not self._phases

    # -------------------------------------------------------------------------------------------- inside

    def _signal(self) -> None:
        self._ready.set()
        if self.on_news:
            self.on_news()

    def _hold(self) -> None:
        """Hold the engine back while the sender does not keep up."""
        waiting = len(self._tokens)
        paused = not self._detached and waiting > self._buffer_tokens // (4 if self.job.held else 2)
        self.job.held = self._stalled or paused

    def _bound(self) -> None:
        self._hold()
        self._trim()
        if len(self._tokens) > self._buffer_tokens and not self._overflowed and not self.ended:
            self._overflowed = True
            self._on_overflow(self)

    def _trim(self) -> None:
        excess = len(self._kept) + len(self._tokens) - self._buffer_tokens
        if excess > 0:
            del self._kept[:excess]

    def _skip(self) -> None:
        lost = min(self._to_skip, len(self._tokens))
        if lost:
            del self._tokens[:lost]
            self._to_skip -= lost
            self._skipped += lost
            # What comes before a gap can no longer be sent again.
            del self._kept[:]
