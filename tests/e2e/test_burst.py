"""A burst of calls far above what the transport takes at once by default: every one is answered."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from tests.e2e.callers import complete, read_all
from tests.e2e.harness import World, expected, prompt
from tests.e2e.local_nodes import local_node

CALLS = 3000
CHANNELS = 3


async def test_every_call_of_a_burst_is_answered(world: World) -> None:
    server = await world.head(await local_node(world))
    stubs = [FleetServiceStub(server.new_channel()) for _ in range(CHANNELS)]

    async def ask(i: int) -> str:
        try:
            await stubs[i % CHANNELS].ListModels(pb.ListModelsRequest())
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "answered"

    assert Counter(await asyncio.gather(*map(ask, range(CALLS)))) == {"answered": CALLS}


@pytest.mark.slow
async def test_every_answer_of_a_burst_of_requests_is_exact(world: World) -> None:
    node = await local_node(world, lanes=64, decode_rate=0.0)
    server = await world.head(node, queue_limit_per_node=CALLS)
    calls = [complete(server, prompt(5, i), 2) for i in range(CALLS)]
    answers = await asyncio.gather(*map(read_all, calls))
    assert [answer.tokens for answer in answers] == [expected(prompt(5, i), 2) for i in range(CALLS)]
