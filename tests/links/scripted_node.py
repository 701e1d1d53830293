"""A node whose every answer a test writes itself, and recorders of what a link tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.domain.commands import Append, Assign, Introduction, Phase, Refusal, Run, RunFinish
from fleet_service.domain.node_types import ModelInfo, Report
from fleet_service.domain.specs import Qos, Sampling
from fleet_service.runtime.protocols import LinkError

INTRODUCTION = Introduction(fleet_id="fleet", head_id="head-1", term=7)
EPOCH = 7 << 32 | 1

Answer = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]
Stream = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]


def hello(**changes: Any) -> pb.HandshakeResponse:
    fields: dict[str, Any] = {
        "version": 1,
        "identity": "node-a",
        "incarnation": "run-1",
        "models": [types_pb2.Model(name="m", revision="r1", vocab_size=100, eos_token_ids=[2])],
    }
    return pb.HandshakeResponse(**(fields | changes))


async def one_report_then_silence(
    request: pb.WatchStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    await context.write(pb.WatchStatusResponse(report=types_pb2.CapacityReport(max_lanes=4)))
    await asyncio.Event().wait()


async def one_token(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.write(
        pb.NodeServiceGenerateResponse(
            epoch=request.epoch, token_ids=[5], finish=types_pb2.FINISH_REASON_LENGTH
        )
    )


class ScriptedNode:
    """Answers of NodeService, each to be replaced by a test; a reply given as bytes goes out as it is."""

    def __init__(self) -> None:
        self.received: dict[str, list[Any]] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.left_generate = asyncio.Event()
        self.answers: dict[str, Any] = {
            "Handshake": hello(),
            "Assign": pb.AssignResponse(),
            "Append": pb.AppendResponse(),
            "Cancel": pb.CancelResponse(),
            "Revoke": pb.RevokeResponse(),
            "RenewLease": pb.RenewLeaseResponse(renewed=True),
            "Reconcile": pb.ReconcileResponse(),
        }
        self.streams: dict[str, Stream] = {
            "WatchStatus": one_report_then_silence,
            "Generate": one_token,
        }

    def handler(self) -> grpc.GenericRpcHandler:
        requests: dict[str, Any] = {
            "Handshake": pb.HandshakeRequest,
            "Assign": pb.AssignRequest,
            "Append": pb.AppendRequest,
            "Cancel": pb.CancelRequest,
            "Revoke": pb.RevokeRequest,
            "RenewLease": pb.RenewLeaseRequest,
            "Reconcile": pb.ReconcileRequest,
            "WatchStatus": pb.WatchStatusRequest,
            "Generate": pb.NodeServiceGenerateRequest,
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, request_type in requests.items():
            kind = (
                grpc.unary_stream_rpc_method_handler
                if name in self.streams
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[name] = kind(
                self._method(name),
                request_deserializer=request_type.FromString,
                response_serializer=_serialize,
            )
        return grpc.method_handlers_generic_handler("fleet.v1.NodeService", handlers)

    def _method(self, name: str) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._record(name, request, context)
            reply = self.answers[name]
            return await reply(request, context) if callable(reply) else reply

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._record(name, request, context)
            try:
                await self.streams[name](request, context)
            finally:
                if name == "Generate":
                    self.left_generate.set()

        return stream if name in self.streams else answer

    def _record(self, name: str, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.received.setdefault(name, []).append(request)
        self.metadata[name] = {key: str(value) for key, value in context.invocation_metadata() or ()}


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


@asynccontextmanager
async def serving(*handlers: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """A gRPC server with these handlers; yields its address."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 * 1024 * 1024)])
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@dataclass
class Step:
    epoch: int
    first_index: int
    token_ids: list[int]
    phase: Phase | None
    finish: RunFinish | None
    refusal: Refusal | None


@dataclass
class RecordingSink:
    """A RunSink that keeps everything; `ended` is set by a finish, a refusal or a break."""

    steps: list[Step] = field(default_factory=list)
    broken: list[LinkError] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    def on_step(
        self,
        epoch: int,
        first_index: int,
        token_ids: Sequence[int],
        phase: Phase | None,
        finish: RunFinish | None,
        refusal: Refusal | None,
    ) -> None:
        self.steps.append(Step(epoch, first_index, list(token_ids), phase, finish, refusal))
        self.stepped.set()
        if finish or refusal:
            self.ended.set()

    def on_broken(self, error: LinkError) -> None:
        self.broken.append(error)
        self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step.token_ids]


@dataclass
class RecordingListener:
    """A LinkListener that keeps everything."""

    signs: int = 0
    reports: list[tuple[Report, tuple[ModelInfo, ...]]] = field(default_factory=list)
    losses: list[LinkError] = field(default_factory=list)
    leaving: bool = False
    reported: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def on_sign(self) -> None:
        self.signs += 1

    def on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        self.reports.append((report, models))
        self.reported.set()

    def on_leaving(self) -> None:
        self.leaving = True

    def on_lost(self, error: LinkError) -> None:
        self.losses.append(error)
        self.lost.set()


def an_assign(session_id: str = "s-1", **changes: Any) -> Assign:
    fields: dict[str, Any] = {
        "session_id": session_id,
        "epoch": EPOCH,
        "command_id": 1,
        "model": "m",
        "model_revision": "r1",
        "sampling": Sampling(temperature=0.5, top_p=0.25, top_k=3, seed=2**64 - 1),
        "qos": Qos.AGENT,
        "engine_options": b"",
        "lease_s": 60.0,
    }
    return Assign(**(fields | changes))


def an_append(token_ids: Sequence[int], session_id: str = "s-1", **changes: Any) -> Append:
    fields: dict[str, Any] = {"session_id": session_id, "epoch": EPOCH, "command_id": 2, "base_length": 0}
    return Append(**(fields | {"token_ids": token_ids} | changes))


def a_run(session_id: str = "s-1", **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "session_id": session_id,
        "epoch": EPOCH,
        "command_id": 3,
        "generation_id": "g-1",
        "context_length": 3,
        "context_crc32": 0,
        "prefix_token_ids": (),
        "first_index": 0,
        "max_new_tokens": 10,
        "max_wall_s": 30.0,
        "sampling": Sampling(),
        "qos": Qos.INTERACTIVE,
    }
    return Run(**(fields | changes))
