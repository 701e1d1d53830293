"""Calls of FleetService over gRPC, with as little work as can be (`benchmarks.http2`): a stream per call
(Complete), or all calls of a connection over one stream (Connect).
"""

from __future__ import annotations

import asyncio

from benchmarks.calls import Call
from benchmarks.http2 import Connection, Messages, message, request_headers
from benchmarks.plan import Outcome
from benchmarks.stamps import now_us
from fleet.v1 import fleet_service_pb2 as pb

MODEL = "bench"
_COMPLETE = request_headers("/fleet.v1.FleetService/Complete")
_CONNECT = request_headers("/fleet.v1.FleetService/Connect")
_ENDED = "the stream ended without an end of the answer"
_BROKE = "the connection broke"


def request_of(tokens: int, salt: int) -> pb.CompleteRequest:
    return pb.CompleteRequest(
        session=pb.SessionSpec(model=MODEL),
        token_ids=[3 + salt, 5, 7, 11],
        spec=pb.GenerationSpec(max_new_tokens=tokens),
    )


async def open_connection(address: str, connection: Connection) -> None:
    host, _, port = address.rpartition(":")
    await asyncio.get_running_loop().create_connection(lambda: connection, host, int(port))


class _Completes:
    """One connection with a stream per call."""

    def __init__(self) -> None:
        self.connection = Connection(self, client=True)
        self._calls: dict[int, tuple[Call, Messages]] = {}

    def start(self, call: Call, salt: int) -> None:
        request = message(request_of(call.wanted, salt).SerializeToString())
        self._calls[self.connection.open(_COMPLETE, request, end=True)] = call, Messages()

    def on_headers(self, stream: int, *, end: bool) -> None:
        if end and (found := self._calls.pop(stream, None)):
            found[0].finish(_ENDED, now_us())

    def on_data(self, stream: int, data: bytes, *, end: bool) -> None:
        found = self._calls.get(stream)
        if not found:
            return
        call, messages = found
        now = now_us()
        for payload in messages.feed(data):
            event = pb.CompleteResponse.FromString(payload).event
            tokens = event.tokens
            if tokens.token_ids:
                call.take(tokens.first_index, tokens.token_ids, now)
            elif event.HasField("finished"):
                call.finish(_failure(event.finished), now)
            elif event.HasField("moved"):
                call.moved = True
        if end:
            self.on_headers(stream, end=True)

    def on_reset(self, stream: int) -> None:
        self.on_headers(stream, end=True)

    def on_turn(self) -> None:
        pass

    def on_lost(self) -> None:
        calls, self._calls = self._calls, {}
        for call, _ in calls.values():
            call.finish(_BROKE, now_us())


class _Connected:
    """One connection with one stream for all calls. Calls that begin in one turn leave in one message."""

    def __init__(self, outcome: Outcome) -> None:
        self.connection = Connection(self, client=True)
        self._outcome = outcome
        self._calls: dict[int, Call] = {}
        self._next = 1
        self._messages = Messages()
        self._stream = 0
        self._request = pb.ConnectRequest()

    def begin(self) -> None:
        self._stream = self.connection.open(_CONNECT, b"", end=False)

    def start(self, call: Call, salt: int) -> None:
        self._calls[self._next] = call
        self._request.calls.add(call_id=self._next, complete=request_of(call.wanted, salt))
        self._next += 1

    def on_turn(self) -> None:
        if self._request.calls:
            self._outcome.messages_out += 1
            self._outcome.calls_out += len(self._request.calls)
            self.connection.send(self._stream, message(self._request.SerializeToString()))
            self._request.Clear()

    def on_headers(self, stream: int, *, end: bool) -> None:
        if end:
            self._lose(_ENDED)

    def on_data(self, stream: int, data: bytes, *, end: bool) -> None:
        now = now_us()
        for payload in self._messages.feed(data):
            response = pb.ConnectResponse.FromString(payload)
            for event in response.events:
                if event.event.HasField("moved") and (moved := self._calls.get(event.call_id)):
                    moved.moved = True
            self._take(response.tokens, now)
            if response.replies:
                self._outcome.messages_in += 1
                self._outcome.replies_in += len(response.replies)
            for reply in response.replies:
                if call := self._calls.pop(reply.call_id, None):
                    refused = reply.HasField("error")
                    call.finish(reply.error.message if refused else _failure(reply.finished), now)
        if end:
            self._lose(_ENDED)

    def _take(self, tokens: pb.TokenColumns, now: int) -> None:
        ids = tokens.token_ids
        if not ids:
            return
        at = 0
        for call_id, count, first in zip(tokens.call_ids, tokens.counts, tokens.first_indexes, strict=True):
            if call := self._calls.get(call_id):
                call.take(first, ids[at : at + count], now)
            at += count

    def on_reset(self, stream: int) -> None:
        self._lose(_ENDED)

    def on_lost(self) -> None:
        self._lose(_BROKE)

    def _lose(self, why: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(why, now_us())


def _failure(finished: pb.Finished) -> str:
    return f"{finished.error.reason}: {finished.error.message}" if finished.HasField("error") else ""


class GrpcWay:
    """So many connections, which calls take in turn."""

    def __init__(self, address: str, connections: int, outcome: Outcome, *, connected: bool) -> None:
        self._address = address
        self._lines = [_Connected(outcome) if connected else _Completes() for _ in range(connections)]
        self._next = 0

    async def connect(self) -> None:
        for line in self._lines:
            await open_connection(self._address, line.connection)
            if isinstance(line, _Connected):
                line.begin()
                line.connection.flush()

    def start(self, call: Call, salt: int) -> None:
        line = self._lines[self._next]
        self._next = (self._next + 1) % len(self._lines)
        if line.connection.lost:
            call.finish(_BROKE, now_us())
            return
        line.start(call, salt)

    def flush(self) -> None:
        for line in self._lines:
            line.on_turn()
            line.connection.flush()

    def close(self) -> None:
        for line in self._lines:
            line.connection.close()
