"""A fleet of a thousand nodes with a hundred thousand sessions serves as one of two nodes does."""

from __future__ import annotations

import asyncio
import random
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from examples.processes import command_of
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.settings import HeadSettings
from tests.e2e.harness import MODEL, expected, prompt

NODES, SESSIONS, RUNNING, TOKENS = 1_000, 100_000, 200, 60
PROCESSES = 2
PATIENCE_S = 120.0


@asynccontextmanager
async def many_nodes(name: str, count: int) -> AsyncIterator[tuple[Process, list[str]]]:
    """A process of so many nodes, and their addresses."""
    flags = ("--listen", "127.0.0.1:0", "--max-sessions", str(SESSIONS), "--decode-rate", "50")
    command = (command_of("fleet-node"), "--model", MODEL.name, "--identity", name, "--count", str(count))
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout
        lines = [(await process.stdout.readline()).decode() for _ in range(count)]
        yield process, [line.split()[-1] for line in lines]
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def usable(head: Head, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(node.usable for node in head.fleet.nodes) != count:
            await asyncio.wait({head.fleet.changed()}, timeout=0.1)


async def ended(generations: list[Generation]) -> None:
    tasks = {each.task for each in generations if each.task is not None}
    async with asyncio.timeout(PATIENCE_S):
        if tasks:
            await asyncio.wait(tasks)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_thousand_nodes_and_a_hundred_thousand_sessions_give_exact_tokens_though_half_die() -> None:
    async with (
        many_nodes("a", NODES // PROCESSES) as (process, some),
        many_nodes("b", NODES // PROCESSES) as (_, others),
    ):
        head = Head(
            HeadSettings(),
            dialer=FleetDialer(LinkSettings()),
            rng=random.Random(1),
            wall_clock=time.time,
        )
        await head.start([*some, *others])
        await usable(head, NODES)
        for number in range(SESSIONS):
            context = prompt(5 + number % 7, salt=number)
            await head.create_session(f"s{number}", SessionSpec(model=MODEL.name), context, None)
            if number % 20 == 0:
                await asyncio.sleep(0)
        shares = Counter(node.sessions for node in head.fleet.nodes)
        assert set(shares) <= set(range(90, 111)), "sessions are spread evenly"
        spec = GenerationSpec(max_new_tokens=TOKENS)
        numbers = range(0, SESSIONS, SESSIONS // RUNNING)
        running = [await head.generate(f"s{number}", "", spec, None) for number in numbers]
        while not all(each.log.received for each in running):
            await asyncio.sleep(0.05)
        process.kill()
        await ended(running)
        for number, generation in zip(numbers, running, strict=True):
            context = prompt(5 + number % 7, salt=number)
            assert list(generation.log.slice(0)) == expected(context, TOKENS), number
        await usable(head, NODES // PROCESSES)
        assert head.operators.books_balance
        assert sum(node.reservations for node in head.fleet.nodes) == 0
        assert len(head.sessions) == SESSIONS
        await head.stop(0.0)
