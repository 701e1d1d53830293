"""A head's page to test against: the real listener over a real head, and requests as bytes or as JSON."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_service.access_file import Entry, add_entry, hash_of, new_token
from fleet_service.api.access import AccessGate, Gate, OpenGate
from fleet_service.api.admin_servicer import AdminServicer
from fleet_service.api.errors import ErrorTranslator
from fleet_service.api.validate import Limits
from fleet_service.domain.access import Caller, Permission
from fleet_service.http_server import HttpLimits
from fleet_service.web.calls import Calls
from fleet_service.web.door import Door
from fleet_service.web.page import LIMITS, Page, SignIn, operators_page
from fleet_service.web.stories import Stories
from tests.e2e.harness import PATIENCE_S, HeadServer, NodeProcess, World

ABOUT = {"fleet_id": "default", "head_id": "head-1", "policy": "load-aware", "version": "9.9"}


@dataclass
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return str(self.json()["error"]["reason"])


@dataclass
class Served:
    """A page that is served at `port`."""

    server: HeadServer
    stories: Stories
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/"

    async def exchange(self, request: bytes, *, half_close: bool = False) -> bytes:
        """All that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            if half_close:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        finally:
            writer.transport.abort()

    async def get(self, path: str, method: str = "GET") -> Reply:
        return taken_apart(
            await self.exchange(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        )

    @asynccontextmanager
    async def feed(self, token: str = "") -> AsyncIterator[Feed]:
        """A stream of what changes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(call_bytes("WatchFleet", {}, token, {}))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"), head
            yield Feed(reader, writer)
        finally:
            writer.transport.abort()

    async def call(self, method: str, body: object = None, token: str = "", **headers: str) -> Reply:
        return taken_apart(await self.exchange(call_bytes(method, body, token, headers)))


class Feed:
    """A WatchFleet stream; `nodes` and `turns` are what it told so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.messages: list[Any] = []
        self.nodes: dict[str, Any] = {}
        self.turns: list[Any] = []

    async def until(self, condition: Callable[[Feed], object]) -> Feed:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self.take(await self._reader.readuntil(b"\n\n"))
        return self

    def take(self, event: bytes) -> None:
        if event == b":\n\n":
            return
        assert event.startswith(b"data: ")
        message = json.loads(event.removeprefix(b"data: "))
        self.messages.append(message)
        self.nodes |= {node["name"]: node for node in message.get("nodes", ())}
        self.turns += message.get("events", ())

    async def end(self) -> None:
        """Read to the end of the stream."""
        async with asyncio.timeout(PATIENCE_S):
            rest = await self._reader.read()
        for event in rest.split(b"\n\n")[:-1]:
            self.take(event + b"\n\n")


def call_bytes(method: str, body: object, token: str, headers: Mapping[str, str]) -> bytes:
    """A call as the page makes it; `headers` (with _ for -) replace its own, "" leaves one out."""
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    lines = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(data))}
    if token:
        lines["authorization"] = f"Bearer {token}"
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    told = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"POST /api/{method} HTTP/1.1\r\n{told}\r\n".encode() + data


def taken_apart(answer: bytes) -> Reply:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert first.startswith("HTTP/1.1 "), answer[:80]
    headers = dict(line.split(": ", 1) for line in lines)
    return Reply(int(first.split(" ")[1]), headers, body)


@asynccontextmanager
async def served(
    world: World,
    *nodes: NodeProcess | str,
    access: Path | None = None,
    sign_in: SignIn = "no",
    kept: int = 2000,
    limits: HttpLimits = LIMITS,
    tls: ssl.SSLContext | None = None,
    port: int = 0,
    **settings: object,
) -> AsyncIterator[Served]:
    """A head over `nodes` and its page, as `fleet serve` puts them together."""
    stories = Stories(kept, time.time)
    server = await world.head(*nodes, observer=stories, **settings)  # type: ignore[arg-type]
    gate: Gate = AccessGate(access, time.monotonic) if access else OpenGate()
    door = Door(gate, None if access else frozenset({"localhost", "127.0.0.1"}))
    servicer = AdminServicer(server.head.operators, Limits())
    calls = Calls(servicer, server.head.sessions, stories, ABOUT, time.time)
    page = Page(door, calls, ErrorTranslator(random.Random(5)), lambda: "req-1", sign_in)
    async with operators_page(page, "127.0.0.1", port, tls, limits) as listener:
        yield Served(server, stories, listener.port, tls=tls is not None)


def allowed(file: Path, name: str, *may: Permission) -> str:
    """The token of one who may; added to `file`."""
    token = new_token()
    add_entry(file, Entry(Caller(name, frozenset(may)), sha256=hash_of(token)))
    return token
