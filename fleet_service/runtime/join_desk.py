"""Where nodes that dial the head are received: a Dialer whose connect() waits for them.

A joined node has the address `joined:<identity>`. Its keeper is the same as a dialed node's; only where a
connection comes from differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fleet_service.domain.commands import Introduction
from fleet_service.domain.node_types import NodeHello
from fleet_service.runtime.protocols import Dialer, LinkListener, LinkLostError, NodeLink, OfferedLink

JOINED_PREFIX = "joined:"


def joined_address(identity: str) -> str:
    """The address of a node that dials in."""
    return f"{JOINED_PREFIX}{identity}"


class JoinDesk:
    """Dials what can be dialed, and waits for the rest.

    `receive` is asked about every node that dials in, before its link is given to anyone: it makes the node
    known, or raises JoinRefusedError. `introduce` gives the head's introduction.
    """

    def __init__(
        self,
        dialer: Dialer,
        receive: Callable[[NodeHello], Awaitable[None]],
        introduce: Callable[[], Introduction],
    ) -> None:
        self._dialer = dialer
        self._receive = receive
        self._introduce = introduce
        self._waiting: dict[str, asyncio.Future[OfferedLink]] = {}
        self._offered: dict[str, OfferedLink] = {}

    async def offer(self, hello: NodeHello, link: OfferedLink) -> None:
        """A node has dialed in and said hello. Raises JoinRefusedError when it is not taken in."""
        await self._receive(hello)
        address = joined_address(hello.identity)
        waiting = self._waiting.pop(address, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(link)
            return
        replaced = self._offered.pop(address, None)
        self._offered[address] = link
        if replaced is not None:
            await replaced.close()

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> NodeLink:
        """As Dialer.connect; for a joined node, wait until it dials in."""
        if not address.startswith(JOINED_PREFIX):
            return await self._dialer.connect(address, introduction, listener)
        while True:
            link = await self._next(address)
            # The term may have been raised since the wait began.
            if link.introduction == self._introduce() and link.attach(listener):
                return link
            # It was lost while it waited here, or knows the head by an older term: the node dials in anew.
            await link.close()

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        """As Dialer.probe. A joined node cannot be dialed."""
        if not address.startswith(JOINED_PREFIX):
            return await self._dialer.probe(address, introduction)
        raise LinkLostError("it joined by dialing this head, so it cannot be dialed; wait for it to dial in")

    async def _next(self, address: str) -> OfferedLink:
        offered = self._offered.pop(address, None)
        if offered is not None:
            return offered
        waiting: asyncio.Future[OfferedLink] = asyncio.get_running_loop().create_future()
        self._waiting[address] = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._offered[address] = waiting.result()
            raise
        finally:
            if self._waiting.get(address) is waiting:
                del self._waiting[address]
