"""The calls that are open on a node's server, by connection, so that one connection's can be broken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Context(Protocol):
    """What is asked of a call here: who is at the other end."""

    def peer(self) -> str: ...


class Call:
    """One open call, and whether it is to end."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.broken = False
        """To be aborted: its connection is dropped."""
        self.on_broken: Callable[[], None] | None = None
        self._over = asyncio.Event()

    async def over(self, timeout_s: float) -> bool:
        """Wait until it is to end, at most so long; tell whether it is."""
        try:
            await asyncio.wait_for(self._over.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end(self) -> None:
        self._over.set()

    def break_off(self) -> None:
        self.broken = True
        self._over.set()
        if self.on_broken:
            self.on_broken()


class Calls:
    """All open calls."""

    def __init__(self) -> None:
        self._open: set[Call] = set()

    @contextmanager
    def open(self, context: Context) -> Iterator[Call]:
        call = Call(context.peer())
        self._open.add(call)
        try:
            yield call
        finally:
            self._open.discard(call)

    def break_connection(self, peer: str) -> None:
        """Have every call of that connection aborted."""
        for call in self._open:
            if call.peer == peer:
                call.break_off()

    def end_all(self) -> None:
        """Have the calls that never end by themselves end."""
        for call in self._open:
            call.end()
