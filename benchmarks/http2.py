"""HTTP/2 as far as a load driver and a token source need it, for gRPC over loopback without TLS.

What makes it cheap: headers are written without compression and never read, since what matters is in the
messages; frames of one turn leave in one write. It knows both windows of flow control, so that it can talk to
any peer. Padding, priorities and pushes are not used.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator
from typing import Protocol, cast

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">HBBBI")
_WINDOW = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_LARGEST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65_535
_LARGEST_FRAME_BYTES = 16_384
_RENEW_BYTES = 1 << 24
_INITIAL_WINDOW_SIZE, _MAX_CONCURRENT_STREAMS = 4, 3
_MESSAGE_HEAD = struct.Struct(">BI")


class Events(Protocol):
    """What a connection tells its owner."""

    def on_headers(self, stream: int, *, end: bool) -> None: ...
    def on_data(self, stream: int, data: bytes, *, end: bool) -> None: ...
    def on_reset(self, stream: int) -> None: ...
    def on_turn(self) -> None:
        """All that came at once was told."""

    def on_lost(self) -> None: ...


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def message(payload: bytes) -> bytes:
    """A message as gRPC puts it into DATA."""
    return _MESSAGE_HEAD.pack(0, len(payload)) + payload


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def request_headers(path: str) -> bytes:
    """Literals that change no table: POST, http, the path, and what gRPC asks for."""
    content = b"\x0f\x10" + _text("application/grpc")
    return (
        b"\x83\x86\x04"
        + _text(path)
        + b"\x01"
        + _text("bench")
        + content
        + b"\0"
        + _text("te")
        + _text("trailers")
    )


RESPONSE_HEADERS = b"\x88\x0f\x10" + _text("application/grpc")
OK_TRAILERS = b"\0" + _text("grpc-status") + _text("0")


class Messages:
    """Takes messages out of the DATA of one stream."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= 5:
            upto = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if upto > end:
                break
            yield data[at + 5 : upto]
            at = upto
        self._rest = data[at:]


class Connection(asyncio.Protocol):
    """One connection, of either side. Nothing leaves before `flush`, except after what came was told."""

    def __init__(self, events: Events, *, client: bool) -> None:
        self._events = events
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._rest = b""
        self._awaits_preface = not client
        self._next_stream = 1
        self._send_window = _FIRST_WINDOW
        self._stream_window = _FIRST_WINDOW
        self._windows: dict[int, int] = {}
        self._held: dict[int, deque[tuple[bytes, bool]]] = {}
        self._trailers: dict[int, bytes] = {}
        self._unacknowledged_bytes = 0
        self.lost = False

    # ------------------------------------------------------------------------------------------- sending

    def open(self, path_headers: bytes, payload: bytes, *, end: bool) -> int:
        """Begin a stream (client); its number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] = self._stream_window
        self._out.append(frame(HEADERS, END_HEADERS, stream, path_headers))
        if payload or end:
            self.send(stream, payload, end=end)
        return stream

    def headers(self, stream: int, block: bytes) -> None:
        self._out.append(frame(HEADERS, END_HEADERS, stream, block))

    def send(self, stream: int, payload: bytes, *, end: bool = False) -> None:
        """DATA, as far as the peer's windows let it; the rest follows when they do."""
        held = self._held.get(stream)
        window = self._windows.get(stream, 0)
        size = len(payload)
        if held is None and size <= window and size <= self._send_window and size <= _LARGEST_FRAME_BYTES:
            self._windows[stream] = window - size
            self._send_window -= size
            self._out.append(frame(DATA, END_STREAM if end else 0, stream, payload))
            return
        self._held.setdefault(stream, deque()).append((payload, end))
        self._release(stream)

    def end(self, stream: int, trailers: bytes) -> None:
        """End a stream (server), after all of its DATA."""
        if stream in self._held:
            self._trailers[stream] = trailers
            return
        self._windows.pop(stream, None)
        self._out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream, trailers))

    def reset(self, stream: int) -> None:
        """Give a stream up (CANCEL)."""
        self._forget(stream)
        self._out.append(frame(RST_STREAM, 0, stream, _WINDOW.pack(8)))

    def flush(self) -> None:
        if self._out and self._transport and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def close(self) -> None:
        if self._transport:
            self._transport.abort()

    def _release(self, stream: int) -> None:
        held = self._held[stream]
        while held:
            payload, end = held[0]
            room = min(self._windows.get(stream, 0), self._send_window, _LARGEST_FRAME_BYTES)
            part, left = payload[:room], payload[room:]
            if payload and not part:
                return
            self._windows[stream] -= len(part)
            self._send_window -= len(part)
            self._out.append(frame(DATA, END_STREAM if end and not left else 0, stream, part))
            if left:
                held[0] = (left, end)
            else:
                held.popleft()
        del self._held[stream]
        if stream in self._trailers:
            self.end(stream, self._trailers.pop(stream))

    def _forget(self, stream: int) -> None:
        self._windows.pop(stream, None)
        self._held.pop(stream, None)
        self._trailers.pop(stream, None)

    # ----------------------------------------------------------------------------------------- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        settings = _SETTING.pack(_INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        if not self._client:
            settings += _SETTING.pack(_MAX_CONCURRENT_STREAMS, 1_000_000)
        else:
            self._out.append(PREFACE)
        self._out.append(frame(SETTINGS, 0, 0, settings))
        self._out.append(frame(WINDOW_UPDATE, 0, 0, _WINDOW.pack(_LARGEST_WINDOW - _FIRST_WINDOW)))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._events.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if self._awaits_preface:
            if end < len(PREFACE):
                self._rest = data
                return
            at, self._awaits_preface = len(PREFACE), False
        while end - at >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
            upto = at + 9 + (high << 8) + low
            if upto > end:
                break
            if kind == DATA:
                self._unacknowledged_bytes += upto - at - 9
                self._events.on_data(stream, data[at + 9 : upto], end=bool(flags & END_STREAM))
            else:
                self._control(kind, flags, stream, data[at + 9 : upto])
            at = upto
        self._rest = data[at:]
        if self._unacknowledged_bytes >= _RENEW_BYTES:
            self._out.append(frame(WINDOW_UPDATE, 0, 0, _WINDOW.pack(self._unacknowledged_bytes)))
            self._unacknowledged_bytes = 0
        self._events.on_turn()
        self.flush()

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            if not self._client:
                self._windows[stream] = self._stream_window
            self._events.on_headers(stream, end=bool(flags & END_STREAM))
        elif kind == RST_STREAM:
            self._forget(stream)
            self._events.on_reset(stream)
        elif kind == WINDOW_UPDATE:
            self._widen(stream, _WINDOW.unpack(payload)[0] & _LARGEST_WINDOW)
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._settle(payload)
        elif kind == GOAWAY and self._transport:
            self._transport.close()

    def _settle(self, payload: bytes) -> None:
        for number, value in _SETTING.iter_unpack(payload):
            if number == _INITIAL_WINDOW_SIZE:
                more, self._stream_window = value - self._stream_window, value
                for stream in self._windows:
                    self._windows[stream] += more
        self._out.append(frame(SETTINGS, ACK, 0, b""))
        for held in list(self._held):
            self._release(held)

    def _widen(self, stream: int, more: int) -> None:
        if not stream:
            self._send_window += more
            for held in list(self._held):
                self._release(held)
        elif stream in self._windows:
            self._windows[stream] += more
            if stream in self._held:
                self._release(stream)
