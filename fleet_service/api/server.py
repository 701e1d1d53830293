"""The head's listeners, each a grpc.aio server with health and reflection: callers', operators', nodes'."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleet.v1 import admin_service_pb2, admin_service_pb2_grpc, fleet_service_pb2, fleet_service_pb2_grpc
from fleet_service.addresses import why_not_bound
from fleet_service.api.access import Gate, OpenGate
from fleet_service.api.admin_servicer import AdminServicer
from fleet_service.api.connection import ConnectParts
from fleet_service.api.errors import ErrorTranslator
from fleet_service.api.facade import CallersHead, OperatorsHead
from fleet_service.api.fleet_servicer import FleetServicer
from fleet_service.api.health import HealthServicer
from fleet_service.api.interceptors import EdgeInterceptor, RpcObserver
from fleet_service.api.join_servicer import JOIN_SERVICE, Door, JoinServicer
from fleet_service.api.validate import Limits
from fleet_service.tls import ServerTls

FLEET_SERVICE: str = fleet_service_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name
ADMIN_SERVICE: str = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_MAX_PENDING_CALLS = 100_000
_CORE_LIMIT_FACTOR = 2
"""The library refuses what is over this many times our own limit, without a reason; what lies between gets
REQUEST_TOO_LARGE."""


# A silent node is noticed here as on a link that the head dials.
_JOIN_OPTIONS = {
    "grpc.keepalive_time_ms": 15_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.http2.ping_timeout_ms": 5_000,
}
_MAX_JOIN_CALLS = 16_384
"""A fuse far above what a head can serve; the limits that speak are those of the door."""


class ListenError(Exception):
    """A listener could not be opened; the text says where and why."""


@dataclass(frozen=True, slots=True)
class EdgeParts:
    """What every listener is made with. `new_request_id` names calls that bring no id of their own."""

    log: structlog.typing.FilteringBoundLogger
    observer: RpcObserver
    rng: random.Random
    new_request_id: Callable[[], str]
    limits: Limits = field(default_factory=Limits)
    max_request_bytes: int = 16 * 1024 * 1024
    max_open_calls: int = 16_384
    """Of one connection of Connect."""
    reflection: bool = True
    gate: Gate = field(default_factory=OpenGate)
    """Who may call the callers' and the operators' service."""


class Listener:
    """One listening server. Made in the running loop that serves it."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health: HealthServicer,
        service: str,
        port: int,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stop` ends the calls that do not end by themselves."""
        self._server = server
        self._health = health
        self._service = service
        self.port = port
        self._on_stop = on_stop

    async def start(self) -> None:
        """Take calls from now on."""
        await self._server.start()

    def set_serving(self, serving: bool) -> None:  # noqa: FBT001
        """Whether the service can do its work now; what health checks of its name are told."""
        self._health.set_serving(self._service, serving)

    def drain(self) -> None:
        """Tell health checks NOT_SERVING; calls are still taken."""
        self._health.drain()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, wait up to `grace_s` seconds for those that run, then cancel them."""
        self._health.close()
        self._on_stop()
        await self._server.stop(grace_s)


def callers_listener(
    head: CallersHead, parts: EdgeParts, address: str, tls: ServerTls | None = None
) -> Listener:
    """FleetService on `address` (host:port; port 0 = any). NOT_SERVING until told otherwise.

    Raises ListenError, TlsError.
    """
    server = _server(FLEET_SERVICE, parts)
    connecting = ConnectParts(
        translator=ErrorTranslator(parts.rng),
        observer=parts.observer,
        log=parts.log,
        max_open_calls=parts.max_open_calls,
        max_request_bytes=parts.max_request_bytes,
    )
    servicer = FleetServicer(head, parts.limits, connecting)
    fleet_service_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server)
    return _listen(server, FLEET_SERVICE, address, parts, tls, servicer.end_connections)


def operators_listener(
    head: OperatorsHead, parts: EdgeParts, address: str, tls: ServerTls | None = None
) -> Listener:
    """AdminService on `address` (host:port; port 0 = any). SERVING at once: it is there to repair a fleet.

    Raises ListenError, TlsError.
    """
    server = _server(ADMIN_SERVICE, parts)
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(head, parts.limits), server)
    listener = _listen(server, ADMIN_SERVICE, address, parts, tls)
    listener.set_serving(True)
    return listener


def join_listener(door: Door, parts: EdgeParts, address: str, tls: ServerTls | None = None) -> Listener:
    """JoinService on `address` (host:port; port 0 = any). SERVING at once.

    `parts.max_request_bytes` bounds a node's frames. A call lasts as long as its link, so links are closed
    before the listener is stopped. Raises ListenError, TlsError.
    """
    options = _options(parts.max_request_bytes) | _JOIN_OPTIONS
    server = grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=_MAX_JOIN_CALLS)
    servicer = JoinServicer(door, parts.max_request_bytes, parts.log)
    server.add_generic_rpc_handlers((servicer.handler(),))
    listener = _listen(server, JOIN_SERVICE, address, parts, tls)
    listener.set_serving(True)
    return listener


def _server(service: str, parts: EdgeParts) -> grpc.aio.Server:
    interceptor = EdgeInterceptor(
        services=frozenset({service}),
        translator=ErrorTranslator(parts.rng),
        observer=parts.observer,
        log=parts.log,
        new_request_id=parts.new_request_id,
        max_request_bytes=parts.max_request_bytes,
        gate=parts.gate,
    )
    return grpc.aio.server(
        interceptors=[interceptor], options=list(_options(parts.max_request_bytes).items())
    )


def _options(max_request_bytes: int) -> dict[str, int]:
    return {
        # Off: with it two heads would share a port without a word, each answering half of the calls.
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": _CORE_LIMIT_FACTOR * max_request_bytes,
        "grpc.max_send_message_length": -1,
        # Beyond these gRPC cancels calls by itself, without a word; the head's own limits come first.
        "grpc.server.max_pending_requests": _MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": 2 * _MAX_PENDING_CALLS,
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        # Without this a frozen peer is noticed only after a minute, whatever keepalive says.
        "grpc.http2.ping_timeout_ms": 10_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.min_recv_ping_interval_without_data_ms": 10_000,
    }


def _listen(
    server: grpc.aio.Server,
    service: str,
    address: str,
    parts: EdgeParts,
    tls: ServerTls | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> Listener:
    credentials = tls.credentials() if tls else None
    health = HealthServicer([service])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if parts.reflection:
        reflection.enable_server_reflection((service, _HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    if why := _bind_failure(address):
        raise ListenError(f"cannot listen on {address}: {why}")
    try:
        if credentials:
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    return Listener(server, health, service, port, on_stop)


def _bind_failure(address: str) -> str:
    """Why the system does not let us listen on `address` (host:port); "" when it does.

    gRPC itself says only that it cannot, and the reason in a line of its own on standard error. A name may
    stand for several addresses: one in use is enough to refuse, since its calls would go to somebody else.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return f"{host} is the name of no host"
    failures = [_try_to_bind(family, where) for family, _, _, _, where in found]
    if errno.EADDRINUSE not in failures and None in failures:
        return ""
    code = errno.EADDRINUSE if errno.EADDRINUSE in failures else failures[0] or 0
    return why_not_bound(code)


def _try_to_bind(family: int, where: Any) -> int | None:
    """The error's number; None when it worked. Nothing is left bound."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: what is left of connections that ended does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno
    return None
