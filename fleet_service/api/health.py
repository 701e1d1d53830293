"""grpc.health.v1: Check, Watch and List, with statuses set synchronously.

The library's own servicer sets statuses in coroutines, has no List, and its watches keep a server from
stopping before its grace period ends; this one ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LIVENESS = ""
"""The server as a whole: SERVING from its start until it drains, whatever its nodes do."""

_MAX_WATCHES = 1000


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of the services named, each NOT_SERVING at first, and of the process (LIVENESS)."""

    def __init__(self, services: Iterable[str]) -> None:
        self._statuses = {LIVENESS: SERVING} | dict.fromkeys(services, NOT_SERVING)
        self._changed = asyncio.Event()
        self._draining = False
        self._closed = False
        self._watches = 0

    def set_serving(self, service: str, serving: bool) -> None:  # noqa: FBT001
        """Say whether `service` can be used now. Ignored once draining. KeyError for a service not named."""
        status = SERVING if serving else NOT_SERVING
        if self._statuses[service] != status and not self._draining:
            self._statuses[service] = status
            self._tell()

    def drain(self) -> None:
        """Everything is NOT_SERVING from now on, so that balancers send new work elsewhere."""
        self._draining = True
        for service in self._statuses:
            self._statuses[service] = NOT_SERVING
        self._tell()

    def close(self) -> None:
        """Drain, and end the watches: nothing else ends them, and a server waits for its calls."""
        self._closed = True
        self.drain()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here; List names them")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        # The type stubs are older than this method.
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]
            statuses={
                service: health_pb2.HealthCheckResponse(status=status)
                for service, status in self._statuses.items()
            }
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        if self._watches >= _MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MAX_WATCHES} watches are open already"
            )
        self._watches += 1
        try:
            told = None
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, SERVICE_UNKNOWN)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                elif self._closed:
                    return
                else:
                    await changed.wait()
        finally:
            self._watches -= 1
