"""An OpenAI-style worker for the peers, small and quick: a raw protocol, one step for all running answers.

It answers POST /v1/chat/completions with one token to each server-sent event, and what routers ask of a
worker (health, models).

`python -m benchmarks.mock_worker [--rate N] [--port N]`. The text of each event is a token id that is the
time it was made (`benchmarks.stamps`), in digits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import cast

from benchmarks.source import Engine, Running, tell_first
from benchmarks.sse_way import MODEL
from fleet_service.app import loop_factory

_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"%s",'
    b'"choices":[{"index":0,"delta":{%s},"finish_reason":%s}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_ABOUT = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "bench"}],
    "model_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "status": "ok",
}
"""Answers every other question: what any of the routers looks for."""


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def token_event(digits: bytes, *, first: bool) -> bytes:
    role = b'"role":"assistant",' if first else b""
    return _EVENT % (MODEL.encode(), role + b'"content":"' + digits + b'"', b"null")


_LAST = chunk(_EVENT % (MODEL.encode(), b"", b'"length"')) + chunk(_DONE) + b"0\r\n\r\n"


class Requests:
    """Takes requests, head and body, out of what comes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        self._rest += data
        found = []
        while (at := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[:at]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            upto = at + 4 + length
            if len(self._rest) < upto:
                break
            found.append((head, self._rest[at + 4 : upto]))
            self._rest = self._rest[upto:]
        return found


class Line(asyncio.Protocol):
    """One connection, with one answer at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._requests = Requests()
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.drop(self)

    def data_received(self, data: bytes) -> None:
        for head, body in self._requests.feed(data):
            if head.startswith(b"POST /v1/chat/completions"):
                wanted = json.loads(body)
                self._out.append(_HEAD)
                self._engine.add(
                    Running(self, 0, wanted.get("max_tokens") or wanted["max_completion_tokens"])
                )
            else:
                answer = json.dumps(_ABOUT).encode()
                self._out.append(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(answer), answer)
                )
                self.step_over()

    def give(self, running: Running, token_id: bytes, at: int) -> None:
        self._out.append(chunk(token_event(b"%d" % at, first=not running.index)))
        if running.index + 1 == running.wanted:
            self._out.append(_LAST)

    def step_over(self) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()


async def _serve(rate: float, port: int) -> None:
    engine = Engine(rate, tell_first)
    server = await asyncio.get_running_loop().create_server(lambda: Line(engine), "127.0.0.1", port)
    print(f"mock-worker: on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="tokens a second of each answer; 0 = as fast as it goes"
    )
    parser.add_argument("--port", type=int, default=0, help="0 = a free one")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(given.rate, given.port))


if __name__ == "__main__":
    main()
