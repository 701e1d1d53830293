"""The outermost layer of every call to our services: one place for errors, request ids, log lines and spans.

It sees a request before it is decoded, so that one too large or undecodable gets a typed error like any
other. A call ends in one of these ways: it returned; a FleetError or an unforeseen exception became a status;
the caller went away. The last comes as a cancellation at an await, or as an error of the write under way,
which a call tells apart from the head's own troubles with its links.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from fleet_service.api.access import Gate
from fleet_service.api.errors import ErrorTranslator, WireError, is_foreseen, too_large
from fleet_service.domain.access import ANYBODY, Caller
from fleet_service.domain.errors import FleetError, invalid

REQUEST_ID_KEY = "x-request-id"
UNKNOWN_METHOD = "unknown"
"""Stands for every method that there is not: callers choose those names, so no series or span has them."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# A caller counts its deadline from when it sent the call, so it hangs up a little before ours passes.
_ON_THE_WAY_S = 0.1

Metadata = Sequence[tuple[str, str | bytes]]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallerGoneError(Exception):
    """A message could not be sent because its call is over; there is nobody to answer."""


class RpcTrace(Protocol):
    """One call, watched."""

    @property
    def context(self) -> object | None:
        """What the head hangs its own traces on; opaque here."""

    @property
    def trace_id(self) -> str:
        """For log lines; empty when nothing is traced."""

    def ended(self, code: str, reason: str) -> None:
        """The call is over, with a status code's name; `reason` is empty when it carries none."""


class RpcObserver(Protocol):
    """Told of every call to our services."""

    def rpc_started(self, method: str, metadata: Metadata) -> RpcTrace:
        """A call of `method`, like fleet.v1.FleetService/Generate or UNKNOWN_METHOD, begins."""


class NullRpcObserver:
    """Watches nothing; what a listener uses unless traces or metrics are configured."""

    context = None
    trace_id = ""

    def rpc_started(self, method: str, metadata: Metadata) -> RpcTrace:
        return self

    def ended(self, code: str, reason: str) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands for a request that could not be taken; raised once there is a call to answer."""

    error: FleetError
    request: Any = None
    """Where one of many could be decoded: it may hold what each part of it is answered by."""


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of `services`; others (health, reflection) answer by their own rules.

    `new_request_id` names calls whose caller gave no usable x-request-id. `max_request_bytes` bounds a
    request's serialised size. `gate` says who calls, before the request is looked at.
    """

    def __init__(
        self,
        services: frozenset[str],
        translator: ErrorTranslator,
        observer: RpcObserver,
        log: structlog.typing.FilteringBoundLogger,
        new_request_id: Callable[[], str],
        max_request_bytes: int,
        gate: Gate,
    ) -> None:
        self._services = services
        self._gate = gate
        self._translator = translator
        self._observer = observer
        self._log = log
        self._new_request_id = new_request_id
        self._max_request_bytes = max_request_bytes
        self._wrapped: dict[str, _Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        path = handler_call_details.method
        wrapped = self._wrapped.get(path)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers it by itself
            self._observer.rpc_started(UNKNOWN_METHOD, ()).ended("UNIMPLEMENTED", "")
            return None
        method = path.lstrip("/")
        # Only methods that exist are kept, so a caller cannot make the table grow.
        if method.partition("/")[0] not in self._services:
            return handler
        self._wrapped[path] = self._wrap(method, handler)
        return self._wrapped[path]

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        decode = self._decoder(handler.request_deserializer or bytes, one_of_many=handler.request_streaming)
        # The stubs know streaming handlers as iterators; ours are coroutines that read and write.
        serve: Any
        if handler.request_streaming:
            serve, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
        elif handler.response_streaming:
            serve, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            serve, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        behaviour: Any = self._behaviour(method, serve)
        return make(behaviour, decode, handler.response_serializer)

    def _decoder(self, decode: Callable[[bytes], Any], *, one_of_many: bool) -> Callable[[bytes], Any]:
        def decoded(data: bytes) -> Any:
            oversized = len(data) > self._max_request_bytes
            if oversized and not one_of_many:
                return _Refused(too_large(len(data), self._max_request_bytes))
            try:
                request = decode(data)
            except DecodeError:
                return _Refused(invalid("request", "is not a message of the type that this method takes"))
            return _Refused(too_large(len(data), self._max_request_bytes), request) if oversized else request

        return decoded

    def _behaviour(self, method: str, serve: _Behaviour) -> _Behaviour:
        log = self._log.bind(method=method)

        async def behaviour(request: Any, context: Context) -> Any:
            call = self._begin(method, log, context)
            try:
                call.admit()
                if isinstance(request, _Refused):
                    raise request.error
                reply = await serve(request, call)
            except asyncio.CancelledError:
                call.gone()
                raise
            except CallerGoneError:
                call.gone()
                return None
            except grpc.aio.AbortError:
                call.aborted()
                raise
            except Exception as error:  # noqa: BLE001 - the last layer: nothing of ours is above it
                wire = self._translator.translate(error, call.request_id)
                call.failed(wire, None if is_foreseen(error) else error)
                await context.abort(wire.code, wire.message, (*wire.trailers, *call.trailers))
            context.set_trailing_metadata(call.trailers)
            call.succeeded()
            return reply

        return behaviour

    def _begin(self, method: str, log: structlog.typing.FilteringBoundLogger, context: Context) -> ServedCall:
        metadata: Metadata = tuple(context.invocation_metadata() or ())
        trace = self._observer.rpc_started(method, metadata)
        request_id = _request_id_of(metadata) or self._new_request_id()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if trace.trace_id:
            structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)

        def admit() -> Caller:
            return self._gate.admit(method, metadata, context)

        return ServedCall(context, trace, log, request_id, admit)


class ServedCall:
    """One call: what its servicer may use (facade.DuplexCall), and the account of how it ended."""

    __slots__ = ("_admit", "_context", "_log", "_started_s", "_trace", "caller", "request_id")

    def __init__(
        self,
        context: Context,
        trace: RpcTrace,
        log: structlog.typing.FilteringBoundLogger,
        request_id: str,
        admit: Callable[[], Caller],
    ) -> None:
        """`admit` tells who calls, or raises FleetError when it may not."""
        self._admit = admit
        self._context = context
        self._trace = trace
        self._log = log
        self._started_s = asyncio.get_running_loop().time()
        self.request_id = request_id
        self.caller = ANYBODY

    @property
    def trace(self) -> object | None:
        return self._trace.context

    @property
    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """What every call is answered with."""
        return ((REQUEST_ID_KEY, self.request_id),)

    def admit(self) -> None:
        """Find out who calls. Raises CREDENTIALS_REFUSED, PERMISSION_DENIED."""
        self.caller = self._admit()

    async def read(self) -> tuple[Any, FleetError | None] | None:
        """The caller's next message and what it is refused for, if it is; None at their end.

        Raises CallerGoneError, and FleetError as `admit` does: who may call is asked again, since such a call
        may last for days.
        """
        try:
            message = await self._context.read()
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise CallerGoneError from error
        if message is grpc.aio.EOF:
            return None
        self.admit()
        if not isinstance(message, _Refused):
            return message, None
        if message.request is None:
            raise message.error
        return message.request, message.error

    async def write(self, message: Any) -> None:
        """Send one message. Raises CallerGoneError."""
        try:
            await self._context.write(message)
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise CallerGoneError from error

    def succeeded(self) -> None:
        self._trace.ended("OK", "")
        if self._log.is_enabled_for(logging.DEBUG):
            self._log.debug("call answered", caller=self.caller.name, took_s=self._took_s())

    def failed(self, wire: WireError, bug: Exception | None) -> None:
        """A status goes out; `bug` is what nobody foresaw, for the log alone."""
        self._trace.ended(wire.code.name, wire.reason.value)
        if bug is None:
            self._log.info(
                "call refused",
                code=wire.code.name,
                reason=wire.reason.value,
                message=wire.message,
                took_s=self._took_s(),
            )
        else:
            self._log.error("call failed", code=wire.code.name, took_s=self._took_s(), exc_info=bug)

    def gone(self) -> None:
        """The caller left, or its deadline passed."""
        remaining_s: float | None = self._context.time_remaining()  # None without a deadline
        code = "CANCELLED" if remaining_s is None or remaining_s > _ON_THE_WAY_S else "DEADLINE_EXCEEDED"
        self._trace.ended(code, "")
        self._log.info("caller gone", code=code, took_s=self._took_s())

    def aborted(self) -> None:
        """Something below answered with a status of its own."""
        code = self._context.code().name
        self._trace.ended(code, "")
        self._log.info("call aborted", code=code, took_s=self._took_s())

    def _took_s(self) -> float:
        return round(asyncio.get_running_loop().time() - self._started_s, 6)


def _request_id_of(metadata: Metadata) -> str:
    """The caller's id for the call, where it gave a well-formed one."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return ""
