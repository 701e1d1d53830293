"""Clones: a second machine under the identity of another, for a while, and which of the two is right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from fleet_service.runtime.node import Node
from tests.sim.heads import Heads
from tests.sim.joining import Door
from tests.sim.links import SimLink
from tests.sim.network import SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import Oracle
from tests.sim.process import SimProcess

_WELL_FOR_S = 3.0
_CAN_ANSWER_S = 0.3
_DROPPED_S = 0.1
# How long a run that was replaced gets to come back, which it must not, before an operator restarts it.
_BARRED_S = 4.0


class Clones:
    """Makes them, and checks that one identity has one living incarnation. `everyone`: all machines."""

    def __init__(
        self, network: SimNetwork, door: Door, oracle: Oracle, heads: Heads, everyone: list[SimMachine]
    ) -> None:
        self._network = network
        self._door = door
        self._oracle = oracle
        self._heads = heads
        self._everyone = everyone
        self._made = 0
        self.names: dict[str, None] = {}  # of those that ever had one
        self.barred: dict[str, float] = {}  # incarnations that the head says it has replaced, and when
        self.alive: dict[SimMachine, SimMachine] = {}  # clones: whose
        door.watch_offer = self._offered
        heads.forgotten = self.barred.clear

    def make(self, original: SimMachine, lives_s: float) -> bool:
        """A clone dials in, and is switched off after `lives_s`."""
        if original in self.alive.values():
            return False
        self._made += 1
        self.names[original.profile.name] = None
        name = original.profile.name
        clone = SimMachine(
            replace(original.profile, joins=True),
            self._network,
            random.Random(original.rng.random()),
            self._oracle,
            SimProcess,
            label=f"{name}-clone-{self._made}",
        )
        self._everyone.append(clone)
        self.alive[clone] = original
        self._oracle.lasts(name, 1)
        self._oracle.met("an identity is used twice")
        self._door.open_for(clone)
        self._network.loop.call_later(lives_s, self._switch_off, clone, context=self._network.loop.node_side)
        return True

    def _switch_off(self, clone: SimMachine) -> None:
        clone.switch_off()
        self._network.loop.call_later(_BARRED_S, self._over, clone, context=self._network.loop.node_side)

    def _over(self, clone: SimMachine) -> None:
        """An operator sees to what is left: a run that was replaced is started anew."""
        loop = self._network.loop
        if loop.head_stopped or self._oracle.ran_for(loop.time()) < _BARRED_S:
            # The head may not have seen yet that there was a clone.
            loop.call_later(_BARRED_S, self._over, clone, context=loop.node_side)
            return
        original = self.alive.pop(clone, None)
        if original is None:
            return
        if original.process is not None and original.process.incarnation in self.barred:
            original.die(0.5)
        self._oracle.lasts(original.profile.name, -1)

    async def undo(self) -> None:
        """No clone is left, and no address that nobody lives at any more."""
        for clone in list(self.alive):
            clone.switch_off()
            self._switch_off(clone)
        while self.alive:
            await asyncio.sleep(1.0)
        head = await self._heads.lives()
        homes = {machine.address for machine in self._everyone if machine.process is not None}
        for node in head.fleet.nodes:
            if node.address not in homes and node.link is None:
                await head.operators.remove_node(node.address)

    # Checks

    def replaced(self, incarnation: str) -> None:
        """The head says that it has replaced it."""
        self._oracle.met("an incarnation is replaced")
        now_s = self._network.loop.time()
        self.barred[incarnation] = now_s
        for link in [each for each in self._network.links if each.hello.incarnation == incarnation]:
            machine = self._machine_of(link)
            quiet_s = now_s - self._oracle.trouble_of(link.hello.identity).last_s
            if machine and _is_well(link, machine) and quiet_s > _CAN_ANSWER_S and self._wires_are_quiet():
                self._oracle.violation(f"{incarnation} is replaced, and it lives")

    def _machine_of(self, link: SimLink) -> SimMachine | None:
        return next((each for each in self._everyone if each.process is link.process), None)

    def _wires_are_quiet(self) -> bool:
        return self._oracle.wire_trouble.quiet(self._network.loop.time())

    def check(self, node: Node) -> None:
        """At every tick, of each node of the head."""
        link = node.link
        if not isinstance(link, SimLink):
            return
        incarnation = link.hello.incarnation
        barred_s = self.barred.get(incarnation)
        if barred_s is not None and self._network.loop.time() - barred_s > _DROPPED_S:
            self._oracle.violation(f"{incarnation} was replaced, and is taken in again")

    def _offered(self, link: SimLink) -> Callable[[], None]:
        """A node has dialed in: whether it may be taken in is judged by how the one it would replace is."""
        rival = self._rival(link)
        if rival is None:
            return lambda: None
        troubles = self._oracle.trouble_of(link.hello.identity).count, self._oracle.wire_trouble.count

        def taken_in() -> None:
            now = self._oracle.trouble_of(link.hello.identity).count, self._oracle.wire_trouble.count
            if rival.whole and now == troubles:
                self._oracle.violation(
                    f"{link.hello.incarnation} is taken in, and {rival.hello.incarnation} lives"
                )

        return taken_in

    def _rival(self, link: SimLink) -> SimLink | None:
        """The link that has the identity, where nothing is wrong with it."""
        head, now_s = self._heads.head, self._network.loop.time()
        holder = head.fleet.named(link.hello.identity) if head is not None else None
        other = holder.link if holder is not None else None
        if not isinstance(other, SimLink) or other.hello.incarnation == link.hello.incarnation:
            return None
        machine = self._machine_of(other)
        quiet = self._wires_are_quiet() and now_s - other.since_s > _WELL_FOR_S
        return other if machine and _is_well(other, machine) and quiet else None


def _is_well(link: SimLink, machine: SimMachine) -> bool:
    return link.whole and not machine.frozen and not machine.stalled and not machine.cut_off
