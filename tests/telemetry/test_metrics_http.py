"""The metrics' listener against all that a port gets to see: scrapes, garbage, the slow and the many."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fleet_service.telemetry.metrics_http import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    MetricsListener,
    MetricsListenError,
)

BODY = b"# TYPE fleet_example gauge\nfleet_example 1.0\n"
TYPE = "text/plain; version=0.0.4"
PATIENCE_S = 30.0


class Page:
    """What is served; remembers the Accept headers, waits while it is told to, and fails when it is."""

    def __init__(self, body: bytes = BODY) -> None:
        self.body = body
        self.accepted: list[str] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, accept: str) -> tuple[str, bytes]:
        self.accepted.append(accept)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return TYPE, self.body


@asynccontextmanager
async def serving(page: Page, **times: float) -> AsyncIterator[MetricsListener]:
    listener = MetricsListener(page, **times)
    await listener.start("127.0.0.1", 0)
    try:
        yield listener
    finally:
        await listener.stop()


async def exchange(listener: MetricsListener, request: bytes, *, half_close: bool = False) -> bytes:
    """All that comes back for `request`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        writer.write(request)
        if half_close:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.transport.abort()


def status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found, answer[:80]
    return int(found[1])


def taken_apart(answer: bytes) -> tuple[dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    "target", ["/metrics", "/metrics?name[]=fleet_nodes", "http://head:8458/metrics", "/metrics?"]
)
@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
async def test_a_scrape_gets_the_page_and_a_closed_connection(target: str, version: str) -> None:
    async with serving(Page()) as listener:
        answer = await exchange(listener, f"GET {target} {version}\r\nHost: head\r\n\r\n".encode())
        assert status(answer) == 200
        headers, body = taken_apart(answer)
        assert headers == {
            "Content-Type": TYPE,
            "Content-Length": str(len(BODY)),
            "Connection": "close",
        }
        assert body == BODY


async def test_the_accept_header_is_handed_on_whatever_its_case_and_number() -> None:
    page = Page()
    async with serving(page) as listener:
        await exchange(
            listener, b"GET /metrics HTTP/1.1\r\naCCept:text/plain \r\nX: y\r\nAccept: a/b\r\n\r\n"
        )
        await exchange(listener, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert page.accepted == ["text/plain,a/b", ""]


async def test_head_gets_the_same_without_the_page() -> None:
    async with serving(Page()) as listener:
        headers, body = taken_apart(await exchange(listener, b"HEAD /metrics HTTP/1.1\r\n\r\n"))
        assert (headers["Content-Length"], body) == (str(len(BODY)), b"")


@pytest.mark.parametrize(
    "request_bytes, code",
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"POST /admin HTTP/1.1\r\n\r\n", 404),
        (b"GET http://head HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"G\xc3\xa9T /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n: nameless\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nAccept : folded\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)) + b"\r\n\r\n", 400),
    ],
)
async def test_what_is_no_scrape_is_refused_with_a_reason(request_bytes: bytes, code: int) -> None:
    page = Page()
    async with serving(page) as listener:
        answer = await exchange(listener, request_bytes)
        assert status(answer) == code
        headers, body = taken_apart(answer)
        assert headers.get("Allow") == ("GET, HEAD" if code == 405 else None)
        assert int(headers["Content-Length"]) == len(body) > 20
        assert page.accepted == []
        assert status(await exchange(listener, b"GET /metrics HTTP/1.1\r\n\r\n")) == 200


@pytest.mark.parametrize("size", [MAX_REQUEST_BYTES + 1, 200_000])
@pytest.mark.parametrize("ended", [True, False])
async def test_a_request_that_is_too_large_is_told_so(size: int, *, ended: bool) -> None:
    async with serving(Page()) as listener:
        request = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * size + (b"\r\n\r\n" if ended else b"")
        assert status(await exchange(listener, request)) == 431


async def test_half_a_request_is_refused_and_none_is_not_answered() -> None:
    async with serving(Page()) as listener:
        assert status(await exchange(listener, b"GET /metr", half_close=True)) == 400
        assert await exchange(listener, b"", half_close=True) == b""


async def test_a_client_that_closes_its_side_first_gets_its_answer_whole() -> None:
    page = Page(b"x" * 3_000_000)
    async with serving(page) as listener:
        answer = await exchange(listener, b"GET /metrics HTTP/1.1\r\n\r\n", half_close=True)
        assert len(taken_apart(answer)[1]) == 3_000_000


async def test_a_client_that_never_ends_its_request_is_let_go() -> None:
    async with serving(Page(), request_s=0.2) as listener:
        assert status(await exchange(listener, b"GET /metrics HTTP/1.1\r\nHost:")) == 408
        assert status(await exchange(listener, b"")) == 408


async def test_a_client_that_does_not_fetch_its_answer_is_let_go() -> None:
    async with serving(Page(b"x" * 30_000_000), answer_s=0.2) as listener:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", listener.port))
            await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(_until_reset(client), PATIENCE_S)


async def _until_reset(client: socket.socket) -> None:
    """Does not read; writes until it is told that nobody is there."""
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(client, b"x")
        await asyncio.sleep(0.01)


async def test_one_that_waits_holds_up_nobody_and_too_many_are_sent_away() -> None:
    page = Page()
    page.may_answer.clear()
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    async with serving(page) as listener:
        waiting = [asyncio.create_task(exchange(listener, request)) for _ in range(MAX_CONNECTIONS)]
        while len(page.accepted) < MAX_CONNECTIONS:
            await asyncio.sleep(0.01)
        assert status(await exchange(listener, b"")) == 503
        page.may_answer.set()
        assert [status(answer) for answer in await asyncio.gather(*waiting)] == [200] * MAX_CONNECTIONS
        async with asyncio.timeout(PATIENCE_S):
            while status(await exchange(listener, request)) != 200:  # until it has seen them go
                await asyncio.sleep(0.01)


async def test_a_page_that_fails_closes_the_connection_and_nothing_else() -> None:
    page = Page()
    async with serving(page) as listener:
        page.error = RuntimeError("secret")
        answer = await exchange(listener, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status(answer) == 500
        assert b"secret" not in answer
        page.error = None
        assert status(await exchange(listener, b"GET /metrics HTTP/1.1\r\n\r\n")) == 200


async def test_the_end_closes_whoever_is_connected() -> None:
    page = Page()
    page.may_answer.clear()
    listener = MetricsListener(page)
    await listener.start("127.0.0.1", 0)
    asking = asyncio.create_task(exchange(listener, b"GET /metrics HTTP/1.1\r\n\r\n"))
    silent = asyncio.create_task(exchange(listener, b""))
    while not page.accepted:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(listener.stop(), PATIENCE_S)
    await listener.stop()
    ends = await asyncio.gather(asking, silent, return_exceptions=True)
    assert all(end == b"" or isinstance(end, ConnectionResetError) for end in ends)
    with pytest.raises(ConnectionRefusedError):
        await exchange(listener, b"")
    assert [task for task in asyncio.all_tasks() if task.get_name() == "metrics"] == []


async def test_a_port_in_use_and_a_host_that_is_none_are_said() -> None:
    async with serving(Page()) as listener:
        with pytest.raises(MetricsListenError, match=rf"127\.0\.0\.1:{listener.port}: the port is in use"):
            await MetricsListener(Page()).start("127.0.0.1", listener.port)
    with pytest.raises(MetricsListenError, match=r"nowhere\.invalid is the name of no host"):
        await MetricsListener(Page()).start("nowhere.invalid", 0)


async def test_it_listens_on_ipv6_as_well() -> None:
    listener = MetricsListener(Page())
    try:
        await listener.start("[::1]", 0)
    except MetricsListenError as error:
        pytest.skip(f"no IPv6 here: {error}")
    reader, writer = await asyncio.open_connection("::1", listener.port)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status(await reader.read()) == 200
    writer.close()
    await listener.stop()
