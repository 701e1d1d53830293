"""The nodes' tasks: a keeper and a courier for each, from when a node is added until it is removed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import structlog

from fleet_service.domain.commands import Introduction
from fleet_service.domain.epochs import CREDIBLE_TERMS_AHEAD, term_of
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import NodeHello, NodeState, unacceptable
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.keeper import NodeKeeper
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import Dialer, LinkError
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
    ) -> None:
        self._fleet = fleet
        self._dialer = dialer
        self._settings = settings
        self._rng = rng
        self._clock = clock
        self._wall_clock = wall_clock
        self._keepers: dict[Node, NodeKeeper] = {}
        self._tasks: dict[Node, list[asyncio.Task[None]]] = {}

    def add(self, address: str) -> Node:
        """A node to dial at `address`; its tasks start now."""
        node = Node(address, self._settings, self._clock)
        keeper = NodeKeeper(
            node, self._dialer, self._settings, self._rng, introduce=self._introduction, admit=self._admit
        )
        self._fleet.add(node)
        self._keepers[node] = keeper
        loop = asyncio.get_running_loop()
        self._tasks[node] = [
            loop.create_task(keeper.run(), name=f"keep {address}"),
            loop.create_task(keeper.deliver_revokes(), name=f"courier {address}"),
        ]
        return node

    def keeper_of(self, node: Node) -> NodeKeeper | None:
        return self._keepers.get(node)

    async def first_try(self, *nodes: Node) -> None:
        """Wait until each was connected, or could not be, at most FIRST_TRY_S."""
        waits = [
            asyncio.ensure_future(keeper.first_try.wait())
            for node in nodes
            if (keeper := self._keepers.get(node)) is not None
        ]
        if not waits:
            return
        try:
            await asyncio.wait(waits, timeout=FIRST_TRY_S)
        finally:
            for wait in waits:
                wait.cancel()

    async def remove(self, node: Node) -> None:
        """Out of the fleet: what it runs goes on elsewhere; what it holds is given up to its lease."""
        self._fleet.remove(node)
        node.set_state(NodeState.DOWN, "removed")
        node.fail_running(FailureClass.REMOVED, "removed")
        await self._end_lease(node)
        await self._stop_tasks([node])

    async def stop(self) -> None:
        """Give the nodes what is owed to them, then let go of all."""
        nodes = list(self._tasks)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*map(self._end_lease, nodes))
        except TimeoutError:
            log.info("farewell_incomplete", nodes=len(nodes))
        await self._stop_tasks(nodes)

    def violated(self, node: Node, detail: str) -> None:
        """A node broke the protocol: its link is not to be trusted any more."""
        log.warning("protocol_violation", node=node.name, detail=detail)
        keeper = self._keepers.get(node)
        if keeper is not None:
            keeper.drop_link(detail)

    async def probe(self, address: str) -> NodeHello:
        return await self._dialer.probe(address, self._introduction())

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

    def _introduction(self) -> Introduction:
        return Introduction(self._settings.fleet_id, self._settings.head_id, self._fleet.term)

    def _admit(self, node: Node, hello: NodeHello) -> str | None:
        unfit = unacceptable(hello)
        if unfit is not None:
            return f"the node is not taken in: {unfit}"
        resident = self._fleet.at(hello.identity)
        if resident is not None and resident is not node:
            return (
                f"identity {hello.identity} is the address of another node; "
                "give this one another identity, or remove the other"
            )
        other = self._fleet.named(hello.identity)
        if other is not None and other is not node and other.link is not None:
            return (
                f"identity {hello.identity} is in use by the node at {other.address}; "
                "give this node another identity, or remove the other"
            )
        if term_of(hello.highest_epoch) > self._wall_clock() + CREDIBLE_TERMS_AHEAD:
            return (
                f"the node reports epoch {hello.highest_epoch}, of a term far in the future; "
                "compare the clocks of the head and of the node's other heads, and restart the node"
            )
        if hello.highest_epoch > self._fleet.last_epoch:
            self._fleet.raise_term_above(hello.highest_epoch, int(self._wall_clock()))
            log.warning("term_raised", term=self._fleet.term, node=hello.identity)
        if other is not None and other is not node:
            self._replace(other, node)
        self._fleet.rename(node, hello.identity)
        return None

    def _replace(self, old: Node, new: Node) -> None:
        """The identity lives at another address now: its name and its cordon go there."""
        log.info("node_replaced", node=old.name, old_address=old.address, address=new.address)
        new.cordoned, new.cordon_note = old.cordoned, old.cordon_note
        old.unlearn()
        self._fleet.rename(old, old.address)
