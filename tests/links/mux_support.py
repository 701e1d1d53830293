"""What tests of runs on a multiplexed link share: frames in short, and waiting until a link has settled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet.v1 import link_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from tests.links.scripted_link import WAYS, Linked, news
from tests.links.scripted_node import INTRODUCTION, a_run

both_ways = pytest.mark.parametrize("way", WAYS)

EOS, LENGTH = types_pb2.FINISH_REASON_EOS, types_pb2.FINISH_REASON_LENGTH


def end(handle: int, next_index: int, finish: types_pb2.FinishReason = LENGTH) -> link_pb2.RunEvent:
    return link_pb2.RunEvent(handle=handle, finish=finish, next_index=next_index)


def phase(handle: int, which: pb.GenerationPhase) -> link_pb2.RunEvent:
    return link_pb2.RunEvent(handle=handle, phase=which)


def run_number(number: int, **changes: Any) -> Any:
    return a_run(session_id=f"s-{number}", generation_id=f"g-{number}", **changes)


async def settled(both: Linked) -> None:
    """Until the head has taken in all that was sent to it."""
    lease = asyncio.ensure_future(both.link.renew_lease(1.0, INTRODUCTION.term))
    command = await both.node.command()
    while command.WhichOneof("command") == "cancel":
        reply = pb.CancelResponse()
        await both.node.send(news(replies=[link_pb2.NodeReply(call_id=command.call_id, cancel=reply)]))
        command = await both.node.command()
    answer = pb.RenewLeaseResponse(renewed=True)
    await both.node.send(news(replies=[link_pb2.NodeReply(call_id=command.call_id, renew_lease=answer)]))
    assert await lease
