"""The metrics endpoint as a part of a head: the listener, and what measures while it is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet_service.telemetry.metrics import Metrics
from fleet_service.telemetry.metrics_http import MetricsListener


@asynccontextmanager
async def metrics_endpoint(metrics: Metrics, host: str, port: int) -> AsyncIterator[MetricsListener]:
    """Serves `metrics` on host:port (port 0 = any) for as long as it is entered.

    Raises MetricsListenError.
    """
    listener = MetricsListener(metrics.exposition)
    await listener.start(host, port)
    lag = asyncio.get_running_loop().create_task(metrics.measure_lag(), name="event loop lag")
    try:
        yield listener
    finally:
        lag.cancel()
        await asyncio.wait({lag})
        await listener.stop()
