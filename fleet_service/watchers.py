"""Who watches a head from within its process: traces and metrics, as configured."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet_service import __version__
from fleet_service.api.interceptors import NullRpcObserver, RpcObserver
from fleet_service.api.methods import METHODS
from fleet_service.config import FleetConfig
from fleet_service.runtime.observer import FleetObserver, NullObserver
from fleet_service.telemetry.combined import BothFleetObservers, BothRpcObservers
from fleet_service.telemetry.metrics import Metrics
from fleet_service.telemetry.metrics_gauges import HeadLabels
from fleet_service.telemetry.tracing import Tracing, TracingSettings


@asynccontextmanager
async def observers(
    config: FleetConfig, metrics: Metrics | None
) -> AsyncIterator[tuple[RpcObserver, FleetObserver]]:
    """Who is told of calls, and of what the head does, within the block."""
    if not config.telemetry.otlp_endpoint:
        if metrics is None:
            yield NullRpcObserver(), NullObserver()
        else:
            yield metrics.rpc_observer, metrics.fleet_observer
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
        if metrics is None:
            yield tracing.rpc_observer, tracing.fleet_observer
        else:
            yield (
                BothRpcObservers(tracing.rpc_observer, metrics.rpc_observer),
                BothFleetObservers(tracing.fleet_observer, metrics.fleet_observer),
            )
    finally:
        await tracing.close()


def metrics_of(config: FleetConfig) -> Metrics | None:
    """None: nobody wants any."""
    if not config.listen.metrics:
        return None
    labels = HeadLabels(__version__, config.head.fleet_id, config.head.head_id, config.head.policy)
    return Metrics(labels, METHODS, time.monotonic)
