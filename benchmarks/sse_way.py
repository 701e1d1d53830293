"""Calls of an OpenAI-style HTTP server: POST /v1/chat/completions, answered as server-sent events.

HTTP/1.1: a connection carries one call at a time and is used again. A connection for each slot is made
beforehand; further ones as they are needed.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

from benchmarks.calls import Call
from benchmarks.stamps import now_us

MODEL = "bench"
_TOKEN = re.compile(rb'"content": ?"(\d+)')
_DONE = b"data: [DONE]"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def request_of(tokens: int, salt: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{3 + salt} 5 7 11"}],
            "max_tokens": tokens,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Body:
    """Takes the body of a chunked response out of what comes; `ended` once all of it has come."""

    __slots__ = ("_left", "_rest", "ended")

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Bytes of the current chunk that have not come; its line end is among them."""
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        parts: list[bytes] = []
        while at < end:
            if self._left:
                upto = min(at + self._left, end)
                # The last two are the chunk's line end.
                parts.append(data[at : min(upto, at + max(self._left - 2, 0))])
                self._left -= upto - at
                at = upto
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].partition(b";")[0] or b"0", 16)
            if not size:
                # Trailers are not used: the empty line that follows ends it.
                if end < line_end + 4:
                    break
                self.ended, at = True, line_end + 4
                break
            at, self._left = line_end + 2, size + 2
        self._rest = data[at:]
        return b"".join(parts)


class Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, way: SseWay) -> None:
        self._way = way
        self._transport: asyncio.Transport | None = None
        self._call: Call | None = None
        self._head = b""
        self._body: Body | None = None
        self._text = b""

    def ask(self, call: Call, request: bytes) -> None:
        self._call, self._body, self._head, self._text = call, None, b"", b""
        if self._transport is None or self._transport.is_closing():
            call.finish("the connection is closed", now_us())
            return
        self._transport.write(request)

    def close(self) -> None:
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._way.forget(self)
        if self._call:
            self._end("the connection broke")

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            return
        now = now_us()
        if self._body is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head.lower():
                self._end(f"{head.splitlines()[0]!r}: {data[:200]!r}")
                self.close()
                return
            self._body = Body()
        text = self._text + self._body.feed(data)
        whole, found, rest = text.rpartition(b"\n\n")
        self._text = rest
        if found:
            token_ids = [int(digits) for digits in _TOKEN.findall(whole)]
            if token_ids:
                call.take(-1, token_ids, now)
        if self._body.ended:
            # An answer that is cut short and yet ends in order is found by its length.
            self._end("")

    def _end(self, failure: str) -> None:
        call, self._call = self._call, None
        if not failure:
            self._way.free(self)
        if call:
            call.finish(failure, now_us())


class SseWay:
    """Connections, of which each call takes a free one."""

    def __init__(self, address: str, connections: int) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._connections = connections
        self._free: list[Line] = []
        self._lines: set[Line] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        for _ in range(self._connections):
            self.free(await self._open())

    async def _open(self) -> Line:
        line = Line(self)
        await asyncio.get_running_loop().create_connection(lambda: line, self._host, self._port)
        self._lines.add(line)
        return line

    def free(self, line: Line) -> None:
        self._free.append(line)

    def forget(self, line: Line) -> None:
        self._lines.discard(line)
        if line in self._free:
            self._free.remove(line)

    def start(self, call: Call, salt: int) -> None:
        request = request_of(call.wanted, salt)
        if self._free:
            self._free.pop().ask(call, request)
            return
        opening = asyncio.ensure_future(self._open_and_ask(call, request))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open_and_ask(self, call: Call, request: bytes) -> None:
        try:
            line = await self._open()
        except OSError as error:
            call.finish(f"no connection: {error}", now_us())
            return
        line.ask(call, request)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        for opening in self._opening:
            opening.cancel()
        for line in list(self._lines):
            line.close()
