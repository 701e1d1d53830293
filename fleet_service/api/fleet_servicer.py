"""FleetService: checks a request, converts it, asks the head, converts the answer. No decisions here.

Streams are coroutines that write, so that a call is one task and its clean-up one `finally`: a caller that
leaves shows up as a cancellation at any await, or as an error of the write under way.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import fleet_service_pb2_grpc as fleet_grpc
from fleet_service.api import convert_sessions as convert
from fleet_service.api import validate
from fleet_service.api.connection import Connection, ConnectParts, Method
from fleet_service.api.facade import Call, CallersHead, DuplexCall, Generation, StreamStart
from fleet_service.domain.events import Event, Finished, Moved, Tokens
from fleet_service.runtime.fairness import in_turns
from fleet_service.runtime.views import SessionView

_DEFAULT_PAGE_SIZE = 100
_COPIED_AT_ONCE = 32_768
_LISTED_AT_ONCE = 100

ResponseT = TypeVar(
    "ResponseT", fleet.GenerateResponse, fleet.CompleteResponse, fleet.AttachGenerationResponse
)


class FleetServicer(fleet_grpc.FleetServiceServicer):
    """The callers' service. Raises FleetError, which the interceptor turns into a status."""

    def __init__(self, head: CallersHead, limits: validate.Limits, connecting: ConnectParts) -> None:
        self._head = head
        self._limits = limits
        self._copying = asyncio.Lock()
        self._connecting = connecting
        self._connections: set[Connection] = set()
        self._connected = self._connected_methods()

    # Sessions. The stubs' types want contexts to be gRPC's; these are the `Call` that the interceptor brings.

    async def CreateSession(  # type: ignore[override]
        self, request: fleet.CreateSessionRequest, context: Call
    ) -> fleet.CreateSessionResponse:
        validate.check_create_session(request, self._limits)
        context.caller.check_model(request.spec.model)
        view = await self._head.create_session(
            request.session_id,
            convert.session_spec(request.spec),
            convert.token_ids(request.token_ids),
            convert.request_key("CreateSession", request, context.caller.name),
            context.caller.name,
        )
        return fleet.CreateSessionResponse(session=convert.session_message(view))

    async def GetSession(  # type: ignore[override]
        self, request: fleet.GetSessionRequest, context: Call
    ) -> fleet.GetSessionResponse:
        validate.check_session_request(request)
        reply = fleet.GetSessionResponse(
            session=convert.session_message(
                await self._head.told(lambda: self._head.get_session(request.session_id, context.caller.name))
            )
        )
        if request.include_token_ids:
            token_ids = await self._head.context_of(request.session_id, context.caller.name)
            await self._copy(token_ids, reply)
        return reply

    async def _copy(self, token_ids: Sequence[int], reply: fleet.GetSessionResponse) -> None:
        """Millions of ids take long to copy: in parts and one reply at a time, others have their turn."""
        async with self._copying:
            for start in range(0, len(token_ids), _COPIED_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                reply.token_ids.extend(token_ids[start : start + _COPIED_AT_ONCE])

    async def ListSessions(  # type: ignore[override]
        self, request: fleet.ListSessionsRequest, context: Call
    ) -> fleet.ListSessionsResponse:
        validate.check_list_sessions(request)
        views: list[SessionView] = []
        left, token = request.page_size or _DEFAULT_PAGE_SIZE, request.page_token
        while True:
            asked = min(left, _LISTED_AT_ONCE)
            found, token = await self._head.told(
                partial(self._sessions_after, request, token, asked, context)
            )
            views += found
            left -= len(found)
            if not token or not left or len(found) < asked:
                break
            await asyncio.sleep(0)
        sessions = [convert.session_message(view) async for view in in_turns(views)]
        return fleet.ListSessionsResponse(sessions=sessions, next_page_token=token)

    def _sessions_after(
        self, request: fleet.ListSessionsRequest, token: str, count: int, context: Call
    ) -> tuple[list[SessionView], str]:
        state = convert.session_state(request.state)
        return self._head.list_sessions(count, token, state, request.node, context.caller.name)

    async def AppendTokens(  # type: ignore[override]
        self, request: fleet.AppendTokensRequest, context: Call
    ) -> fleet.AppendTokensResponse:
        validate.check_append_tokens(request, self._limits)
        view = await self._head.append_tokens(
            request.session_id,
            convert.token_ids(request.token_ids),
            request.expected_length if request.HasField("expected_length") else None,
            request.truncate_to if request.HasField("truncate_to") else None,
            convert.request_key("AppendTokens", request, context.caller.name),
            context.caller.name,
        )
        return fleet.AppendTokensResponse(session=convert.session_message(view))

    async def ParkSession(  # type: ignore[override]
        self, request: fleet.ParkSessionRequest, context: Call
    ) -> fleet.ParkSessionResponse:
        validate.check_session_request(request)
        view = await self._head.park_session(request.session_id, context.caller.name)
        return fleet.ParkSessionResponse(session=convert.session_message(view))

    async def ResumeSession(  # type: ignore[override]
        self, request: fleet.ResumeSessionRequest, context: Call
    ) -> fleet.ResumeSessionResponse:
        validate.check_session_request(request)
        if context.caller.models:
            session = self._head.get_session(request.session_id, context.caller.name)
            context.caller.check_model(session.spec.model)
        view = await self._head.resume_session(request.session_id, context.caller.name)
        return fleet.ResumeSessionResponse(session=convert.session_message(view))

    async def FinishSession(  # type: ignore[override]
        self, request: fleet.FinishSessionRequest, context: Call
    ) -> fleet.FinishSessionResponse:
        validate.check_session_request(request)
        view = await self._head.finish_session(request.session_id, context.caller.name)
        return fleet.FinishSessionResponse(session=convert.session_message(view))

    # Generations. The stubs' types want streams to be iterators; these are coroutines that write (grpc.aio
    # takes them).

    async def Generate(  # type: ignore[override]
        self, request: fleet.GenerateRequest, context: Call
    ) -> None:
        await _relay(await self._generate(request, context), context, fleet.GenerateResponse)

    async def GenerateAll(  # type: ignore[override]
        self, request: fleet.GenerateAllRequest, context: Call
    ) -> fleet.GenerateAllResponse:
        return await _collect((await self._begin("GenerateAll", request, context)).generation)

    async def Complete(  # type: ignore[override]
        self, request: fleet.CompleteRequest, context: Call
    ) -> None:
        await _relay(await self._complete(request, context), context, fleet.CompleteResponse)

    async def AttachGeneration(  # type: ignore[override]
        self, request: fleet.AttachGenerationRequest, context: Call
    ) -> None:
        await _relay(await self._attach(request, context), context, fleet.AttachGenerationResponse)

    async def CancelGeneration(  # type: ignore[override]
        self, request: fleet.CancelGenerationRequest, context: Call
    ) -> fleet.CancelGenerationResponse:
        validate.check_generation_request(request)
        return convert.cancel_message(
            await self._head.cancel_generation(request.generation_id, context.caller.name)
        )

    async def ListModels(  # type: ignore[override]
        self, request: fleet.ListModelsRequest, context: Call
    ) -> fleet.ListModelsResponse:
        return fleet.ListModelsResponse(
            models=[
                convert.model_summary_message(summary)
                for summary in self._head.list_models()
                if not context.caller.models or summary.model.name in context.caller.models
            ]
        )

    # Many calls over one stream

    async def Connect(  # type: ignore[override]
        self, _requests: object, context: DuplexCall
    ) -> None:
        connection = Connection(context, self._connected, self._connecting)
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)

    def end_connections(self) -> None:
        """The head stops: each connection sends what is ready, and ends with HEAD_DRAINING."""
        for connection in list(self._connections):
            connection.end()

    def _connected_methods(self) -> dict[str, Method]:
        return {
            "create_session": Method("CreateSession", self.CreateSession),
            "get_session": Method("GetSession", self.GetSession),
            "append_tokens": Method("AppendTokens", self.AppendTokens),
            "generate": Method("Generate", self._generate, streams=True),
            "complete": Method("Complete", self._complete, streams=True),
            "attach_generation": Method("AttachGeneration", self._attach, streams=True),
            "cancel_generation": Method("CancelGeneration", self.CancelGeneration),
            "park_session": Method("ParkSession", self.ParkSession),
            "resume_session": Method("ResumeSession", self.ResumeSession),
            "finish_session": Method("FinishSession", self.FinishSession),
        }

    # How streams begin

    async def _generate(self, request: fleet.GenerateRequest, call: Call) -> StreamStart:
        return await self._begin("Generate", request, call)

    async def _begin(
        self, method: str, request: fleet.GenerateRequest | fleet.GenerateAllRequest, call: Call
    ) -> StreamStart:
        validate.check_generate(request)
        if call.caller.models:
            call.caller.check_model(self._head.get_session(request.session_id, call.caller.name).spec.model)
        generation = await self._head.generate(
            request.session_id,
            request.generation_id,
            convert.generation_spec(request.spec),
            convert.request_key(method, request, call.caller.name),
            call.trace,
            call.caller.name,
        )
        return StreamStart(generation)

    async def _complete(self, request: fleet.CompleteRequest, call: Call) -> StreamStart:
        validate.check_complete(request, self._limits)
        call.caller.check_model(request.session.model)
        generation = await self._head.complete(
            convert.session_spec(request.session),
            convert.token_ids(request.token_ids),
            convert.generation_spec(request.spec),
            request.generation_id,
            convert.request_key("Complete", request, call.caller.name),
            call.trace,
            call.caller.name,
        )
        return StreamStart(generation)

    async def _attach(self, request: fleet.AttachGenerationRequest, call: Call) -> StreamStart:
        validate.check_generation_request(request)
        generation = await self._head.told(
            lambda: self._head.find_generation(request.generation_id, call.caller.name)
        )
        return StreamStart(generation, request.from_index, request.branch)


async def _relay(start: StreamStart, call: Call, response_type: Callable[[], ResponseT]) -> None:
    """Send a generation's events from there on, each time all that is new."""
    reader = start.generation.attach(start.from_index, start.branch)
    own_branch = reader.branch  # as long as the head lives
    try:
        finished = False
        while not finished:
            events = await reader.read()
            for event in convert.in_message_sizes(events):
                response = response_type()
                convert.write_event(response.event, event)
                if own_branch:
                    response.event.branch = own_branch
                await call.write(response)
            finished = _ends(events)
    finally:
        reader.close()


async def _collect(generation: Generation) -> fleet.GenerateAllResponse:
    """Read a generation to its end."""
    reader = generation.attach(0)
    token_ids = array("I")
    reply = fleet.GenerateAllResponse(generation_id=generation.generation_id)
    try:
        while True:
            for event in await reader.read():
                if isinstance(event, Tokens):
                    token_ids.extend(event.token_ids)
                elif isinstance(event, Moved):
                    reply.moves.append(convert.moved_message(event))
                elif isinstance(event, Finished):
                    reply.token_ids.extend(token_ids)
                    reply.finished.CopyFrom(convert.finished_message(event))
                    return reply
    finally:
        reader.close()


def _ends(events: list[Event]) -> bool:
    return isinstance(events[-1], Finished)
