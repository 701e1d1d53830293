"""FleetService's stub over one Connect stream: the same methods, so that the same tests run over it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import grpc

from examples.python_gateway import CallRefusedError, ConnectionLostError, FleetConnection, Stream
from fleet.v1 import fleet_service_pb2 as pb

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

Metadata = Sequence[tuple[str, str]]

WINDOW_TOKENS = 64
"""Small, so that tests have streams that wait for credit."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_UNARY = {
    "CreateSession": "create_session",
    "GetSession": "get_session",
    "AppendTokens": "append_tokens",
    "CancelGeneration": "cancel_generation",
    "ParkSession": "park_session",
    "ResumeSession": "resume_session",
    "FinishSession": "finish_session",
}
_STREAMS = {
    "Generate": ("generate", pb.GenerateResponse),
    "Complete": ("complete", pb.CompleteResponse),
    "AttachGeneration": ("attach_generation", pb.AttachGenerationResponse),
}


def as_rpc_error(error: CallRefusedError | ConnectionLostError) -> grpc.aio.AioRpcError:
    """What a call of its own would have raised."""
    none = grpc.aio.Metadata()
    if isinstance(error, ConnectionLostError):
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, str(error))
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", error.error.status))
    return grpc.aio.AioRpcError(_CODES[error.error.code], none, trailers, error.error.message)


class ConnectedStream:
    """A stream's call as grpc.aio gives it, as far as tests use it."""

    def __init__(self, stream: Stream, response_type: Any, timeout_s: float | None) -> None:
        self._stream = stream
        self._response_type = response_type
        self._deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                event = await anext(self._stream)
        except (CallRefusedError, ConnectionLostError) as error:
            raise as_rpc_error(error) from error
        except TimeoutError as error:
            self._stream.close()
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, none, none) from error
        return self._response_type(event=event)

    async def read(self) -> Any:
        try:
            return await anext(self)
        except StopAsyncIteration:
            return grpc.aio.EOF

    def cancel(self) -> bool:
        self._stream.close()
        return True


class ConnectedStub:
    """Calls go over one connection, made with the first; what Connect does not carry goes by itself."""

    def __init__(self, plain: FleetServiceAsyncStub) -> None:
        self._plain = plain
        self._connection: FleetConnection | None = None

    @property
    def connection(self) -> FleetConnection:
        if self._connection is None:
            self._connection = FleetConnection(self._plain)
        return self._connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def __getattr__(self, method: str) -> Any:
        if method in _UNARY:
            return lambda request, metadata=(): self._ask(_UNARY[method], request, metadata)
        if method in _STREAMS:
            kind, response_type = _STREAMS[method]

            def stream(request: Any, metadata: Metadata = (), timeout: float | None = None) -> Any:
                trace = dict(metadata)
                begun = self.connection.stream(WINDOW_TOKENS, trace, **{kind: request})
                return ConnectedStream(begun, response_type, timeout)

            return stream
        return getattr(self._plain, method)

    async def _ask(self, kind: str, request: Any, metadata: Metadata) -> Any:
        try:
            return await self.connection.ask(dict(metadata), **{kind: request})
        except (CallRefusedError, ConnectionLostError) as error:
            raise as_rpc_error(error) from error
