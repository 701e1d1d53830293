"""A simulated store in virtual time: it outlives its heads, is slow, full or away for a while.

A head that is killed while it writes leaves the batch that was under way kept, whole, or lost, by seed. What
it was told is kept stays kept. What waits for its batch is lost: under RELAXED that may have been told.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from fleet_service.runtime.records import Record, RequestAnswered, Saved, SavedGeneration
from fleet_service.runtime.store import StoreError, StoreTrouble
from fleet_service.stores.memory import Answers, replay
from tests.sim.loop import SimLoop

T = TypeVar("T")

SLOWEST_S = 2.0
_MOST_S = 0.02
_SLOW = 0.003  # of all it does
_SLOW_IN_KILLS = 0.5  # of what a head is killed in that tells ahead
_KEPT_UNSEEN = 0.5  # of the batches under way when their head is killed
TROUBLE_LASTS_S = 3.5
"""How long after its end a head may still say that the store is in trouble."""
_GATHERED_S = 0.041
"""Under RELAXED, what is told begins to be written within this time, unless an earlier batch is under way."""
_NOTICED_S = 0.001
"""How long a head may take to see that a write has failed."""


class Op(Enum):
    """What a head asks of its store."""

    OPEN = "opens its store"
    TERM = "takes its term"
    WRITE = "writes"
    CONTEXT = "reads a context"
    ANSWER = "looks for an answer"


@dataclass(slots=True)
class Kill:
    """The head is killed in the `left`-th `op` from now: while it is under way, or when it is just done."""

    op: Op
    left: int
    where: float  # of the time that it takes, in [0, 1); 1 = once it is done, and before anybody knows
    strike: Callable[[], object]
    record: type[Record] | None = None  # only writes of such a record count; None = all
    takes_s: float | None = None  # how long the operation would take; None = as ever


class SimStore:
    """What is kept, and what befalls it. Each head gets at it by an `Access` of its own."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.saved = Saved()
        self.contexts: dict[str, array[int]] = {}
        self.answers: Answers = {}
        self.kills: list[Kill] = []
        self.writes = 0
        self.ran_for: Callable[[float], float] = lambda now_s: now_s
        """How long its head has run without standing still. Set by the world."""
        self.fails: Callable[[], None] = lambda: None
        """Called once its head must have seen that nothing can be kept now. Set by the world."""
        self.spells = 0  # of failing writes, so far
        self._failed_writes = 0  # since the last that did not fail
        self._trouble: StoreTrouble | None = None
        self._trouble_ended_s = -1e9
        self._access: Access | None = None

    def open_for_head(self, *, tells_ahead: bool = False) -> Access:
        """The way in for a head that starts."""
        self._access = Access(self, tells_ahead=tells_ahead)
        return self._access

    def head_died(self) -> float:
        """Its head is gone, and what was under way is decided; all that was put before that time is kept."""
        access, self._access = self._access, None
        return self.loop.time() if access is None else access.die()

    def kept_until_s(self) -> float:
        """All that was put before that time stays kept, whatever becomes of the head that lives."""
        return -1.0 if self._access is None else self._access.kept_until_s()

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

    @property
    def failing(self) -> bool:
        """The batch that is being written has failed before."""
        return self._failed_writes > 0

    def written(self, *, failed: bool) -> None:
        """A write has ended so."""
        self._failed_writes = self._failed_writes + 1 if failed else 0
        if self._failed_writes == 1:
            self.spells += 1
            self.loop.call_later(_NOTICED_S, self._noticed, self._access, context=self.loop.node_side)

    def _noticed(self, access: Access | None) -> None:
        if self.failing and access is self._access:
            self.fails()

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

    __slots__ = ("changes", "effect")

    def __init__(self, effect: Callable[[], object], *, changes: bool) -> None:
        self.effect = effect
        self.changes = changes


class Access:
    """The SessionStore of one head, until that dies."""

    def __init__(self, store: SimStore, *, tells_ahead: bool) -> None:
        self._store = store
        self._tells_ahead = tells_ahead
        self._under_way: list[_Work] = []
        self._dead = self._is_closed = False
        self._batch: Sequence[Record] | None = None
        self._batch_is_kept = False
        self._gathers_s = -1.0  # how long at most what is put waits for others; -1 = nothing is written yet
        self._waits_from_s = self._last_began_s = self._last_ended_s = store.loop.time()

    def die(self) -> float:
        store, self._dead = self._store, True
        store.written(failed=False)
        kept_s = self.kept_until_s()
        for work in self._under_way:
            if work.changes and store.rng.random() < _KEPT_UNSEEN:
                work.effect()
                kept_s = self._last_began_s
        return kept_s

    def kept_until_s(self) -> float:
        """All that was put before that time is kept, also if the head dies and its batch is lost."""
        if self._is_closed:
            return self._store.loop.time()
        if self._batch is None:
            return self._oldest_s()
        return self._last_began_s if self._batch_is_kept else self._waits_from_s

    def _oldest_s(self) -> float:
        """Since when the oldest that is not being written may have waited for that."""
        now_s = self._store.loop.time()
        since_s = now_s - self._last_ended_s
        if self._tells_ahead:
            since_s = min(since_s, self._store.ran_for(now_s))
        if since_s <= self._gathers_s or self._gathers_s < 0:
            return (
                self._last_began_s
            )  # what came while the one before was written has waited since that began
        return now_s - self._gathers_s

    # SessionStore

    async def open(self) -> Saved:
        return await self._do(Op.OPEN, lambda: _copy(self._store.saved))

    async def take_term(self, term: int, branch: int, *, tells_ahead: bool = False) -> None:
        def take() -> None:
            self._store.saved.term, self._store.saved.branch = term, branch
            self._store.saved.torn = tells_ahead

        await self._do(Op.TERM, take, changes=True)
        self._gathers_s = _GATHERED_S if self._tells_ahead else 0.0
        self._last_ended_s = self._store.loop.time()

    async def write(self, batch: Sequence[Record]) -> None:
        store = self._store
        if batch is not self._batch:
            self._waits_from_s = self._oldest_s()
            self._batch, self._batch_is_kept = batch, False
            self._last_began_s = store.loop.time()

        def write() -> None:
            replay(batch, store.saved, store.contexts, store.answers)
            store.writes += 1
            self._batch_is_kept = True

        await self._do(Op.WRITE, write, changes=True)
        self._batch, self._last_ended_s = None, store.loop.time()

    async def context(self, session_id: str) -> array[int]:
        return await self._do(Op.CONTEXT, lambda: self._store.contexts[session_id][:])

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return await self._do(Op.ANSWER, lambda: self._store.answers.get((owner, request_id)))

    async def close(self) -> None:
        if not self._dead and self._gathers_s >= 0 and not self._store.failing:
            self._store.saved.torn = False
            self._is_closed = True
        self._dead = True

    async def _do(self, op: Op, effect: Callable[[], T], *, changes: bool = False) -> T:
        """Have the store do it, in its own time."""
        store, loop = self._store, self._store.loop
        if self._dead:
            raise StoreError(StoreTrouble.UNAVAILABLE, "its head is gone")
        done: asyncio.Future[T] = loop.create_future()
        work = _Work(effect, changes=changes)
        takes_s, kill = store.takes_s(), store.next_kill(op, self._batch or ())
        if kill is not None and kill.takes_s is not None:
            takes_s = kill.takes_s
        elif kill is not None and self._tells_ahead and store.rng.random() < _SLOW_IN_KILLS:
            takes_s = store.rng.random() * SLOWEST_S  # so that much is told meanwhile, and lost
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
            if op is Op.WRITE:
                store.written(failed=done.exception() is not None)
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
        cancels=dict(saved.cancels),
        revokes=dict(saved.revokes),
        listed=dict(saved.listed),
        marks=dict(saved.marks),
    )
