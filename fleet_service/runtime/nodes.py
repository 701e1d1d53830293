"""The nodes' tasks: a keeper and a courier for each, from when a node is added until it is removed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

import structlog

from fleet_service.domain.commands import HeldSession, Introduction
from fleet_service.domain.errors import Reason
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import NodeHello, NodeState
from fleet_service.runtime.admission import Admission
from fleet_service.runtime.dials import Dials
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.join_desk import JoinDesk, joined_address
from fleet_service.runtime.keeper import NodeKeeper
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import Dialer, JoinRefusedError, LinkError
from fleet_service.runtime.settings import HeadSettings

log = structlog.get_logger(__name__)

FIRST_TRY_S = 2.0
"""How long adding a node, or starting the head, waits for a first answer."""

FAREWELL_S = 2.0
"""How long stopping waits for the nodes to take what is owed."""


class Nodes:
    """Adds, keeps and removes nodes."""

    def __init__(
        self,
        fleet: Fleet,
        dialer: Dialer,
        settings: HeadSettings,
        rng: random.Random,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        orphans: Callable[[Node, Sequence[HeldSession]], Sequence[HeldSession]],
    ) -> None:
        self._fleet = fleet
        self._admission = Admission(fleet, self._drop_link, self._raise_term, self._add_joined, wall_clock)
        self.desk = JoinDesk(dialer, self._receive, self.introduction)
        self._settings = settings
        self._rng = rng
        self._clock = clock
        self._wall_clock = wall_clock
        self._orphans = orphans
        self._dials = Dials()
        self._keepers: dict[Node, NodeKeeper] = {}
        self._tasks: dict[Node, list[asyncio.Task[None]]] = {}
        self._stopping = False

    def add(self, address: str) -> Node:
        """A node to dial at `address`; its tasks start now."""
        node = Node(address, self._settings, self._clock)
        keeper = NodeKeeper(
            node,
            self.desk,
            self._settings,
            self._rng,
            self._dials,
            introduce=self.introduction,
            admit=self._admission.admit,
            orphans=self._orphans,
        )
        self._fleet.add(node)
        self._keepers[node] = keeper
        loop = asyncio.get_running_loop()
        self._tasks[node] = [
            loop.create_task(keeper.run(), name=f"keep {address}"),
            loop.create_task(keeper.deliver_revokes(), name=f"courier {address}"),
        ]
        return node

    async def _receive(self, hello: NodeHello) -> None:
        self._open_for_nodes()
        await self._admission.receive(hello)

    def _add_joined(self, identity: str) -> Node:
        self._open_for_nodes()  # it may have begun to stop since the node was received
        return self.add(joined_address(identity))

    def _open_for_nodes(self) -> None:
        if self._stopping:
            raise JoinRefusedError(
                Reason.HEAD_DRAINING.value, "the head is shutting down; dial again, or elsewhere if you can"
            )

    def keeper_of(self, node: Node) -> NodeKeeper | None:
        return self._keepers.get(node)

    async def first_try(self, *nodes: Node) -> None:
        """Wait until each was connected, or could not be, at most FIRST_TRY_S."""
        keepers = [keeper for node in nodes if (keeper := self._keepers.get(node)) is not None]
        await all_set((keeper.first_try for keeper in keepers), FIRST_TRY_S)

    def tell_unanswered(self, *nodes: Node) -> None:
        """Warn of those whose first try is still open; the keepers have told how it ended for the others."""
        for node in nodes:
            if node.state is NodeState.CONNECTING:
                log.warning(
                    "node_not_reached",
                    node=node.name,
                    address=node.address,
                    why=f"no answer within {FIRST_TRY_S:g} s; it is dialed on",
                )

    async def remove(self, node: Node) -> None:
        """Out of the fleet: what it runs goes on elsewhere; what it holds is given up to its lease."""
        self.take_out(node)
        await self.let_go(node)

    def take_out(self, node: Node) -> None:
        """The first half of `remove`, at once: nothing is placed or goes on there any more."""
        self._fleet.remove(node)
        node.set_state(NodeState.DOWN, "removed")
        node.fail_running(FailureClass.REMOVED, "removed")

    async def let_go(self, node: Node) -> None:
        """The second half: end its lease, its link and its tasks. Nothing more is owed to it."""
        await self._end_lease(node)
        await self._stop_tasks([node])
        node.new_life()

    async def stop(self, *, comes_back: bool = False) -> None:
        """Give the nodes what is owed to them, then let go of all. Who dials in from now on is refused.

        `comes_back`: the next run of the head takes up what they hold; if none comes, their leases run out.
        """
        self._stopping = True
        nodes = list(self._tasks)
        linked = [node for node in nodes if node.link is not None]
        try:
            async with asyncio.timeout(FAREWELL_S):
                if comes_back:
                    await asyncio.gather(*(node.outbox_empty.wait() for node in linked))
                else:
                    await asyncio.gather(*(self._end_lease(node) for node in linked))
        except TimeoutError:
            log.info("farewell_incomplete", nodes=len(nodes))
        await self._stop_tasks(nodes)

    def violated(self, node: Node, detail: str) -> None:
        """A node broke the protocol: its link is not to be trusted any more."""
        log.warning("protocol_violation", node=node.name, detail=detail)
        self._drop_link(node, detail)

    async def probe(self, address: str) -> NodeHello:
        return await self.desk.probe(address, self.introduction())

    async def _end_lease(self, node: Node) -> None:
        """A lease that ends now frees all this head has there, with one command."""
        try:
            for term in list(node.leases):
                if node.link is not None:
                    await node.link.renew_lease(0.0, term)
        except LinkError as error:
            log.info("lease_not_ended", node=node.name, error=str(error))

    async def _stop_tasks(self, nodes: Sequence[Node]) -> None:
        tasks = [task for node in nodes for task in self._tasks.pop(node, [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in nodes:
            self._keepers.pop(node, None)

    def introduction(self) -> Introduction:
        """What the head says of itself to nodes."""
        return Introduction(self._settings.fleet_id, self._settings.head_id, self._fleet.term)

    def _raise_term(self, above_epoch: int) -> None:
        self._fleet.raise_term_above(above_epoch, int(self._wall_clock()))
        log.warning("term_raised", term=self._fleet.term)

    def _drop_link(self, node: Node, why: str) -> None:
        keeper = self._keepers.get(node)
        if keeper is not None:
            keeper.drop_link(why)


async def all_set(events: Iterable[asyncio.Event], timeout_s: float) -> None:
    """Wait until each is set, at most so long."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    if not waits:
        return
    try:
        await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
