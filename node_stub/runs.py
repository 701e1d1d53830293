"""One generation on its way to the head: what its engine made, waiting to be sent, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node_stub.engine import Finish, Job, Phase
from node_stub.journal import Entry
from node_stub.rules import Admission, Code, Owner, Refusal


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a run. A finish or a refusal is its last."""

    first_index: int
    token_ids: Sequence[int] = ()
    phase: Phase | None = None
    finish: Finish | None = None
    refusal: Refusal | None = None


class Run:
    """Takes what the engine says (a JobSink) and hands it out in messages, at the sender's own pace.

    The first to end it wins: the engine, a cancel or the wall clock; and over all of them, as long as the
    last message has not gone out, a refusal from the node rules.
    """

    def __init__(
        self,
        admission: Admission,
        owner: Owner,
        entry: Entry,
        now_ms: Callable[[], int],
        on_left: Callable[[Run], None],
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
        self._last_token = 0
        self._skipped = 0
        self._to_skip = 0
        self._now_ms = now_ms
        self._on_left = on_left
        self._phases: list[Phase] = []
        self._tokens: list[int] = []
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

    # ---------------------------------------------------------------------------------- from the engine

    def on_phase(self, phase: Phase) -> None:
        self._phases.append(phase)
        self._ready.set()

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)
        self._ready.set()

    def on_end(self, finish: Finish, detail: str = "") -> None:
        self.entry.ended_ms = self._now_ms()
        if finish is Finish.ERROR:
            self.refuse(Refusal(Code.ENGINE_ERROR, detail=detail))
        elif not self.ended:
            self._finish = self._wanted if finish is Finish.CANCELLED and self._wanted else finish
            self.entry.outcome = self._finish.name
        self._ready.set()
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
            self._tokens.clear()
            self._phases.clear()
        self._ready.set()
        self._stop.set()

    def drop(self) -> None:
        """Its connection is to be dropped."""
        self.dropped = True
        self._ready.set()
        self._stop.set()

    # ------------------------------------------------------------------------------------- to the sender

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
            return Step(self._next_index, refusal=self._refusal)
        self._skip()
        room = len(self._tokens) if limit is None else max(0, limit - self.sent)
        phase = self._phases.pop(0) if self._phases else None
        # Only DECODE travels with tokens; a phase before it is news of its own.
        tokens = self._tokens[:room] if phase in (None, Phase.DECODE) else []
        index = self._next_index
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
        self.delivered = step.finish is not None or step.refusal is not None
        if step.token_ids:
            self.sent += len(step.token_ids)
            self.entry.tokens_sent = self.sent
            self._last_token = step.token_ids[-1]

    def repeat(self) -> Step:
        """The last token sent, once more, under its old index."""
        return Step(self._next_index - 1, (self._last_token,))

    def skip_token(self) -> None:
        """Lose the next token: its index will be missing."""
        self._to_skip += 1

    @property
    def all_tokens_sent(self) -> bool:
        """The engine has finished and only the finish is left to send."""
        return self._finish is not None and not self._tokens and not self._phases

    def _skip(self) -> None:
        lost = min(self._to_skip, len(self._tokens))
        del self._tokens[:lost]
        self._to_skip -= lost
        self._skipped += lost

    @property
    def _next_index(self) -> int:
        return self.admission.first_index + self.sent + self._skipped
