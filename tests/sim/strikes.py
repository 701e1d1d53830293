"""What can be done to a fleet: to its wires, what nodes say of themselves, its operators and its head.

Each strike returns whether it could. What only befalls one machine is in nodes.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.runtime.head import Head
from fleet_service.runtime.records import Record
from fleet_service.runtime.store import StoreTrouble
from tests.sim.heads import Heads
from tests.sim.network import Noise, SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import Oracle
from tests.sim.stores import Kill, Op
from tests.sim.talking import Talk

# Between two of them the head must have had time to see for itself what came of its nodes.
_BETWEEN_STANDSTILLS_S = 5.0
_JUST_BEFORE = 0.99
_SEEN_TO_S = 0.5
"""Between two looks of an operator at whether a node is back."""


class Strikes:
    """Strikes, and what has to be undone of them."""

    def __init__(
        self, network: SimNetwork, machines: Sequence[SimMachine], oracle: Oracle, heads: Heads
    ) -> None:
        self._network = network
        self._machines = machines
        self._oracle = oracle
        self._heads = heads
        self._line = Talk(heads, oracle, random.Random("operators"))
        self._operations: set[asyncio.Task[None]] = set()
        self.cordoned: dict[str, None] = {}
        self._uncordoning: set[str] = set()
        self._cloned: set[SimMachine] = set()
        self._ordered: set[SimMachine] = set()  # that ever were cordoned
        self.removed: dict[str, None] = {}

    async def undo(self) -> None:
        """Make the fleet whole again, and wait until every operation under way is done."""
        if self._heads.store is not None:
            self._heads.store.kills.clear()
            self._heads.store.work_again()
            self._heads.killed_soon.clear()
        await self._heads.lives()
        while self._operations:
            await asyncio.wait(set(self._operations))
        self._network.noise = Noise()
        for machine in self._machines:
            machine.heal()
        for machine in self._machines:
            self._uncordon(machine)
        while self._heads.store is not None and self.cordoned:
            await asyncio.sleep(_SEEN_TO_S)

    def may_be_cloned(self, machine: SimMachine) -> bool:
        """What was ordered of a node that is away may come upon its clone; where it is kept, for good."""
        if self._heads.store is not None and machine in self._ordered:
            return False
        self._cloned.add(machine)
        return True

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._network.loop.call_later(delay_s, action, context=self._network.loop.node_side)

    @property
    def relaxed(self) -> bool:
        """Heads tell ahead."""
        return self._heads.relaxed

    # Nodes

    def drop(self, machine: SimMachine) -> bool:
        self._oracle.lasts(machine.profile.name, 1)
        self._oracle.lasts(machine.profile.name, -1)
        machine.drop_links()
        return True

    def refuse(self, machine: SimMachine, duration_s: float) -> bool:
        if machine.profile.joins:
            return False
        machine.refuses = "this node speaks version 2 to 3 only"
        machine.drop_links()
        self._until(machine, duration_s, lambda: setattr(machine, "refuses", ""))
        return True

    def lie(self, machine: SimMachine, rng: random.Random) -> bool:
        lies = {
            "kv_blocks_used": rng.randint(0, 100),
            "kv_blocks_total": 100,
            "decode_tokens_per_s": rng.choice([0, 1, 10**6]),
            "prefill_tokens_per_s": rng.choice([0, 1, 10**6]),
            "queue_depth": rng.choice([0, 500]),
            "lanes_active": rng.choice([0, 500]),
            "own_queue_depth": rng.choice([0, 1000]),
        }
        machine.lies = {name: lies[name] for name in lies if rng.random() < 0.5}
        return True

    def silence(self, machine: SimMachine, duration_s: float) -> bool:
        """A node that sends no reports and has nothing to say is silent, and so suspect."""
        machine.silent_reports = True
        self._until(machine, duration_s, lambda: setattr(machine, "silent_reports", False))
        return True

    def outage(self, machines: Sequence[SimMachine], duration_s: float) -> bool:
        """Nothing gets to or from any of them."""
        self._oracle.met("many fall silent together")
        stalled = [machine.stall(duration_s) for machine in machines]
        return all(stalled)

    def _until(self, machine: SimMachine, duration_s: float, end: Callable[[], None]) -> None:
        name = machine.profile.name
        self._oracle.lasts(name, 1)

        def over() -> None:
            end()
            self._oracle.lasts(name, -1)

        self.later(duration_s, over)

    # Wires and head

    def noise(self, noise: Noise, duration_s: float) -> bool:
        self._network.noise = noise
        self._oracle.wire_trouble.lasting += 1
        self._oracle.wire_trouble.count += 1
        self.later(duration_s, self._quiet)
        return True

    def _quiet(self) -> None:
        self._network.noise = Noise()
        self._oracle.wire_trouble.lasting -= 1
        self._oracle.wire_trouble.last_s = self._network.loop.time()

    def stop_head(self, duration_s: float) -> bool:
        """All of it stands still; what came due or arrived meanwhile happens at once afterwards."""
        loop, began_s = self._network.loop, self._network.loop.time()
        if (
            loop.head_stopped
            or self._heads.head is None
            or self._oracle.ran_for(began_s) < _BETWEEN_STANDSTILLS_S
        ):
            return False
        loop.stop_head(duration_s)
        self._oracle.stood_still(began_s, began_s + duration_s)
        self._oracle.met("the head stands still")
        return True

    def crash_head(self, down_s: float) -> bool:
        if not self._heads.crash(down_s):
            return False
        if self._heads.store is None:
            self.cordoned.clear()
            self.removed.clear()
        return True

    # The store

    def crash_in(
        self, op: Op, left: int, where: float, down_s: float, record: type[Record] | None = None
    ) -> bool:
        """The head is killed in what it does with its store."""
        store = self._heads.store
        assert store is not None

        def strike() -> None:
            if self.crash_head(down_s):
                self._oracle.met(f"a head is killed as it {op.value}")
                self._oracle.story.note("* the head is killed as it %s, down for %.2f s", op.value, down_s)

        store.kills.append(Kill(op, left, where, strike, record))
        return True

    def crash_again(self, down_s: float, after_s: float, again_s: float) -> bool:
        """The head is killed, and the next one while it begins."""
        if not self.crash_head(down_s):
            return False
        self._heads.killed_soon.append((after_s, again_s))
        return True

    def end_head(self, grace_s: float, down_s: float) -> bool:
        """It ends in order, and another one starts."""
        return self._heads.end(grace_s, down_s)

    def crash_twice(self, record: type[Record], takes_s: float, down_s: float, again_s: float) -> bool:
        """The head is killed in a write that takes long, the next, a STRICT one, before its first."""
        store = self._heads.store
        assert store is not None

        def strike() -> None:
            if self.crash_head(down_s):
                self._heads.next_is_strict = True
                self.crash_in(Op.TERM, 1, 1.0, again_s)

        store.kills.append(Kill(Op.WRITE, 1, _JUST_BEFORE, strike, record, takes_s))
        return True

    def crash_into_trouble(
        self, down_s: float, after_s: float, trouble: StoreTrouble, duration_s: float
    ) -> bool:
        """The head is killed, and the store fails after `after_s`."""
        if not self.crash_head(down_s):
            return False

        def fail() -> None:
            self.store_fails(trouble, duration_s)

        self.later(after_s, fail)
        return True

    def store_fails(self, trouble: StoreTrouble, duration_s: float) -> bool:
        store = self._heads.store
        assert store is not None
        self._oracle.met(f"the store is {trouble.value}")
        return store.fail(trouble, duration_s)

    # Operators

    def _head(self, machine: SimMachine) -> Head | None:
        """The head, if it can be asked and knows the node."""
        head = self._heads.head
        known = head is not None and not self._network.loop.head_stopped and self._heads.up.is_set()
        return head if known and head is not None and head.fleet.find(machine.address) is not None else None

    def cordon(self, machine: SimMachine, back_s: float) -> bool:
        name, head = machine.profile.name, self._head(machine)
        if head is None or name in self.cordoned or name in self.removed:
            return False
        if self._heads.store is not None and machine in self._cloned:
            return False
        self._ordered.add(machine)
        head.operators.cordon_node(machine.address, "seeded")
        self.cordoned[name] = None
        self._oracle.met("a node is cordoned")
        self._network.loop.call_later(back_s, self._uncordon, machine, context=self._network.loop.head_side)
        return True

    def _uncordon(self, machine: SimMachine) -> None:
        """Also where the cordon has gone with the head, the node, or to another address."""
        head = self._heads.head
        if self._heads.store is not None:
            self._see_to_uncordon(machine)
        elif self.cordoned.pop(machine.profile.name, machine) is None and head is not None:
            for ref in (machine.address, machine.profile.name):
                if head.fleet.find(ref) is not None:
                    head.operators.uncordon_node(ref)

    def _see_to_uncordon(self, machine: SimMachine) -> None:
        name, loop = machine.profile.name, self._network.loop
        if name in self.cordoned and name not in self._uncordoning:
            self._uncordoning.add(name)
            task = loop.create_task(self._uncordon_for_good(machine), context=loop.head_side)
            self._line.owns(task)
            self._operations.add(task)
            task.add_done_callback(self._operations.discard)

    async def _uncordon_for_good(self, machine: SimMachine) -> None:
        """An operator who sees to it that it is done, by whichever head, once that knows the node."""
        name = machine.profile.name

        async def end(head: Head) -> bool:
            there = [ref for ref in (name, machine.address) if head.fleet.find(ref) is not None]
            for ref in there:
                head.operators.uncordon_node(ref)
            await head.journal.settled()
            return bool(there)

        while not (await self._line.call(end) and await self._line.is_kept()):
            await asyncio.sleep(_SEEN_TO_S)
        self._uncordoning.discard(name)
        self.cordoned.pop(name, None)

    def remove(self, machine: SimMachine, back_s: float) -> bool:
        name, head = machine.profile.name, self._head(machine)
        if head is None or name in self.cordoned or name in self.removed:
            return False
        self.removed[name] = None
        self._oracle.lasts(name, 1)
        self._oracle.met("a node is removed")
        loop = self._network.loop
        task = loop.create_task(self._remove_and_add(machine, back_s), context=loop.head_side)
        self._line.owns(task)
        self._operations.add(task)

        def over(_task: object) -> None:
            self._operations.discard(task)
            self.removed.pop(name, None)
            self._oracle.lasts(name, -1)

        task.add_done_callback(over)
        return True

    async def _remove_and_add(self, machine: SimMachine, back_s: float) -> None:
        """A node that joins is back by itself; what was one that can be dialed is added again."""
        asked = {"remove": 0, "add": 0}

        async def remove(head: Head) -> None:
            asked["remove"] += 1
            await head.operators.remove_node(machine.address)
            await head.journal.settled()

        async def add(head: Head) -> None:
            asked["add"] += 1
            await head.operators.add_node(machine.address)
            await head.journal.settled()

        try:
            await self._done_once(remove, Reason.NODE_NOT_FOUND, asked)
            await asyncio.sleep(back_s)
            if not machine.profile.joins:
                await self._done_once(add, Reason.NODE_ALREADY_EXISTS, asked)
        except FleetError as error:
            if error.reason is not Reason.NODE_NOT_FOUND:
                raise
            self._oracle.violation(f"{machine.profile.name} was there, and could not be removed: {error}")

    async def _done_once(
        self, operation: Callable[[Head], Awaitable[None]], done: Reason, asked: dict[str, int]
    ) -> None:
        """Have it done, again where that was lost; `done`: the answer where a head that died has done it."""
        while True:
            try:
                await self._line.call(operation)
            except FleetError as error:
                if error.reason is not done or not self._line.lasts or asked[operation.__name__] == 1:
                    raise
            if await self._line.is_kept():
                return
