"""The programs of the benchmarks: each tells what it is for, and a tiny load goes through them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.measure import nodes_for
from benchmarks.peers import DirectSse, haproxy_config, nginx_config
from benchmarks.plan import Outcome, Plan
from benchmarks.pool import Drivers
from benchmarks.targets import Direct, DirectNodes, Head, Target
from benchmarks.works import BY_KEY, CHIEF, WORKS
from examples.processes import Children

PROGRAMS = (
    "bare",
    "decisions",
    "driver",
    "durability",
    "mock_worker",
    "source",
    "store",
    "suite",
    "timed_node",
)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_says_what_it_is_for(program: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"benchmarks.{program}", "--help", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert b"usage:" in output


def test_works_have_names_of_their_own() -> None:
    assert len(BY_KEY) == len(WORKS)
    assert set(CHIEF) <= set(BY_KEY)


def test_proxies_are_told_of_every_source(tmp_path: Path) -> None:
    for config in (haproxy_config(9, ["a:1", "b:2"]), nginx_config(tmp_path, 9, ["a:1", "b:2"])):
        assert "a:1" in config
        assert "b:2" in config
        assert "127.0.0.1:9" in config


@pytest.mark.parametrize(
    "target",
    [Direct("complete"), Direct("connect"), DirectSse(), DirectNodes(), Head("complete"), Head("connect")],
    ids=lambda target: target.name,
)
async def test_a_tiny_load_gets_every_token_once(target: Target, tmp_path: Path) -> None:
    async with Drivers(1) as drivers, Children(tmp_path) as children:
        running = await target.start(children, nodes_for([BY_KEY["paced-128x50-4"]]))
        outcome = await answered(drivers, Plan(target.shape, running.address, 4, 5, 2, 0.0, 30.0, once=True))
    assert (outcome.requests, outcome.lost, outcome.unfinished, outcome.failure) == (4, 0, 0, "")
    assert outcome.tokens == 20
    assert sum(outcome.way_us.values()) == 20


async def test_a_server_that_is_not_there_is_told_as_calls_lost() -> None:
    async with Drivers(1) as drivers:
        outcome = await answered(drivers, Plan("complete", "127.0.0.1:1", 1, 1, 1, 0.0, 0.1))
    assert outcome.lost == 1
    assert "no connection" in outcome.failure


async def answered(drivers: Drivers, plan: Plan) -> Outcome:
    begun = await drivers.prepare(plan)
    await begun.go()
    return await begun.outcome()
