"""Work on very many nodes or sessions at once, done so that everything else has its turn in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 32


async def in_turns(items: Iterable[T], at_once: int = AT_ONCE) -> AsyncIterator[T]:
    """The items; after every few of them the event loop serves others. Where there are few, it does not."""
    for number, item in enumerate(items):
        if number and number % at_once == 0:
            await asyncio.sleep(0)
        yield item


class Turnstile:
    """Lets those who come at the same moment through one by one; who comes alone does not wait."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def through(self) -> None:
        """Return when it is one's turn: nobody else's is in the same step of the event loop."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was this one's turn, and it does not take it
                raise
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        self._taken = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken = True
                turn.set_result(None)
                return
