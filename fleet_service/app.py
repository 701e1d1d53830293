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
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from fleet_service import __version__
from fleet_service.addresses import split_address
from fleet_service.api.interceptors import NullRpcObserver, RpcObserver
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
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.join import JoinDoor
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.head import Head
from fleet_service.runtime.observer import FleetObserver, NullObserver
from fleet_service.telemetry.logging import configure_logging
from fleet_service.telemetry.tracing import Tracing, TracingSettings

_HEALTH_PERIOD_S = 0.5
# How long streams get to carry their last event out, once every generation has ended.
_FLUSH_S = 2.0

_log = structlog.get_logger(__name__)


class StartError(Exception):
    """The head could not start; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the head listens, with the ports that were chosen."""

    callers: str
    admin: str
    join: str = ""
    """Empty: no node may dial in."""


class StopRequest:
    """Asked once, the head ends in order; asked again, at once."""

    def __init__(self) -> None:
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
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_until_signal(config, announce))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
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
        announce(f"fleet: serving callers on {where.callers}, admin on {where.admin}{joining}")

    await serve(config, ready=ready, stop=stop)


async def serve(config: FleetConfig, *, ready: Callable[[Addresses], None], stop: StopRequest) -> None:
    """Run a head until `stop` is asked; `ready` is called once it takes calls. Raises StartError.

    Ends in order: health says NOT_SERVING, new work is refused, generations may end within
    `shutdown_grace_s`, then the listeners close.
    """
    async with AsyncExitStack() as parts:
        rpc_observer, fleet_observer = await parts.enter_async_context(_observers(config))
        head = Head(
            config.head.runtime_settings(),
            dialer=FleetDialer(link_settings(config)),
            rng=random.Random(),
            wall_clock=time.time,
            observer=fleet_observer,
        )
        callers, admin, joining = _listeners(config, head, rpc_observer)
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
            health = tasks.create_task(_tell_health(head, callers))
            where = _addresses(config, callers, admin, joining)
            _log.info("serving", callers=where.callers, admin=where.admin, nodes=list(config.nodes))
            ready(where)
            await stop.asked.wait()
            health.cancel()
            await _shut_down(head, listeners, config.shutdown_grace_s, stop)


def link_settings(config: FleetConfig) -> LinkSettings:
    """The numbers of links, as they take them."""
    links = config.links
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
    )


@asynccontextmanager
async def _observers(config: FleetConfig) -> AsyncIterator[tuple[RpcObserver, FleetObserver]]:
    if not config.telemetry.otlp_endpoint:
        yield NullRpcObserver(), NullObserver()
        return
    tracing = Tracing(
        TracingSettings(
            otlp_endpoint=config.telemetry.otlp_endpoint,
            sampling_ratio=config.telemetry.sampling_ratio,
            instance_id=config.head.head_id,
            version=__version__,
        )
    )
    try:
        yield tracing.rpc_observer, tracing.fleet_observer
    finally:
        await tracing.close()


def _listeners(
    config: FleetConfig, head: Head, observer: RpcObserver
) -> tuple[Listener, Listener, Listener | None]:
    """Callers', operators', and, where wanted, that of joining nodes."""
    rng = random.Random()
    parts = EdgeParts(
        log=structlog.get_logger("fleet_service.api"),
        observer=observer,
        rng=rng,
        new_request_id=lambda: f"req-{rng.getrandbits(64):016x}",
        limits=Limits(
            max_request_tokens=config.listen.max_request_tokens,
            max_engine_options_bytes=config.listen.max_engine_options_bytes,
        ),
        max_request_bytes=config.listen.max_message_bytes,
        reflection=config.listen.reflection,
    )
    try:
        callers = callers_listener(head, parts, config.listen.callers)
    except ListenError as error:
        raise StartError(f"{error}; choose another with --listen (setting listen.callers)") from error
    try:
        admin = operators_listener(head.operators, parts, config.listen.admin)
    except ListenError as error:
        raise StartError(f"{error}; choose another with --admin-listen (setting listen.admin)") from error
    if not config.listen.join:
        return callers, admin, None
    door = JoinDoor(head.nodes.desk, head.nodes.introduction, link_settings(config))
    try:
        return callers, admin, join_listener(door, parts, config.listen.join)
    except ListenError as error:
        raise StartError(f"{error}; choose another with --join-listen (setting listen.join)") from error


def _addresses(
    config: FleetConfig, callers: Listener, admin: Listener, joining: Listener | None
) -> Addresses:
    return Addresses(
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
