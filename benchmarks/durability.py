"""What it costs that sessions and answers outlive the head, and how soon it is there again.

`python -m benchmarks.durability [--json] [--quick] [FOLDER]`. The loads of `benchmarks.loads`, on heads that
keep nothing (memory), tell before it is on disk (relaxed), and tell what is on disk (strict), with two stub
nodes each over a multiplexed link; each figure is the median of three runs, taken in turns. The paced load
also tells how long tokens are on their way (`benchmarks.latency` says what exactly is measured). Then starts
on stored sessions, and on generations that ran when the head was killed (`benchmarks.recovery`).

FOLDER says whose disk it is (default: the current one); it needs 2 GB free for a moment. `--quick` is short
and small, to see that everything works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.latency import drive_timed, local_nodes
from benchmarks.loads import (
    FULL_SPEED,
    ONE_TOKEN,
    PACED,
    Driven,
    Load,
    cpu_s,
    drive,
    head_process,
    node_processes,
    percentile,
    warm_up,
)
from benchmarks.recovery import Started, WentOn, check_room, going_on, starts
from examples.processes import Children
from fleet_service.app import loop_factory

DURABILITIES = ("memory", "relaxed", "strict")
RUNS = 3
SESSIONS = (0, 10_000, 100_000)
QUICK_SESSIONS = (0, 1_000)
_QUICK_TOKENS = 100
_QUICK_ROUNDS = 5
_TIMEOUT_S = 1_800.0


@dataclass(frozen=True, slots=True)
class Paced:
    """Streams at the pace of their nodes. CPU is that of the head's process."""

    durability: str
    wall_s: float
    tokens_per_s: float
    us_per_token: float
    way_p50_ms: float
    """How long tokens are on their way, after the first second."""
    way_p99_ms: float
    added_p50_ms: float = 0.0
    """More than with memory."""
    added_p99_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FullSpeed:
    """Streams as fast as they go."""

    durability: str
    tokens_per_s: float
    us_per_token: float


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests for one token each."""

    durability: str
    requests_per_s: float
    us_per_request: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    paced: Sequence[Paced]
    full_speed: Sequence[FullSpeed]
    requests: Sequence[Requests]
    starts: Sequence[Started]
    going_on: Sequence[WentOn]


ResultT = TypeVar("ResultT", Paced, FullSpeed, Requests)


def _flags(folder: Path, durability: str) -> list[str]:
    return ["--durability", durability, "--data-dir", str(folder / "data")]


async def paced(folder: Path, durability: str, load: Load) -> Paced:
    async with local_nodes(load.rate) as nodes, Children(folder) as children:
        head, address = await head_process(children, nodes.addresses, *_flags(folder, durability))
        await drive_timed(address, warm_up(load), nodes)
        before = cpu_s(head.process.pid)
        driven, way_s = await drive_timed(address, load, nodes)
        cpu = cpu_s(head.process.pid) - before
    return Paced(
        durability,
        driven.wall_s,
        driven.tokens / driven.wall_s,
        cpu * 1e6 / driven.tokens,
        percentile(way_s, 50) * 1e3,
        percentile(way_s, 99) * 1e3,
    )


async def full_speed(folder: Path, durability: str, load: Load) -> FullSpeed:
    driven, cpu = await _driven(folder, durability, load)
    return FullSpeed(durability, driven.tokens / driven.wall_s, cpu * 1e6 / driven.tokens)


async def requests(folder: Path, durability: str, load: Load) -> Requests:
    driven, cpu = await _driven(folder, durability, load)
    return Requests(
        durability,
        driven.requests / driven.wall_s,
        cpu * 1e6 / driven.requests,
        percentile(driven.took_s, 50) * 1e3,
        percentile(driven.took_s, 99) * 1e3,
    )


async def _driven(folder: Path, durability: str, load: Load) -> tuple[Driven, float]:
    async with Children(folder) as children:
        nodes = await node_processes(children, load)
        head, address = await head_process(children, nodes, *_flags(folder, durability))
        await drive(address, warm_up(load))
        before = cpu_s(head.process.pid)
        driven = await drive(address, load)
        return driven, cpu_s(head.process.pid) - before


def middle(results: Sequence[ResultT]) -> ResultT:
    """Of runs of one durability, the median of each figure."""
    names = [each.name for each in fields(results[0]) if each.name != "durability"]
    return replace(
        results[0], **{name: median(getattr(result, name) for result in results) for name in names}
    )


def added(results: Sequence[Paced]) -> list[Paced]:
    """What tokens need more than with the first of these."""
    base = results[0]
    return [
        replace(
            result,
            added_p50_ms=result.way_p50_ms - base.way_p50_ms,
            added_p99_ms=result.way_p99_ms - base.way_p99_ms,
        )
        for result in results
    ]


async def measure(folder: Path, *, quick: bool) -> Report:
    """Everything, one after the other; what it writes is in `folder`."""
    counts = QUICK_SESSIONS if quick else SESSIONS
    check_room(folder, max(counts))
    runs = 1 if quick else RUNS
    paced_runs: dict[str, list[Paced]] = {name: [] for name in DURABILITIES}
    full_runs: dict[str, list[FullSpeed]] = {name: [] for name in DURABILITIES}
    request_runs: dict[str, list[Requests]] = {name: [] for name in DURABILITIES}
    # In turns, so that what else the machine does meets all of them alike.
    for run in range(runs):
        for name in DURABILITIES:
            _tell(f"loads, {name}, run {run + 1} of {runs}")
            paced_runs[name].append(await paced(_new(folder), name, _sized(PACED, quick=quick)))
            full_runs[name].append(await full_speed(_new(folder), name, _sized(FULL_SPEED, quick=quick)))
            request_runs[name].append(await requests(_new(folder), name, _sized(ONE_TOKEN, quick=quick)))
    started: list[Started] = []
    for count in counts:
        _tell(f"starts on {count} sessions")
        started.append(await starts(folder, count, started[0].rss_mb if started else None))
    _tell("generations that run while the head is killed")
    went_on = await going_on(folder)
    return Report(
        added([middle(paced_runs[name]) for name in DURABILITIES]),
        [middle(full_runs[name]) for name in DURABILITIES],
        [middle(request_runs[name]) for name in DURABILITIES],
        started,
        [went_on],
    )


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder, prefix="head-"))


def _sized(load: Load, *, quick: bool) -> Load:
    if not quick:
        return load
    tokens, rounds = min(load.tokens, _QUICK_TOKENS), min(load.rounds, _QUICK_ROUNDS)
    return replace(load, tokens=tokens, rounds=rounds)


def _tell(what: str) -> None:
    print(f"running: {what}", file=sys.stderr, flush=True)


def _table(title: str, results: Sequence[Paced | FullSpeed | Requests | Started | WentOn]) -> None:
    rows = [asdict(result) for result in results]
    print(f"\n{title}")
    widths = {name: max(len(name), 10) for name in rows[0]}
    print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("  ".join(f"{_text(row[name]):>{width}}" for name, width in widths.items()))


def _text(value: str | float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


async def _bounded(folder: Path, *, quick: bool) -> Report:
    async with asyncio.timeout(_TIMEOUT_S):
        return await measure(folder, quick=quick)


def main() -> None:
    """Measure and print tables, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="on the disk that is meant")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="short loads, few sessions")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.folder, prefix="durability-") as folder,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        report = runner.run(_bounded(Path(folder), quick=given.quick))
    if given.json:
        print(json.dumps(asdict(report), indent=2))
        return
    _table(f"{PACED.name} (CPU of the head; a token's way from the node to its caller)", report.paced)
    _table(FULL_SPEED.name, report.full_speed)
    _table(ONE_TOKEN.name, report.requests)
    _table("starts", report.starts)
    _table("generations that ran when the head was killed", report.going_on)


if __name__ == "__main__":
    main()
