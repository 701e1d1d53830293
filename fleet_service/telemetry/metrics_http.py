"""GET /metrics over HTTP, in the head's own event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fleet_service.http_server import (
    ANSWER_S,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    REQUEST_S,
    Answer,
    Exchange,
    HttpError,
    HttpLimits,
    HttpListener,
    HttpListenError,
    only,
)

PATH = "/metrics"
MAX_REQUEST_BYTES = MAX_HEAD_BYTES

Page = Callable[[str], Awaitable[tuple[str, bytes]]]
"""Content type and body for an Accept header."""

MetricsListenError = HttpListenError

__all__ = ["MAX_CONNECTIONS", "MAX_REQUEST_BYTES", "PATH", "MetricsListenError", "MetricsListener", "Page"]


class MetricsListener(HttpListener):
    """Serves `page` at PATH. The times are settings for tests."""

    def __init__(self, page: Page, request_s: float = REQUEST_S, answer_s: float = ANSWER_S) -> None:
        limits = HttpLimits(MAX_CONNECTIONS, request_s=request_s, answer_s=answer_s)
        super().__init__(self._page_at, "metrics", limits)
        self._page = page

    async def _page_at(self, exchange: Exchange) -> Answer:
        request = exchange.request
        if request.path != PATH:
            raise HttpError(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}")
        only(request, "GET", "HEAD")
        content_type, body = await self._page(request.headers.get("accept", ""))
        return Answer(HTTPStatus.OK, content_type, body)
