"""Runs kept for their head to come back to, some time after their link is gone or their end was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node_stub.runs import Run

RunKey = tuple[str, int, str]


class Keeper:
    """Keeps each run for `keep_s` seconds, then hands it to `on_expired`.

    All are kept equally long, so they expire in the order of their coming and one timer serves them all. Of
    more than `capacity` runs the oldest makes room, as if its time were over.
    """

    def __init__(self, keep_s: float, capacity: int, on_expired: Callable[[Run], None]) -> None:
        self._keep_s = keep_s
        self._capacity = capacity
        self._on_expired = on_expired
        self._kept: dict[RunKey, tuple[Run, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> dict[RunKey, Run]:
        """All that are kept, the one that expires first first."""
        return {key: run for key, (run, _) in self._kept.items()}

    def get(self, key: RunKey) -> Run | None:
        kept = self._kept.get(key)
        return kept[0] if kept else None

    def keep(self, run: Run) -> None:
        """Keep the run from now on."""
        self.release(run)
        loop = asyncio.get_running_loop()
        self._kept[run.key] = (run, loop.time() + self._keep_s)
        if len(self._kept) > self._capacity:
            self._expire_first()
        if self._timer is None:
            self._timer = loop.call_later(self._keep_s, self._expire)

    def release(self, run: Run) -> None:
        """Keep it no longer: it has a link again, or is of no use to anyone."""
        self._kept.pop(run.key, None)

    def close(self) -> None:
        """Let go of all, without a word."""
        self._kept.clear()
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _expire_first(self) -> None:
        run, _ = self._kept.pop(next(iter(self._kept)))
        self._on_expired(run)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._kept and (due_s := next(iter(self._kept.values()))[1]) <= now_s:
            self._expire_first()
        self._timer = loop.call_at(due_s, self._expire) if self._kept else None
