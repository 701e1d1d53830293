"""JoinService: each call is the stream of one node that dialed in. Moves frames; decides nothing."""

from __future__ import annotations

from typing import Any, Final, NoReturn, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fleet.v1 import join_service_pb2, link_pb2
from fleet_service.api.errors import DOMAIN, STATUS_DETAILS_KEY
from fleet_service.runtime.protocols import JoinRefusedError, LinkError, LinkLostError, NodeFaultError
from fleet_service.token import Way

JOIN_SERVICE: str = join_service_pb2.DESCRIPTOR.services_by_name["JoinService"].full_name

MAX_HELLO_BYTES = 64 * 1024
"""Largest frame of a node up to and with its hello."""

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Others are FAILED_PRECONDITION: something has to be changed first.
_CODES: Final = {
    "IDENTITY_IN_USE": grpc.StatusCode.ALREADY_EXISTS,
    "FLEET_TOKEN_REFUSED": grpc.StatusCode.UNAUTHENTICATED,
    "LINK_PROTOCOL_VIOLATED": grpc.StatusCode.INVALID_ARGUMENT,
    "LIMIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
_TEXT_LIMIT_CHARS = 1000


class JoinStream(Protocol):
    """What a joining node's call is to those who speak with the node (links.frames.FrameStream)."""

    async def send(self, frame: link_pb2.HeadFrame) -> None: ...

    async def receive(self) -> link_pb2.NodeFrame | None: ...

    async def close(self) -> None: ...

    @property
    def encrypted(self) -> bool: ...

    @property
    def way(self) -> Way: ...


class Door(Protocol):
    """Who speaks with the nodes that dial in (links.join.JoinDoor)."""

    async def admit(self, stream: JoinStream, peer: str) -> LinkError | None:
        """Serve a node until its link ends. Raises JoinRefusedError when it is not taken in."""


class JoinServicer:
    """Serves Join calls. `max_frame_bytes` bounds a frame of a node that has said hello."""

    def __init__(self, door: Door, max_frame_bytes: int, log: structlog.typing.FilteringBoundLogger) -> None:
        self._door = door
        self._max_frame_bytes = max_frame_bytes
        self._log = log

    def handler(self) -> grpc.GenericRpcHandler:
        """For a server. Frames come undecoded, so that their size is judged first."""
        join = grpc.stream_stream_rpc_method_handler(
            self._join,
            request_deserializer=bytes,
            response_serializer=join_service_pb2.JoinResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(JOIN_SERVICE, {"Join": join})

    async def _join(self, _requests: object, context: _Context) -> None:
        peer = context.peer()
        try:
            error = await self._door.admit(JoinCall(context, self._max_frame_bytes), peer)
        except JoinRefusedError as refused:
            self._log.warning("join refused", peer=peer, reason=refused.reason, message=str(refused))
            await _abort(context, refused.reason, str(refused))
        except LinkError as lost:
            self._log.info("joining node gone", peer=peer, error=str(lost))
            return
        except Exception:  # noqa: BLE001 - the last layer: nothing of ours is above it
            self._log.exception("a join failed", peer=peer)
            await _abort(context, "INTERNAL", "a fault of the head; its log tells more")
        if isinstance(error, NodeFaultError):
            self._log.warning("joined node broke the contract", peer=peer, error=str(error))
            await _abort(context, "LINK_PROTOCOL_VIOLATED", str(error))


class JoinCall:
    """A JoinStream over one call. Ending it is the business of the method that serves the call."""

    def __init__(self, context: _Context, max_frame_bytes: int) -> None:
        self._context = context
        self._max_frame_bytes = max_frame_bytes
        self._limit_bytes = MAX_HELLO_BYTES

    way: Way = "join"

    @property
    def encrypted(self) -> bool:
        """Whether it is TLS."""
        return self._context.auth_context().get("transport_security_type") == [b"ssl"]

    async def send(self, frame: link_pb2.HeadFrame) -> None:
        """Hand a frame to gRPC; waits while the node takes nothing. Raises LinkLostError."""
        try:
            await self._context.write(join_service_pb2.JoinResponse(frame=frame))
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise LinkLostError("Join: the node's call is over") from error

    async def receive(self) -> link_pb2.NodeFrame | None:
        """The next frame; None at the end of the node's frames. Raises LinkLostError or NodeFaultError."""
        try:
            data = await self._context.read()
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise LinkLostError("Join: the node's call is over") from error
        if data is grpc.aio.EOF:
            return None
        if len(data) > self._limit_bytes:
            raise NodeFaultError(
                f"Join: a frame has {len(data)} bytes; the head takes {self._limit_bytes} here"
            )
        try:
            frame = join_service_pb2.JoinRequest.FromString(data).frame
        except DecodeError as error:
            raise NodeFaultError("Join: a frame could not be decoded") from error
        if frame.type == link_pb2.FRAME_TYPE_HELLO:
            self._limit_bytes = self._max_frame_bytes
        return frame

    async def close(self) -> None:
        """Nothing: the call ends with its method, which waits for the end of the link."""


async def _abort(context: _Context, reason: str, message: str) -> NoReturn:
    """End the call with a status that says why, in words and as google.rpc.ErrorInfo."""
    code = _CODES.get(reason, grpc.StatusCode.FAILED_PRECONDITION)
    number, _name = code.value
    status = status_pb2.Status(code=number, message=message[:_TEXT_LIMIT_CHARS])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    trailers = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code, status.message, trailers)
    raise AssertionError("abort always raises")
