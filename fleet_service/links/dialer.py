"""Dialed nodes: over one multiplexed stream where the node serves it, otherwise over plain RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

import grpc

from fleet.v1 import link_pb2, link_service_pb2, link_service_pb2_grpc
from fleet_service.domain.commands import Introduction
from fleet_service.domain.node_types import Feature, NodeHello
from fleet_service.links import convert
from fleet_service.links.frames import shake_hands
from fleet_service.links.mux import MuxLink
from fleet_service.links.plain import PlainDialer, PlainLink
from fleet_service.links.settings import LinkSettings
from fleet_service.links.status import link_error
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkError,
    LinkListener,
    LinkLostError,
    LinkTimeoutError,
    NodeFaultError,
)
from fleet_service.token import Way

if TYPE_CHECKING:  # The stubs' types for asyncio have no counterpart at run time.
    from fleet.v1.link_service_pb2_grpc import LinkServiceAsyncStub

_T = TypeVar("_T")


class FleetDialer:
    """A Dialer. Every connect has a channel, and so a connection, of its own."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._plain = PlainDialer(settings)

    async def connect(
        self, address: str, introduction: Introduction, listener: LinkListener
    ) -> MuxLink | PlainLink:
        """Dial, shake hands, start reports. Raises LinkLostError, LinkTimeoutError or HandshakeRefusedError.

        Refused connections fail at once, silent ones within `connect_timeout_s`.
        """
        due_s = asyncio.get_running_loop().time() + self._settings.handshake_timeout_s
        dialed = await self._plain.dial(address, introduction)
        hello = dialed.hello
        if not self._settings.multiplexed or Feature.LINK not in hello.features:
            return PlainLink(dialed, address, introduction, listener, self._settings)
        stream = DialedStream(dialed.channel, encrypted=self._settings.tls is not None)
        try:
            link_hello = await self._greet(stream, address, introduction, due_s)
            if (link_hello.identity, link_hello.incarnation) != (hello.identity, hello.incarnation):
                raise LinkLostError(f"{address} answered as another run of a node than just before")
        except BaseException:
            await stream.close()
            raise
        return MuxLink(stream, address, introduction, link_hello, self._settings, listener)

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        """Dial and shake hands only, on a connection of its own. Raises as `connect`."""
        return await self._plain.probe(address, introduction)

    async def _greet(
        self, stream: DialedStream, address: str, introduction: Introduction, due_s: float
    ) -> NodeHello:
        try:
            async with asyncio.timeout_at(due_s):
                answer = await shake_hands(stream, introduction, self._settings, address)
        except TimeoutError:
            raise LinkTimeoutError(f"{address} answered the handshake but opened no link in time") from None
        except NodeFaultError as error:
            raise HandshakeRefusedError(
                f"{address} announces a multiplexed link but serves none: upgrade the node, or set"
                f" links.multiplexed to false ({error})"
            ) from error
        return convert.hello(
            answer, authenticated=self._settings.token is not None, encrypted=stream.encrypted
        )


class DialedStream:
    """A FrameStream: a Link call, alone on its channel.

    The channel would connect anew by itself, perhaps to another run of the node's process; the call would
    not, so the link ends with the connection. It also ends when the node says that it takes no more calls.
    """

    way: Way = "link"

    def __init__(self, channel: grpc.aio.Channel, *, encrypted: bool = False) -> None:
        self.encrypted = encrypted
        self._channel = channel
        stub: LinkServiceAsyncStub = link_service_pb2_grpc.LinkServiceStub(channel)
        self._call = stub.Link()
        self._why_lost = "the link was closed"
        self._watch = asyncio.create_task(self._watch_connection(), name="connection of a link")

    async def send(self, frame: link_pb2.HeadFrame) -> None:
        """Hand a frame to gRPC; waits while the node takes nothing. Raises a LinkError."""
        await self._explained(self._call.write(link_service_pb2.LinkRequest(frame=frame)))

    async def receive(self) -> link_pb2.NodeFrame | None:
        """The next frame; None at the end of the call. Raises a LinkError."""
        response = await self._explained(self._call.read())
        if response is grpc.aio.EOF:
            return None
        if not isinstance(response, link_service_pb2.LinkResponse):
            raise NodeFaultError("Link: a frame could not be decoded")
        return response.frame

    async def close(self) -> None:
        """Cancel the call and drop the connection."""
        self._watch.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _explained(self, operation: Coroutine[None, None, _T]) -> _T:
        task = asyncio.current_task()
        cancels_before = 0 if task is None else task.cancelling()
        try:
            return await operation
        except (asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.AioRpcError) as failure:
            # gRPC shows a call cancelled by its own task, and one whose channel was closed, in either way.
            if task is not None and task.cancelling() > cancels_before:
                raise asyncio.CancelledError from failure
            raise self._error(failure) from failure

    def _error(self, failure: BaseException) -> LinkError:
        if isinstance(failure, grpc.aio.AioRpcError) and failure.code() is not grpc.StatusCode.CANCELLED:
            return link_error(failure, "Link")
        return LinkLostError(f"Link: {self._why_lost}")

    async def _watch_connection(self) -> None:
        """The link is lost once its connection takes no more calls."""
        await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        self._why_lost = "the connection was lost or takes no more calls"
        self._call.cancel()
