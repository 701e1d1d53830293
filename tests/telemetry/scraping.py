"""A scrape as Prometheus makes it, and its samples by name and labels."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from fleet_service.api.methods import METHODS
from fleet_service.runtime.head import Head
from fleet_service.telemetry.metrics import Metrics
from fleet_service.telemetry.metrics_endpoint import metrics_endpoint
from fleet_service.telemetry.metrics_gauges import HeadLabels

LABELS = HeadLabels(version="9.9", fleet_id="default", head_id="head-1", policy="load-aware")


def new_metrics() -> Metrics:
    return Metrics(LABELS, METHODS, monotonic)


@dataclass(frozen=True)
class Scrape:
    """What one scrape gave."""

    families: Mapping[str, Metric]

    def __getitem__(self, name: str) -> float:
        """A sample without labels."""
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that carry `labels`; KeyError when there is none."""
        found = self.samples(name, **labels)
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found.values())

    def samples(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """The values of all samples of that name that carry `labels`, by the values of their other labels."""
        return {
            tuple(value for key, value in sorted(sample.labels.items()) if key not in labels): sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    def label_values(self, label: str) -> set[str]:
        """Every value that any sample has for a label."""
        return {
            sample.labels[label]
            for family in self.families.values()
            for sample in family.samples
            if label in sample.labels
        }


def parsed(text: str) -> Scrape:
    return Scrape({family.name: family for family in text_string_to_metric_families(text)})


@dataclass(frozen=True)
class Scraper:
    """Reads one endpoint over HTTP."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    async def text(self, accept: str = "text/plain") -> str:
        return (await self.fetch(accept))[1]

    async def fetch(self, accept: str) -> tuple[str, str]:
        """Content type and text."""

        def read() -> tuple[str, str]:
            request = urllib.request.Request(self.url, headers={"Accept": accept})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.headers["Content-Type"], answer.read().decode()

        return await asyncio.to_thread(read)

    async def scrape(self) -> Scrape:
        return parsed(await self.text())


@asynccontextmanager
async def scraper_of(metrics: Metrics, head: Head) -> AsyncIterator[Scraper]:
    """The metrics endpoint of a head that was made with `metrics` as its observers."""
    metrics.watch(head.gauges)
    async with metrics_endpoint(metrics, "127.0.0.1", 0) as listener:
        yield Scraper(listener.port)
