"""The page's listener against all that a port gets to see: files, garbage, the slow and the large."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path

import pytest

from fleet_service.http_server import MAX_HEAD_BYTES, PULSE, Answer, Exchange, HttpLimits, HttpListener
from fleet_service.web.calls import ADMIN_METHODS, OWN_METHODS
from tests.e2e.harness import PATIENCE_S, World
from tests.web.served import Reply, call_bytes, served, taken_apart

STATIC = sorted(file.name for file in files("fleet_service.web").joinpath("static").iterdir())


def guarded(reply: Reply) -> None:
    """The browser is told to load nothing from elsewhere and to guess nothing."""
    content = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
    assert content["default-src"] == "'none'"
    assert {content["script-src"], content["style-src"], content["connect-src"]} == {"'self'"}
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Cache-Control"] == "no-store"


async def test_the_files_are_served_with_their_types_and_nothing_from_elsewhere(world: World) -> None:
    async with served(world) as page:
        for name in ["", *STATIC, "page.json"]:
            reply = await page.get(f"/{name}")
            assert reply.status == 200
            assert int(reply.headers["Content-Length"]) == len(reply.body) > 0
            guarded(reply)
            for elsewhere in (b"https://", b"http://", b"innerHTML", b"eval("):
                assert elsewhere not in reply.body.replace(b"http://www.w3.org/2000/svg", b""), name
        assert (await page.get("/")).headers["Content-Type"] == "text/html; charset=utf-8"
        assert (await page.get("/page.js")).headers["Content-Type"] == "text/javascript; charset=utf-8"
        assert (await page.get("/page.json")).json() == {"sign_in": "no"}


def test_the_page_is_no_heavier_than_it_needs() -> None:
    found = [file for file in Path("fleet_service/web/static").iterdir() if file.is_file()]
    assert len(found) == len(STATIC)
    assert sum(file.stat().st_size for file in found) < 60_000
    assert sum(len(file.read_text().splitlines()) for file in found) <= 1050


async def test_head_gets_the_same_without_the_body(world: World) -> None:
    async with served(world) as page:
        whole, head = await page.get("/page.css"), await page.get("/page.css", "HEAD")
        assert head.status == 200
        assert (head.headers, head.body) == (whole.headers, b"")
        assert (await page.get("/nothing", "HEAD")).body == b""


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/static/page.js",
        "/../calls.py",
        "/..%2f..%2fapp.py",
        "/%2e%2e/calls.py",
        "//etc/passwd",
        "/page.js/",
        "/page.js%00",
        "/./page.js",
        "/PAGE.JS",
        "/api/",
        "/api/GetNode",
        "/api/RemoveNode",
        "/api/../page.js",
        "/api/__class__",
    ],
)
async def test_what_is_not_there_is_not_found(world: World, path: str) -> None:
    async with served(world) as page:
        for method in ("GET", "POST"):
            reply = await page.get(path, method)
            assert reply.status == 404
            guarded(reply)


async def test_files_are_only_read_and_calls_only_posted(world: World) -> None:
    async with served(world) as page:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            reply = await page.get("/page.js", method)
            assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
        for call in (*ADMIN_METHODS, *OWN_METHODS):
            for method in ("GET", "HEAD", "OPTIONS", "PUT"):
                reply = await page.get(f"/api/{call}", method)
                assert (reply.status, reply.headers["Allow"]) == (405, "POST")
                assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize(
    "garbage, code",
    [
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : spaced\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)) + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 3000 + b"\r\n", 431),
    ],
)
async def test_garbage_and_too_much_is_refused_and_hurts_nobody(
    world: World, garbage: bytes, code: int
) -> None:
    async with served(world) as page:
        reply = taken_apart(await page.exchange(garbage))
        assert reply.status == code
        guarded(reply)
        assert (await page.get("/")).status == 200


@pytest.mark.parametrize(
    "body, headers, code",
    [
        (b"", {"content_length": str(64 * 1024 + 1)}, 413),
        (b"", {"content_length": "9" * 400}, 413),
        (b"{}", {"content_length": "-1"}, 400),
        (b"{}", {"content_length": "2, 2"}, 400),
        (b"{}", {"content_length": "\u0662".encode().decode("latin-1")}, 400),
        (b"2\r\n{}\r\n0\r\n\r\n", {"transfer_encoding": "chunked"}, 411),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"[" * 60_000, {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"unheard_of": 1}', {}, 400),
        (b'{"text": 5}', {}, 400),
        (b'{"state": "ASLEEP"}', {}, 400),
        (b'{"text": "%s"}' % (b"x" * 300), {}, 400),
    ],
)
async def test_a_body_that_makes_no_sense_is_refused(
    world: World, body: bytes, headers: dict[str, str], code: int
) -> None:
    async with served(world) as page:
        reply = await page.call("ListSessions", body, **headers)
        assert reply.status == code
        assert (await page.call("ListSessions")).status == 200


async def test_a_body_that_never_comes_is_not_waited_for(world: World) -> None:
    async with served(world, limits=HttpLimits(max_body_bytes=1000, request_s=0.2)) as page:
        request = call_bytes("ListSessions", {}, "", {"content_length": "500"})
        assert taken_apart(await page.exchange(request)).status == 408
        assert taken_apart(await page.exchange(request, half_close=True)).status == 400
        assert taken_apart(await page.exchange(b"GET / HT")).status == 408


async def test_a_client_that_waits_for_leave_to_send_gets_it(world: World) -> None:
    async with served(world) as page:
        request = call_bytes("GetAbout", {}, "", {"expect": "100-continue"})
        answer = await page.exchange(request)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


class Flood:
    """A handler that streams without end; tells how it ended and how much lay unsent."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.most_unsent = 0

    async def __call__(self, exchange: Exchange) -> Answer | None:
        if exchange.request.path == "/ping":
            return Answer(HTTPStatus.OK, "text/plain", b"pong")
        await exchange.stream("text/event-stream", b":\n\n")
        try:
            while True:
                await exchange.write(b"x" * 100_000)
                unsent = exchange._writer.transport.get_write_buffer_size()
                self.most_unsent = max(self.most_unsent, unsent)
                await asyncio.sleep(0)
        except BaseException as error:
            self.ended.set_result(type(error).__name__)
            raise


async def test_a_stream_that_nobody_reads_is_ended_and_little_kept_for_it() -> None:
    flood = Flood()
    listener = HttpListener(flood, "flood", HttpLimits(answer_s=0.3))
    await listener.start("127.0.0.1", 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", listener.port))
        await loop.sock_sendall(client, b"GET /flood HTTP/1.1\r\n\r\n")
        # It holds up nobody else meanwhile.
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET /ping HTTP/1.1\r\n\r\n")
        assert (await reader.read()).endswith(b"pong")
        writer.close()
        assert await asyncio.wait_for(flood.ended, PATIENCE_S) == "TimeoutError"
    assert flood.most_unsent <= 64 * 1024 + 100_000
    await listener.stop()


async def test_a_reader_that_leaves_ends_its_stream_at_once() -> None:
    flood = Flood()
    listener = HttpListener(flood, "flood")
    await listener.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(b"GET /flood HTTP/1.1\r\n\r\n")
    await reader.read(1000)
    writer.transport.abort()
    ended = await asyncio.wait_for(flood.ended, PATIENCE_S)
    assert ended in ("CancelledError", "ConnectionResetError", "BrokenPipeError")
    await listener.stop()
    assert [task for task in asyncio.all_tasks() if task.get_name() in (PULSE, "flood")] == []
