"""Puts a head together out of its parts and runs it: settings in, two listeners out, an orderly end.

Nothing here is kept beyond the run: `serve` can be called again, in the same process and loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from fleet_service import __version__
from fleet_service.access_file import AccessFileError
from fleet_service.addresses import split_address
from fleet_service.api.access import AccessGate, CertificateGate, Gate, OpenGate
from fleet_service.api.admin_servicer import AdminServicer
from fleet_service.api.errors import ErrorTranslator
from fleet_service.api.interceptors import RpcObserver
from fleet_service.api.server import (
    EdgeParts,
    Listener,
    ListenError,
    callers_listener,
    join_listener,
    operators_listener,
)
from fleet_service.api.validate import Limits
from fleet_service.config import FleetConfig
from fleet_service.exposure import warn_of_clear_tokens
from fleet_service.garbage import looked_for_in_pieces
from fleet_service.http_server import HttpListenError
from fleet_service.keeping import Keeping, advice_on, keeping, nothing_is_garbage
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.join import JoinDoor
from fleet_service.links.resolver import SystemResolver
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.head import Head
from fleet_service.runtime.store import StoreError
from fleet_service.telemetry.combined import BothFleetObservers
from fleet_service.telemetry.logging import configure_logging
from fleet_service.telemetry.metrics import Metrics
from fleet_service.telemetry.metrics_endpoint import metrics_endpoint
from fleet_service.telemetry.metrics_http import MetricsListenError
from fleet_service.tls import ServerTls, TlsError
from fleet_service.token import TokenError, read_token
from fleet_service.watchers import metrics_of, observers
from fleet_service.web.calls import Calls
from fleet_service.web.door import Door
from fleet_service.web.page import Page, operators_page, sign_in_by
from fleet_service.web.stories import Stories

_HEALTH_PERIOD_S = 0.5
# How long streams get to carry their last event out, once every generation has ended.
_FLUSH_S = 2.0

_log = structlog.get_logger(__name__)


class StartError(Exception):
    """The head could not start; the text says what to change."""


class CredentialsError(StartError):
    """A file of the fleet token, of those who may call, or of TLS cannot be used."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the head listens, with the ports that were chosen."""

    callers: str
    admin: str
    join: str = ""
    """Empty: no node may dial in."""
    metrics: str = ""
    """Empty: there are none."""
    page: str = ""
    """URL; empty: there is none."""


class StopRequest:
    """Asked once, the head ends in order; asked again, at once."""

    def __init__(self) -> None:
        self.failed = ""
        """Why the head cannot go on, when it is that."""
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        """Ask for the end. Call it in the loop's thread."""
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()


def run(config: FleetConfig, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` gets the one line that says the head is ready.

    Raises StartError.
    """
    configure_logging(sys.stderr, config.log.level, config.log.format)
    warn_of_clear_tokens(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve_until_signal(config, announce))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the head's event loop: uvloop's where it is installed, else None, asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve_until_signal(config: FleetConfig, announce: Callable[[str], None]) -> None:
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)

    def ready(where: Addresses) -> None:
        joining = f", joining nodes on {where.join}" if where.join else ""
        metrics = f", metrics on http://{where.metrics}/metrics" if where.metrics else ""
        page = f", page on {where.page}" if where.page else ""
        announce(f"fleet: serving callers on {where.callers}, admin on {where.admin}{joining}{metrics}{page}")

    await serve(config, ready=ready, stop=stop)


async def serve(config: FleetConfig, *, ready: Callable[[Addresses], None], stop: StopRequest) -> None:
    """Run a head until `stop` is asked; `ready` is called once it takes calls. Raises StartError.

    Ends in order: health says NOT_SERVING, new work is refused, generations may end within
    `shutdown_grace_s`, then the listeners close.
    """
    links = link_settings(config)
    async with AsyncExitStack() as parts:
        metrics = metrics_of(config)
        rpc_observer, fleet_observer = await parts.enter_async_context(observers(config, metrics))
        stories = Stories(config.listen.page_generations_kept, time.time) if config.listen.page else None
        with nothing_is_garbage():
            kept = await parts.enter_async_context(_keeping(config, stop, fleet_observer.committed))
            head = Head(
                config.head.runtime_settings(),
                dialer=FleetDialer(links),
                rng=random.Random(),
                wall_clock=time.time,
                observer=BothFleetObservers(fleet_observer, stories) if stories else fleet_observer,
                resolver=SystemResolver(),
                discovery=config.links.discovery_settings(),
                kept=kept.kept,
            )
        await kept.begin(head.fleet.term, head.branch)
        # Closed last, so that a head that drains can be watched.
        metrics_at = await _serve_metrics(config, metrics, head, parts) if metrics else ""
        page_at = await _serve_page(config, stories, head, parts) if stories else ""
        callers, admin, joining = _listeners(config, head, links, rpc_observer)
        listeners = [callers, admin, *([joining] if joining else [])]
        # However this ends: nothing is left open. After an orderly end there is nothing left to do for them.
        parts.push_async_callback(head.stop, 0.0)
        for listener in listeners:
            parts.push_async_callback(listener.stop, 0.0)
        await head.start(config.nodes)
        callers.set_serving(head.ready)
        for listener in listeners:
            await listener.start()
        async with asyncio.TaskGroup() as tasks:
            garbage = parts.enter_context(looked_for_in_pieces(lambda: head.generations.running_count == 0))
            background = [
                tasks.create_task(_tell_health(head, callers)),
                tasks.create_task(garbage.run(), name="garbage"),
            ]
            where = _addresses(config, callers, admin, joining, metrics_at, page_at)
            _log.info(
                "serving",
                callers=where.callers,
                admin=where.admin,
                nodes=[node.address for node in head.fleet.nodes],
            )
            ready(where)
            await stop.asked.wait()
            for task in background:
                task.cancel()
            await _shut_down(head, listeners, config.shutdown_grace_s, stop)
    if stop.failed:
        raise StartError(stop.failed)


@asynccontextmanager
async def _keeping(
    config: FleetConfig, stop: StopRequest, committed: Callable[[float], None]
) -> AsyncIterator[Keeping]:
    """What outlives the head. Raises StartError; asks for the end when nothing can be kept any more."""

    def broken(error: StoreError) -> None:
        _log.error("store_lost", error=str(error))
        stop.failed = f"the head ends, since it can keep nothing any more: {error}"
        # At once: no stream can end any more.
        stop.ask()
        stop.ask()

    try:
        async with keeping(config.store, config.head.head_id, broken=broken, committed=committed) as kept:
            yield kept
    except StoreError as error:
        raise StartError(f"{error}{advice_on(error, config.store)}") from error


def link_settings(config: FleetConfig) -> LinkSettings:
    """The settings of links, as they take them, with the fleet token read. Raises CredentialsError."""
    links = config.links
    tls = config.node_tls.files()
    try:
        token = read_token(Path(config.token_file)) if config.token_file else None
        if tls:
            tls.check()
    except (TokenError, TlsError) as error:
        raise CredentialsError(str(error)) from error
    return LinkSettings(
        connect_timeout_s=links.connect_timeout_s,
        handshake_timeout_s=links.handshake_timeout_s,
        report_period_s=links.report_period_s,
        command_timeout_s=config.head.command_timeout_s,
        keepalive_time_s=links.keepalive_time_s,
        keepalive_timeout_s=links.keepalive_timeout_s,
        ping_timeout_s=links.ping_timeout_s,
        max_message_bytes=links.max_message_bytes,
        multiplexed=links.multiplexed,
        token=token,
        tls=tls,
    )


async def _serve_metrics(config: FleetConfig, metrics: Metrics, head: Head, parts: AsyncExitStack) -> str:
    """The address they are at, until `parts` close."""
    metrics.watch(head.gauges)
    host, port = split_address(config.listen.metrics)
    try:
        listener = await parts.enter_async_context(metrics_endpoint(metrics, host, port))
    except MetricsListenError as error:
        raise StartError(f"{error}; choose another with --metrics-listen (setting listen.metrics)") from error
    return f"{host}:{listener.port}"


async def _serve_page(config: FleetConfig, stories: Stories, head: Head, parts: AsyncExitStack) -> str:
    """Where the page is, until `parts` close."""
    host, port = split_address(config.listen.page)
    tls = config.admin_tls.files()
    with _listening("--page-listen (setting listen.page)"):
        page = operators_page(
            _page(config, stories, head, tls), host, port, tls.ssl_context() if tls else None
        )
        listener = await parts.enter_async_context(page)
    return f"{'https' if tls else 'http'}://{host}:{listener.port}/"


def _page(config: FleetConfig, stories: Stories, head: Head, tls: ServerTls | None) -> Page:
    gate = _gate(config, tls)
    asked = not isinstance(gate, OpenGate)
    about = {
        "fleet_id": config.head.fleet_id,
        "head_id": config.head.head_id,
        "policy": config.head.policy,
        "version": __version__,
    }
    rng = random.Random()
    servicer = AdminServicer(head.operators, _limits(config))
    return Page(
        Door(gate, None if asked else frozenset({"localhost", split_address(config.listen.page)[0].lower()})),
        Calls(servicer, head.sessions, stories, about, time.time),
        ErrorTranslator(rng),
        lambda: f"req-{rng.getrandbits(64):016x}",
        sign_in_by(access_file=bool(config.access_file), certificates=bool(tls and tls.client_ca_file)),
    )


def _limits(config: FleetConfig) -> Limits:
    return Limits(
        max_request_tokens=config.listen.max_request_tokens,
        max_engine_options_bytes=config.listen.max_engine_options_bytes,
    )


def _listeners(
    config: FleetConfig, head: Head, links: LinkSettings, observer: RpcObserver
) -> tuple[Listener, Listener, Listener | None]:
    """Callers', operators', and, where wanted, that of joining nodes."""
    rng = random.Random()
    parts = EdgeParts(
        log=structlog.get_logger("fleet_service.api"),
        observer=observer,
        rng=rng,
        new_request_id=lambda: f"req-{rng.getrandbits(64):016x}",
        limits=_limits(config),
        max_request_bytes=config.listen.max_message_bytes,
        max_open_calls=config.listen.max_open_calls,
        reflection=config.listen.reflection,
    )
    callers_tls, admin_tls = config.callers_tls.files(), config.admin_tls.files()
    with _listening("--listen (setting listen.callers)"):
        open_to = replace(parts, gate=_gate(config, callers_tls))
        callers = callers_listener(head, open_to, config.listen.callers, callers_tls)
    with _listening("--admin-listen (setting listen.admin)"):
        open_to = replace(parts, gate=_gate(config, admin_tls))
        admin = operators_listener(head.operators, open_to, config.listen.admin, admin_tls)
    if not config.listen.join:
        return callers, admin, None
    door = JoinDoor(head.nodes.desk, head.nodes.introduction, links)
    with _listening("--join-listen (setting listen.join)"):
        return callers, admin, join_listener(door, parts, config.listen.join, config.join_tls.files())


@contextmanager
def _listening(setting: str) -> Iterator[None]:
    """Tells what to change when a listener cannot be opened."""
    try:
        yield
    except (TlsError, AccessFileError) as error:
        raise CredentialsError(str(error)) from error
    except (ListenError, HttpListenError) as error:
        raise StartError(f"{error}; choose another with {setting}") from error


def _gate(config: FleetConfig, tls: ServerTls | None) -> Gate:
    """Who may call a listener: by the access file, else by certificate where one is asked for, else anybody.

    Raises AccessFileError.
    """
    if config.access_file:
        return AccessGate(Path(config.access_file), time.monotonic)
    return CertificateGate() if tls and tls.client_ca_file else OpenGate()


def _addresses(
    config: FleetConfig, callers: Listener, admin: Listener, joining: Listener | None, metrics: str, page: str
) -> Addresses:
    return Addresses(
        page=page,
        metrics=metrics,
        join=f"{split_address(config.listen.join)[0]}:{joining.port}" if joining else "",
        callers=f"{split_address(config.listen.callers)[0]}:{callers.port}",
        admin=f"{split_address(config.listen.admin)[0]}:{admin.port}",
    )


async def _tell_health(head: Head, callers: Listener) -> None:
    """Callers' health is SERVING while at least one node can be used."""
    while True:
        callers.set_serving(head.ready)
        await asyncio.sleep(_HEALTH_PERIOD_S)


async def _shut_down(head: Head, listeners: list[Listener], grace_s: float, stop: StopRequest) -> None:
    _log.info("stopping", grace_s=grace_s)
    for listener in listeners:
        listener.drain()
    in_order = asyncio.create_task(head.stop(grace_s))
    at_once = asyncio.create_task(stop.at_once.wait())
    await asyncio.wait({in_order, at_once}, return_when=asyncio.FIRST_COMPLETED)
    flush_s = _FLUSH_S
    if not in_order.done():
        _log.warning("stopping at once")
        in_order.cancel()
        await asyncio.wait({in_order})
        in_order = asyncio.create_task(head.stop(0.0))
        flush_s = 0.0
    at_once.cancel()
    await in_order
    await asyncio.gather(*(listener.stop(flush_s) for listener in listeners))
    _log.info("stopped")
