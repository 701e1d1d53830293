"""The heads of a world, one after the other: started, killed without a word, and started anew with nothing.

A head that is killed ends as by SIGKILL: its connections are reset, and every task that ran for it or talked
to it is cancelled. Only what the world registered as its own goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from fleet_service.runtime.head import Head
from fleet_service.runtime.settings import HeadSettings
from tests.sim.links import SimDialer
from tests.sim.network import SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import Oracle

EPOCH_UNIX_S = 1_700_000_000.0
_CLOCK_SET_BACK_S = 1_000.0


class Heads:
    """`head` is the one that lives, None between two. `up` is set while there is one."""

    def __init__(
        self,
        settings: HeadSettings,
        network: SimNetwork,
        machines: Sequence[SimMachine],
        everyone: Sequence[SimMachine],
        oracle: Oracle,
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._network = network
        self._machines = machines
        self._everyone = everyone
        self._oracle = oracle
        self._rng = rng
        self._own: set[asyncio.Task[object]] = set()
        self._died_s: float | None = None
        self.since_s = 0.0  # when the head that lives had tried its nodes
        self._starting: asyncio.Task[None] | None = None
        self.head: Head | None = None
        self.up = asyncio.Event()
        self.forgotten: Callable[[], None] = lambda: None  # called when a head's memory is gone

    def owns(self, task: asyncio.Task[object]) -> None:
        """It is the world's: it outlives heads."""
        self._own.add(task)
        task.add_done_callback(self._own.discard)

    async def start(self, wall_clock: Callable[[], float] | None = None) -> None:
        """A head with empty memory, that dials the nodes."""
        loop = self._network.loop
        head = Head(
            self._settings,
            dialer=SimDialer(self._network),
            rng=random.Random(self._rng.random()),
            wall_clock=wall_clock or (lambda: EPOCH_UNIX_S + loop.time()),
            observer=self._oracle.watch(),
        )
        self.head = head
        await head.start([machine.address for machine in self._machines if not machine.profile.joins])
        if self.head is head:
            self.since_s = loop.time()
            if self._died_s is not None:
                self._oracle.stood_still(self._died_s, self.since_s)
            self.up.set()

    async def lives(self) -> Head:
        """The head that lives, waited for."""
        while self.head is None or not self.up.is_set():
            await self.up.wait()
        return self.head

    def crash(self, down_s: float) -> bool:
        """Kill it; another starts after `down_s`. False when there is none to kill."""
        loop = self._network.loop
        if self.head is None or not self.up.is_set() or loop.head_stopped:
            return False
        died_s = self._died_s = loop.time()
        self.head = None
        self.up.clear()
        processes = [machine.process for machine in self._everyone if machine.process is not None]
        self.forgotten()
        self._oracle.head_died(processes, self._settings.fleet_id)
        for link in list(self._network.links):
            link.die()
        for task in _in_order(asyncio.all_tasks() - self._own):
            task.cancel()
        # Its clock may say the same second again, or be set back: the nodes' epochs tell it better.
        behind_s = self._rng.choice([0.0, 0.0, 0.0, died_s + down_s, _CLOCK_SET_BACK_S])
        self._starting = loop.create_task(
            self._start_again(down_s, behind_s), name="start the next head", context=loop.head_side
        )
        self.owns(self._starting)
        return True

    async def _start_again(self, down_s: float, behind_s: float) -> None:
        loop = self._network.loop
        await asyncio.sleep(down_s)
        self._oracle.story.note("* another head starts, its clock %.2f s behind", behind_s)
        self._oracle.met("a head starts anew")
        start = loop.create_task(
            self.start(lambda: EPOCH_UNIX_S + loop.time() - behind_s), name="start of a head"
        )
        await asyncio.wait({start})
        if not start.cancelled():
            start.result()


def _in_order(tasks: set[asyncio.Task[object]]) -> list[asyncio.Task[object]]:
    """In an order that is the same each time; those without a name of their own are numbered."""

    def place(task: asyncio.Task[object]) -> tuple[int, str]:
        name = task.get_name()
        number = name.removeprefix("Task-")
        return (int(number), "") if name != number and number.isdigit() else (0, name)

    return sorted(tasks, key=place)
