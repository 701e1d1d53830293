"""Notices that a run makes no progress on a node that is otherwise well (design: generation_stall)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleet_service.domain.commands import Phase

# Prompt tokens per second assumed when judging whether a prefill has stalled and no rate is known.
SLOW_PREFILL_TOKENS_PER_S = 200
# A reported rate may be a lie: a prefill is allowed at most so many times the stall limit.
MAX_PREFILL_STALLS = 10
# How long the head must have run, and heard nothing, before it calls a silence of the run a stall.
CONFIRM_STALL_S = 0.5

_DECODE = Phase.DECODE
"""Looked up here, once: it is asked for with every token."""


class StallWatch:
    """Calls what it was started with, and a text, when there was no token and no new phase for `stall_s`.

    A phase is new once between two tokens: a node that goes back and forth among them gets nowhere.

    A prefill is allowed twice the time its prompt should take, on top; waiting in the node's own queue is no
    stall. `prefill_rate` gives the node's tokens per second, 0 = unknown.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stall_s: float,
        prompt_tokens: int,
        prefill_rate: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._stall_s = stall_s
        self._prompt_tokens = prompt_tokens
        self._prefill_rate = prefill_rate
        self._stalled: Callable[[str], None] | None = None
        self._phase: Phase | None = None
        self._seen: tuple[Phase, ...] = ()
        self._progress_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, stalled: Callable[[str], None]) -> None:
        """Watch from now on."""
        self.stop()
        self._stalled = stalled
        self._progress_s = self._loop.time()
        self._watch()

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        self._stalled = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def enter(self, phase: Phase, now_s: float) -> None:
        """Told of a phase: progress, unless it was there since the last token.

        To leave the queue, which it enters but once, is progress too.
        """
        if phase is self._phase or (phase in self._seen and self._phase is not Phase.QUEUED):
            return
        self._seen += (phase,)
        self._progress_s = now_s
        self._phase = phase

    def token(self, now_s: float) -> None:
        """Told of a token: progress. From the first one on the prefill is allowed nothing more."""
        self._progress_s = now_s
        self._seen = ()
        self._phase = _DECODE

    def _watch(self) -> None:
        """Look again when a stall may be due at the earliest, so that news need not move the timer."""
        now_s, due_s = self._loop.time(), self._due_s()
        if now_s < due_s:
            self._timer = self._loop.call_at(min(due_s, now_s + self._stall_s), self._watch)
        else:
            confirmed_s = now_s + CONFIRM_STALL_S
            self._timer = self._loop.call_at(confirmed_s, self._confirm, confirmed_s)

    def _confirm(self, due_s: float) -> None:
        """The head may not have run itself (rule 13): what came meanwhile is let in before it judges."""
        now_s = self._loop.time()
        if now_s < self._due_s() or now_s - due_s > CONFIRM_STALL_S:
            self._watch()
        elif self._stalled is not None:
            self._stalled(f"no progress for {now_s - self._progress_s:.1f} s")

    def _due_s(self) -> float:
        if self._phase is Phase.QUEUED:
            return self._loop.time() + self._stall_s
        return self._progress_s + self._stall_s + self._prefill_allowance_s()

    def _prefill_allowance_s(self) -> float:
        if self._phase is Phase.DECODE:
            return 0.0
        rate = self._prefill_rate() or SLOW_PREFILL_TOKENS_PER_S
        return min(2.0 * self._prompt_tokens / rate, MAX_PREFILL_STALLS * self._stall_s)
