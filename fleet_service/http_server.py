"""As much of an HTTP/1.1 server as the head's pages need, in its own event loop: everything bounded.

One request per connection. The library's own server answers from threads, which would read the head's state
while the loop changes it, and a web framework is a lot for a few pages.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import structlog

from fleet_service.addresses import why_not_bound

MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 16
REQUEST_S = 5.0
"""How long a client may take to send its request."""
ANSWER_S = 10.0
"""How long it may take to fetch the answer, or one piece of a stream."""
PULSE_S = 10.0
PULSE = "http pulse"
"""Name of the tasks that look after streams."""

_LINGER_BYTES = 256 * 1024
_STREAM_BUFFER_BYTES = 64 * 1024
_TEXT = "text/plain; charset=utf-8"
_VERSIONS = ("HTTP/1.0", "HTTP/1.1")

log = structlog.get_logger(__name__)

Headers = tuple[tuple[str, str], ...]


class HttpListenError(Exception):
    """The listener could not be opened; the text says where and why."""


class HttpError(Exception):
    """Ends a request with a status and one line of text that says why."""

    def __init__(self, status: HTTPStatus, text: str, headers: Headers = ()) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Request:
    """What came before the body. Header names are in lower case; one sent twice is joined by commas."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: Headers = ()


class Exchange:
    """One request and the way to answer it. A handler returns an Answer, or streams and returns None."""

    def __init__(
        self,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: HttpLimits,
        headers: Headers,
    ) -> None:
        self.request = request
        self.streams = False
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._headers = headers
        self._gone: asyncio.Task[None] | None = None

    def certificate_names(self) -> Mapping[str, list[str]]:
        """`alternative` and `common` names of the client's certificate, where TLS has verified one."""
        connection = self._writer.get_extra_info("ssl_object")
        shown = connection.getpeercert() if connection is not None else None
        if not shown:
            return {}
        alternative = [name for _kind, name in shown.get("subjectAltName", ())]
        common = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
        return {"alternative": alternative, "common": common}

    async def body(self) -> bytes:
        """The request's body. Raises HttpError when it is too large, late, or of unknown length."""
        headers = self.request.headers
        if "transfer-encoding" in headers:
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "send the body with a Content-Length")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal():
            raise HttpError(HTTPStatus.BAD_REQUEST, "Content-Length is no number")
        if len(length) > 12 or int(length) > self._limits.max_body_bytes:
            text = f"send at most {self._limits.max_body_bytes} bytes"
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        if headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._limits.request_s):
                return await self._reader.readexactly(int(length))
        except TimeoutError:
            raise _late(self._limits) from None
        except (asyncio.IncompleteReadError, OSError):
            raise HttpError(HTTPStatus.BAD_REQUEST, "the body has no end") from None

    async def stream(self, content_type: str, pulse: bytes) -> None:
        """Begin an answer that ends with the connection; when the client leaves, the handler is cancelled.

        `pulse` is sent every PULSE_S, so that both sides notice when the other has vanished.
        """
        self.streams = True
        self._writer.transport.set_write_buffer_limits(high=_STREAM_BUFFER_BYTES)
        serving = asyncio.current_task()
        assert serving is not None  # noqa: S101 - a handler always runs in a task
        self._gone = asyncio.get_running_loop().create_task(self._until_gone(serving, pulse), name=PULSE)
        self._writer.write(_head(HTTPStatus.OK, content_type, self._headers))

    async def write(self, data: bytes) -> None:
        """One piece of a stream. Raises TimeoutError when the client does not read."""
        self._writer.write(data)
        async with asyncio.timeout(self._limits.answer_s):
            await self._writer.drain()

    async def close(self) -> None:
        """The handler is done."""
        if self._gone is not None:
            self._gone.cancel()
            await asyncio.wait({self._gone})

    async def _until_gone(self, serving: asyncio.Task[object], pulse: bytes) -> None:
        there = True
        while there:
            try:
                async with asyncio.timeout(PULSE_S):
                    there = bool(await self._reader.read(16 * 1024))
            except TimeoutError:
                self._writer.write(pulse)
            except OSError:
                there = False
        serving.cancel()


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one listener takes."""

    max_connections: int = MAX_CONNECTIONS
    max_body_bytes: int = 0
    request_s: float = REQUEST_S
    answer_s: float = ANSWER_S


Handler = Callable[[Exchange], Awaitable[Answer | None]]


class HttpListener:
    """Lets `handle` answer. `name` is that of its tasks; `headers` go out with every answer."""

    def __init__(
        self, handle: Handler, name: str, limits: HttpLimits | None = None, headers: Headers = ()
    ) -> None:
        self._handle = handle
        self._name = name
        self._limits = limits or HttpLimits()
        self._headers = headers
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Answer from now on; port 0 = any. Raises HttpListenError."""
        try:
            self._server = await asyncio.start_server(
                self._connected,
                host.strip("[]"),
                port,
                limit=MAX_HEAD_BYTES,
                ssl=tls,
                ssl_handshake_timeout=self._limits.request_s if tls else None,
            )
        except socket.gaierror as error:
            raise HttpListenError(f"cannot listen on {host}:{port}: {host} is the name of no host") from error
        except OSError as error:
            why = why_not_bound(error.errno or 0)
            raise HttpListenError(f"cannot listen on {host}:{port}: {why}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        most = self._limits.max_connections
        if len(self._connections) >= most:
            busy = f"{most} others are being answered; retry later"
            self._write(writer, _refusal(HttpError(HTTPStatus.SERVICE_UNAVAILABLE, busy)))
            writer.close()
            return
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer), name=self._name)
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answered = await self._answer(reader, writer)
            if answered:
                async with asyncio.timeout(self._limits.answer_s):
                    await _finish(reader, writer)
        except (OSError, TimeoutError):
            pass  # a client that left or does not read; there is nobody to tell
        finally:
            # Nothing is kept of an answer that was not fetched in time.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Write the answer; False when there is nobody to answer."""
        with_body = True
        try:
            request = await self._request(reader)
            if request is None:
                return False
            with_body = request.method != "HEAD"
            answer = await self._handled(Exchange(request, reader, writer, self._limits, self._headers))
        except HttpError as error:
            answer = _refusal(error)
        if answer is not None:
            self._write(writer, answer, with_body=with_body)
        return True

    async def _handled(self, exchange: Exchange) -> Answer | None:
        """None when it was streamed. Raises HttpError, OSError, TimeoutError."""
        try:
            return await self._handle(exchange)
        except HttpError:
            raise
        except Exception as error:
            if exchange.streams and isinstance(error, OSError | TimeoutError):
                raise  # its client
            log.exception("http_request_failed", listener=self._name)
            if exchange.streams:
                return None
            raise HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "the head's log says why") from None
        finally:
            await exchange.close()

    async def _request(self, reader: asyncio.StreamReader) -> Request | None:
        """None when nothing came. Raises HttpError."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise _late(self._limits) from None
        except asyncio.LimitOverrunError:
            text = f"send at most {MAX_HEAD_BYTES} bytes"
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text) from None
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise HttpError(HTTPStatus.BAD_REQUEST, "the request has no end") from None
        return _parse(head)

    def _write(self, writer: asyncio.StreamWriter, answer: Answer, *, with_body: bool = True) -> None:
        length = ("Content-Length", str(len(answer.body)))
        headers = (length, *answer.headers, *self._headers)
        writer.write(_head(answer.status, answer.content_type, headers))
        if with_body:
            writer.write(answer.body)


def only(request: Request, *methods: str) -> None:
    """Raises HttpError unless the request is one of `methods`."""
    if request.method not in methods:
        text = f"only {' and '.join(methods)} of {request.path} are answered"
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, text, (("Allow", ", ".join(methods)),))


def _parse(head: bytes) -> Request:
    """Raises HttpError when it is not HTTP/1."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not name or not colon or name.strip() != name:
            raise _no_request()
        key = name.lower()
        headers[key] = f"{headers[key]},{value.strip()}" if key in headers else value.strip()
    if len(words) != 3 or words[2] not in _VERSIONS or not words[0].isalpha():
        raise _no_request()
    path = words[1].partition("?")[0]
    if "://" in path:  # as to a proxy; the host is ours whatever it says
        path = "/" + path.partition("://")[2].partition("/")[2]
    return Request(words[0], path, headers)


def _no_request() -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")


def _late(limits: HttpLimits) -> HttpError:
    return HttpError(HTTPStatus.REQUEST_TIMEOUT, f"no whole request came within {limits.request_s:g} s")


def _refusal(error: HttpError) -> Answer:
    return Answer(error.status, _TEXT, f"{error.status.phrase}: {error}\n".encode(), error.headers)


def _head(status: HTTPStatus, content_type: str, headers: Headers) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n{lines}Connection: close\r\n\r\n"
    ).encode()


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await writer.drain()
    if writer.can_write_eof():  # TLS has no half of a connection to close
        writer.write_eof()
        await _linger(reader)
    writer.close()
    await writer.wait_closed()


async def _linger(reader: asyncio.StreamReader) -> None:
    """Read on until the client closes: closed with something unread, a connection takes its answer along."""
    left = _LINGER_BYTES
    while left > 0 and (more := await reader.read(16 * 1024)):
        left -= len(more)
