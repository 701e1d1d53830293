"""A link that blips: the same node takes the answer up at the next token, and nobody sees it."""

from __future__ import annotations

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from tests.e2e.callers import complete, read_all
from tests.e2e.harness import World, expected, prompt

MULTIPLEXED = pytest.mark.parametrize("world", ["link", "join"], indirect=True)


def _cut(after_tokens: int, ms: int) -> stub_pb.Fault:
    return stub_pb.Fault(
        point=stub_pb.FAULT_POINT_AFTER_TOKENS,
        action=stub_pb.FAULT_ACTION_CUT_LINK,
        after_tokens=after_tokens,
        delay_ms=ms,
        times=1,
    )


@MULTIPLEXED
async def test_200_ms_without_a_link_cost_no_token_and_no_prefill(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node, relink_s=3.0)
    await node.faults(_cut(10, 200))
    answer = await read_all(complete(server, prompt(30), 80))
    assert answer.tokens == expected(prompt(30), 80)
    assert answer.moves == []
    assert answer.finished.attempts == 1
    (run,) = await node.journal(kind="generate")
    assert run.resumes == 1


@MULTIPLEXED
async def test_a_node_that_comes_back_too_late_finds_its_answer_gone_on_elsewhere(world: World) -> None:
    first, second = await world.start_nodes(2)
    server = await world.head(first, second, relink_s=0.3)
    for node in (first, second):
        await node.faults(_cut(10, 2000))
    answer = await read_all(complete(server, prompt(30), 40))
    assert answer.tokens == expected(prompt(30), 40)
    assert [move.to_node for move in answer.moves] != []
