"""Metrics for Prometheus: what is counted as it happens, and what is read when somebody scrapes.

A registry of its own; nothing is global. docs/metrics.md lists every family. Labels take values from closed
sets and the names of nodes, never ids of sessions, generations or callers. Nothing happens per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fleet_service.runtime.gauges import HeadGauges
from fleet_service.telemetry.metrics_gauges import HeadLabels, HeadReader
from fleet_service.telemetry.metrics_observers import GenerationMeter, RpcMeter

LAG_PERIOD_S = 0.1
"""A standstill of the loop of at least this length is seen for certain, a shorter one by chance."""

SAMPLES_AT_ONCE = 500
"""Written before the loop gets its turn, which takes about 2 ms."""

_LAG_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_END_OF_OPENMETRICS = b"# EOF\n"


class Metrics:
    """All metrics of one head. `methods` are the RPCs there are.

    `clock` tells seconds, finer than uvloop's own clock, which is in milliseconds.
    """

    def __init__(self, labels: HeadLabels, methods: Iterable[str], clock: Callable[[], float]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._clock = clock
        self.rpc_observer = RpcMeter(self._registry, methods, clock)
        self.fleet_observer = GenerationMeter(self._registry, labels.policy, clock)
        self._lag = Histogram(
            "fleet_event_loop_lag_seconds",
            "How late the event loop ran a timer of 0.1 s",
            registry=self._registry,
            buckets=_LAG_BUCKETS_S,
        )
        self._gauges = HeadReader(labels)
        ProcessCollector(registry=self._registry)
        self._one_at_a_time = asyncio.Lock()

    def watch(self, read: Callable[[], Awaitable[HeadGauges]]) -> None:
        """`read` gives the head's gauges from now on, at every scrape."""
        self._gauges.read = read

    async def measure_lag(self) -> None:
        """Until cancelled."""
        while True:
            due_s = self._clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.observe(max(0.0, self._clock() - due_s))

    async def exposition(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, in the format that the Accept header asks for.

        Nodes are read and all is written in pieces, between which the loop serves others; the rest is of the
        moment in which the last node was read.
        """
        encode, content_type = _encoder(accept)
        pieces: list[bytes] = []
        async with self._one_at_a_time:
            head = await self._gauges.head()
            for family in chain(list(self._registry.collect()), self._gauges.families(head)):
                for piece in _written(family, encode):
                    pieces.append(piece)
                    await asyncio.sleep(0)
        if content_type.startswith("application/openmetrics-text"):
            pieces.append(_END_OF_OPENMETRICS)
        return content_type, b"".join(pieces)


class _Alone(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


Encode = Callable[[Collector], bytes]


def _written(family: Metric, encode: Encode) -> Iterator[bytes]:
    """A family's text, a piece at a time, without the library's `_created` series, which nobody asked for."""
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    for start in range(0, max(1, len(samples)), SAMPLES_AT_ONCE):
        family.samples = samples[start : start + SAMPLES_AT_ONCE]
        piece = encode(_Alone(family)).removesuffix(_END_OF_OPENMETRICS)
        while start and piece.startswith(b"# "):  # its heading stands above the first piece
            piece = piece.partition(b"\n")[2]
        yield piece


def _encoder(accept: str) -> tuple[Encode, str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none
        return choose_encoder("")
