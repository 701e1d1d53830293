"""The calls that are open on a node's server, by connection, so that one connection's can be broken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Context(Protocol):
    """What is asked of a call here: who is at the other end."""

    def peer(self) -> str: ...


class Call:
    """One open call. `broken` is set when its connection is to be dropped."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.broken = asyncio.Event()


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
                call.broken.set()

    def break_all(self) -> None:
        for call in self._open:
            call.broken.set()
