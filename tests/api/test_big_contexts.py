"""A context of millions of tokens is read back whole, and its copying keeps nobody waiting for long."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence

import structlog

from fleet.v1 import fleet_service_pb2 as fleet
from fleet_service.api.connection import ConnectParts
from fleet_service.api.errors import ErrorTranslator
from fleet_service.api.fleet_servicer import FleetServicer
from fleet_service.api.interceptors import NullRpcObserver
from fleet_service.api.validate import Limits
from fleet_service.domain.access import ANYBODY
from tests.api.fakes import FakeHead

CONTEXT = array("I", range(300_001))
CONNECTING = ConnectParts(
    ErrorTranslator(random.Random(1)), NullRpcObserver(), structlog.get_logger(), 1, 1_000_000
)


class BigHead(FakeHead):
    async def context_of(self, session_id: str, owner: str) -> Sequence[int]:
        return CONTEXT


class AnyCall:
    trace = None
    caller = ANYBODY

    async def write(self, message: object) -> None:
        raise AssertionError("a unary call writes nothing")


async def test_others_are_answered_while_big_contexts_are_copied() -> None:
    servicer = FleetServicer(BigHead(), Limits(), CONNECTING)
    request = fleet.GetSessionRequest(session_id="s1", include_token_ids=True)
    answered: list[str] = []

    async def big() -> fleet.GetSessionResponse:
        reply = await servicer.GetSession(request, AnyCall())
        answered.append("big")
        return reply

    async def small() -> None:
        await servicer.ListModels(fleet.ListModelsRequest(), AnyCall())
        answered.append("small")

    async with asyncio.TaskGroup() as group:
        copies = [group.create_task(big()) for _ in range(4)]
        group.create_task(small())
    assert answered == ["small", *["big"] * 4]
    assert all(array("I", copy.result().token_ids) == CONTEXT for copy in copies)


async def test_a_caller_that_leaves_while_its_copy_is_made_holds_nobody_up() -> None:
    servicer = FleetServicer(BigHead(), Limits(), CONNECTING)
    request = fleet.GetSessionRequest(session_id="s1", include_token_ids=True)
    leaves = asyncio.create_task(servicer.GetSession(request, AnyCall()))
    stays = asyncio.create_task(servicer.GetSession(request, AnyCall()))
    await asyncio.sleep(0)
    leaves.cancel()
    assert len((await stays).token_ids) == len(CONTEXT)
    assert leaves.cancelled()
