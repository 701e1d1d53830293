"""What a finished generation leaves in the head is its log: no task, attempt, stream or link's reader."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.links.plain_run import PlainRun
from fleet_service.runtime.attempt import Attempt
from fleet_service.runtime.driver import Driver
from fleet_service.runtime.reservation import Reservation
from fleet_service.runtime.stall import StallWatch
from fleet_service.runtime.tokenlog import Reader
from tests.e2e.callers import Reading, complete, generate, open_session, read_all
from tests.e2e.harness import HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import local_node

COUNT = 30
N = 8
OF_A_RUN = (Driver, Attempt, PlainRun, StallWatch, Reservation, Reader)


def alive() -> Counter[str]:
    """What there is of objects that belong to a generation's run, by class."""
    gc.collect()
    found = Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, OF_A_RUN))
    found["driver task"] = sum(
        isinstance(each, asyncio.Task) and each.get_name().startswith("drive ") for each in gc.get_objects()
    )
    return +found


async def completed(server: HeadServer) -> None:
    answers = await asyncio.gather(*(read_all(complete(server, prompt(9, i), N)) for i in range(COUNT)))
    assert [answer.tokens for answer in answers] == [expected(prompt(9, i), N) for i in range(COUNT)]


async def generated(server: HeadServer) -> None:
    """In sessions that stay."""
    ids = [await open_session(server, prompt(9, i)) for i in range(COUNT)]
    await asyncio.gather(*(read_all(generate(server, session_id, N)) for session_id in ids))


async def cancelled(server: HeadServer) -> None:
    readings = [Reading(complete(server, prompt(9, i), 5000)) for i in range(COUNT)]
    await asyncio.gather(*(reading.until(lambda answer: answer.events) for reading in readings))
    for reading in readings:
        request = pb.CancelGenerationRequest(generation_id=reading.answer.generation_id)
        await server.fleet.CancelGeneration(request)
        assert (await reading.end()).reason == "CANCELLED"


@pytest.mark.parametrize("work", [completed, generated, cancelled])
async def test_finished_generations_keep_nothing_of_their_runs(world: World, work: object) -> None:
    node = await local_node(world, "node-1", lanes=8)
    server = await world.head(node)
    gc.collect()
    before = alive()
    await work(server)  # type: ignore[operator]
    # A call's own end comes a little after its last message.
    await until(lambda: not alive() - before, "everything of the runs is gone")
    assert len(server.head.generations._by_id) == COUNT
