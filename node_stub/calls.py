"""The calls that are open on a node's server, by connection, so that one connection's can be broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LinkDropped(Exception):
    """The connection is to be dropped: abort the call."""


class Call:
    """One open call, and whether it is to end."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.broken = False
        """To be aborted: its connection is dropped."""
        self.on_broken: Callable[[], None] | None = None
        self.in_order = False
        """It is to end because the node is being stopped, with time to say so."""
        self._over = asyncio.Event()

    async def over(self, timeout_s: float) -> bool:
        """Wait until it is to end, at most so long; tell whether it is."""
        try:
            await asyncio.wait_for(self._over.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def ending(self) -> None:
        """Return when it is to end."""
        await self._over.wait()

    def check(self) -> None:
        """Raise LinkDropped when its connection is dropped."""
        if self.broken:
            raise LinkDropped

    def end(self, *, in_order: bool) -> None:
        self.in_order = in_order
        self._over.set()

    def break_off(self) -> None:
        self.broken = True
        self._over.set()
        if self.on_broken:
            self.on_broken()


class Calls:
    """All open calls. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: set[Call] = set()
        self._clock = clock
        self._cut_until_s = 0.0

    @contextmanager
    def open(self, peer: str) -> Iterator[Call]:
        """An open call. Raises LinkDropped while the network is cut."""
        if self.cut_left_s > 0:
            raise LinkDropped
        call = Call(peer)
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

    def cut(self, cut_s: float) -> None:
        """Have every call aborted, and for so long each that is made."""
        self._cut_until_s = self._clock() + cut_s
        for call in self._open:
            call.break_off()

    @property
    def cut_left_s(self) -> float:
        """Seconds until calls are taken again; 0 = they are."""
        return max(0.0, self._cut_until_s - self._clock())

    def end_all(self, *, in_order: bool) -> None:
        """Have the calls that never end by themselves end; `in_order`: after a goodbye."""
        for call in self._open:
            call.end(in_order=in_order)
