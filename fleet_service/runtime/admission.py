"""Who may be which node: one identity, one living incarnation (design: Failures, two live machines).

A newcomer under a living node's identity is refused; under a silent one's, it replaces it, and the old
incarnation is barred for good.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import structlog

from fleet_service.domain.epochs import CREDIBLE_TERMS_AHEAD, term_of
from fleet_service.domain.node_types import NodeHello, unacceptable
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.join_desk import JOINED_PREFIX, joined_address
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    JoinRefusedError,
    LinkError,
    LinkTimeoutError,
    NodeLink,
)

log = structlog.get_logger(__name__)

CHALLENGE_S = 1.0
"""How long the node that has an identity gets to show that it lives."""

CONFIRM_S = 0.1
"""How long the head must have run after that, and heard nothing, before it calls the node silent."""

MAX_BARRED = 10_000
"""Incarnations remembered as replaced, the oldest going first."""

IDENTITY_IN_USE = "IDENTITY_IN_USE"
INVALID_FIELD = "INVALID_FIELD"


class Admission:
    """Decides on every hello.

    `drop_link` closes a node's link; `raise_term` goes on in a term above an epoch; `add_joined` makes a node
    that dials in known.
    """

    def __init__(
        self,
        fleet: Fleet,
        drop_link: Callable[[Node, str], None],
        raise_term: Callable[[int], None],
        add_joined: Callable[[str], Node],
        wall_clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._wall_clock = wall_clock
        self._drop_link = drop_link
        self._raise_term = raise_term
        self._add_joined = add_joined
        self._barred: OrderedDict[str, None] = OrderedDict()

    async def admit(self, node: Node, hello: NodeHello) -> None:
        """`node` said hello on a new link, and is `arriving` from here on. Raises HandshakeRefusedError."""
        node.other_way_to = ""
        refused = self._unfit(node, hello) or await self._contest(node, hello)
        if refused is not None:
            raise HandshakeRefusedError(refused)
        if hello.highest_epoch > self._fleet.last_epoch:
            self._raise_term(hello.highest_epoch)
        other = self._fleet.named(hello.identity)
        if other is not None and other is not node:
            self._hand_over(other, node)
        self._fleet.rename(node, hello.identity)
        node.arriving = hello

    async def receive(self, hello: NodeHello) -> None:
        """A node has dialed in. Makes it known, or raises JoinRefusedError."""
        unfit = self._unfit(None, hello)
        if unfit is not None:
            raise JoinRefusedError(INVALID_FIELD, unfit)
        refused = await self._contest(None, hello)
        if refused is not None:
            raise JoinRefusedError(IDENTITY_IN_USE, refused)
        holder = self._fleet.named(hello.identity)
        if holder is not None and holder.address.startswith(JOINED_PREFIX):
            return
        # It may have dialed in before, and since then have been at an address that is dialed.
        joined = self._fleet.at(joined_address(hello.identity)) or self._add_joined(hello.identity)
        if holder is not None:
            self._hand_over(holder, joined)
        self._fleet.rename(joined, hello.identity)

    def _unfit(self, node: Node | None, hello: NodeHello) -> str | None:
        """What is wrong with the hello itself."""
        unfit = unacceptable(hello)
        if unfit is not None:
            return f"the node is not taken in: {unfit}"
        resident = self._fleet.at(hello.identity)
        if resident is not None and resident is not node:
            return (
                f"identity {hello.identity} is the address of another node; "
                "give this one another identity, or remove the other"
            )
        if term_of(hello.highest_epoch) > self._wall_clock() + CREDIBLE_TERMS_AHEAD:
            return (
                f"the node reports epoch {hello.highest_epoch}, of a term far in the future; "
                "compare the clocks of the head and of the node's other heads, and restart the node"
            )
        return None

    async def _contest(self, newcomer: Node | None, hello: NodeHello) -> str | None:
        """Why the newcomer may not have its identity; None when it may, and then nobody else has."""
        while True:
            if hello.incarnation in self._barred:
                return f"this run of node {hello.identity} was silent and has been replaced; restart it"
            holder = self._fleet.named(hello.identity)
            if holder is None or holder is newcomer:
                return None
            dials_in_again = newcomer is None and holder.address.startswith(JOINED_PREFIX)
            said, link = holder.arriving or holder.hello, holder.link
            if said is None or (link is None and (holder.arriving is None or dials_in_again)):
                return None
            if said.incarnation == hello.incarnation:
                if dials_in_again:
                    self._drop_link(holder, "the node dialed in anew")
                    return None
                if newcomer is not None:
                    newcomer.other_way_to = hello.identity
                way = f"as {holder.address}; use one of the two ways"
                return f"node {hello.identity} is connected already, {way}"
            if link is None or await self._lives(link):
                return (
                    f"identity {hello.identity} is in use by a living node at {holder.address}; "
                    "give this one another with --identity, or stop the other"
                )
            # Others may have been quicker while that one was given time to answer.
            if self._fleet.named(hello.identity) is holder and holder.link is link:
                self._bar(holder)
                return None

    async def _lives(self, link: NodeLink) -> bool:
        """Whether it answers. What came while the head itself did not run is let in first (rule 13)."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        ping = loop.create_task(link.ping(), name="challenge")
        try:
            await asyncio.wait({ping}, timeout=CHALLENGE_S)
            late = True
            while late and not ping.done():
                due_s = loop.time() + CONFIRM_S
                await asyncio.wait({ping}, timeout=CONFIRM_S)
                late = loop.time() - due_s > CONFIRM_S
            if not ping.done():
                return False
            await ping
        except LinkTimeoutError:
            stood_still = loop.time() - asked_s > CHALLENGE_S + 3 * CONFIRM_S
            return stood_still and await self._lives(link)
        except LinkError:
            return False
        finally:
            ping.cancel()
        return True

    def _bar(self, holder: Node) -> None:
        log.warning("incarnation_barred", node=holder.name, incarnation=holder.incarnation)
        self._barred[holder.incarnation] = None
        if len(self._barred) > MAX_BARRED:
            self._barred.popitem(last=False)
        self._drop_link(holder, "another run of the node has replaced it")

    def _hand_over(self, old: Node, new: Node) -> None:
        """The identity lives at another address now: its name and its cordon go there."""
        log.info("node_replaced", node=old.name, old_address=old.address, address=new.address)
        new.take_cordon_of(old)
        old.unlearn()
        self._fleet.rename(old, old.address)
