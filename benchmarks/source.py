"""A node-like source of tokens, for callers without a head, and for plain proxies to stand before.

It serves FleetService.Complete on one port and .Connect on another, with as little work as can be
(`benchmarks.http2`).

`python -m benchmarks.source [--rate N] [--ports N N]`. One step makes one token for every running call, each
a message of its own (Complete), or all of a connection in one message (Connect). Ids are the time they were
made.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from benchmarks.http2 import OK_TRAILERS, RESPONSE_HEADERS, Connection, Messages, message
from benchmarks.stamps import now_us, stamp
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.types_pb2 import FINISH_REASON_LENGTH
from fleet_service.app import loop_factory

_LONGEST_LATE_S = 0.1
_FINISHED = pb.CompleteResponse(
    event=pb.GenerationEvent(finished=pb.Finished(reason=FINISH_REASON_LENGTH))
).SerializeToString()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def token_message(index: int, token_id: bytes) -> bytes:
    """A CompleteResponse with one token, as gRPC sends it; `token_id` is encoded already."""
    tokens = (b"\x08" + varint(index) if index else b"") + b"\x12" + varint(len(token_id)) + token_id
    event = b"\x1a" + varint(len(tokens)) + tokens
    return message(b"\x0a" + varint(len(event)) + event)


class Running:
    """One call that wants tokens."""

    __slots__ = ("index", "key", "line", "wanted")

    def __init__(self, line: Line, key: int, wanted: int) -> None:
        self.line = line
        self.key = key
        """Its stream, or with Connect its call id."""
        self.wanted = wanted
        self.index = 0


class Line(Protocol):
    """A connection to one who asks."""

    def give(self, running: Running, token_id: bytes, at: int) -> None: ...
    def step_over(self) -> None: ...


class Engine:
    """Makes one token for each running call at a time, `rate` times a second; 0 = as fast as it goes."""

    def __init__(self, rate: float, on_first: Callable[[], None]) -> None:
        self._rate = rate
        self._running: dict[tuple[int, int], Running] = {}
        self._wake = asyncio.Event()
        self._on_first: Callable[[], None] | None = on_first

    def add(self, running: Running) -> None:
        self._running[id(running.line), running.key] = running
        self._wake.set()
        if self._on_first:
            self._on_first()
            self._on_first = None

    def drop(self, line: Line, key: int | None = None) -> None:
        """Forget one call, or all of a connection."""
        keys = [(id(line), key)] if key is not None else [k for k in self._running if k[0] == id(line)]
        for each in keys:
            self._running.pop(each, None)

    async def run(self) -> None:
        due_s = time.monotonic()
        while True:
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                due_s = time.monotonic()
            if self._rate:
                due_s = max(due_s + 1 / self._rate, time.monotonic() - _LONGEST_LATE_S)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._step()

    def _step(self) -> None:
        at = stamp(now_us())
        token_id = varint(at)
        lines: dict[int, Line] = {}
        for key, running in list(self._running.items()):
            line = running.line
            lines[key[0]] = line
            line.give(running, token_id, at)
            running.index += 1
            if running.index == running.wanted:
                self._running.pop(key, None)
        for line in lines.values():
            line.step_over()


class CompleteLine:
    """A connection with a stream per call."""

    def __init__(self, engine: Engine) -> None:
        self.connection = Connection(self, client=False)
        self._engine = engine
        self._asked: dict[int, Messages] = {}

    def on_headers(self, stream: int, *, end: bool) -> None:
        self._asked[stream] = Messages()
        self.connection.headers(stream, RESPONSE_HEADERS)

    def on_data(self, stream: int, data: bytes, *, end: bool) -> None:
        for payload in self._asked[stream].feed(data):
            wanted = pb.CompleteRequest.FromString(payload).spec.max_new_tokens
            self._engine.add(Running(self, stream, wanted))
        if end:
            del self._asked[stream]

    def give(self, running: Running, token_id: bytes, at: int) -> None:
        self.connection.send(running.key, token_message(running.index, token_id))
        if running.index + 1 == running.wanted:
            self.connection.send(running.key, message(_FINISHED))
            self.connection.end(running.key, OK_TRAILERS)

    def step_over(self) -> None:
        self.connection.flush()

    def on_reset(self, stream: int) -> None:
        self._engine.drop(self, stream)

    def on_turn(self) -> None:
        pass

    def on_lost(self) -> None:
        self._engine.drop(self)


class ConnectLine:
    """A connection with one stream for all calls."""

    def __init__(self, engine: Engine) -> None:
        self.connection = Connection(self, client=False)
        self._engine = engine
        self._messages = Messages()
        self._stream = 0
        self._next = pb.ConnectResponse()

    def on_headers(self, stream: int, *, end: bool) -> None:
        self._stream = stream
        self.connection.headers(stream, RESPONSE_HEADERS)
        limits = pb.ConnectLimits(max_open_calls=1_000_000, max_request_bytes=1 << 24)
        self.connection.send(stream, message(pb.ConnectResponse(limits=limits).SerializeToString()))

    def on_data(self, stream: int, data: bytes, *, end: bool) -> None:
        for payload in self._messages.feed(data):
            request = pb.ConnectRequest.FromString(payload)
            for call in request.calls:
                self._engine.add(Running(self, call.call_id, call.complete.spec.max_new_tokens))
            for call_id in request.closed_call_ids:
                self._engine.drop(self, call_id)
        if end:
            self.connection.end(stream, OK_TRAILERS)

    def give(self, running: Running, token_id: bytes, at: int) -> None:
        columns = self._next.tokens
        columns.call_ids.append(running.key)
        columns.counts.append(1)
        columns.first_indexes.append(running.index)
        columns.token_ids.append(at)
        if running.index + 1 == running.wanted:
            self._next.replies.add(call_id=running.key, finished=pb.Finished(reason=FINISH_REASON_LENGTH))

    def step_over(self) -> None:
        self.connection.send(self._stream, message(self._next.SerializeToString()))
        self._next.Clear()
        self.connection.flush()

    def on_reset(self, stream: int) -> None:
        self._engine.drop(self)

    def on_turn(self) -> None:
        pass

    def on_lost(self) -> None:
        self._engine.drop(self)


def tell_first() -> None:
    """For those who wait until a source that was started again is used."""
    print(f"first call at {time.monotonic():.6f}", flush=True)


async def _serve(rate: float, ports: tuple[int, int]) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(rate, tell_first)
    complete = await loop.create_server(lambda: CompleteLine(engine).connection, "127.0.0.1", ports[0])
    connect = await loop.create_server(lambda: ConnectLine(engine).connection, "127.0.0.1", ports[1])
    ports = complete.sockets[0].getsockname()[1], connect.sockets[0].getsockname()[1]
    print(f"source: Complete on 127.0.0.1:{ports[0]} , Connect on 127.0.0.1:{ports[1]}", flush=True)
    await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="tokens a second of each call; 0 = as fast as it goes"
    )
    parser.add_argument(
        "--ports", type=int, nargs=2, default=(0, 0), help="of Complete and Connect; 0 = free ones"
    )
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(given.rate, (given.ports[0], given.ports[1])))


if __name__ == "__main__":
    main()
