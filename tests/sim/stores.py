"""A simulated store in virtual time: it outlives its heads, is slow, full or away for a while.

A head that is killed while it writes leaves the batch that was under way kept, whole, or lost, by seed. What
it was told is kept stays kept.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from fleet_service.runtime.records import Record, Saved, SavedGeneration
from fleet_service.runtime.store import StoreError, StoreTrouble
from fleet_service.stores.memory import replay
from tests.sim.loop import SimLoop

T = TypeVar("T")

SLOWEST_S = 2.0
_MOST_S = 0.02
_SLOW = 0.003  # of all it does
_KEPT_UNSEEN = 0.5  # of the batches under way when their head is killed
TROUBLE_LASTS_S = 3.5
"""How long after its end a head may still say that the store is in trouble."""


class Op(Enum):
    """What a head asks of its store."""

    OPEN = "opens its store"
    TERM = "takes its term"
    WRITE = "writes"
    CONTEXT = "reads a context"


@dataclass(slots=True)
class Kill:
    """The head is killed in the `left`-th `op` from now: while it is under way, or when it is just done."""

    op: Op
    left: int
    where: float  # of the time that it takes, in [0, 1); 1 = once it is done, and before anybody knows
    strike: Callable[[], object]
    record: type[Record] | None = None  # only writes of such a record count; None = all


class SimStore:
    """What is kept, and what befalls it. Each head gets at it by an `Access` of its own."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.saved = Saved()
        self.contexts: dict[str, array[int]] = {}
        self.kills: list[Kill] = []
        self.writes = 0
        self._trouble: StoreTrouble | None = None
        self._trouble_ended_s = -1e9
        self._access: Access | None = None

    def open_for_head(self) -> Access:
        """The way in for a head that starts."""
        self._access = Access(self)
        return self._access

    def head_died(self) -> float:
        """Its head is gone, and what was under way is decided; all that was put before that time is kept."""
        access, self._access = self._access, None
        return self.loop.time() if access is None else access.die()

    def kept(self, generation_id: str) -> SavedGeneration | None:
        """A generation as it is kept now."""
        return self.saved.generations.get(generation_id)

    # What befalls it

    def fail(self, trouble: StoreTrouble, duration_s: float) -> bool:
        """All it is asked fails for a while."""
        if self._trouble is not None:
            return False
        self._trouble = trouble
        self.loop.call_later(duration_s, self.work_again, context=self.loop.node_side)
        return True

    def work_again(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            self._trouble_ended_s = self.loop.time()

    @property
    def may_fail(self) -> bool:
        """Whether a head may say that it is in trouble."""
        return self._trouble is not None or self.loop.time() - self._trouble_ended_s < TROUBLE_LASTS_S

    def check(self) -> None:
        """Raises StoreError while it is in trouble."""
        if self._trouble is not None:
            raise StoreError(self._trouble, "simulated")

    def takes_s(self) -> float:
        return SLOWEST_S if self.rng.random() < _SLOW else self.rng.random() * _MOST_S

    def next_kill(self, op: Op, batch: Sequence[Record]) -> Kill | None:
        """The kill that this operation meets, if any."""
        for kill in self.kills:
            wanted = kill.record
            if kill.op is op and (wanted is None or any(isinstance(each, wanted) for each in batch)):
                kill.left -= 1
                if kill.left <= 0:
                    self.kills.remove(kill)
                    return kill
        return None


class _Work:
    """One operation under way."""

    __slots__ = ("began_s", "changes", "effect", "waits_from_s")

    def __init__(
        self, effect: Callable[[], object], *, changes: bool, began_s: float, waits_from_s: float
    ) -> None:
        self.effect = effect
        self.changes = changes
        self.began_s = began_s
        self.waits_from_s = waits_from_s


class Access:
    """The SessionStore of one head, until that dies."""

    def __init__(self, store: SimStore) -> None:
        self._store = store
        self._under_way: list[_Work] = []
        self._dead = False
        self._batch: Sequence[Record] | None = None
        self._waits_from_s = 0.0  # the oldest of the batch may have waited so long
        self._last_began_s = self._last_ended_s = -1.0

    def die(self) -> float:
        store, self._dead = self._store, True
        kept_s = store.loop.time()
        for work in self._under_way:
            if work.changes and store.rng.random() < _KEPT_UNSEEN:
                work.effect()
                kept_s = min(kept_s, work.began_s)
            elif work.changes:
                kept_s = min(kept_s, work.waits_from_s)
        if self._batch is not None and not self._under_way:
            kept_s = min(kept_s, self._waits_from_s)  # it failed, and is to be tried again
        return kept_s

    # SessionStore

    async def open(self) -> Saved:
        return await self._do(Op.OPEN, lambda: _copy(self._store.saved))

    async def take_term(self, term: int, branch: int, *, tells_ahead: bool = False) -> None:
        def take() -> None:
            self._store.saved.term, self._store.saved.branch = term, branch
            self._store.saved.torn = tells_ahead

        await self._do(Op.TERM, take, changes=True)

    async def write(self, batch: Sequence[Record]) -> None:
        store, now_s = self._store, self._store.loop.time()
        if batch is not self._batch:
            # What came while the one before was written has waited since that began.
            self._waits_from_s = self._last_began_s if self._last_ended_s == now_s else now_s
            self._batch, self._last_began_s = batch, now_s

        def write() -> None:
            replay(batch, store.saved, store.contexts)
            store.writes += 1

        await self._do(Op.WRITE, write, changes=True)
        self._batch, self._last_ended_s = None, store.loop.time()

    async def context(self, session_id: str) -> array[int]:
        return await self._do(Op.CONTEXT, lambda: self._store.contexts[session_id][:])

    async def close(self) -> None:
        self._dead = True

    async def _do(self, op: Op, effect: Callable[[], T], *, changes: bool = False) -> T:
        """Have the store do it, in its own time."""
        store, loop = self._store, self._store.loop
        if self._dead:
            raise StoreError(StoreTrouble.UNAVAILABLE, "its head is gone")
        done: asyncio.Future[T] = loop.create_future()
        work = _Work(effect, changes=changes, began_s=loop.time(), waits_from_s=self._waits_from_s)
        takes_s, kill = store.takes_s(), store.next_kill(op, self._batch or ())
        if kill is not None and kill.where < 1.0:
            loop.call_later(takes_s * kill.where, self._kill, kill, context=loop.node_side)
        self._under_way.append(work)

        def end() -> None:
            if self._dead:
                return
            self._under_way.remove(work)
            if done.cancelled():
                return
            try:
                store.check()
                done.set_result(effect())
            except (StoreError, KeyError) as error:
                done.set_exception(error)
            if kill is not None and kill.where >= 1.0:
                self._kill(kill)

        loop.call_later(takes_s, end, context=loop.node_side)
        return await done

    def _kill(self, kill: Kill) -> None:
        if not self._dead:
            kill.strike()


def _copy(saved: Saved) -> Saved:
    """As it is read anew: records never change, what holds them is made again."""
    return Saved(
        term=saved.term,
        raised_term=saved.raised_term,
        branch=saved.branch,
        torn=saved.torn,
        sessions={name: replace(each) for name, each in saved.sessions.items()},
        generations={
            name: replace(each, token_ids=each.token_ids[:], marks=list(each.marks), cuts=list(each.cuts))
            for name, each in saved.generations.items()
        },
        requests=dict(saved.requests),
        cancels=dict(saved.cancels),
        revokes=dict(saved.revokes),
        listed=dict(saved.listed),
        marks=dict(saved.marks),
    )
