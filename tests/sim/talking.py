"""How callers and operators reach the head. Where heads keep what they did, callers outlive them.

A call that breaks off with its head is made again at the next one, as by a client that retries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.runtime.head import Head
from tests.sim.heads import Heads
from tests.sim.oracle import Oracle
from tests.sim.stores import TROUBLE_LASTS_S

T = TypeVar("T")

_BACK_WITHIN_S = 0.6
_STORE_PAUSE_S = 0.3
_LOOK_S = 0.02


class BrokenOffError(Exception):
    """The head died, or could not say, and the call is not to be made again."""


class Talk:
    """One caller's way to the heads."""

    def __init__(self, heads: Heads, oracle: Oracle, rng: random.Random) -> None:
        self._heads = heads
        self._oracle = oracle
        self._rng = rng

    @property
    def lasts(self) -> bool:
        """Whether it goes on over the death of a head."""
        return self._heads.store is not None

    @property
    def may_lose(self) -> bool:
        """What it is told may be lost with the head that told it."""
        return self._heads.relaxed

    @property
    def lives(self) -> int:
        """Of heads, so far."""
        return self._oracle.lives

    def owns(self, task: asyncio.Task[Any]) -> None:
        """It is the caller's, and lasts as long as the talk."""
        if self.lasts:
            self._heads.owns(task)

    async def call(self, ask: Callable[[Head], Awaitable[T]], *, again: bool = True) -> T:
        """What the head answers. Raises BrokenOffError where it does not, and `again` is False."""
        if not self.lasts:
            return await ask(self._head)
        while True:
            head = await self._heads.lives()
            try:
                answer = await asyncio.ensure_future(ask(head))
                if head is self._heads.head or not self.may_lose:
                    return answer
                pause_s = self._rng.random() * _BACK_WITHIN_S  # it did not arrive before the head died
            except FleetError as error:
                if error.reason is Reason.STORE_UNAVAILABLE:
                    self._check_trouble(error)
                elif error.reason is not Reason.HEAD_DRAINING or self._heads.up.is_set():
                    raise
                pause_s = _STORE_PAUSE_S
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                if head is self._heads.head:
                    self._oracle.violation("a call is cancelled, and its head lives")
                self._oracle.met("a call breaks off with its head")
                pause_s = self._rng.random() * _BACK_WITHIN_S
            await asyncio.sleep(pause_s)
            if not again:
                raise BrokenOffError

    async def is_kept(self) -> bool:
        """Once what was told until now is kept for good; False when a head died first that lost it."""
        if not self.may_lose or self._heads.store is None or self._oracle.telling is None:
            return True
        told_s, life = asyncio.get_running_loop().time(), self.lives
        while self._heads.store.kept_until_s() <= told_s and life == self.lives:
            await asyncio.sleep(_LOOK_S)
        return self._oracle.telling.is_kept(told_s)

    async def look(self, see: Callable[[Head], T]) -> T:
        """What is to be seen at the head that lives."""
        return see(await self._heads.lives() if self.lasts else self._head)

    @property
    def _head(self) -> Head:
        assert self._heads.head is not None
        return self._heads.head

    def _check_trouble(self, error: FleetError) -> None:
        """Whether the store is in trouble, or was when the head last looked."""
        self._oracle.met("a caller is told that nothing can be kept")
        store, loop = self._heads.store, asyncio.get_running_loop()
        ran_s = self._oracle.ran_for(loop.time())
        if store is not None and not store.may_fail and ran_s > TROUBLE_LASTS_S:
            self._oracle.violation(f"{error}; but the store works")


def _is_cancelled() -> bool:
    """It is the one who waits that is cancelled, and not what it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
