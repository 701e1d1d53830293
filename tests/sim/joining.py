"""Nodes that dial in: their dials, the head's door, and the link that is handed to its join desk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from fleet_service.domain.node_types import NodeHello
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import JoinRefusedError, LinkLostError
from tests.sim.links import SimLink
from tests.sim.network import Peer, SimNetwork, Wire
from tests.sim.nodes import NodeProcess, SimMachine
from tests.sim.oracle import Oracle

_FIRST_S, _CAP_S = 0.1, 1.0
_IN_USE_S = 3.0
"""How long a node waits that was refused."""


class Door:
    """Where nodes dial in. `head` gives the head that lives, if any."""

    def __init__(
        self, network: SimNetwork, oracle: Oracle, head: Callable[[], Head | None], rng: random.Random
    ) -> None:
        self._rng = rng
        self._network = network
        self._oracle = oracle
        self._head = head
        self._failed: dict[NodeProcess, int] = {}
        self._open = True
        self._inside: set[asyncio.Task[None]] = set()
        # Asked before a node is offered to the desk; what it gives is called when the node was taken in.
        self.watch_offer: Callable[[SimLink], Callable[[], None]] = lambda _link: _nothing

    def open_for(self, machine: SimMachine) -> None:
        """Its processes dial in from now on."""
        machine.dials_in = self._begin
        if machine.process is not None:
            self._begin(machine.process)

    def close(self) -> None:
        """Nobody dials in any more."""
        self._open = False

    async def empty(self) -> None:
        """Return when the last link has been seen off."""
        for link in list(self._network.links):
            link.die()
        if self._inside:
            await asyncio.wait(self._inside)

    # The node's side

    def _begin(self, process: NodeProcess) -> None:
        self._failed[process] = 0
        self._dial_in(process, process.machine.rng.uniform(0.0, _FIRST_S))

    def _dial_in(self, process: NodeProcess, after_s: float) -> None:
        loop, machine = self._network.loop, process.machine
        loop.call_later(
            after_s, machine.when_running, process, lambda: self._dial(process), context=loop.node_side
        )

    def _again(self, process: NodeProcess, *, refused: bool = False) -> None:
        failed, rng = self._failed[process], process.machine.rng
        self._failed[process] = failed + 1
        wait_s = _IN_USE_S if refused else min(_CAP_S, _FIRST_S * 2.0 ** min(failed, 8))
        self._dial_in(process, wait_s * rng.uniform(0.5, 1.0))

    def _dial(self, process: NodeProcess) -> None:
        machine, head = process.machine, self._head()
        if not self._open:
            return
        if head is None or machine.cut_off:
            self._again(process)
            return
        wire = Wire(self._network, machine, process)
        self._network.wires[wire] = None
        wire.late_s = machine.rng.choice([0.0, 0.0, 3.0])  # a goodbye that comes when it is back already
        wire.closed_at_node = lambda: self._again(process, refused=wire.refused)
        wire.later(lambda: self._greet(head, wire))

    # The head's side

    def _greet(self, head: Head, wire: Wire) -> None:
        if self._head() is not head:
            wire.break_("the head is gone")
            return
        introduction = head.nodes.introduction()

        def answer() -> None:
            hello = wire.process.hello(introduction)
            wire.later(lambda: self._welcome(head, wire, hello))

        wire.to_node(answer)

    def _welcome(self, head: Head, wire: Wire, hello: NodeHello) -> None:
        if self._head() is not head or wire not in self._network.wires:
            wire.break_("the head is gone")
            return
        link = SimLink(wire, head.nodes.introduction(), hello, None)
        link.opened()
        task = self._network.loop.create_task(self._admit(head, link, wire), name=f"door {hello.identity}")
        self._inside.add(task)
        task.add_done_callback(self._inside.discard)

    async def _admit(self, head: Head, link: SimLink, wire: Wire) -> None:
        taken_in = self.watch_offer(link)
        for old in [
            each for each in self._network.links if each.process is link.process and each is not link
        ]:
            self._oracle.met("a node is back before its old link has gone")
            if self._rng.random() < 0.7:
                self._say_goodbye(old, self._rng.randint(0, 12))
        try:
            await head.nodes.desk.offer(link.hello, link)
            self._oracle.met("a node dials in")
            taken_in()
            self._joined_once(link.process)
            await link.ended()
        except JoinRefusedError as error:
            wire.refused = True
            self._oracle.met(f"a node that dials in is refused: {error.reason}")
            self._oracle.story.note("* %s is refused: %s", link.hello.incarnation, error)
        finally:
            await link.close()

    def _say_goodbye(self, old: SimLink, turns: int) -> None:
        """The end of the old link is noticed, some turns of the loop later."""
        if turns:
            self._network.loop.call_soon(self._say_goodbye, old, turns - 1)
        else:
            old.lose(LinkLostError("its connection ended, noticed late"))

    def _joined_once(self, process: Peer) -> None:
        for each in self._failed:
            if each is process:
                self._failed[each] = 0


def _nothing() -> None:
    """Nobody watches."""
