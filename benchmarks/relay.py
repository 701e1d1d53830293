"""What the head costs: its CPU time per streamed token and per short request, with stub nodes on loopback.

`python -m benchmarks.relay [--json]`. CPU time of the head's own process is read before and after each load,
so that other work on the machine disturbs the figures little. Each load is run over both kinds of link to the
nodes: plain RPCs, and one multiplexed link each; and over a bare relay of `benchmarks.bare`, which tells what
gRPC costs without a head.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from examples.processes import Child, Children, command_of
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

MODEL = "bench"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` callers, each asking `rounds` times for `tokens` tokens; nodes decode `rate` a second."""

    name: str
    streams: int
    rounds: int
    tokens: int
    rate: float


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


LOADS = (
    Load("128 streams, paced 50/s", 128, 1, 400, 50.0),
    Load("32 streams, full speed", 32, 4, 400, 0.0),
    Load("one-token requests, 64 at once", 64, 30, 1, 0.0),
)


def cpu_s(pid: int) -> float:
    """CPU time a process has used, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


async def _one(fleet: FleetServiceAsyncStub, load: Load, salt: int) -> int:
    request = pb.CompleteRequest(
        session=pb.SessionSpec(model=MODEL),
        token_ids=[3 + salt, 5, 7, 11],
        spec=pb.GenerationSpec(max_new_tokens=load.tokens),
    )
    got = 0
    async for response in fleet.Complete(request):
        got += len(response.event.tokens.token_ids)
    if got != load.tokens:
        raise RuntimeError(f"asked for {load.tokens} tokens, got {got}")
    return got


async def _drive(address: str, load: Load) -> tuple[int, int, float]:
    async with grpc.aio.insecure_channel(address) as channel:
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)

        async def caller(salt: int) -> int:
            return sum([await _one(fleet, load, salt) for _ in range(load.rounds)])

        began = time.monotonic()
        got = await asyncio.gather(*map(caller, range(load.streams)))
        return load.streams * load.rounds, sum(got), time.monotonic() - began


async def _measure_bare(folder: Path, load: Load) -> Result:
    bare = [sys.executable, "-m", "benchmarks.bare"]
    async with Children(folder) as children:
        source = [*bare, "source", "--rate", str(load.rate)]
        _, line = await children.start("source", source, "bare: serving")
        relay, line = await children.start("relay", [*bare, "relay", line.split()[-1]], "bare: serving")
        return await _cost(relay, line.split()[-1], load, "bare")


async def _measure(folder: Path, load: Load, *, multiplexed: bool) -> Result:
    async with Children(folder) as children:
        nodes = [await _node(children, f"n{i}", load) for i in range(2)]
        flags = [flag for node in nodes for flag in ("--node", node)]
        serve = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        command = [*serve, "--log-level", "warning", "--set", f"links.multiplexed={multiplexed}", *flags]
        head, line = await children.start("head", command, "fleet: serving")
        address = line.split()[4].rstrip(",")
        return await _cost(head, address, load, "link" if multiplexed else "plain")


async def _cost(head: Child, address: str, load: Load, nodes: str) -> Result:
    await _drive(address, Load("warm-up", 8, 2, 8, load.rate))
    head_before, own_before = cpu_s(head.process.pid), time.process_time()
    requests, tokens, wall_s = await _drive(address, load)
    head_s = cpu_s(head.process.pid) - head_before
    return Result(
        load=load.name,
        nodes=nodes,
        requests=requests,
        tokens=tokens,
        wall_s=round(wall_s, 3),
        head_cpu_s=round(head_s, 3),
        client_cpu_s=round(time.process_time() - own_before, 3),
        us_per_token=round(head_s / tokens * 1e6, 1),
        us_per_request=round(head_s / requests * 1e6, 1),
    )


async def _node(children: Children, name: str, load: Load) -> str:
    flags = ["--model", MODEL, "--identity", name, "--listen", "127.0.0.1:0", "--lanes", "64"]
    rates = ["--decode-rate", str(load.rate), "--prefill-rate", "0", "--log-level", "warning"]
    _, line = await children.start(name, [command_of("fleet-node"), *flags, *rates], "fleet-node:")
    return line.rpartition(" on ")[2].strip()


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
