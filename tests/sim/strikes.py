"""What can be done to a fleet: to its wires, what nodes say of themselves, its operators and its head.

Each strike returns whether it could. What only befalls one machine is in nodes.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.runtime.head import Head
from tests.sim.heads import Heads
from tests.sim.network import Noise, SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import Oracle

# Between two of them the head must have had time to see for itself what came of its nodes.
_BETWEEN_STANDSTILLS_S = 5.0


class Strikes:
    """Strikes, and what has to be undone of them."""

    def __init__(
        self, network: SimNetwork, machines: Sequence[SimMachine], oracle: Oracle, heads: Heads
    ) -> None:
        self._network = network
        self._machines = machines
        self._oracle = oracle
        self._heads = heads
        self._operations: set[asyncio.Task[None]] = set()
        self.cordoned: dict[str, None] = {}
        self.removed: dict[str, None] = {}

    async def undo(self) -> None:
        """Make the fleet whole again, and wait until every operation under way is done."""
        await self._heads.lives()
        while self._operations:
            await asyncio.wait(set(self._operations))
        self._network.noise = Noise()
        for machine in self._machines:
            machine.heal()
        for machine in self._machines:
            self._uncordon(machine)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._network.loop.call_later(delay_s, action, context=self._network.loop.node_side)

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
        self.cordoned.clear()
        self.removed.clear()
        return True

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
        head.operators.cordon_node(machine.address, "seeded")
        self.cordoned[name] = None
        self._oracle.met("a node is cordoned")
        self._network.loop.call_later(back_s, self._uncordon, machine, context=self._network.loop.head_side)
        return True

    def _uncordon(self, machine: SimMachine) -> None:
        """Also where the cordon has gone with the head, the node, or to another address."""
        head = self._heads.head
        if self.cordoned.pop(machine.profile.name, machine) is None and head is not None:
            for ref in (machine.address, machine.profile.name):
                if head.fleet.find(ref) is not None:
                    head.operators.uncordon_node(ref)

    def remove(self, machine: SimMachine, back_s: float) -> bool:
        name, head = machine.profile.name, self._head(machine)
        if head is None or name in self.cordoned or name in self.removed:
            return False
        self.removed[name] = None
        self._oracle.lasts(name, 1)
        self._oracle.met("a node is removed")
        loop = self._network.loop
        task = loop.create_task(self._remove_and_add(head, machine, back_s), context=loop.head_side)
        self._operations.add(task)

        def over(_task: object) -> None:
            self._operations.discard(task)
            self.removed.pop(name, None)
            self._oracle.lasts(name, -1)

        task.add_done_callback(over)
        return True

    async def _remove_and_add(self, head: Head, machine: SimMachine, back_s: float) -> None:
        """A node that joins is back by itself; what was one that can be dialed is added again."""
        try:
            await head.operators.remove_node(machine.address)
            await asyncio.sleep(back_s)
            if not machine.profile.joins:
                await head.operators.add_node(machine.address)
        except FleetError as error:
            if error.reason is not Reason.NODE_NOT_FOUND:
                raise
            self._oracle.violation(f"{machine.profile.name} was there, and could not be removed: {error}")
