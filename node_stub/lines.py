"""Work that waits in line: per key one thing after the other, different keys independently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine


class Lines:
    """Lines by key. An error in any is told to `on_error`, and ends that line."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._lines: dict[str, deque[Coroutine[None, None, None]]] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._waiting = 0

    def __len__(self) -> int:
        """Things not yet done."""
        return self._waiting

    def is_busy(self, key: str) -> bool:
        return key in self._lines

    def add(self, key: str, work: Coroutine[None, None, None]) -> None:
        """Do `work` when all before it in its line is done."""
        self._waiting += 1
        line = self._lines.get(key)
        if line is not None:
            line.append(work)
            return
        self._lines[key] = deque([work])
        worker = asyncio.create_task(self._work(key), name=f"line {key}")
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    async def close(self) -> None:
        """Do nothing more."""
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for line in self._lines.values():
            for work in line:
                work.close()
        self._lines.clear()
        self._waiting = 0

    async def _work(self, key: str) -> None:
        line = self._lines[key]
        try:
            while line:
                await line.popleft()
                self._waiting -= 1
        except Exception as error:  # noqa: BLE001 - told to whom it concerns
            self._on_error(error)
            return
        del self._lines[key]
