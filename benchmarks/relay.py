"""What the head costs: its CPU time per streamed token and per short request, with stub nodes on loopback.

`python -m benchmarks.relay [--json]`. CPU time of the head's own process is read before and after each load,
so that other work on the machine disturbs the figures little. Each load is run over both kinds of link to the
nodes: plain RPCs, and one multiplexed link each; and over a bare relay of `benchmarks.bare`, which tells what
gRPC costs without a head. The head keeps nothing; `benchmarks.durability` tells what that costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.loads import LOADS, Load, cpu_s, drive, head_process, node_processes, warm_up
from examples.processes import Child, Children


@dataclass(frozen=True, slots=True)
class Result:
    """What one load cost the head. CPU is that of its process, user and system."""

    load: str
    nodes: str
    requests: int
    tokens: int
    wall_s: float
    head_cpu_s: float
    client_cpu_s: float
    us_per_token: float
    us_per_request: float


async def _measure_bare(folder: Path, load: Load) -> Result:
    bare = [sys.executable, "-m", "benchmarks.bare"]
    async with Children(folder) as children:
        source = [*bare, "source", "--rate", str(load.rate)]
        _, line = await children.start("source", source, "bare: serving")
        relay, line = await children.start("relay", [*bare, "relay", line.split()[-1]], "bare: serving")
        return await _cost(relay, line.split()[-1], load, "bare")


async def _measure(folder: Path, load: Load, *, multiplexed: bool) -> Result:
    async with Children(folder) as children:
        nodes = await node_processes(children, load)
        kept_nothing = ("--durability", "memory")
        head, address = await head_process(children, nodes, *kept_nothing, multiplexed=multiplexed)
        return await _cost(head, address, load, "link" if multiplexed else "plain")


async def _cost(head: Child, address: str, load: Load, nodes: str) -> Result:
    await drive(address, warm_up(load))
    head_before, own_before = cpu_s(head.process.pid), time.process_time()
    driven = await drive(address, load)
    head_s = cpu_s(head.process.pid) - head_before
    return Result(
        load=load.name,
        nodes=nodes,
        requests=driven.requests,
        tokens=driven.tokens,
        wall_s=round(driven.wall_s, 3),
        head_cpu_s=round(head_s, 3),
        client_cpu_s=round(time.process_time() - own_before, 3),
        us_per_token=round(head_s / driven.tokens * 1e6, 1),
        us_per_request=round(head_s / driven.requests * 1e6, 1),
    )


async def measure() -> list[Result]:
    """Every load, one after the other, each on processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for load in LOADS:
            print(f"running: {load.name}, bare relay", file=sys.stderr, flush=True)
            results.append(await _measure_bare(Path(folder), load))
            for multiplexed in (False, True):
                kind = "link" if multiplexed else "plain"
                print(f"running: {load.name}, nodes by {kind}", file=sys.stderr, flush=True)
                results.append(await _measure(Path(folder), load, multiplexed=multiplexed))
        return results


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    wants_json = parser.parse_args().json
    results = asyncio.run(measure())
    if wants_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    columns = f"{'load':32} {'nodes':>6} {'requests':>9} {'tokens':>8} {'wall s':>7} {'head s':>7}"
    print(f"{columns} {'µs/token':>9} {'µs/request':>11}")
    for r in results:
        print(
            f"{r.load:32} {r.nodes:>6} {r.requests:9} {r.tokens:8} {r.wall_s:7.2f} {r.head_cpu_s:7.2f}"
            f" {r.us_per_token:9.1f} {r.us_per_request:11.1f}"
        )


if __name__ == "__main__":
    main()
