"""A head that answers what a test tells it to, on two real listeners, for the client and the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import admin_service_pb2_grpc as admin_grpc
from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import fleet_service_pb2_grpc as fleet_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Refuse:
    """End the call with a status as a head makes it."""

    code: int
    message: str
    reason: str = ""
    details: tuple[Message, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)

    async def end(self, context: Context) -> None:
        packed = [_packed(detail) for detail in self.details]
        if self.reason:
            info = error_details_pb2.ErrorInfo(reason=self.reason, domain="fleet.v1", metadata=self.metadata)
            packed.insert(0, _packed(info))
        status = status_pb2.Status(code=self.code, message=self.message, details=packed)
        await context.abort_with_status(rpc_status.to_status(status))


# As a broken connection looks to the caller: a code, and nothing from the head.
CONNECTION_LOST = Refuse(code_pb2.UNAVAILABLE, "Socket closed")


@dataclass(frozen=True)
class Hang:
    """Say nothing until the caller goes away."""


Step = fleet.GenerationEvent | Refuse | Hang


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def accepted(generation_id: str = "g1") -> fleet.GenerationEvent:
    return fleet.GenerationEvent(accepted=fleet.Accepted(generation_id=generation_id, session_id="s1"))


def tokens(first_index: int, *ids: int) -> fleet.GenerationEvent:
    return fleet.GenerationEvent(tokens=fleet.Tokens(first_index=first_index, token_ids=ids))


def finished(reason: str = "LENGTH", **more: Any) -> fleet.GenerationEvent:
    done = fleet.Finished(reason=f"FINISH_REASON_{reason}", attempts=1, **more)
    return fleet.GenerationEvent(finished=done)


def on_branch(branch: int, *events: fleet.GenerationEvent) -> list[fleet.GenerationEvent]:
    """The events as a head gives them that began that branch."""
    for event in events:
        event.branch = branch
    return list(events)


DATA_LOSS = Refuse(
    code_pb2.DATA_LOSS,
    "the head lost what it had of generation g1 from index 2 on; attach there, without the rest",
    reason="DATA_LOSS",
    metadata={"generationId": "g1", "nextIndex": "2", "branch": "1"},
)
HEAD_DRAINING = Refuse(
    code_pb2.UNAVAILABLE,
    "the head is shutting down; attach again at index 1 once it is back",
    reason="HEAD_DRAINING",
    metadata={"nextIndex": "1"},
)


@dataclass
class ScriptedHead:
    """`streams` are played in order, one per call; `replies` by method. `calls` keeps every request.

    `told` is what the operators' streams say, by method. `serving` is the callers' health, by service.
    """

    address: str = ""
    admin_address: str = ""
    streams: list[Sequence[Step]] = field(default_factory=list)
    replies: dict[str, Message | Refuse | Hang] = field(default_factory=dict)
    told: dict[str, Sequence[Message | Refuse | Hang]] = field(default_factory=dict)
    serving: dict[str, bool] = field(default_factory=lambda: {"": True, "fleet.v1.FleetService": True})
    calls: list[tuple[str, Any]] = field(default_factory=list)
    called: asyncio.Condition = field(default_factory=asyncio.Condition)

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    async def wait_for(self, method: str) -> Any:
        async with self.called:
            await self.called.wait_for(lambda: bool(self.requests(method)))
        return self.requests(method)[-1]

    async def note(self, method: str, request: Any) -> None:
        async with self.called:
            self.calls.append((method, request))
            self.called.notify_all()


def _unary(method: str) -> Callable[..., Any]:
    async def answer(self: Any, request: Any, context: Context) -> Any:
        await self.script.note(method, request)
        reply = self.script.replies[method]
        if isinstance(reply, Refuse):
            await reply.end(context)
        if isinstance(reply, Hang):
            await asyncio.Event().wait()
        return reply

    return answer


def _stream(method: str, response: Callable[..., Message]) -> Callable[..., Any]:
    async def answer(self: Any, request: Any, context: Context) -> None:
        await self.script.note(method, request)
        for step in self.script.streams.pop(0):
            if isinstance(step, Refuse):
                await step.end(context)
            elif isinstance(step, Hang):
                await asyncio.Event().wait()
            else:
                await context.write(response(event=step))

    return answer


def _told(method: str) -> Callable[..., Any]:
    async def answer(self: Any, request: Any, context: Context) -> None:
        await self.script.note(method, request)
        for step in self.script.told.get(method, ()):
            if isinstance(step, Refuse):
                await step.end(context)
            elif isinstance(step, Hang):
                await asyncio.Event().wait()
            else:
                await context.write(step)

    return answer


def _servicer(base: type, script: ScriptedHead) -> Any:
    streams = {
        "Generate": fleet.GenerateResponse,
        "Complete": fleet.CompleteResponse,
        "AttachGeneration": fleet.AttachGenerationResponse,
    }
    methods = [name for name in dir(base) if name[0].isupper()]
    told = ("DrainNode", "WatchFleet")
    body = {
        name: _stream(name, streams[name]) if name in streams else (_told if name in told else _unary)(name)
        for name in methods
    }
    return type(f"Scripted{base.__name__}", (base,), {**body, "script": script})()


class _Health(health_pb2_grpc.HealthServicer):
    def __init__(self, script: ScriptedHead) -> None:
        self._script = script

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        reply = health_pb2.HealthCheckResponse
        return reply(status=reply.SERVING if self._script.serving[request.service] else reply.NOT_SERVING)


@asynccontextmanager
async def scripted_head() -> AsyncIterator[ScriptedHead]:
    """Both listeners, open."""
    script = ScriptedHead()
    callers, operators = grpc.aio.server(), grpc.aio.server()
    fleet_grpc.add_FleetServiceServicer_to_server(_servicer(fleet_grpc.FleetServiceServicer, script), callers)
    admin_grpc.add_AdminServiceServicer_to_server(
        _servicer(admin_grpc.AdminServiceServicer, script), operators
    )
    health_pb2_grpc.add_HealthServicer_to_server(_Health(script), callers)
    script.address = f"127.0.0.1:{callers.add_insecure_port('127.0.0.1:0')}"
    script.admin_address = f"127.0.0.1:{operators.add_insecure_port('127.0.0.1:0')}"
    script.replies = {
        "GetSession": fleet.GetSessionResponse(session=fleet.Session(session_id="s1")),
        "AppendTokens": fleet.AppendTokensResponse(),
        "CreateSession": fleet.CreateSessionResponse(),
        "CancelGeneration": fleet.CancelGenerationResponse(),
        "ListNodes": admin.ListNodesResponse(books_balance=True),
    }
    await callers.start()
    await operators.start()
    try:
        yield script
    finally:
        await callers.stop(0)
        await operators.stop(0)
