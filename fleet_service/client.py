"""A small asynchronous client of a head, over the generated stubs: errors taken apart, streams that go on.

The command line and the demo use it; a service in another language needs nothing but its own stubs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from fleet.v1 import admin_service_pb2_grpc, fleet_service_pb2_grpc
from fleet.v1.fleet_service_pb2 import (
    AttachGenerationRequest,
    CompleteRequest,
    GenerateRequest,
    GenerationEvent,
)
from fleet_service.addresses import ADMIN_PORT, CALLERS_PORT
from fleet_service.credentials import Credentials
from fleet_service.grpc_causes import NO_ANSWER, connection_cause

DEFAULT_CALLERS_ADDRESS = f"127.0.0.1:{CALLERS_PORT}"
DEFAULT_ADMIN_ADDRESS = f"127.0.0.1:{ADMIN_PORT}"
ERROR_DOMAIN = "fleet.v1"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# A generation outlives a lost connection only when its request says so: a grace that re-attaching fits into.
REATTACH_GRACE_MS = 10_000

CONNECT_TIMEOUT_S = 10.0
HEAD_DRAINING = "HEAD_DRAINING"
# CANCELLED is what a server says to calls that still reach it while it stops.
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class CallError(Exception):
    """A call that did not work. `reason` is that of errors.proto, empty when the head said none.

    `violations` are (field, what it must be), `resource` is (type, name), `fault_id` names an INTERNAL
    error in the head's log. All are empty where the head sent no such detail.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()
    resource: tuple[str, str] | None = None
    retry_after_s: float | None = None
    fault_id: str = ""

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason or '-'}: {self.message}"

    @property
    def connection_lost(self) -> bool:
        """The connection failed, not the request: the head did not say anything."""
        return not self.reason and self.code in _LOST


class UnreachableError(CallError):
    """No head is at the address: nothing listens there, or the way to it is broken. Told at once."""


class NoAnswerError(CallError):
    """The address took until the timeout and said nothing: a head may be there, busy or far away."""


def decode_error(error: grpc.aio.AioRpcError) -> CallError:
    """Take apart the google.rpc.Status that a head sends with an error."""
    plain = CallError(error.code(), error.details() or "")
    trailer = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if not isinstance(trailer, bytes):
        return plain
    status = status_pb2.Status()
    try:
        status.ParseFromString(trailer)
    except DecodeError:
        return plain
    for packed in status.details:
        _take_detail(plain, packed)
    return plain


def _take_detail(into: CallError, packed: any_pb2.Any) -> None:
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    resource = error_details_pb2.ResourceInfo()
    request = error_details_pb2.RequestInfo()
    if packed.Unpack(info):
        if info.domain == ERROR_DOMAIN:
            into.reason, into.metadata = info.reason, dict(info.metadata)
    elif packed.Unpack(bad):
        into.violations = tuple((each.field, each.description) for each in bad.field_violations)
    elif packed.Unpack(retry):
        into.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    elif packed.Unpack(resource):
        into.resource = (resource.resource_type, resource.resource_name)
    elif packed.Unpack(request):
        into.fault_id = request.request_id


class _EventResponse(Protocol):
    @property
    def event(self) -> GenerationEvent: ...


class _EventCall(Protocol):
    def __aiter__(self) -> AsyncIterator[_EventResponse]: ...

    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Reattached:
    """Told when a stream was cut off, or its head ends, and is taken up again at `next_index`."""

    generation_id: str
    next_index: int
    error: CallError


class FleetClient:
    """Connections to one head: callers' and operators' services. Use it as an async context manager."""

    def __init__(
        self,
        address: str = DEFAULT_CALLERS_ADDRESS,
        admin_address: str = DEFAULT_ADMIN_ADDRESS,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reattach_s: float = REATTACH_GRACE_MS / 1000,
        rng: random.Random | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`reattach_s`: how long a stream tries to come back after its connection was lost.

        Raises CredentialsError.
        """
        self.address = address
        self.admin_address = admin_address
        self._reattach_s = reattach_s
        self._rng = rng or random.Random()
        options = _channel_options(connect_timeout_s)
        shown = credentials or Credentials()
        self._channel = shown.channel(address, options)
        self._admin_channel = shown.channel(admin_address, options)
        self.fleet: fleet_service_pb2_grpc.FleetServiceAsyncStub = fleet_service_pb2_grpc.FleetServiceStub(
            self._channel
        )
        self.admin: admin_service_pb2_grpc.AdminServiceAsyncStub = admin_service_pb2_grpc.AdminServiceStub(
            self._admin_channel
        )
        # Health of the callers' listener. Its published types know only blocking channels.
        self.health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()
        await self._admin_channel.close()

    async def ask(self, call: Awaitable[_T]) -> _T:
        """Await a unary call of `fleet`, `admin` or `health`.

        Raises CallError: UnreachableError where nothing listens, NoAnswerError at the timeout.
        """
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _outcome(decode_error(error)) from error

    async def messages(self, call: AsyncIterable[_T], first_within_s: float) -> AsyncGenerator[_T]:
        """What a streaming call of `admin` sends, to its end; the first within that time.

        Raises CallError as `ask` does. Close it when it is not read to its end.
        """
        stream = aiter(call)
        try:
            async with asyncio.timeout(first_within_s):
                first = await anext(stream, None)
            if first is None:
                return
            yield first
            async for message in stream:
                yield message
        except TimeoutError:
            raise NoAnswerError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer") from None
        except grpc.aio.AioRpcError as error:
            raise _outcome(decode_error(error)) from error
        finally:
            if isinstance(call, grpc.aio.Call):
                call.cancel()

    def complete(
        self, request: CompleteRequest, on_reattach: Callable[[Reattached], None] | None = None
    ) -> AsyncGenerator[GenerationEvent]:
        """Events of Complete; see `generate`."""
        return self._follow(self.fleet.Complete(request), AttachGenerationRequest(), on_reattach)

    def generate(
        self, request: GenerateRequest, on_reattach: Callable[[Reattached], None] | None = None
    ) -> AsyncGenerator[GenerationEvent]:
        """Events of Generate, the last one `finished`. Raises CallError.

        When the connection is lost, or the head ends, after `accepted`, the stream is taken up at the next
        index; for that the request needs `disconnect_grace_ms` (REATTACH_GRACE_MS) or on_disconnect CONTINUE.

        The reason DATA_LOSS: the head lost tokens that it gave. Those from `metadata["nextIndex"]` on are to
        be dropped; `attach` goes on there.
        """
        return self._follow(self.fleet.Generate(request), AttachGenerationRequest(), on_reattach)

    def attach(
        self,
        generation_id: str,
        from_index: int = 0,
        on_reattach: Callable[[Reattached], None] | None = None,
        *,
        branch: int = 0,
    ) -> AsyncGenerator[GenerationEvent]:
        """Events of AttachGeneration from an index on; see `generate`. A head that is away is waited for.

        `branch`: that of the newest event the caller has. By it the head knows what it lost of what it gave.
        """
        place = AttachGenerationRequest(generation_id=generation_id, from_index=from_index, branch=branch)
        return self._follow(self.fleet.AttachGeneration(place), place, on_reattach)

    async def _follow(
        self,
        call: _EventCall,
        place: AttachGenerationRequest,
        on_reattach: Callable[[Reattached], None] | None,
    ) -> AsyncGenerator[GenerationEvent]:
        """`place`: what takes the stream up behind all that came; it moves on with it."""
        accepted = finished = False
        give_up_at, delay_s = 0.0, 0.0  # 0 = the connection is well
        while True:
            try:
                async for response in call:
                    event = response.event
                    give_up_at, delay_s = 0.0, 0.0
                    place.branch = event.branch
                    kind = event.WhichOneof("event")
                    if kind == "accepted":
                        place.generation_id = event.accepted.generation_id
                        if accepted:
                            continue
                        accepted = True
                    elif kind == "tokens":
                        place.from_index = event.tokens.first_index + len(event.tokens.token_ids)
                    finished = kind == "finished"
                    yield event
                lost = CallError(grpc.StatusCode.UNAVAILABLE, "the stream ended before the generation did")
            except grpc.aio.AioRpcError as error:
                lost = decode_error(error)
                leaves = place.generation_id and lost.reason == HEAD_DRAINING
                if not finished and not lost.connection_lost and not leaves:
                    raise _outcome(lost) from error
            finally:
                call.cancel()
            if finished:  # and the call has ended with its status, so that the head saw no cancel
                return
            if not place.generation_id:  # there is nothing to come back to
                raise _outcome(lost)
            now = time.monotonic()
            give_up_at = give_up_at or now + self._reattach_s
            if now + delay_s >= give_up_at:
                raise _outcome(lost)
            if delay_s == 0.0 and on_reattach is not None:
                on_reattach(Reattached(place.generation_id, place.from_index, lost))
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))
            delay_s = min(1.0, max(0.1, delay_s * 2))
            call = self.fleet.AttachGeneration(place)


def _channel_options(connect_timeout_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        # gRPC gives each attempt to connect this long: it is the connect timeout, not a wait before the next.
        ("grpc.min_reconnect_backoff_ms", max(1, round(connect_timeout_s * 1000))),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def _outcome(error: CallError) -> CallError:
    """Tell an address where nothing listens, and one that does not answer, from an error of a head."""
    if error.reason:
        return error
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NoAnswerError(error.code, error.message)
    if error.code is not grpc.StatusCode.UNAVAILABLE:
        return error
    kind = NoAnswerError if connection_cause(error.message) == NO_ANSWER else UnreachableError
    return kind(error.code, error.message)
