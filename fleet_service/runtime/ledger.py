"""Idempotency: the same request_id gets the first answer again (design: The contract, request_id)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.runtime.views import RequestKey

T = TypeVar("T")

EXPIRED_AT_ONCE = 100
"""Answers that a request finds expired, and forgets; the tender comes for the others."""


async def _nowhere(_key: RequestKey) -> None:
    return None


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    answer: asyncio.Future[Any]
    expires_s: float


class RequestLedger:
    """Remembers answers by request id for `kept_s`, at most `limit` of them, the oldest going first.

    Only answers are kept: a request that was refused may be tried again under its id. `elsewhere` is asked
    for what is not here: it knows those that had to go, and those of `earlier` runs.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        kept_s: float,
        limit: int,
        elsewhere: Callable[[RequestKey], Coroutine[Any, Any, tuple[bytes, Any] | None]] = _nowhere,
        *,
        earlier: bool = False,
    ) -> None:
        """`elsewhere` gives the fingerprint and the answer, None where there is none."""
        self._clock = clock
        self._elsewhere = elsewhere
        # Until then one that is not here may come again.
        self._ask_until_s = clock() + (kept_s if earlier else 0.0)
        self._kept_s = kept_s
        self._limit = limit
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def once(self, key: RequestKey | None, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`make`'s result, or that of the same request before. Raises REQUEST_ID_REUSED for another body.

        A caller that goes away while `make` runs does not undo it: the next one gets its answer.
        """
        if key is None:
            return await make()
        self.expire(EXPIRED_AT_ONCE)
        name = (key.owner, key.request_id)
        entry = self._entries.get(name)
        if entry is not None and entry.expires_s <= self._clock():
            del self._entries[name]
            entry = None
        if entry is None:
            work = self._again_or_new(key, make) if self._clock() < self._ask_until_s else make()
            entry = _Entry(
                key.fingerprint, asyncio.get_running_loop().create_task(work), self._clock() + self._kept_s
            )
            self._entries[name] = entry
            entry.answer.add_done_callback(lambda task: self._answered(name, task))
            while len(self._entries) > self._limit:
                _, gone = self._entries.popitem(last=False)
                self._ask_until_s = max(self._ask_until_s, gone.expires_s)
        else:
            _check_same(entry.fingerprint, key)
        return cast("T", await asyncio.shield(cast("Awaitable[T]", entry.answer)))

    async def _again_or_new(self, key: RequestKey, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        found = await self._elsewhere(key)
        if found is None:
            return await make()
        fingerprint, answer = found
        _check_same(fingerprint, key)
        return cast("T", answer)

    def expire(self, most: int) -> int:
        """Forget what is old enough; how many, at most `most`."""
        now_s, forgotten = self._clock(), 0
        while self._entries and forgotten < most:
            oldest = next(iter(self._entries.values()))
            if oldest.expires_s > now_s:
                break
            self._entries.popitem(last=False)
            forgotten += 1
        return forgotten

    def _answered(self, name: tuple[str, str], task: asyncio.Future[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            entry = self._entries.get(name)
            if entry is not None and entry.answer is task:
                del self._entries[name]


def _check_same(fingerprint: bytes, key: RequestKey) -> None:
    if fingerprint != key.fingerprint:
        raise FleetError(
            Reason.REQUEST_ID_REUSED,
            f"request_id {key.request_id} was used for another request; use a new one for a new request",
            metadata={"requestId": key.request_id},
        )
