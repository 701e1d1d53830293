"""Nodes that dial in: from a new stream to a link that is handed to the desk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from fleet_service.domain.commands import Introduction
from fleet_service.domain.node_types import NodeHello
from fleet_service.links import convert
from fleet_service.links.frames import FrameStream, HelloError, shake_hands
from fleet_service.links.mux import MuxLink
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import (
    JoinRefusedError,
    LinkError,
    LinkLostError,
    NodeFaultError,
    OfferedLink,
)

_log = structlog.get_logger(__name__)

MAX_HANDSHAKES = 128
"""Handshakes with joining nodes at once; further ones wait for their turn."""
HELLO_S = 2.0
"""How long a node whose turn it is may take: silent peers shall not keep the others waiting."""
MAX_WAITING = 1024
"""Joining nodes that wait for their turn; further ones are refused."""


class Desk(Protocol):
    """Where joined nodes are handed in."""

    async def offer(self, hello: NodeHello, link: OfferedLink) -> None:
        """Take the node in, or raise JoinRefusedError. The link lives on afterwards."""


class JoinDoor:
    """Shakes hands with whoever dials in. `introduce` says who the head is now."""

    def __init__(self, desk: Desk, introduce: Callable[[], Introduction], settings: LinkSettings) -> None:
        self._desk = desk
        self._introduce = introduce
        self._settings = settings
        self._turns = asyncio.Semaphore(MAX_HANDSHAKES)
        self._waiting = 0

    async def admit(self, stream: FrameStream, peer: str) -> LinkError | None:
        """Serve one node until its link ends: with the error that ended it, or None when the head closed it.

        `peer` names the connection in texts. Raises JoinRefusedError when the node is not taken in.
        """
        link = await self._welcome(stream, peer)
        try:
            await self._desk.offer(link.hello, link)
            return await link.ended()
        except asyncio.CancelledError:
            link.lose(LinkLostError("the node's connection ended"))
            raise
        finally:
            await link.close()

    async def _welcome(self, stream: FrameStream, peer: str) -> MuxLink:
        """The handshake, in its turn and within its time, the wait for the turn included."""
        if self._waiting >= MAX_WAITING:
            raise JoinRefusedError(
                "LIMIT_EXCEEDED", f"{MAX_WAITING} joining nodes wait already; dial again later"
            )
        timeout_s = self._settings.handshake_timeout_s
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                async with self._turns, asyncio.timeout(min(HELLO_S, timeout_s)):
                    return await self._shake_hands(stream, peer)
        except TimeoutError:
            raise JoinRefusedError(
                "LINK_PROTOCOL_VIOLATED",
                f"no hello came within {min(HELLO_S, timeout_s):g} s of being asked for it",
            ) from None
        except HelloError as error:
            raise JoinRefusedError(error.reason, str(error)) from error
        except NodeFaultError as error:
            raise JoinRefusedError("LINK_PROTOCOL_VIOLATED", str(error)) from error
        finally:
            self._waiting -= 1

    async def _shake_hands(self, stream: FrameStream, peer: str) -> MuxLink:
        introduction = self._introduce()
        answer = await shake_hands(stream, introduction, self._settings, peer)
        hello = convert.hello(
            answer, authenticated=self._settings.token is not None, encrypted=stream.encrypted
        )
        return MuxLink(stream, peer, introduction, hello, self._settings)
