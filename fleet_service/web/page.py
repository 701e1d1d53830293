"""The operators' page over HTTP: its files, open to all, and its calls, behind the door."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from typing import Literal

import grpc
import structlog

from fleet_service.api.errors import ErrorTranslator, is_foreseen
from fleet_service.domain.errors import FleetError
from fleet_service.http_server import Answer, Exchange, HttpError, HttpLimits, HttpListener, only
from fleet_service.web.calls import ADMIN_METHODS, OWN_METHODS, Calls, event, is_change, parsed
from fleet_service.web.convert import Json
from fleet_service.web.door import Door

CALLS = "/api/"
LIMITS = HttpLimits(max_connections=64, max_body_bytes=64 * 1024, request_s=5.0, answer_s=20.0)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _CONTENT),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_STATUSES: Mapping[grpc.StatusCode, HTTPStatus] = {
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}

SignIn = Literal["no", "token", "token or certificate"]

log = structlog.get_logger(__name__)


def sign_in_by(*, access_file: bool, certificates: bool) -> SignIn:
    """What the page has to ask of a person: nothing, where a certificate or nobody is enough."""
    if not access_file:
        return "no"
    return "token or certificate" if certificates else "token"


@asynccontextmanager
async def operators_page(
    page: Page, host: str, port: int, tls: ssl.SSLContext | None, limits: HttpLimits = LIMITS
) -> AsyncIterator[HttpListener]:
    """Serves the page on host:port (port 0 = any) for as long as it is entered. Raises HttpListenError."""
    listener = HttpListener(page.answer, "page", limits, _HEADERS)
    await listener.start(host, port, tls)
    try:
        yield listener
    finally:
        await listener.stop()


class Page:
    """Answers requests. `sign_in` tells the page what to ask for; `new_request_id` names calls that fail."""

    def __init__(
        self,
        door: Door,
        calls: Calls,
        translator: ErrorTranslator,
        new_request_id: Callable[[], str],
        sign_in: SignIn,
    ) -> None:
        self._door = door
        self._calls = calls
        self._translator = translator
        self._new_request_id = new_request_id
        # All there is to be had, read once: no path of a request ever names a file.
        self._files = {
            f"/{file.name}": (_TYPES[file.name.rpartition(".")[2]], file.read_bytes())
            for file in files("fleet_service.web").joinpath("static").iterdir()
            if file.name.rpartition(".")[2] in _TYPES
        }
        self._files["/"] = self._files["/index.html"]
        self._files["/page.json"] = ("application/json", json.dumps({"sign_in": sign_in}).encode())

    async def answer(self, exchange: Exchange) -> Answer | None:
        """None when it was streamed. Raises HttpError."""
        request = exchange.request
        if request.path.startswith(CALLS):
            method = request.path.removeprefix(CALLS)
            if method not in (*ADMIN_METHODS, *OWN_METHODS):
                raise HttpError(HTTPStatus.NOT_FOUND, "there is no such call")
            only(request, "POST")
            return await self._call(method, exchange)
        if request.path not in self._files:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such page")
        only(request, "GET", "HEAD")
        content_type, content = self._files[request.path]
        return Answer(HTTPStatus.OK, content_type, content)

    async def _call(self, method: str, exchange: Exchange) -> Answer | None:
        caller = ""
        try:
            admitted = self._door.admit(exchange, method)
            caller = admitted.name
            reply = await self._calls.call(method, parsed(await exchange.body()), exchange, admitted)
        except (HttpError, asyncio.CancelledError):
            raise
        except Exception as error:
            if exchange.streams and isinstance(error, OSError | TimeoutError):
                raise  # its client
            return await self._failed(error, method, caller, exchange)
        if is_change(method):
            log.info("page_call", method=method, caller=caller)
        return None if reply is None else _json(HTTPStatus.OK, reply)

    async def _failed(self, error: Exception, method: str, caller: str, exchange: Exchange) -> Answer | None:
        wire = self._translator.translate(error, self._new_request_id())
        if is_foreseen(error):
            log.info("page_call_refused", method=method, caller=caller, reason=wire.reason.value)
        else:
            log.error("page_call_failed", method=method, message=wire.message, exc_info=error)
        told: Json = {"error": {"reason": wire.reason.value, "message": wire.message}}
        if exchange.streams:
            await exchange.write(event(told))
            return None
        status = _STATUSES.get(wire.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        wants = isinstance(error, FleetError) and status is HTTPStatus.UNAUTHORIZED
        return _json(status, told, (("WWW-Authenticate", "Bearer"),) if wants else ())


def _json(status: HTTPStatus, value: Json, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return Answer(status, "application/json", json.dumps(value, separators=(",", ":")).encode(), headers)
