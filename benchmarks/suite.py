"""Everything measured in one run, so that what the machine does meanwhile meets all of it alike.

`make bench`, or `python -m benchmarks.suite [--quick] [--json FILE] [--picture FILE] [--runs N] [--works
KEY,...] [--targets TEXT,...] [--without PART,...]`. Results come as lines on the standard error while it
runs; in the end tables, or with `--json` all figures in a file as well. `benchmarks/README.md` says what is
measured and how.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from benchmarks import about, decisions, failover, memory, picture, report
from benchmarks.measure import Result, Times, measure, nodes_for
from benchmarks.peers import RAMPS_S, peers
from benchmarks.pool import Drivers
from benchmarks.targets import SkippedError, Target, ours
from benchmarks.works import BY_KEY, WORKS, Work
from examples.processes import ChildFailedError, Children
from fleet_service.app import loop_factory

RUNS = 3
QUICK_WORKS = ("full-128", "one-64", "paced-128x50-4")
PARTS = ("loads", "placement", "failover", "memory")


@dataclass(slots=True)
class Everything:
    """All that was measured."""

    about: about.About
    results: list[Result] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why, by target."""
    placement: list[decisions.Choices] = field(default_factory=list)
    failover: list[failover.Lost] = field(default_factory=list)
    memory: list[memory.Memory] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured."""

    works: Sequence[Work]
    targets: Sequence[Target]
    runs: int
    parts: frozenset[str]
    quick: bool


Say = Callable[[str], None]


async def loads(drivers: Drivers, wanted: Wanted, folder: Path, everything: Everything, say: Say) -> None:
    """Each run has every work on every target once."""
    for run in range(wanted.runs):
        for _, group in groupby(wanted.works, key=lambda work: work.rate):
            works = list(group)
            for target in wanted.targets:
                taken = [work for work in works if _takes(target, work)]
                if not taken or target.name in everything.skipped:
                    continue
                try:
                    await _loads_of(drivers, target, taken, run, folder, everything, say)
                except (SkippedError, ChildFailedError, TimeoutError, RuntimeError, OSError) as error:
                    everything.skipped[target.name] = str(error) or type(error).__name__
                    say(f"skipped: {target.name}: {everything.skipped[target.name]}")


def _takes(target: Target, work: Work) -> bool:
    # HTTP/1.1 has a connection per stream, whatever the number.
    return work.key in target.only if target.only else not (target.shape == "sse" and work.connections > 4)


async def _loads_of(
    drivers: Drivers,
    target: Target,
    works: Sequence[Work],
    run: int,
    folder: Path,
    everything: Everything,
    say: Say,
) -> None:
    """On processes of its own, which end afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        async with Children(Path(own)) as children:
            running = await target.start(children, nodes_for(works))
            times = Times(ramp_s=RAMPS_S.get(target.name, Times().ramp_s))
            for work in works:
                result = await measure(drivers, running, work, target.name, target.shape, run, times)
                everything.results.append(result)
                say(report.line_of(result))


async def measure_all(
    wanted: Wanted, folder: Path, say: Say, keep: Callable[[Everything], None]
) -> Everything:
    """`keep` is given what there is, before the longest part and in the end."""
    everything = Everything(await about.about(wanted.targets, wanted.runs))
    if "placement" in wanted.parts:
        say("placement")
        everything.placement = await decisions.choices(quick=wanted.quick)
    async with Drivers() as drivers:
        if "failover" in wanted.parts:
            everything.failover = await failover.measure_all(drivers, folder, say, quick=wanted.quick)
        if "memory" in wanted.parts:
            everything.memory = await memory.measure_all(drivers, folder, say, quick=wanted.quick)
        keep(everything)
        if "loads" in wanted.parts:
            await loads(drivers, wanted, folder, everything, say)
    everything.about.load_average_after = os.getloadavg()[0]
    keep(everything)
    return everything


def _wanted(given: argparse.Namespace) -> Wanted:
    keys = given.works.split(",") if given.works else QUICK_WORKS if given.quick else [w.key for w in WORKS]
    named = given.targets.split(",") if given.targets else [""]
    targets = [*ours(quick=given.quick), *peers(quick=given.quick)]
    return Wanted(
        works=[BY_KEY[key] for key in keys],
        targets=[target for target in targets if any(text in target.name for text in named)],
        runs=given.runs or (1 if given.quick else RUNS),
        parts=frozenset(PARTS) - frozenset(given.without.split(",")),
        quick=given.quick,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small selection, once: three minutes")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--picture", type=Path, help="file for a picture (SVG)")
    parser.add_argument("--runs", type=int, default=0, help="how often everything is measured")
    parser.add_argument("--works", default="", help=f"which, of {', '.join(BY_KEY)}")
    parser.add_argument("--targets", default="", help="only those whose names contain one of these texts")
    parser.add_argument("--without", default="", help=f"parts to leave out, of {', '.join(PARTS)}")
    given = parser.parse_args()

    def keep(everything: Everything) -> None:
        if given.json:
            given.json.write_text(json.dumps(asdict(everything), indent=1), encoding="utf-8")

    with (
        tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        everything = runner.run(measure_all(_wanted(given), Path(folder), _say, keep))
    if given.picture:
        given.picture.write_text(picture.drawn(everything.results), encoding="utf-8")
    print(report.text(everything))


if __name__ == "__main__":
    main()
