"""Node servicers with one mistake each, where the mistake lies outside of the pure rules."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import grpc

from fleet.v1 import node_service_pb2 as pb
from node_stub.rules import NodeRules
from node_stub.server import NodeServicer

QUEUED = pb.GENERATION_PHASE_QUEUED


class _Through:
    """A call's context, with what is written to it changed on its way; None = lost."""

    def __init__(self, context: Any, change: Callable[[Any], Any]) -> None:
        self._context = context
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if (changed := self._change(message)) is not None:
            await self._context.write(changed)


class SpeaksAnyVersion(NodeServicer):
    async def Handshake(self, request: Any, context: Any) -> Any:
        request.min_version = request.max_version = 1
        return await super().Handshake(request, context)


class AnswersWithTheNewestVersion(NodeServicer):
    async def Handshake(self, request: Any, context: Any) -> Any:
        answer = await super().Handshake(request, context)
        answer.version = request.max_version + 1
        return answer


class IsAnotherRunEachTime(NodeServicer):
    async def Handshake(self, request: Any, context: Any) -> Any:
        answer = await super().Handshake(request, context)
        answer.incarnation = uuid.uuid4().hex
        return answer


class NamesAModelTwice(NodeServicer):
    async def Handshake(self, request: Any, context: Any) -> Any:
        answer = await super().Handshake(request, context)
        answer.models.append(answer.models[0])
        return answer


class AbortsOddIds(NodeServicer):
    async def Assign(self, request: Any, context: Any) -> Any:
        if not 0 < len(request.session_id) <= 128:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an odd id")
        return await super().Assign(request, context)


class KeepsSessionsByConnection(NodeServicer):
    async def Assign(self, request: Any, context: Any) -> Any:
        self.__dict__.setdefault("peers", {})[request.session_id] = context.peer()
        return await super().Assign(request, context)

    async def Append(self, request: Any, context: Any) -> Any:
        if self.__dict__["peers"].get(request.session_id) != context.peer():
            return pb.AppendResponse(refusal=pb.Refusal(code=pb.REFUSAL_CODE_UNKNOWN_SESSION))
        return await super().Append(request, context)


class FinishesLate(NodeServicer):
    """The finish follows the last tokens in a message of its own."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        async def split(message: Any) -> None:
            if message.finish and message.token_ids:
                tokens = pb.NodeServiceGenerateResponse()
                tokens.CopyFrom(message)
                tokens.ClearField("finish")
                await context.write(tokens)
                message.first_index += len(message.token_ids)
                del message.token_ids[:]
            await context.write(message)

        through = _Through(context, lambda message: message)
        through.write = split  # type: ignore[method-assign]
        await super().Generate(request, through)  # type: ignore[arg-type]


class SaysNoPhase(NodeServicer):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        def without(message: Any) -> Any:
            message.ClearField("phase")
            return message

        await super().Generate(request, _Through(context, without))  # type: ignore[arg-type]


class WaitsInSilence(NodeServicer):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        def unless_queued(message: Any) -> Any:
            return None if message.phase == QUEUED else message

        await super().Generate(request, _Through(context, unless_queued))  # type: ignore[arg-type]


class KnowsNoTime(NodeServicer):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        request.max_wall_ms = 0
        await super().Generate(request, context)


class CancelsNothing(NodeServicer):
    async def Cancel(self, request: Any, context: Any) -> Any:
        return pb.CancelResponse(was_running=True)


class TellsNothingRan(NodeServicer):
    async def Cancel(self, request: Any, context: Any) -> Any:
        answer = await super().Cancel(request, context)
        answer.was_running = False
        return answer


class RunsOnAlone(NodeServicer):
    """Nobody tells the engine that a call has ended."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        self._node.abandon = lambda run: None  # type: ignore[method-assign]
        await super().Generate(request, context)


class ReportsOnce(NodeServicer):
    async def WatchStatus(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        request.period_ms = 3_600_000
        await super().WatchStatus(request, context)


class ReportsLate(NodeServicer):
    async def WatchStatus(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        waits = iter([None])
        through = _Through(context, lambda message: next(waits, message))
        await super().WatchStatus(request, through)  # type: ignore[arg-type]


class HasNoClock(NodeServicer):
    async def WatchStatus(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        def at_noon(message: Any) -> Any:
            message.report.sampled_at_ms = 43_200_000
            return message

        await super().WatchStatus(request, _Through(context, at_noon))  # type: ignore[arg-type]


class KnowsNoOwner(NodeServicer):
    async def WatchStatus(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        request.head_id = "nobody"
        await super().WatchStatus(request, context)


class IgnoresWhatRidesAlong(NodeServicer):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        request.ClearField("assign")
        request.ClearField("append")
        await super().Generate(request, context)


class GoesOnAfterARefusedPart(NodeServicer):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override] # writes
        request.append.base_length = 0
        await super().Generate(request, context)


class TellsAllFleets(NodeServicer):
    async def Reconcile(self, request: Any, context: Any) -> Any:
        request.fleet_id = next((h.owner.fleet_id for h in self._rules.holdings()), request.fleet_id)
        return await super().Reconcile(request, context)

    @property
    def _rules(self) -> NodeRules:
        return self._node.rules


class TellsFencedSessionsAsLive(NodeServicer):
    async def Reconcile(self, request: Any, context: Any) -> Any:
        answer = await super().Reconcile(request, context)
        for session in answer.sessions:
            session.fenced = False
        return answer


class TellsNoGenerations(NodeServicer):
    async def Reconcile(self, request: Any, context: Any) -> Any:
        answer = await super().Reconcile(request, context)
        for session in answer.sessions:
            del session.generation_ids[:]
        return answer
