"""What a head costs as it grows: placement, a tick, memory, and how long others have to wait at the most.

`python -m benchmarks.growth` measures the head's own code with nodes that are never spoken to, and then a
head with 1,000 stub nodes in two processes (`fleet-node --count`), on loopback. `--quick` is short and small;
`--seconds N` is how long a steady while is. All times are CPU time of the head's thread, so that what else
runs on the machine is not in them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import resource
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from benchmarks import metrics as bench
from benchmarks.loads import percentile
from examples.processes import command_of
from fleet_service.app import link_settings, loop_factory
from fleet_service.config import FleetConfig
from fleet_service.domain.errors import FleetError
from fleet_service.domain.placement import Demand
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.garbage import looked_for_in_pieces
from fleet_service.links.dialer import FleetDialer
from fleet_service.runtime.head import Head
from fleet_service.runtime.settings import HeadSettings

CHOICES = 5_000
REFUSALS = 20
TICKS = 5
LONG_CONTEXTS, LONG_TOKENS = 200, 10_000
MODEL = bench.MODEL.name
DEMAND = Demand(MODEL, prompt_tokens=64)
RUNNING = 200
"""Generations that run in a steady while."""
DECODE_RATE = 50.0
PROCESSES = 2
"""Of nodes."""
PORTS = range(10_000, 30_000)
"""Where they listen, each process on ports that follow each other."""
LAP_S = 0.001
GIVE_UP_S = 60.0


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def us_of(work: Callable[[], object], times: int) -> list[float]:
    """CPU time of each call."""
    took = []
    for _ in range(times):
        began_s = time.thread_time()
        with suppress(FleetError):
            work()
        took.append((time.thread_time() - began_s) * 1e6)
    return took


async def make_sessions(head: Head, count: int, token_ids: Sequence[int] = ()) -> float:
    """Resident bytes of each."""
    before = resident_bytes()
    for number in range(count):
        await head.create_session("", SessionSpec(model=MODEL), token_ids, None)
        if number % 10 == 0:
            await asyncio.sleep(0)
    return (resident_bytes() - before) / max(1, count)


# Without any node


async def tell_of_a_head(nodes: int, sessions: int) -> None:
    """One line of the table."""
    bench.SETTINGS = replace(HeadSettings(), max_nodes=20_000, silence_s=3_600.0)
    head = await bench.head_with(nodes, 0)
    each_bytes = await make_sessions(head, sessions)
    took_us = us_of(lambda: head.fleet.choose(DEMAND), CHOICES)
    nowhere = replace(DEMAND, selector={"no": "such label"})
    refused_us = us_of(lambda: head.fleet.choose(nowhere), REFUSALS)
    ticks_ms = []
    for _ in range(TICKS):
        began_s = time.thread_time()
        await head.tender.tick(asyncio.get_running_loop().time())
        ticks_ms.append((time.thread_time() - began_s) * 1e3)
    memory = f"{each_bytes:>9,.0f}" if sessions else f"{'–':>9}"
    print(
        f"{nodes:>7,}{sessions:>10,}{percentile(took_us, 50):>9.0f}{percentile(took_us, 99):>9.0f}"
        f"{percentile(refused_us, 50):>12.0f}{percentile(ticks_ms, 50):>9.2f}{memory}",
        flush=True,
    )


async def tell_of_tokens() -> None:
    head = await bench.head_with(4, 0)
    token_ids = list(range(LONG_TOKENS))
    short = await make_sessions(head, LONG_CONTEXTS)
    long = await make_sessions(head, LONG_CONTEXTS, token_ids)
    print(f"a token of a context: {(long - short) / LONG_TOKENS:.1f} bytes")


# With nodes


class Laps:
    """How long the loop's other work took between two turns of a task that wants one every millisecond."""

    def __init__(self) -> None:
        self._cpu_ms: list[float] = []
        self.collections_ms: list[float] = []
        self._collecting_s = 0.0

    async def run(self) -> None:
        gc.callbacks.append(self._collected)
        last_s = time.thread_time()
        try:
            while True:
                await asyncio.sleep(LAP_S)
                now_s = time.thread_time()
                self._cpu_ms.append((now_s - last_s) * 1e3)
                last_s = now_s
        finally:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_s = time.thread_time()
        else:
            self.collections_ms.append((time.thread_time() - self._collecting_s) * 1e3)

    def tell(self, what: str, more: str = "") -> None:
        laps, self._cpu_ms = self._cpu_ms or [0.0], []
        collections, self.collections_ms = self.collections_ms or [0.0], []
        print(
            f"{what:<36}{percentile(laps, 99):>8.1f}{max(laps):>9.1f}{max(collections):>12.1f}"
            f"{sum(laps) / 1e3:>9.2f}  {more}",
            flush=True,
        )


async def start_anywhere(count: int) -> tuple[Process, int]:
    """A process of so many nodes, and the port of the first."""
    for _ in range(100):
        first_port = random.choice(PORTS)
        process = await start_nodes(first_port, count)
        if process.returncode is None:
            return process, first_port
    raise RuntimeError(f"there are no {count} ports in a row")


async def start_nodes(first_port: int, count: int) -> Process:
    """A process of so many nodes, all of which are ready; it has ended where a port was somebody's."""
    command = [command_of("fleet-node"), "--model", MODEL, "--identity", f"n{first_port}"]
    command += ["--count", str(count), "--listen", f"127.0.0.1:{first_port}", "--log-level", "error"]
    command += ["--decode-rate", str(DECODE_RATE), "--max-sessions", "1000000"]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    assert process.stdout is not None
    for _ in range(count):
        if not await process.stdout.readline():
            await process.wait()
            break
    return process


async def all_up(head: Head, count: int) -> float:
    """Seconds until so many nodes can be used."""
    began_s = time.monotonic()
    async with asyncio.timeout(GIVE_UP_S):
        while sum(node.usable for node in head.fleet.nodes) < count:  # noqa: ASYNC110 - it is what is measured
            await asyncio.sleep(0.01)
    return time.monotonic() - began_s


async def tell_of_nodes(count: int, sessions: int, seconds: float) -> None:
    half = count // 2
    started = [await start_anywhere(half) for _ in range(PROCESSES)]
    processes, ports = [process for process, _ in started], [port for _, port in started]
    laps = Laps()
    try:
        with looked_for_in_pieces(lambda: True) as garbage:
            tasks = [asyncio.create_task(laps.run()), asyncio.create_task(garbage.run())]
            await steps_of(ports, half, sessions, seconds, laps, processes)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def steps_of(
    ports: Sequence[int], half: int, sessions: int, seconds: float, laps: Laps, processes: list[Process]
) -> None:
    head = Head(
        HeadSettings(),
        dialer=FleetDialer(link_settings(FleetConfig())),
        rng=random.Random(),
        wall_clock=time.time,
    )
    addresses = [f"127.0.0.1:{port + number}" for port in ports for number in range(half)]
    print(f"\n{2 * half:,} nodes, {sessions:,} sessions              p99, ms  longest  collection   CPU, s")
    began_s = time.monotonic()
    await head.start(addresses)
    await all_up(head, 2 * half)
    laps.tell("start until all nodes are connected", f"after {time.monotonic() - began_s:.1f} s")
    await make_sessions(head, sessions)
    laps.tell("making the sessions")
    await asyncio.sleep(seconds)
    laps.tell(f"{seconds:.0f} s of nothing")
    chosen = await generate_for(head, seconds)
    placement = f"placement p50 {percentile(chosen, 50):.0f}, p99 {percentile(chosen, 99):.0f} µs"
    laps.tell(f"{seconds:.0f} s of {RUNNING} generations", placement)
    await head.gauges()
    await head.operators.all_nodes()
    laps.tell("a scrape, and a list of all nodes")
    processes[0].kill()
    await processes[0].wait()
    await asyncio.sleep(5.0)
    laps.tell("5 s after half of the nodes died")
    processes[0] = await start_nodes(ports[0], half)
    back_s = await all_up(head, 2 * half)
    laps.tell("while they start", f"all are back {back_s:.1f} s after the last is ready")
    await head.stop(0.0)


async def generate_for(head: Head, seconds: float) -> list[float]:
    """Keep as many running; what a placement took meanwhile, in µs."""
    took_us: list[float] = []

    async def caller(number: int) -> None:
        # Apart from each other, and of different lengths: else all of them would end and begin at once.
        await asyncio.sleep(number * 0.01)
        spec = GenerationSpec(max_new_tokens=round(DECODE_RATE) + number % 37)
        while True:
            generation = await head.complete(SessionSpec(model=MODEL), [1, 2, 3], spec, "", None)
            if generation.task is not None:
                await asyncio.wait({generation.task})

    callers = [asyncio.create_task(caller(number)) for number in range(RUNNING)]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        await asyncio.sleep(0.01)
        took_us += us_of(lambda: head.fleet.choose(DEMAND), 1)
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    return took_us


async def main(*, quick: bool, seconds: float) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    await tell_of_tokens()  # first: what was freed would be used again unseen
    print("  nodes  sessions  p50, µs  p99, µs  refused, µs  tick, ms  B/session")
    tenth = 10 if quick else 1
    sizes = ((4, 0), (100, 0), (256, 0), (1_000, 0), (1_000, 100_000), (10_000, 0), (10_000, 100_000))
    for nodes, sessions in sizes:
        await tell_of_a_head(nodes, sessions // tenth)
    await tell_of_nodes(1_000 // tenth, 100_000 // tenth, seconds)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a tenth of the nodes and sessions")
    options.add_argument("--seconds", type=float, default=10.0, help="how long a steady while is")
    given = options.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(quick=given.quick, seconds=given.seconds))
