"""The node's gRPC server: fleet.v1.NodeService over a Node, the stub's control beside it."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, Never, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.stub.v1 import stub_service_pb2_grpc as stub_grpc
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import node_service_pb2_grpc as pb_grpc
from node_stub import convert, rules
from node_stub.calls import Call, Calls
from node_stub.faults import FaultError, Hazards, Point
from node_stub.node import Node
from node_stub.rules import Refusal
from node_stub.runs import Run, Step
from node_stub.sender import LinkDropped, Sender, Striker

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DEFAULT_PERIOD_MS = 2_000
_SHORTEST_PERIOD_MS = 20
_ERROR_DOMAIN = "fleet.v1"

NODE_SERVICE = "fleet.v1.NodeService"
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

    def __init__(self, node: Node, calls: Calls, hazards: Hazards) -> None:
        self._node = node
        self._calls = calls
        self._striker = Striker(node, hazards, calls.break_connection)

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        node, settings = self._node, self._node.settings
        if not request.min_version <= PROTOCOL_VERSION <= request.max_version:
            await _refuse_handshake(
                context,
                "VERSION_UNSUPPORTED",
                f"this node speaks protocol version {PROTOCOL_VERSION}, the head {request.min_version} to "
                f"{request.max_version}; use releases that overlap",
                {"nodeVersion": str(PROTOCOL_VERSION)},
            )
        if settings.fleet_id and request.fleet_id != settings.fleet_id:
            await _refuse_handshake(
                context,
                "FLEET_MISMATCH",
                f"this node belongs to fleet {settings.fleet_id!r}, the head to {request.fleet_id!r}; start "
                "the node with the head's --fleet-id",
                {"nodeFleetId": settings.fleet_id, "headFleetId": request.fleet_id},
            )
        log.info("handshake with head %s, term %d (%s)", request.head_id, request.term, context.peer())
        return pb.HandshakeResponse(
            version=PROTOCOL_VERSION,
            identity=settings.identity,
            incarnation=settings.incarnation,
            labels=settings.labels,
            report=convert.report_to(node.report_told()),
            models=[convert.model_to(model) for model in node.rules.models()],
            features=convert.features_of(settings),
            max_message_bytes=MAX_MESSAGE_BYTES,
            highest_epoch=node.rules.highest_epoch(request.fleet_id),
        )

    async def Assign(self, request: pb.AssignRequest, context: Context) -> pb.AssignResponse:
        with self._calls.open(context) as call:
            refusal = await self._step(convert.assign_from(request), call, context)
            return pb.AssignResponse(refusal=convert.refusal_to(refusal))

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        with self._calls.open(context) as call:
            command = convert.append_from(request)
            refusal = await self._step(command, call, context)
            if refusal:
                return pb.AppendResponse(refusal=convert.refusal_to(refusal))
            return pb.AppendResponse(context_length=command.base_length + len(command.token_ids))

    async def Generate(self, request: pb.NodeServiceGenerateRequest, context: Context) -> None:  # type: ignore[override] # writes
        with self._calls.open(context) as call:
            command = convert.generate_from(request, inline=self._node.settings.inline_bind)
            run = await self._start(command, call, context)
            if isinstance(run, Refusal):
                await context.write(convert.step_to(Step(command.first_index, refusal=run), command.epoch))
                return
            run.entry.traceparent = _traceparent(context)
            try:
                await self._send(run, call, context)
            finally:
                self._node.abandon(run)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        outcome = self._node.cancel(request.session_id, request.epoch, request.generation_id)
        refusal = convert.refusal_to(outcome.refusal)
        return pb.CancelResponse(refusal=refusal, was_running=outcome.was_running)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        refusal = self._node.revoke(request.session_id, request.epoch)
        return pb.RevokeResponse(refusal=convert.refusal_to(refusal))

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        renewed, live = self._node.renew_lease(convert.owner_from(request), request.lease_ms)
        return pb.RenewLeaseResponse(renewed=renewed, live_sessions=live)

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: Context) -> None:  # type: ignore[override] # writes
        owner = convert.owner_from(request)
        period_s = max(request.period_ms or DEFAULT_PERIOD_MS, _SHORTEST_PERIOD_MS) / 1000
        models = [convert.model_to(model) for model in self._node.rules.models()]
        with self._calls.open(context) as call:
            over = False
            while not over:
                if not self._node.faults.lies.silent:
                    report = convert.report_to(self._node.report_told(owner))
                    await context.write(pb.WatchStatusResponse(report=report, models=models))
                    models = []
                over = await call.over(period_s)
            if call.broken:
                await _drop(context)

    # -------------------------------------------------------------------------------------------- inside

    async def _step(
        self, command: rules.Assign | rules.Append, call: Call, context: Context
    ) -> Refusal | None:
        """Execute an Assign or Append with the faults around it."""
        try:
            if isinstance(command, rules.Assign):
                before = await self._striker.on_command(Point.BEFORE_ASSIGN, command.session_id, call)
                if before:
                    return before
                refusal = self._node.assign(command)
                after = await self._striker.on_command(Point.AFTER_ASSIGN, command.session_id, call)
            else:
                refusal = self._striker.append(command)
                after = await self._striker.on_command(Point.AFTER_APPEND, command.session_id, call)
        except LinkDropped:
            await _drop(context)
        if call.broken:
            await _drop(context)
        return refusal or after

    async def _start(self, command: rules.Generate, call: Call, context: Context) -> Run | Refusal:
        steps = self._node.rules.steps(command)
        if isinstance(steps, Refusal):
            return steps
        *parts, alone = steps
        for part in parts:
            refusal = await self._step(part, call, context)
            if refusal:
                self._node.refuse_rest(command, refusal)
                return refusal
        return self._node.start(alone)

    async def _send(self, run: Run, call: Call, context: Context) -> None:
        async def write(step: Step, epoch: int) -> None:
            await context.write(convert.step_to(step, epoch))

        call.on_broken = run.drop
        try:
            await Sender(self._node, self._striker, run, call, write).send_all()
        except LinkDropped:
            await _drop(context)


class StubServicer(stub_grpc.StubServiceServicer):
    """fleet.stub.v1.StubService."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def SetFaults(
        self, request: stub_pb.SetFaultsRequest, context: Context
    ) -> stub_pb.SetFaultsResponse:
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
        faults = self._node.faults
        return stub_pb.GetFaultsResponse(
            faults=[convert.fault_to(fault) for fault in faults.left()],
            reports=convert.lies_to(faults.lies),
            slow_down=faults.slow_down,
        )

    async def GetJournal(
        self, request: stub_pb.GetJournalRequest, context: Context
    ) -> stub_pb.GetJournalResponse:
        entries = self._node.journal.entries(request.session_id)
        return stub_pb.GetJournalResponse(entries=[convert.entry_to(entry) for entry in entries])

    async def GetHoldings(
        self, request: stub_pb.GetHoldingsRequest, context: Context
    ) -> stub_pb.GetHoldingsResponse:
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

    def __init__(self, node: Node, hazards: Hazards, idle_timeout_s: float = 120.0) -> None:
        self._calls = Calls()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=server_options(idle_timeout_s))
        servicer = NodeServicer(node, self._calls, hazards)
        pb_grpc.add_NodeServiceServicer_to_server(servicer, self._server)
        stub_grpc.add_StubServiceServicer_to_server(StubServicer(node), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (NODE_SERVICE, STUB_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, address: str) -> int:
        """Listen and serve; the port. Raises BindError."""
        if why := _bind_failure(address):
            raise BindError(f"cannot listen on {address}: {why}")
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        for service in ("", NODE_SERVICE, STUB_SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, end the watches, give calls `grace_s` to end, then cancel them."""
        await self._health.enter_graceful_shutdown()
        self._calls.end_all()
        await self._server.stop(grace_s)


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


def _traceparent(context: Context) -> str:
    values = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    return str(values[0]) if values else ""


async def _drop(context: Context) -> Never:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "link dropped")
    raise AssertionError("abort does not return")


async def _refuse_handshake(context: Context, reason: str, text: str, metadata: dict[str, str]) -> Never:
    info = error_details_pb2.ErrorInfo(reason=reason, domain=_ERROR_DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message=text, details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort does not return")
