"""The node's gRPC server: fleet.v1.NodeService over a Node, the stub's control beside it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Never, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.stub.v1 import stub_service_pb2_grpc as stub_grpc
from fleet.v1 import link_pb2 as link_pb
from fleet.v1 import link_service_pb2 as link_service_pb
from fleet.v1 import link_service_pb2_grpc as link_grpc
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import node_service_pb2_grpc as pb_grpc
from node_stub import convert
from node_stub.calls import Call, Calls, LinkDropped
from node_stub.commands import (
    MAX_MESSAGE_BYTES,
    TOKEN_REFUSED,
    Commands,
    HelloRefusal,
    hello_of,
    period_s,
)
from node_stub.faults import FaultError, Hazards
from node_stub.gate import TokenGate, is_local
from node_stub.join import Joiner, JoinSettings
from node_stub.link import LinkAuthError, LinkLimits, LinkProtocolError, LinkSession
from node_stub.node import Node
from node_stub.rules import Refusal
from node_stub.runs import Step
from node_stub.sender import Sender, Striker, send_all
from node_stub.tls import TlsFiles, server_credentials
from node_stub.token import FleetToken

log = logging.getLogger(__name__)

_ERROR_DOMAIN = "fleet.v1"
_GOODBYE_S = 0.02

NODE_SERVICE = "fleet.v1.NodeService"
LINK_SERVICE = "fleet.v1.LinkService"
STUB_SERVICE = "fleet.stub.v1.StubService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


_BIND_ERRORS = {
    errno.EADDRINUSE: "the port is in use",
    errno.EADDRNOTAVAIL: "the address is none of this machine's",
    errno.EACCES: "the system does not allow that port",
}


class BindError(Exception):
    """The address cannot be listened on; the text says which and why."""


def server_options(idle_timeout_s: float) -> Sequence[tuple[str, int]]:
    """Channel arguments. A connection without any call for `idle_timeout_s` is closed; 0 = never."""
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]
    if idle_timeout_s:
        options.append(("grpc.max_connection_idle_ms", int(idle_timeout_s * 1000)))
    return options


class NodeServicer(pb_grpc.NodeServiceServicer):
    """fleet.v1.NodeService."""

    def __init__(self, commands: Commands, calls: Calls) -> None:
        self._node = commands.node
        self._commands = commands
        self._calls = calls

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        async with open_call(self._calls, context):
            token = self._commands.token
            answer = hello_of(self._node, request, token, token.own_nonce if token else b"", "plain")
            if isinstance(answer, HelloRefusal):
                refused = answer.reason == TOKEN_REFUSED
                code = grpc.StatusCode.UNAUTHENTICATED if refused else grpc.StatusCode.FAILED_PRECONDITION
                self._commands.refusals.tell(request.head_id, context.peer(), answer.message)
                await _abort(context, code, answer.message, answer.reason, answer.metadata)
            log.info("handshake with head %s, term %d (%s)", request.head_id, request.term, context.peer())
            return answer

    async def Assign(self, request: pb.AssignRequest, context: Context) -> pb.AssignResponse:
        async with open_call(self._calls, context) as call:
            return await self._commands.assign(request, call)

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        async with open_call(self._calls, context) as call:
            return await self._commands.append(request, call)

    async def Generate(self, request: pb.NodeServiceGenerateRequest, context: Context) -> None:  # type: ignore[override] # writes
        async with open_call(self._calls, context) as call:
            run = await self._commands.start(request, call, _trace_headers(context))
            if isinstance(run, Refusal):
                await context.write(convert.step_to(Step(request.first_index, refusal=run), request.epoch))
                return

            async def write(step: Step, epoch: int) -> None:
                await context.write(convert.step_to(step, epoch))

            call.on_broken = run.drop
            try:
                await send_all(Sender(self._node, run), run, self._commands.striker, call, write)
            finally:
                self._node.abandon(run)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with open_call(self._calls, context):
            return self._commands.cancel(request)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        async with open_call(self._calls, context):
            return self._commands.revoke(request)

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        async with open_call(self._calls, context):
            return self._commands.renew_lease(request)

    async def Reconcile(self, request: pb.ReconcileRequest, context: Context) -> pb.ReconcileResponse:
        if not self._node.settings.reconcile:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node does not announce RECONCILE")
        async with open_call(self._calls, context):
            return self._commands.reconcile(request)

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: Context) -> None:  # type: ignore[override] # writes
        owner = convert.owner_from(request)
        models = [convert.model_to(model) for model in self._node.rules.models()]
        async with open_call(self._calls, context) as call:
            over = False
            while not over:
                if not self._node.faults.lies.silent:
                    report = convert.report_to(self._node.report_told(owner))
                    await context.write(pb.WatchStatusResponse(report=report, models=models))
                    models = []
                over = await call.over(period_s(request.period_ms))
            call.check()
            if call.in_order:
                await context.write(pb.WatchStatusResponse(leaving=True))


class LinkServicer(link_grpc.LinkServiceServicer):
    """fleet.v1.LinkService."""

    def __init__(self, commands: Commands, calls: Calls, limits: LinkLimits) -> None:
        self._commands = commands
        self._calls = calls
        self._limits = limits

    async def Link(self, requests: AsyncIterator[link_service_pb.LinkRequest], context: Context) -> None:  # type: ignore[override] # writes
        async def frames() -> AsyncIterator[link_pb.HeadFrame]:
            async for request in requests:
                yield request.frame

        async def write(frame: link_pb.NodeFrame) -> None:
            await context.write(link_service_pb.LinkResponse(frame=frame))

        async with open_call(self._calls, context) as call:
            try:
                await LinkSession(self._commands, call, write, self._limits).serve(frames())
            except LinkAuthError as error:
                self._commands.refusals.tell("", context.peer(), str(error))
                await _abort(context, grpc.StatusCode.UNAUTHENTICATED, str(error), TOKEN_REFUSED)
            except LinkProtocolError as error:
                log.warning("link with %s closed: %s", context.peer(), error)
                code, text = grpc.StatusCode.INVALID_ARGUMENT, f"the link is closed: {error}"
                await _abort(context, code, text, "LINK_PROTOCOL_VIOLATED")


@asynccontextmanager
async def open_call(calls: Calls, context: Context) -> AsyncIterator[Call]:
    """A call that can be broken; a broken one is aborted."""
    try:
        with calls.open(context.peer()) as call:
            yield call
    except LinkDropped:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "link dropped")


class StubServicer(stub_grpc.StubServiceServicer):
    """fleet.stub.v1.StubService; for callers on this machine."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def SetFaults(
        self, request: stub_pb.SetFaultsRequest, context: Context
    ) -> stub_pb.SetFaultsResponse:
        await _only_local(context)
        slow_down = request.slow_down if request.HasField("slow_down") else 1.0
        try:
            faults = [convert.fault_from(fault) for fault in request.faults]
            self._node.set_faults(faults, convert.lies_from(request.reports), slow_down)
        except FaultError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return stub_pb.SetFaultsResponse()

    async def GetFaults(
        self, request: stub_pb.GetFaultsRequest, context: Context
    ) -> stub_pb.GetFaultsResponse:
        await _only_local(context)
        faults = self._node.faults
        return stub_pb.GetFaultsResponse(
            faults=[convert.fault_to(fault) for fault in faults.left()],
            reports=convert.lies_to(faults.lies),
            slow_down=faults.slow_down,
        )

    async def GetJournal(
        self, request: stub_pb.GetJournalRequest, context: Context
    ) -> stub_pb.GetJournalResponse:
        await _only_local(context)
        entries = self._node.journal.entries(request.session_id)
        return stub_pb.GetJournalResponse(entries=[convert.entry_to(entry) for entry in entries])

    async def GetHoldings(
        self, request: stub_pb.GetHoldingsRequest, context: Context
    ) -> stub_pb.GetHoldingsResponse:
        await _only_local(context)
        report = self._node.report()
        return stub_pb.GetHoldingsResponse(
            holdings=[convert.holding_to(holding) for holding in self._node.rules.holdings()],
            lanes_active=report.lanes_active,
            queue_depth=report.queue_depth,
            kv_blocks_used=report.kv_blocks_used,
            peak_lanes_active=self._node.engine.load().peak_lanes_active,
        )


class NodeServer:
    """A Node on an address."""

    def __init__(
        self,
        node: Node,
        hazards: Hazards,
        idle_timeout_s: float = 120.0,
        limits: LinkLimits | None = None,
        *,
        token: FleetToken | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._limits = limits or LinkLimits()
        self._calls = Calls()
        self._commands = Commands(node, Striker(node, hazards, self._calls), token)
        self._tls = tls
        self._joiners: list[Joiner] = []
        self._health = health.aio.HealthServicer()
        gates = [TokenGate(token, NODE_SERVICE, frozenset({"Handshake"}), _refuse_head)] if token else []
        self._server = grpc.aio.server(interceptors=gates, options=server_options(idle_timeout_s))
        self._services = [NODE_SERVICE, STUB_SERVICE]
        pb_grpc.add_NodeServiceServicer_to_server(NodeServicer(self._commands, self._calls), self._server)
        if node.settings.link:
            self._services.append(LINK_SERVICE)
            servicer = LinkServicer(self._commands, self._calls, self._limits)
            link_grpc.add_LinkServiceServicer_to_server(servicer, self._server)
        stub_grpc.add_StubServiceServicer_to_server(StubServicer(node), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def joiner(self, settings: JoinSettings, rng: random.Random, say: Callable[[str], None]) -> Joiner:
        """What keeps the node joined to a head; it dials no more once the server is stopped."""
        joiner = Joiner(self._commands, self._calls, settings, rng, say, self._limits)
        self._joiners.append(joiner)
        return joiner

    async def start(self, address: str) -> int:
        """Listen and serve; the port. Raises BindError, TlsError."""
        credentials = server_credentials(self._tls) if self._tls else None
        if why := _bind_failure(address):
            raise BindError(f"cannot listen on {address}: {why}")
        try:
            if credentials:
                port = self._server.add_secure_port(address, credentials)
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        for service in ("", *self._services):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, end watches and links, give generations `grace_s` to end, then cancel them."""
        await self._health.enter_graceful_shutdown()
        for joiner in self._joiners:
            joiner.stop()
        self._calls.end_all(in_order=grace_s > 0)
        if grace_s > 0:
            # So that goodbyes leave before the connections take no more calls.
            await asyncio.sleep(_GOODBYE_S)
        await asyncio.gather(self._server.stop(grace_s), *(joiner.over(grace_s) for joiner in self._joiners))


def _bind_failure(address: str) -> str:
    """Why the system does not let us listen on `address` (host:port); "" when it does.

    gRPC itself says only that it cannot, and the reason in a line of its own on standard error.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return f"{host} is the name of no host"
    failures = [_try_to_bind(family, where) for family, _, _, _, where in found]
    if errno.EADDRINUSE not in failures and None in failures:
        return ""
    code = errno.EADDRINUSE if errno.EADDRINUSE in failures else failures[0] or 0
    return _BIND_ERRORS.get(code, os.strerror(code).lower())


def _try_to_bind(family: int, where: Any) -> int | None:
    """The error's number; None when it worked. Nothing is left bound."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: what is left of connections that ended does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno
    return None


async def _only_local(context: Context) -> None:
    if not is_local(context.peer()):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "the stub's control is for callers on its own machine"
        )


async def _refuse_head(context: Context) -> None:
    text = "this call lacks the proof of this node's fleet token; give the head the node's token file"
    await _abort(context, grpc.StatusCode.UNAUTHENTICATED, text, TOKEN_REFUSED)


def _trace_headers(context: Context) -> Mapping[str, str]:
    """The W3C trace context that a call carries."""
    metadata = context.invocation_metadata() or ()
    return {key: str(value) for key, value in metadata if key in {"traceparent", "tracestate"}}


async def _abort(
    context: Context,
    code: grpc.StatusCode,
    text: str,
    reason: str,
    metadata: Mapping[str, str] | None = None,
) -> Never:
    """End a call with a status that says why, in words and as google.rpc.ErrorInfo."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=_ERROR_DOMAIN, metadata=metadata))
    status = status_pb2.Status(code=code.value[0], message=text, details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort does not return")
