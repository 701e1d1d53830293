"""The heads of a world, one after the other: started, killed without a word or ended in order, started anew.

A head that is killed ends as by SIGKILL: its connections are reset, and every task that ran for it or talked
to it is cancelled. Only what the world registered as its own goes on. The next one begins with nothing, or
with what there is in the world's store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from fleet_service.runtime.head import Head
from fleet_service.runtime.journal import Durability, StoreJournal
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.records import Saved
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.store import StoreError
from tests.sim.links import SimDialer
from tests.sim.network import SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import Oracle
from tests.sim.stores import Access, SimStore

EPOCH_UNIX_S = 1_700_000_000.0
_CLOCK_SET_BACK_S = 1_000.0
_KEPT_FOR_S = 200.0
"""Where heads keep what they did, no clock is so much behind that it is forgotten when the next is right."""
_STARTED_AGAIN_S = 0.5
"""How long after a head could not begin it is started again."""
_STRICT_BETWEEN = 0.25
"""Of the heads after the first where they are RELAXED, those that an operator has start as STRICT."""


class Heads:
    """`head` is the one that lives, None between two. `up` is set while there is one that takes calls.

    `store` None: nothing outlives a head. `relaxed`: they may tell of what is not kept yet.
    """

    def __init__(
        self,
        settings: HeadSettings,
        network: SimNetwork,
        machines: Sequence[SimMachine],
        everyone: Sequence[SimMachine],
        oracle: Oracle,
        rng: random.Random,
        store: SimStore | None = None,
        *,
        relaxed: bool = False,
    ) -> None:
        self.store = store
        self.relaxed = relaxed
        self._settings = settings
        self._network = network
        self._machines = machines
        self._everyone = everyone
        self._oracle = oracle
        self._rng = rng
        self._own: set[asyncio.Task[object]] = set()
        self._died_s: float | None = None
        self._journal: StoreJournal | None = None
        self._access: Access | None = None
        self.since_s = 0.0  # when the head that lives had tried its nodes
        self.behind_s = 0.0  # of its clock
        self._starting: asyncio.Task[None] | None = None
        self._beginning: asyncio.Task[None] | None = None
        self.head: Head | None = None
        self.up = asyncio.Event()
        self.forgotten: Callable[[], None] = lambda: None  # called when a head's memory is gone
        self.lost: Callable[[float], None] = lambda _: None  # and then; what was put before that is kept
        self.immortal = False  # when the story is over
        self.next_is_strict = False  # whatever the others are
        self.killed_soon: list[tuple[float, float]] = []  # in the starts to come: after so long, down for
        if store is not None:
            store.ran_for, store.fails = oracle.ran_for, self._nothing_can_be_kept

    def owns(self, task: asyncio.Task[object]) -> None:
        """It is the world's: it outlives heads."""
        self._own.add(task)
        task.add_done_callback(self._own.discard)

    async def start(self, behind_s: float = 0.0) -> None:
        """A head with what is kept, if anything, that dials the nodes."""
        loop = self._network.loop
        access, saved, durability = None, None, self._next_durability()
        if self.store is not None:
            access = self.store.open_for_head(tells_ahead=durability is Durability.RELAXED)
            saved = await access.open()
        head = self._make(behind_s, access, saved, durability)
        if access is not None and saved is not None and self._journal is not None:
            await access.take_term(head.fleet.term, head.branch, tells_ahead=self._journal.tells_ahead)
            self._oracle.has_term(head.fleet.term)
            self._journal.start()
        await head.start([machine.address for machine in self._machines if not machine.profile.joins])
        if self.head is head:
            self.since_s = loop.time()
            if self._died_s is not None:
                self._oracle.stood_still(self._died_s, self.since_s)
                self._died_s = None
            self._oracle.callers_may_come()
            self.up.set()

    def _next_durability(self) -> Durability:
        if not self.relaxed:
            return Durability.STRICT
        strict = self._oracle.lives > 1 and self._rng.random() < _STRICT_BETWEEN
        strict, self.next_is_strict = strict or self.next_is_strict, False
        return Durability.STRICT if strict else Durability.RELAXED

    def _make(
        self, behind_s: float, access: Access | None, saved: Saved | None, durability: Durability
    ) -> Head:
        loop = self._network.loop
        self.behind_s, self._access = behind_s, access
        if access is not None:
            self._journal = StoreJournal(access, durability, broken=self._broken)
        # Known from its first step on: what it takes up is judged as it does so.
        self._oracle.head_begins(behind_s, tells_ahead=durability is Durability.RELAXED)
        self.head = Head(
            self._settings,
            dialer=SimDialer(self._network),
            rng=random.Random(self._rng.random()),
            wall_clock=lambda: EPOCH_UNIX_S + loop.time() - behind_s,
            observer=self._oracle.watch(),
            kept=None if self._journal is None or saved is None else Kept(self._journal, saved),
        )
        self._oracle.head_has_begun(self.head)
        return self.head

    def _broken(self, error: StoreError) -> None:
        self._oracle.violation(f"the head gives its store up: {error}")

    def _nothing_can_be_kept(self) -> None:
        if self.head is not None and self._oracle.telling is not None:
            self._oracle.telling.nothing_can_be_kept(self.head.generations.running)

    async def stop(self, grace_s: float) -> None:
        """In order: what is left is written."""
        assert self.head is not None
        await self.head.stop(grace_s)
        if self._journal is not None and self._access is not None:
            await self._journal.stop()
            await self._access.close()

    async def lives(self) -> Head:
        """The head that lives, waited for."""
        while self.head is None or not self.up.is_set():
            await self.up.wait()
        return self.head

    @property
    def begins(self) -> bool:
        """One that is to take up what is kept is about to."""
        return self.store is not None and self._beginning is not None and not self._beginning.done()

    def crash(self, down_s: float) -> bool:
        """Kill it; another starts after `down_s`. False when there is none to kill."""
        loop = self._network.loop
        lives = self.begins or (self.head is not None and self.up.is_set())
        if self.immortal or loop.head_stopped or not lives:
            return False
        if self.begins:
            self._oracle.met("a head is killed while it begins")
        died_s = loop.time()
        kept_s = died_s if self.store is None else self.store.head_died()
        self._died_s = min(died_s if self._died_s is None else self._died_s, kept_s)
        self._is_gone(kept_s, down_s)
        return True

    def end(self, grace_s: float, down_s: float) -> bool:
        """Have it end in order; another starts after `down_s`. False when there is none that can."""
        loop = self._network.loop
        if self.store is None or loop.head_stopped or self.head is None or not self.up.is_set():
            return False
        self._oracle.met("a head ends in order")
        self._died_s = loop.time()
        self.up.clear()
        self.owns(loop.create_task(self._end(grace_s, down_s), name="end of a head", context=loop.head_side))
        return True

    async def _end(self, grace_s: float, down_s: float) -> None:
        assert self.head is not None
        assert self.store is not None
        assert self._oracle.telling is not None
        await self.head.stop(grace_s)
        self.head = None  # who waits for an answer gets none
        for task in _in_order(asyncio.all_tasks() - self._own):
            if task.get_name() != "journal":
                task.cancel()
        if self._journal is not None and self._access is not None:
            await self._journal.stop()
            await self._access.close()
        self._oracle.telling.ahead = self.store.saved.torn  # else all that was told is kept
        self._is_gone(self.store.head_died(), down_s)

    def _is_gone(self, kept_s: float, down_s: float) -> None:
        """There is no head now; another starts after `down_s`."""
        loop, now_s = self._network.loop, self._network.loop.time()
        self.head = self._journal = None
        self.up.clear()
        processes = [machine.process for machine in self._everyone if machine.process is not None]
        self.forgotten()
        self._oracle.head_died(processes, self._settings.fleet_id, kept_s)
        self.lost(kept_s)
        if self.store is not None and self._died_s is not None:
            self._oracle.stands_still_from(self._died_s)
        for link in list(self._network.links):
            link.die()
        for task in _in_order(asyncio.all_tasks() - self._own):
            task.cancel()
        self._starting = loop.create_task(
            self._start_again(down_s, self._next_clock(now_s + down_s)),
            name="start the next head",
            context=loop.head_side,
        )
        self.owns(self._starting)

    def _next_clock(self, starts_s: float) -> float:
        """Its clock may say the same second again, or be set back: store or nodes know the epochs better."""
        if self.store is None:
            return self._rng.choice([0.0, 0.0, 0.0, starts_s, _CLOCK_SET_BACK_S])
        return self._rng.choice([*[0.0] * 8, starts_s, _KEPT_FOR_S])

    async def _start_again(self, down_s: float, behind_s: float) -> None:
        loop = self._network.loop
        await asyncio.sleep(down_s)
        self._oracle.story.note("* another head starts, its clock %.2f s behind", behind_s)
        self._oracle.met("a head starts anew")
        begin = self._beginning = loop.create_task(self._begin(behind_s), name="start of a head")
        if self.killed_soon:
            loop.call_later(*self._kill_soon(begin), context=loop.node_side)
        await asyncio.wait({begin})
        if not begin.cancelled():
            begin.result()

    async def _begin(self, behind_s: float) -> None:
        """One that cannot take its store ends, and is started again."""
        try:
            await self.start(behind_s)
        except StoreError as error:
            self._oracle.story.note("* it ends again: %s", error.trouble.value)
            self._oracle.met("a head cannot begin, and ends")
            self.crash(_STARTED_AGAIN_S)

    def _kill_soon(self, begin: asyncio.Task[None]) -> tuple[float, Callable[[], None]]:
        after_s, down_s = self.killed_soon.pop(0)

        def kill() -> None:
            if self._beginning is begin:
                self.crash(down_s)

        return after_s, kill


def _in_order(tasks: set[asyncio.Task[object]]) -> list[asyncio.Task[object]]:
    """In an order that is the same each time; those without a name of their own are numbered."""

    def place(task: asyncio.Task[object]) -> tuple[int, str]:
        name = task.get_name()
        number = name.removeprefix("Task-")
        return (int(number), "") if name != number and number.isdigit() else (0, name)

    return sorted(tasks, key=place)
