"""One Connect stream: takes in the calls of many sessions, and sends what is ready for all of them together.

Two tasks for each connection, whatever it carries: one reads calls, one writes what has gathered since its
last message. Calls that are not streams, and the beginnings of streams, have a task each while they last; a
running stream has none (api/connected_streams.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog

from fleet.v1 import fleet_service_pb2 as fleet
from fleet_service.api.connected_streams import ConnectedStream, Outbound
from fleet_service.api.errors import ErrorTranslator, WireError, call_error, is_foreseen
from fleet_service.api.facade import Call, DuplexCall, StreamStart
from fleet_service.api.interceptors import RpcObserver, RpcTrace
from fleet_service.domain.access import Caller
from fleet_service.domain.errors import FleetError, Reason, invalid

_SERVICE: Final = "fleet.v1.FleetService"
_NAMES_A_SESSION: Final = frozenset(
    {
        "create_session",
        "get_session",
        "append_tokens",
        "generate",
        "park_session",
        "resume_session",
        "finish_session",
    }
)
_CALLS_IN_ONE_STEP: Final = 64
"""Calls of one message that are begun before others have their turn."""
_PARTS_IN_ONE_STEP: Final = 512
"""Closes and credits, which cost little."""
_MAX_WAITING: Final = 1024
"""Calls under way that are no streams, and replies not sent yet, with which reading goes on."""
_MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""Of replies not sent yet, with which reading goes on."""


@dataclass(frozen=True, slots=True)
class Method:
    """How a call is served: `serve` gives the message of its reply, or where its stream begins."""

    name: str
    serve: Callable[[Any, Call], Awaitable[Any]]
    streams: bool = False


@dataclass(frozen=True, slots=True)
class ConnectParts:
    """What every connection is made with."""

    translator: ErrorTranslator
    observer: RpcObserver
    log: structlog.typing.FilteringBoundLogger
    max_open_calls: int
    max_request_bytes: int


class _ConnectedCall:
    """One call of a connection, as a servicer's method sees it, until its reply is in line."""

    __slots__ = ("_connection", "_trace", "call_id", "credit_tokens", "method", "over", "stream")

    def __init__(
        self, connection: Connection, call_id: int, method: Method, credit_tokens: int | None, trace: RpcTrace
    ) -> None:
        self.call_id = call_id
        self.method = method
        self.credit_tokens = credit_tokens
        self.stream: ConnectedStream | None = None
        self.over = False
        self._connection = connection
        self._trace = trace

    @property
    def caller(self) -> Caller:
        return self._connection.caller

    @property
    def trace(self) -> object | None:
        return self._trace.context

    async def write(self, message: Any) -> None:
        raise RuntimeError("a call of a connection writes no messages of its own")

    def ended(self, code: str, reason: str = "") -> None:
        self.over = True
        self._trace.ended(code, reason)


async def _in_turns(parts: Sequence[Any], take: Callable[[Any], None]) -> None:
    """Take each, and let others have their turn between: a message may hold millions of them."""
    for number, part in enumerate(parts, start=1):
        take(part)
        if number % _PARTS_IN_ONE_STEP == 0:
            await asyncio.sleep(0)


class Connection:
    """Serves one Connect call. `end` is for the head that stops."""

    def __init__(self, call: DuplexCall, methods: Mapping[str, Method], parts: ConnectParts) -> None:
        """`methods` by the field names of ConnectCall."""
        self._call = call
        self._methods = methods
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _ConnectedCall] = {}
        self._tasks: dict[asyncio.Task[None], _ConnectedCall] = {}
        self._last_of: dict[str, asyncio.Task[None]] = {}
        """The last task of each session that a call under way names."""
        limits = fleet.ConnectLimits(
            max_open_calls=parts.max_open_calls, max_request_bytes=parts.max_request_bytes
        )
        self._out = Outbound(limits, self._stream_over, lambda: not self._calls)
        self._room = asyncio.Event()
        self._large_replies = asyncio.Lock()
        self._stopping = False

    @property
    def caller(self) -> Caller:
        return self._call.caller

    def end(self) -> None:
        """The head stops: what is ready still goes out, then the call ends with HEAD_DRAINING."""
        self._stopping = True
        self._out.finish()

    async def serve(self) -> None:
        """Until the caller has ended its side and all its calls are over. Raises FleetError."""
        reading = self._loop.create_task(self._read(), name="reader of a connection")
        try:
            while (response := await self._out.next_message()) is not None:
                await self._call.write(response)
                self._room.set()
            if self._stopping:
                raise FleetError(
                    Reason.HEAD_DRAINING,
                    "the head has shut down; connect again, elsewhere if you can",
                    retry_after_s=1.0,
                )
            await reading
        finally:
            reading.cancel()
            self._let_go()
            await asyncio.wait({reading})

    def _let_go(self) -> None:
        """The caller is gone, or done: readers leave, what is under way is given up."""
        for task in self._tasks:
            task.cancel()
        for call in list(self._calls.values()):
            if call.stream is not None:
                call.stream.close()
            if not call.over:
                call.ended("CANCELLED")
        self._calls.clear()

    # What comes in

    async def _read(self) -> None:
        try:
            while (read := await self._call.read()) is not None:
                request, refusal = read
                await self._begin_all(request.calls, refusal)
                await _in_turns(request.credits, self._grant)
                await _in_turns(request.closed_call_ids, self._close)
                del read, request  # it may be large, and the next one far away
            while self._tasks:
                await asyncio.wait(set(self._tasks))
            for call in self._calls.values():
                if call.stream is not None:
                    call.stream.grant_all()  # no more credit can come
            self._out.finish_when_idle()
        except BaseException:
            self._let_go()  # now: the writer may be held up by a caller that does not read
            self._out.abort()  # the writer's task tells why
            raise

    async def _begin_all(self, calls: Sequence[fleet.ConnectCall], refusal: FleetError | None) -> None:
        limit = self._parts.max_open_calls
        if len(calls) > limit:
            raise invalid("calls", f"are {len(calls)} in one message; at most {limit} may be open")
        for number, message in enumerate(calls):
            if number and number % _CALLS_IN_ONE_STEP == 0:
                await asyncio.sleep(0)
            while not self._may_read_on():
                await self._more_room()
            self._begin(message, refusal)

    def _may_read_on(self) -> bool:
        out = self._out
        few = len(self._tasks) + out.replies_waiting < _MAX_WAITING
        return few and out.reply_bytes_waiting < _MAX_REPLY_BYTES

    async def _more_room(self) -> None:
        """Until a reply has gone out, or a call that is no stream is over."""
        self._room.clear()
        await self._room.wait()

    def _close(self, call_id: int) -> None:
        """A stream that is read no more; its caller knows nothing of it any longer."""
        call = self._calls.get(call_id)
        if call is None or not call.method.streams:
            return
        del self._calls[call_id]
        if call.stream is not None:
            self._out.forget(call.stream)
            call.stream.close()
        call.ended("CANCELLED")

    def _grant(self, credit: fleet.ConnectCredit) -> None:
        call = self._calls.get(credit.call_id)
        if call is None:
            return
        if call.stream is not None:
            call.stream.grant(credit.tokens)
        elif call.credit_tokens is not None:
            call.credit_tokens += credit.tokens

    def _begin(self, message: fleet.ConnectCall, refusal: FleetError | None) -> None:
        """Raises INVALID_FIELD for what makes it impossible to answer this call alone."""
        call_id = message.call_id
        if call_id in self._calls:
            raise invalid("calls.call_id", f"{call_id} is the id of a call that is not over")
        kind = message.WhichOneof("call")
        if kind is None:
            wire = self._translated(
                invalid("calls.call", "is missing, or of a kind that this head does not know"),
                call_id,
                "Connect",
            )
            self._out.reply(call_id, "error", call_error(wire))
            return
        method = self._methods[kind]
        trace = self._parts.observer.rpc_started(f"{_SERVICE}/{method.name}", tuple(message.trace.items()))
        credit_tokens = message.credit_tokens if message.HasField("credit_tokens") else None
        call = _ConnectedCall(self, call_id, method, credit_tokens, trace)
        if refusal is None and len(self._calls) >= self._parts.max_open_calls:
            refusal = self._too_many()
        if refusal is not None:
            self._refuse(call, refusal)
            return
        self._calls[call_id] = call
        self._start(call, getattr(message, kind), kind)

    def _too_many(self) -> FleetError:
        limit = self._parts.max_open_calls
        return FleetError(
            Reason.LIMIT_EXCEEDED,
            f"{limit} calls are open on this connection, the most it may have; wait for some to end",
            metadata={"limit": "max_open_calls", "value": str(limit)},
            retry_after_s=1.0,
        )

    def _start(self, call: _ConnectedCall, request: Any, kind: str) -> None:
        session_id = request.session_id if kind in _NAMES_A_SESSION else ""
        before = self._last_of.get(session_id) if session_id else None
        task = self._loop.create_task(self._serve_one(call, request, kind, before))
        self._tasks[task] = call
        if session_id:
            self._last_of[session_id] = task
        task.add_done_callback(partial(self._done, session_id))

    def _done(self, session_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if session_id and self._last_of.get(session_id) is task:
            del self._last_of[session_id]
        self._room.set()

    async def _serve_one(
        self, call: _ConnectedCall, request: Any, kind: str, before: asyncio.Task[None] | None
    ) -> None:
        """Answer one call, or begin its stream. Nobody waits for an answer to one that is over."""
        if before is not None:
            await asyncio.wait({before})
        try:
            if kind == "get_session" and request.include_token_ids:
                await self._reply_large(call, request, kind)
                return
            answer = await call.method.serve(request, call)
            if isinstance(answer, StreamStart):
                self._started(call, answer)
            elif not call.over:
                self._reply(call, kind, answer)
        except (Exception, asyncio.CancelledError) as error:  # it costs this call, and no other
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if not call.over:
                self._refuse(call, error)

    async def _reply_large(self, call: _ConnectedCall, request: Any, kind: str) -> None:
        """One at a time, once there is room: it may have megabytes, and perhaps nobody reads."""
        async with self._large_replies:
            while self._out.reply_bytes_waiting >= _MAX_REPLY_BYTES:
                await self._more_room()
            answer = await call.method.serve(request, call)
            if not call.over:
                self._reply(call, kind, answer)

    def _started(self, call: _ConnectedCall, start: StreamStart) -> None:
        """Follow the generation from now on. Raises FleetError; whoever begins it may have gone meanwhile."""
        stream = ConnectedStream(call.call_id, call.credit_tokens, self._out)
        stream.follow(start)
        if call.over:
            stream.close()
            return
        call.stream = stream
        self._out.mark(stream)

    # What goes out

    def _reply(self, call: _ConnectedCall, kind: str, answer: Any) -> None:
        self._out.reply(call.call_id, kind, answer)
        self._answered(call)

    def _refuse(self, call: _ConnectedCall, error: BaseException) -> None:
        if self._calls.get(call.call_id) is call:
            del self._calls[call.call_id]
        wire = self._translated(error, call.call_id, call.method.name)
        self._out.reply(call.call_id, "error", call_error(wire))
        call.ended(wire.code.name, wire.reason.value)

    def _stream_over(self, stream: ConnectedStream, error: Exception | None) -> None:
        """Its end is in a message that goes out next; with an error, that is still to be said."""
        call = self._calls.get(stream.call_id)
        if call is None or call.stream is not stream:
            return
        if error is not None:
            self._refuse(call, error)
        else:
            self._answered(call)

    def _answered(self, call: _ConnectedCall) -> None:
        self._calls.pop(call.call_id, None)
        call.ended("OK")
        self._parts.log.debug("call answered", method=call.method.name, caller=self.caller.name)

    def _translated(self, error: BaseException, call_id: int, method: str) -> WireError:
        request_id = f"{self._call.request_id}/{call_id}"
        wire = self._parts.translator.translate(error, request_id)
        log = self._parts.log.bind(
            method=f"{_SERVICE}/{method}", request_id=request_id, code=wire.code.name, caller=self.caller.name
        )
        if is_foreseen(error):
            log.info("call refused", reason=wire.reason.value, message=wire.message)
        else:
            log.error("call failed", exc_info=error)
        return wire
