"""What the metrics cost: per request as they are counted, and per scrape by sessions and by nodes.

`python -m benchmarks.metrics` needs no other process: the head's own code runs in it, with nodes that are
never spoken to.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import cast

from fleet_service.api.methods import METHODS
from fleet_service.domain.events import Finished, FinishReason, Timings
from fleet_service.domain.node_types import ModelInfo, NodeState, Report
from fleet_service.domain.specs import Qos, SessionSpec
from fleet_service.runtime.head import Head
from fleet_service.runtime.node import Node
from fleet_service.runtime.observer import GenerationInfo
from fleet_service.runtime.protocols import Dialer, NodeLink
from fleet_service.runtime.settings import HeadSettings
from fleet_service.telemetry.metrics import Metrics
from fleet_service.telemetry.metrics_gauges import HeadLabels

MODEL = ModelInfo("bench")
SETTINGS = HeadSettings()
REQUESTS = 20_000
SCRAPES = 5
METHOD = "fleet.v1.FleetService/Complete"
INFO = GenerationInfo("gen-1", "s-1", MODEL.name, Qos.INTERACTIVE, 32, 64, 600.0)
FINISHED = Finished(FinishReason.LENGTH, 32, 64, 1, Timings(0.001, 0.05, 1.0, 0.04, 0.99))


def new_metrics() -> Metrics:
    return Metrics(HeadLabels("0", "bench", "head-1", SETTINGS.policy), METHODS, time.monotonic)


def one_request(metrics: Metrics) -> None:
    """All that one undisturbed request of any number of tokens makes the metrics do."""
    call = metrics.rpc_observer.rpc_started(METHOD, ())
    metrics.fleet_observer.placement(None)
    generation = metrics.fleet_observer.generation_started(INFO, None)
    generation.placed("node-1", list)
    generation.waited(0.001)
    attempt = generation.attempt_started("node-1", 1, 1, 0)
    attempt.carrier()
    generation.first_token()
    attempt.ended(None, 64)
    generation.finished(FINISHED)
    call.ended("OK", "")


def us_per_request() -> float:
    metrics = new_metrics()
    began_s = time.process_time()
    for _ in range(REQUESTS):
        one_request(metrics)
    return (time.process_time() - began_s) * 1e6 / REQUESTS


async def head_with(nodes: int, sessions: int) -> Head:
    nobody = cast("Dialer", None)
    head = Head(SETTINGS, dialer=nobody, rng=random.Random(1), wall_clock=time.time)
    loop = asyncio.get_running_loop()
    for number in range(nodes):
        node = Node(f"node-{number}", SETTINGS, loop.time)
        node.link = cast("NodeLink", object())
        node.report = Report(kv_blocks_used=10, kv_blocks_total=100, max_lanes=8)
        node.report_at_s = loop.time()
        node.models = {MODEL.name: MODEL}
        node.set_state(NodeState.UP, "")
        head.fleet.add(node)
    for _ in range(sessions):
        await head.create_session("", SessionSpec(model=MODEL.name), [1, 2, 3], None)
    return head


async def scrape(nodes: int, sessions: int) -> tuple[float, float, float, int]:
    """CPU in ms for reading and for all of it, the longest step without the loop in ms, and the bytes."""
    metrics, head = new_metrics(), await head_with(nodes, sessions)
    metrics.watch(head.gauges)
    one_request(metrics)
    began_s = time.process_time()
    for _ in range(SCRAPES):
        await head.gauges()
    read_s = (time.process_time() - began_s) / SCRAPES
    longest_s, size = 0.0, 0
    began_s = time.process_time()
    for _ in range(SCRAPES):
        scraping = asyncio.ensure_future(metrics.exposition(""))
        while not scraping.done():
            step_s = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - step_s)
        size = len(scraping.result()[1])
    total_s = (time.process_time() - began_s) / SCRAPES
    return read_s * 1e3, total_s * 1e3, longest_s * 1e3, size


async def main() -> None:
    print(f"{us_per_request():.1f} µs per request")
    print(" nodes  sessions  reading, ms  scrape, ms  longest step, ms      bytes")
    for nodes, sessions in ((4, 0), (4, 1_000), (4, 20_000), (100, 1_000), (1_000, 1_000), (4_096, 1_000)):
        read_ms, total_ms, longest_ms, size = await scrape(nodes, sessions)
        print(f"{nodes:>6}{sessions:>10}{read_ms:>13.3f}{total_ms:>12.2f}{longest_ms:>18.2f}{size:>11}")


if __name__ == "__main__":
    asyncio.run(main())
