"""What a head's commands do at a node, for every transport: messages in, messages out, faults between."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.v1 import node_service_pb2 as pb
from node_stub import convert, rules
from node_stub.calls import Call
from node_stub.faults import Point
from node_stub.gate import RefusalLog
from node_stub.node import Node
from node_stub.rules import Refusal
from node_stub.runs import Run
from node_stub.sender import Striker
from node_stub.token import NONCE_BYTES, FleetToken, Way

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DEFAULT_PERIOD_MS = 2_000
TOKEN_REFUSED = "FLEET_TOKEN_REFUSED"  # noqa: S105 - a reason of errors.proto
_SHORTEST_PERIOD_MS = 20


@dataclass(frozen=True, slots=True)
class HelloRefusal:
    """Why a head is not served. `reason` is one of fleet.v1.ErrorReason, without the prefix."""

    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)


def hello_of(
    node: Node, request: pb.HandshakeRequest, token: FleetToken | None, nonce: bytes, way: Way
) -> pb.HandshakeResponse | HelloRefusal:
    """The node's answer to a head that introduces itself; `nonce` is the node's, for a node with a token."""
    settings = node.settings
    if token and len(request.nonce) != NONCE_BYTES:
        return HelloRefusal(
            TOKEN_REFUSED,
            "this node has a fleet token and the head none; give the head the node's token file",
        )
    if not request.min_version <= PROTOCOL_VERSION <= request.max_version:
        return HelloRefusal(
            "VERSION_UNSUPPORTED",
            f"this node speaks protocol version {PROTOCOL_VERSION}, the head {request.min_version} to "
            f"{request.max_version}; use releases that overlap",
            {"nodeVersion": str(PROTOCOL_VERSION)},
        )
    if refusal := _of_another_fleet(node, request.fleet_id):
        return refusal
    return pb.HandshakeResponse(
        version=PROTOCOL_VERSION,
        identity=settings.identity,
        incarnation=settings.incarnation,
        labels=settings.labels,
        report=convert.report_to(node.report_told(convert.owner_from(request))),
        models=[convert.model_to(model) for model in node.rules.models()],
        features=convert.features_of(settings),
        max_message_bytes=MAX_MESSAGE_BYTES,
        highest_epoch=node.rules.highest_epoch(request.fleet_id),
        nonce=nonce if token else b"",
        proof=token.proof(way, request.nonce, nonce) if token else b"",
    )


def _of_another_fleet(node: Node, head_fleet_id: str) -> HelloRefusal | None:
    """Refuse a head whose fleet is neither the node's own nor, of a node without one, that it works for."""
    own, at_work = node.settings.fleet_id, node.fleet_at_work()
    fleet_id = own or at_work
    if fleet_id in ("", head_fleet_id):
        return None
    if own:
        what = f"belongs to fleet {own!r}, the head to {head_fleet_id!r}; start it with the head's --fleet-id"
    else:
        what = (
            f"works for fleet {at_work!r}, the head is of {head_fleet_id!r}; remove the node from one of the "
            "two, or wait until the other's lease has run out"
        )
    metadata = {"nodeFleetId": fleet_id, "headFleetId": head_fleet_id}
    return HelloRefusal("FLEET_MISMATCH", f"this node {what}", metadata)


def period_s(asked_ms: int) -> float:
    """Seconds between two reports, for a head that asked for so many milliseconds; 0 = the usual."""
    return max(asked_ms or DEFAULT_PERIOD_MS, _SHORTEST_PERIOD_MS) / 1000


class Commands:
    """Executes commands, and lets the faults strike that lie before and after each.

    Assign, Append and a Generate's parts may wait where a fault says so, and raise LinkDropped where one
    drops the connection; the others are done at once. `token`: what heads must prove to know.
    """

    def __init__(self, node: Node, striker: Striker, token: FleetToken | None = None) -> None:
        self.node = node
        self.striker = striker
        self.token = token
        self.refusals = RefusalLog(time.monotonic)

    async def assign(self, request: pb.AssignRequest, call: Call) -> pb.AssignResponse:
        refusal = await self._step(convert.assign_from(request), call)
        return pb.AssignResponse(refusal=convert.refusal_to(refusal))

    async def append(self, request: pb.AppendRequest, call: Call) -> pb.AppendResponse:
        command = convert.append_from(request)
        refusal = await self._step(command, call)
        if refusal:
            return pb.AppendResponse(refusal=convert.refusal_to(refusal))
        return pb.AppendResponse(context_length=command.base_length + len(command.token_ids))

    async def start(
        self, request: pb.NodeServiceGenerateRequest, call: Call, headers: Mapping[str, str]
    ) -> Run | Refusal:
        """Start a run; a generation that is known is refused. `headers`: its W3C trace context."""
        command = convert.generate_from(request, inline=self.node.settings.inline_bind)
        steps = self.node.rules.steps(command)
        if isinstance(steps, Refusal):
            return steps
        *parts, alone = steps
        for part in parts:
            refusal = await self._step(part, call)
            if refusal:
                self.node.refuse_rest(command, refusal)
                return refusal
        return self.node.start(alone, headers)

    def cancel(self, request: pb.CancelRequest) -> pb.CancelResponse:
        outcome = self.node.cancel(request.session_id, request.epoch, request.generation_id)
        refusal = convert.refusal_to(outcome.refusal)
        return pb.CancelResponse(refusal=refusal, was_running=outcome.was_running)

    def revoke(self, request: pb.RevokeRequest) -> pb.RevokeResponse:
        refusal = self.node.revoke(request.session_id, request.epoch)
        return pb.RevokeResponse(refusal=convert.refusal_to(refusal))

    def renew_lease(self, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
        renewed, live = self.node.renew_lease(convert.owner_from(request), request.lease_ms)
        return pb.RenewLeaseResponse(renewed=renewed, live_sessions=live)

    def reconcile(self, request: pb.ReconcileRequest) -> pb.ReconcileResponse:
        held = self.node.held(request.fleet_id)
        return pb.ReconcileResponse(sessions=[convert.held_to(*each) for each in held])

    async def _step(self, command: rules.Assign | rules.Append, call: Call) -> Refusal | None:
        """Execute an Assign or Append with the faults around it."""
        strike, session_id = self.striker.on_command, command.session_id
        if isinstance(command, rules.Assign):
            before = await strike(Point.BEFORE_ASSIGN, session_id, call)
            if before:
                return before
            refusal = self.node.assign(command)
            after = await strike(Point.AFTER_ASSIGN, session_id, call)
        else:
            refusal = self.striker.append(command)
            after = await strike(Point.AFTER_APPEND, session_id, call)
        call.check()
        return refusal or after
