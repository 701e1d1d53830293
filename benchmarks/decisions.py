"""What the head's own decisions cost, without any I/O: the choice among nodes, and the end of an output.

`python -m benchmarks.decisions` needs no other process; each figure is CPU time over many decisions.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from benchmarks.metrics import MODEL, SETTINGS, head_with
from fleet_service.domain.output_rules import OutputRules
from fleet_service.domain.placement import Demand, choose, make_policy

CHOICES = 400
TOKENS = 200_000
PROMPT_TOKENS = 64


def us_each(times: int, work: Callable[[], object]) -> float:
    began_s = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began_s) * 1e6 / times


async def us_per_choice(number: int) -> float:
    head = await head_with(number, 0)
    nodes = list(head.fleet.nodes)
    demand, policy = Demand(MODEL.name, prompt_tokens=PROMPT_TOKENS), make_policy(SETTINGS.policy)
    now_s = asyncio.get_running_loop().time()
    return us_each(CHOICES, lambda: choose(nodes, nodes, demand, policy, now_s))


def us_per_token() -> float:
    rules = OutputRules(frozenset({2}), ((7, 8, 9),), TOKENS + 1)
    rng = random.Random(1)
    steps = iter([(rng.randrange(10, 32_000),) for _ in range(TOKENS)])
    return us_each(TOKENS, lambda: rules.accept(next(steps)))


async def main() -> None:
    for number in (4, 100, 256, 1_000):
        print(f"choice among {number:>5} nodes {await us_per_choice(number):>10.1f} µs")
    print(f"end of output, a token    {us_per_token():>10.2f} µs")


if __name__ == "__main__":
    asyncio.run(main())
