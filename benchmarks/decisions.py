"""What the head's own decisions cost, without any I/O: the choice among nodes, and the end of an output.

`python -m benchmarks.decisions [--quick]` needs no other process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.loads import percentile
from benchmarks.metrics import MODEL, head_with
from fleet_service.domain.output_rules import OutputRules
from fleet_service.domain.placement import Demand

CHOICES = 400
NODES = (10, 100, 1_000, 10_000)
TOKENS = 200_000
PROMPT_TOKENS = 64


def us_each(times: int, work: Callable[[], object]) -> float:
    began_s = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began_s) * 1e6 / times


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices among so many nodes. Times are CPU time, which other work on the machine does not lengthen."""

    nodes: int
    mean_us: float
    p50_ms: float
    p99_ms: float


async def choices_among(nodes: int) -> Choices:
    head = await head_with(nodes, 0)
    demand = Demand(MODEL.name, prompt_tokens=PROMPT_TOKENS)
    took_s: list[float] = []

    def one() -> None:
        began_s = time.thread_time()
        head.fleet.choose(demand)
        took_s.append(time.thread_time() - began_s)

    mean_us = us_each(CHOICES, one)
    return Choices(nodes, mean_us, percentile(took_s, 50) * 1e3, percentile(took_s, 99) * 1e3)


async def choices(*, quick: bool) -> list[Choices]:
    return [await choices_among(nodes) for nodes in (NODES[:-1] if quick else NODES)]


def us_per_token() -> float:
    rules = OutputRules(frozenset({2}), ((7, 8, 9),), TOKENS + 1)
    rng = random.Random(1)
    steps = iter([(rng.randrange(10, 32_000),) for _ in range(TOKENS)])
    return us_each(TOKENS, lambda: rules.accept(next(steps)))


async def _print(*, quick: bool) -> None:
    print(f"{'nodes':>6} {'mean, µs':>10} {'p50, ms':>10} {'p99, ms':>10}")
    for each in await choices(quick=quick):
        print(f"{each.nodes:>6} {each.mean_us:>10.1f} {each.p50_ms:>10.3f} {each.p99_ms:>10.3f}")
    print(f"end of output, a token {us_per_token():>10.2f} µs of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to a thousand nodes")
    asyncio.run(_print(quick=parser.parse_args().quick))


if __name__ == "__main__":
    main()
