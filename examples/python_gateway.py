"""An example of a gateway: many sessions over one stream of a fleet head, each at its own reader's pace.

`FleetConnection` is the part to copy: calls and streams of `FleetService.Connect`, and what to do when the
connection breaks. `.venv/bin/python -m examples.python_gateway --help` runs a few answers over it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet.v1.types_pb2 import FinishReason

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

# How long an answer goes on without us, and we try to come back to it.
GRACE_S = 10.0

# What a request may have, in bytes, until the head has told its own limit.
FIRST_MAX_REQUEST_BYTES = 4 * 1024 * 1024

CHANNEL_OPTIONS = [
    # A reply with a long context may have more than gRPC takes by default.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Tell a head that is frozen, or gone in silence; without calls nothing is sent.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
]


class CallRefusedError(Exception):
    """The head refused one call, or ended it. Branch on the reason, never on the message."""

    def __init__(self, error: pb.CallError) -> None:
        super().__init__(f"{error.reason}: {error.message}")
        self.reason = error.reason
        self.error = error


class ConnectionLostError(Exception):
    """The connection ended, and with it every call on it; generations go on for their grace."""


class Stream:
    """Events of one generation, in order; the last is `finished`. Raises as FleetConnection.ask."""

    def __init__(self, connection: FleetConnection, call_id: int, window_tokens: int) -> None:
        self._connection = connection
        self._call_id = call_id
        self._window_tokens = window_tokens
        self._read_tokens = 0
        self._events: deque[pb.GenerationEvent] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._over = False
        self._branch = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerationEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        event = self._events.popleft()
        if self._window_tokens:
            # The head sends no more than the window ahead of us: what we do not read waits there, not here.
            self._read_tokens += len(event.tokens.token_ids)
            if self._read_tokens * 2 >= self._window_tokens and not self._over:
                self._connection.grant(self._call_id, self._read_tokens)
                self._read_tokens = 0
        return event

    def close(self) -> None:
        """Read no more. What becomes of the generation, its on_disconnect says."""
        if not self._over:
            self._over = True
            self._connection.leave(self._call_id)
            self._news.set()

    def take(self, event: pb.GenerationEvent) -> None:
        """For the connection: something came."""
        if event.HasField("accepted"):
            self._branch = event.branch
        event.branch = self._branch
        self._events.append(event)
        self._over = self._over or event.HasField("finished")
        self._news.set()

    def fail(self, error: Exception) -> None:
        """For the connection: there is no more."""
        self._error, self._over = error, True
        self._news.set()


class FleetConnection:
    """Many calls and streams over one stream of the head. Use it as a context manager, in one event loop."""

    def __init__(
        self, fleet: FleetServiceAsyncStub, metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        self._call = fleet.Connect(metadata=grpc.aio.Metadata(*metadata))
        self._asked: dict[int, asyncio.Future[pb.ConnectReply]] = {}
        self._streams: dict[int, Stream] = {}
        # What waits to be sent.
        self._calls: deque[pb.ConnectCall] = deque()
        self._credits: list[pb.ConnectCredit] = []
        self._closed: list[int] = []
        self._max_request_bytes = FIRST_MAX_REQUEST_BYTES
        self._to_write = asyncio.Event()
        self._call_ids = count(1)  # none is used twice
        self._lost: ConnectionLostError | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up: open calls fail, and readers count as gone."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._lose("it was closed")

    async def ask(self, trace: Mapping[str, str] | None = None, **call: Any) -> Any:
        """The reply to one call, named as ConnectCall's fields: `ask(park_session=request)`.

        Raises CallRefusedError, ConnectionLostError.
        """
        call_id = self._send(call, trace)
        reply: asyncio.Future[pb.ConnectReply] = asyncio.get_running_loop().create_future()
        self._asked[call_id] = reply
        answer = await reply
        return getattr(answer, answer.WhichOneof("reply") or "")

    def stream(self, window_tokens: int = 0, trace: Mapping[str, str] | None = None, **call: Any) -> Stream:
        """The events of `generate`, `complete` or `attach_generation`; `window_tokens` 0 = no limit."""
        call_id = self._send(call, trace, window_tokens)
        self._streams[call_id] = Stream(self, call_id, window_tokens)
        return self._streams[call_id]

    def grant(self, call_id: int, tokens: int) -> None:
        """Let a stream send more."""
        self._credits.append(pb.ConnectCredit(call_id=call_id, tokens=tokens))
        self._to_write.set()

    def leave(self, call_id: int) -> None:
        """Read a stream no more."""
        if self._streams.pop(call_id, None) is not None:
            self._closed.append(call_id)
            self._to_write.set()

    def _send(self, call: Mapping[str, Any], trace: Mapping[str, str] | None, window_tokens: int = 0) -> int:
        """Put a call into the next message: what is sent in one turn of the loop leaves together."""
        if self._lost is not None:
            raise self._lost
        call_id = next(self._call_ids)
        message = pb.ConnectCall(call_id=call_id, trace=trace or {}, **call)
        if window_tokens:
            message.credit_tokens = window_tokens
        self._calls.append(message)
        self._to_write.set()
        return call_id

    def _next_request(self) -> pb.ConnectRequest:
        """Calls in their order, as many as fit; credits and closes may mean calls of the same message."""
        request, room_bytes = pb.ConnectRequest(), self._max_request_bytes
        while self._calls:
            room_bytes -= self._calls[0].ByteSize() + 8
            if room_bytes < 0 and request.calls:
                return request
            request.calls.append(self._calls.popleft())
        request.credits.extend(self._credits)
        request.closed_call_ids.extend(self._closed)
        self._credits.clear()
        self._closed.clear()
        return request

    async def _write(self) -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            try:
                while self._calls or self._credits or self._closed:
                    await self._call.write(self._next_request())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader tells why

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
            self._lose("the head ended it")
        except grpc.aio.AioRpcError as error:
            self._lose(f"{error.code().name}: {error.details()}")
        except Exception as error:
            self._lose(f"what it sent could not be read: {error!r}")
            raise

    def _take(self, response: pb.ConnectResponse) -> None:
        """Events, then tokens, then replies."""
        if response.HasField("limits"):
            self._max_request_bytes = response.limits.max_request_bytes
        for event in response.events:
            self._pass_on(event.call_id, event.event)
        columns, start = response.tokens, 0
        for call_id, number, first_index in zip(
            columns.call_ids, columns.counts, columns.first_indexes, strict=True
        ):
            token_ids = columns.token_ids[start : start + number]
            start += number
            tokens = pb.Tokens(first_index=first_index, token_ids=token_ids)
            self._pass_on(call_id, pb.GenerationEvent(tokens=tokens))
        for reply in response.replies:
            self._end(reply)

    def _pass_on(self, call_id: int, event: pb.GenerationEvent) -> None:
        stream = self._streams.get(call_id)
        if stream is not None:  # else it was left, which the head may not have known
            stream.take(event)

    def _end(self, reply: pb.ConnectReply) -> None:
        stream = self._streams.pop(reply.call_id, None)
        if stream is not None and reply.HasField("finished"):
            stream.take(pb.GenerationEvent(finished=reply.finished))
        elif stream is not None:
            stream.fail(CallRefusedError(reply.error))
        else:
            self._answer(reply)

    def _answer(self, reply: pb.ConnectReply) -> None:
        asked = self._asked.pop(reply.call_id, None)
        if asked is None or asked.done():  # who asked has gone
            return
        if reply.HasField("error"):
            asked.set_exception(CallRefusedError(reply.error))
        else:
            asked.set_result(reply)

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = ConnectionLostError(why)
        streams, self._streams = self._streams, {}
        asked, self._asked = self._asked, {}
        for stream in streams.values():
            stream.fail(self._lost)
        for reply in asked.values():
            if not reply.done():
                reply.set_exception(self._lost)


class Gateway:
    """Answers over one connection, which is made anew when it breaks; each answer goes on where it was."""

    def __init__(self, fleet: FleetServiceAsyncStub) -> None:
        self._fleet = fleet
        self._connection: FleetConnection | None = None

    def connection(self) -> FleetConnection:
        """The connection there is, or a new one."""
        if self._connection is None:
            self._connection = FleetConnection(self._fleet)
        return self._connection

    async def drop(self, connection: FleetConnection) -> None:
        """It is broken; whoever comes next makes another."""
        if self._connection is connection:
            self._connection = None
            await connection.close()

    async def answer(self, request: pb.CompleteRequest) -> AsyncIterator[pb.GenerationEvent]:
        """Events of one answer, each token once, whatever becomes of the connection.

        Raises CallRefusedError, ConnectionLostError when the head was not reached for GRACE_S.
        """
        request.spec.disconnect_grace_ms = round(GRACE_S * 1000)
        place = pb.AttachGenerationRequest()
        loop = asyncio.get_running_loop()
        lost_at_s: float | None = None  # None: all is well
        while True:
            connection, pause_s = self.connection(), 0.1
            try:
                if place.generation_id:
                    stream = connection.stream(256, attach_generation=place)
                else:
                    stream = connection.stream(256, complete=request)
                with contextlib.closing(stream):
                    async for event in stream:
                        lost_at_s = None
                        place.branch = event.branch
                        place.generation_id = event.accepted.generation_id or place.generation_id
                        if event.HasField("tokens"):
                            place.from_index = event.tokens.first_index + len(event.tokens.token_ids)
                        yield event
                return
            except ConnectionLostError as error:
                failure: Exception = error
                await self.drop(connection)
            except CallRefusedError as refused:
                if refused.reason != "HEAD_DRAINING":
                    raise
                # What runs on this connection goes on to its end; it is lost when the head has ended.
                failure, pause_s = refused, refused.error.retry_after_ms / 1000
            if lost_at_s is None:
                lost_at_s = loop.time()
                note(f"{failure}; trying to go on at {place.from_index}")
            if loop.time() - lost_at_s > GRACE_S:
                raise failure
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        if self._connection is not None:
            await self.drop(self._connection)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run(options: argparse.Namespace) -> int:
    """Ask for the answers, all at once, and print a line for each that has ended."""
    async with grpc.aio.insecure_channel(options.address, options=CHANNEL_OPTIONS) as channel:
        gateway = Gateway(FleetServiceStub(channel))

        async def ask(number: int) -> bool:
            spec = pb.GenerationSpec(max_new_tokens=options.max_tokens)
            request = pb.CompleteRequest(
                session=pb.SessionSpec(model=options.model),
                token_ids=[*options.prompt, number],
                spec=spec,
                request_id=f"{options.run_id}-{number}" if options.run_id else "",
            )
            tokens: list[int] = []
            node, how = "", "ERROR"
            async for event in gateway.answer(request):
                tokens.extend(event.tokens.token_ids)
                if event.HasField("moved"):
                    note(f"answer {number} moved from {event.moved.from_node} to {event.moved.to_node}")
                node = event.started.node or event.moved.to_node or node
                if event.HasField("finished"):
                    how = FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_")
            print(f"answer {number}: {how}, {len(tokens)} tokens from {node}: {tokens[:6]}...", flush=True)
            return how in {"EOS", "STOP", "LENGTH"}

        try:
            whole = await asyncio.gather(*map(ask, range(options.answers)))
        except (CallRefusedError, ConnectionLostError) as error:
            note(f"failed: {error}")
            return 1
        finally:
            await gateway.close()
    return 0 if all(whole) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.python_gateway", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8455", metavar="HOST:PORT", help="the head")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--answers", type=int, default=8, help="how many to ask for at once")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--run-id", default="", help="makes the answers those of an earlier run of that id")
    parser.set_defaults(prompt=[1, 2, 3])
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
