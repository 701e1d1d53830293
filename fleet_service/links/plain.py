"""Dialed nodes over plain RPCs: one channel and one status stream per link, one call per command and run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import grpc
import structlog

from fleet.v1 import node_service_pb2, node_service_pb2_grpc
from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Refusal,
    Revoke,
    Run,
)
from fleet_service.domain.node_types import NodeHello
from fleet_service.links import convert
from fleet_service.links.frames import check_answer, check_proof
from fleet_service.links.plain_run import PlainRun
from fleet_service.links.settings import LinkSettings
from fleet_service.links.status import handshake_error, link_error
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkError,
    LinkListener,
    LinkLostError,
    NodeFaultError,
    RunSink,
)
from fleet_service.tls import TlsError
from fleet_service.token import PROOF_KEY

_log = structlog.get_logger(__name__)


_Answer = (
    node_service_pb2.AssignResponse
    | node_service_pb2.AppendResponse
    | node_service_pb2.CancelResponse
    | node_service_pb2.RevokeResponse
)
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


@dataclass(frozen=True, slots=True)
class Dialed:
    """A connection to a node that has shaken hands. `proof` of the fleet token goes with every call."""

    channel: grpc.aio.Channel
    hello: NodeHello
    proof: Metadata


class PlainDialer:
    """A Dialer of plain links. Every connect has a channel, and so a connection, of its own."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> PlainLink:
        """Dial, shake hands, start reports. Raises LinkLostError, LinkTimeoutError or HandshakeRefusedError.

        Refused connections fail at once, silent ones within `connect_timeout_s`.
        """
        return PlainLink(
            await self.dial(address, introduction), address, introduction, listener, self._settings
        )

    async def dial(self, address: str, introduction: Introduction) -> Dialed:
        """A channel to the node, which has shaken hands. Raises as `connect`."""
        channel = self._channel(address)
        try:
            hello, proof = await self._handshake(channel, address, introduction)
            return Dialed(channel, hello, proof)
        except BaseException:
            await channel.close()
            raise

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        """Dial and shake hands only, on a connection of its own. Raises as `connect`."""
        channel = self._channel(address)
        try:
            hello, _ = await self._handshake(channel, address, introduction)
            return hello
        finally:
            await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        try:
            return self._settings.channel(address)
        except TlsError as error:
            raise HandshakeRefusedError(f"{address} is not dialed: {error}") from error

    async def _handshake(
        self, channel: grpc.aio.Channel, address: str, introduction: Introduction
    ) -> tuple[NodeHello, Metadata]:
        """What the node says of itself, and what proves the head to it with every further call."""
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        request, token = convert.handshake_request(introduction), self._settings.token
        request.nonce = token.new_nonce() if token else b""
        try:
            answer = await stub.Handshake(request, timeout=self._settings.handshake_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise handshake_error(
                error,
                address,
                self._settings.connect_timeout_s,
                encrypted=self._settings.tls is not None,
            ) from error
        if not isinstance(answer, node_service_pb2.HandshakeResponse):
            raise HandshakeRefusedError(
                f"{address} answered the handshake with what is no HandshakeResponse: is it a fleet node?"
            )
        check_answer(answer, address)
        proof: Metadata = ()
        if token:
            check_proof(token, "plain", request.nonce, answer, address)
            proof = ((PROOF_KEY, request.nonce + token.proof("plain", request.nonce, answer.nonce)),)
        encrypted = self._settings.tls is not None
        return convert.hello(answer, authenticated=token is not None, encrypted=encrypted), proof


class PlainLink:
    """A NodeLink over one connection, lost with it or with its status stream, whichever ends first.

    The channel would connect anew by itself, perhaps to another run of the node's process, which knows
    nothing of what was agreed here; so nothing is sent once it has left READY, as it does when the node says
    that it takes no more calls.
    """

    def __init__(
        self,
        dialed: Dialed,
        address: str,
        introduction: Introduction,
        listener: LinkListener,
        settings: LinkSettings,
    ) -> None:
        self._channel = dialed.channel
        self._stub = node_service_pb2_grpc.NodeServiceStub(dialed.channel)
        self._proof = dialed.proof
        self._address = address
        self._introduction = introduction
        self._hello = dialed.hello
        self._listener = listener
        self._settings = settings
        self._gone = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._watch_reports(), f"reports of {address}")
        self._connection = self._start(self._watch_connection(), f"connection to {address}")

    @property
    def hello(self) -> NodeHello:
        """What the node said at the handshake."""
        return self._hello

    @property
    def resumes(self) -> bool:
        """False: here the loss of the link is a cancel."""
        return False

    async def assign(self, command: Assign) -> Refusal | None:
        request = convert.assign_request(command, self._introduction)
        answer = await self._call(self._stub.Assign, request, "Assign")
        return _refusal(answer)

    async def append(self, command: Append) -> Refusal | None:
        answer = await self._call(self._stub.Append, convert.append_request(command), "Append")
        return _refusal(answer)

    async def cancel(self, command: CancelRun) -> Refusal | None:
        answer = await self._call(self._stub.Cancel, convert.cancel_request(command), "Cancel")
        return _refusal(answer)

    async def revoke(self, command: Revoke) -> Refusal | None:
        answer = await self._call(self._stub.Revoke, convert.revoke_request(command), "Revoke")
        return _refusal(answer)

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        request = convert.renew_request(self._introduction, lease_s, term)
        answer = await self._call(self._stub.RenewLease, request, "RenewLease")
        return answer.renewed

    async def reconcile(self) -> list[HeldSession]:
        request = convert.reconcile_request(self._introduction)
        return convert.held_sessions(await self._call(self._stub.Reconcile, request, "Reconcile"))

    async def ping(self) -> None:
        """Any answer will do, a refusal or an error of the node's own too."""
        with suppress(NodeFaultError):
            await self._call(self._stub.Cancel, convert.ping_request(), "Cancel")

    def run(self, command: Run, sink: RunSink) -> PlainRun:
        """Start a generation. Raises ValueError when a number of the command does not fit its wire type."""
        call = None
        if self._takes_calls():
            call = self._stub.Generate(
                convert.generate_request(command, self._introduction),
                metadata=(*command.carrier.items(), *self._proof),
            )
        run = PlainRun(
            call,
            sink,
            on_sign=self._listener.on_sign,
            explain=lambda error: self._explain(error, "Generate"),
            end_timeout_s=self._settings.command_timeout_s,
        )
        self._start(run.read(), f"run {command.generation_id}")
        return run

    async def close(self) -> None:
        """Drop the connection; its runs break. Returns when nothing of the link is left."""
        self._closed = True
        await self._drop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_RequestT, _ResponseT],
        request: _RequestT,
        name: str,
    ) -> _ResponseT:
        if not self._takes_calls():
            raise LinkLostError(f"{name}: the link to {self._address} is gone")
        task = asyncio.current_task()
        cancels_before = 0 if task is None else task.cancelling()
        try:
            answer = await method(request, timeout=self._settings.command_timeout_s, metadata=self._proof)
        except (asyncio.CancelledError, grpc.aio.AioRpcError) as error:
            # gRPC shows a call cancelled by its own task, and one whose channel was closed, in either way.
            if task is not None and task.cancelling() > cancels_before:
                raise asyncio.CancelledError from error
            raise self._explain(error, name) from error
        if answer is None:  # gRPC's way to say that it could not decode the message
            raise NodeFaultError(f"{name}: the answer could not be decoded")
        if not self._gone:
            self._listener.on_sign()
        return answer

    def _explain(self, error: BaseException, name: str) -> LinkError:
        """What the failure of a call means: once the link is gone, nothing it says is the node's doing."""
        if isinstance(error, grpc.aio.AioRpcError) and not self._gone:
            return link_error(error, name)
        return LinkLostError(f"{name}: the link to {self._address} is gone")

    def _takes_calls(self) -> bool:
        return not self._gone and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def _watch_connection(self) -> None:
        """The link is lost once its connection takes no more calls."""
        await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await self._lose(LinkLostError("the connection was lost or takes no more calls"))

    async def _watch_reports(self) -> None:
        """Pass on reports until the stream ends, which is the end of the link."""
        error: LinkError
        try:
            error = await self._relay_reports()
        except asyncio.CancelledError:
            if not self._closed:
                raise
            return
        except grpc.aio.AioRpcError as failure:
            error = link_error(failure, "WatchStatus")
        except Exception as failure:  # noqa: BLE001 - it ends the link, whatever it is
            if self._closed:  # before the first report was asked for
                return
            _log.exception("reading a node's reports failed", address=self._address)
            error = NodeFaultError(f"WatchStatus: reading failed: {failure!r}")
        await self._lose(error)

    async def _lose(self, error: LinkError) -> None:
        """Drop the connection and tell the listener, once; not after close()."""
        if self._gone:
            return
        try:
            await self._drop()
        finally:
            self._listener.on_lost(error)

    async def _drop(self) -> None:
        self._gone = True
        if asyncio.current_task() is not self._connection:
            # gRPC does not always end a watch for a change of state when the channel is closed.
            self._connection.cancel()
        await self._channel.close()

    async def _relay_reports(self) -> LinkError:
        call = self._stub.WatchStatus(
            convert.watch_request(self._introduction, self._settings.report_period_s), metadata=self._proof
        )
        while True:
            message = await call.read()
            if self._closed:
                return LinkLostError("WatchStatus: the link was closed")
            if message is grpc.aio.EOF:
                self._listener.on_leaving()
                return LinkLostError("WatchStatus: the node ended its status stream")
            if not isinstance(message, node_service_pb2.WatchStatusResponse):
                return NodeFaultError("WatchStatus: a message could not be decoded")
            self._listener.on_sign()
            if message.leaving:
                self._listener.on_leaving()
            if message.HasField("report"):
                models = tuple(convert.model(each) for each in message.models)
                self._listener.on_report(convert.report(message.report), models)

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a sink or listener raised", task=task.get_name(), exc_info=error)


def _refusal(answer: _Answer) -> Refusal | None:
    return convert.refusal(answer.refusal) if answer.HasField("refusal") else None
