"""A session's context: whatever the link does to appends, an answer is to exactly the tokens appended."""

from __future__ import annotations

import asyncio
import zlib
from array import array

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.domain.commands import Append, Refusal, RefusalCode, Run
from fleet_service.runtime.protocols import NodeLink, RunHandle, RunSink
from tests.e2e.callers import Answer, context_of, cordon, generate, open_session, open_session_on, read_all
from tests.e2e.harness import HeadServer, World, expected, prompt
from tests.e2e.local_nodes import LocalNode, local_node, local_nodes
from tests.e2e.refused import refusal_of
from tests.e2e.tap import Tap

LOSE = stub_pb.FAULT_ACTION_LOSE_APPEND
REPEAT = stub_pb.FAULT_ACTION_REPEAT_APPEND
INLINE = pytest.mark.parametrize("inline_bind", [True, False], ids=["inline", "one-by-one"])


def on_append(action: stub_pb.FaultAction, times: int = 1, delay_ms: int = 0) -> stub_pb.Fault:
    return stub_pb.Fault(
        point=stub_pb.FAULT_POINT_AFTER_APPEND, action=action, times=times, delay_ms=delay_ms
    )


async def append(server: HeadServer, session_id: str, token_ids: list[int], **fields: int) -> pb.Session:
    request = pb.AppendTokensRequest(session_id=session_id, token_ids=token_ids, **fields)  # type: ignore[arg-type]
    return (await server.fleet.AppendTokens(request)).session


async def outcomes(node: LocalNode, kind: str = "generate") -> list[str]:
    return [entry.outcome for entry in await node.journal(kind=kind)]


async def failures(server: HeadServer) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in server.head.fleet.nodes:
        counts |= node.failures
    return counts


def check_bound_anew(answer: Answer, node: str) -> None:
    """The attempt failed once for its context, and went on at the same node under a higher epoch."""
    (moved,) = answer.moves
    assert (moved.from_node, moved.to_node) == (node, node)
    assert (moved.cause, moved.next_index) == (pb.MOVE_CAUSE_SESSION_LOST, 0)
    assert moved.epoch > answer.started[0].epoch


@INLINE
@pytest.mark.parametrize("action", [LOSE, REPEAT], ids=["lost", "repeated"])
async def test_a_first_append_lost_or_repeated_is_noticed_and_resent(
    world: World, action: stub_pb.FaultAction, inline_bind: bool
) -> None:
    node = await local_node(world, "node-1", inline_bind=inline_bind)
    server = await world.head(node)
    session_id = await open_session(server, prompt(20))
    await node.faults(on_append(action))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20), 16)
    check_bound_anew(answer, "node-1")
    assert await outcomes(node) == ["CONTEXT_MISMATCH", "LENGTH"]
    assert await failures(server) == {}


@INLINE
@pytest.mark.parametrize("action", [LOSE, REPEAT], ids=["lost", "repeated"])
async def test_a_later_append_lost_or_repeated_is_noticed_and_resent(
    world: World, action: stub_pb.FaultAction, inline_bind: bool
) -> None:
    node = await local_node(world, "node-1", inline_bind=inline_bind)
    server = await world.head(node)
    session_id = await open_session(server, prompt(20))
    await read_all(generate(server, session_id, 4))
    await append(server, session_id, prompt(7, salt=1))
    await node.faults(on_append(action))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20) + prompt(7, salt=1), 16)
    check_bound_anew(answer, "node-1")
    (held,) = (await node.holdings()).holdings
    assert (held.context_length, held.epoch) == (27, answer.moves[0].epoch)


@INLINE
async def test_an_append_answered_late_only_takes_longer(world: World, inline_bind: bool) -> None:
    node = await local_node(world, "node-1", inline_bind=inline_bind)
    server = await world.head(node)
    session_id = await open_session(server, prompt(20))
    await node.faults(on_append(stub_pb.FAULT_ACTION_DELAY, delay_ms=300))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20), 16)
    assert answer.moves == []


async def test_an_append_never_answered_in_time_goes_elsewhere_and_its_late_effect_harms_nobody(
    world: World,
) -> None:
    late, other = await local_nodes(world, 2, inline_bind=False)
    server = await world.head(late, other, command_timeout_s=0.6)
    session_id = await open_session_on(server, late, prompt(20))
    await late.faults(on_append(stub_pb.FAULT_ACTION_DELAY, delay_ms=1500))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20), 16)
    (moved,) = answer.moves
    assert (moved.to_node, moved.cause) == (other.identity, pb.MOVE_CAUSE_STALLED)
    assert await outcomes(late) == []


async def test_an_append_that_arrives_after_the_generation_it_was_for_gives_no_wrong_answer(
    world: World,
) -> None:
    """The link says that the append was done, and delivers it behind the Generate."""
    node = await local_node(world, "node-1", inline_bind=False)
    tap = Tap()
    held: list[Append] = []
    late: list[Refusal | None] = []

    async def hold_back(link: NodeLink, command: Append) -> Refusal | None:
        if held:
            return await link.append(command)
        held.append(command)
        return None

    async def deliver_late(link: NodeLink) -> None:
        while "CONTEXT_MISMATCH" not in [entry.outcome for entry in await node.journal(kind="generate")]:
            await asyncio.sleep(0.01)
        late.append(await link.append(held[0]))

    def run(link: NodeLink, command: Run, sink: RunSink) -> RunHandle:
        handle = link.run(command, sink)
        deliveries.append(asyncio.create_task(deliver_late(link)))
        return handle

    deliveries: list[asyncio.Task[None]] = []
    tap.on_append, tap.on_run = hold_back, run
    server = await world.head(node, through=tap)
    session_id = await open_session(server, prompt(20))
    answer = await read_all(generate(server, session_id, 16))
    await asyncio.gather(*deliveries)
    assert answer.tokens == expected(prompt(20), 16)
    check_bound_anew(answer, "node-1")
    assert await outcomes(node) == ["CONTEXT_MISMATCH", "LENGTH"]
    assert late[-1] is not None
    # Refused either way, be it before the session is bound anew or after.
    assert late[-1].code in (RefusalCode.REPLAYED, RefusalCode.STALE_EPOCH)


async def test_an_old_append_delivered_again_behind_a_newer_one_changes_nothing(world: World) -> None:
    node = await local_node(world, "node-1", inline_bind=False)
    tap = Tap()
    again: list[Refusal | None] = []

    async def newest_then_oldest(link: NodeLink, command: Append) -> Refusal | None:
        refusal = await link.append(command)
        if len(tap.appends) > 1:
            again.append(await link.append(tap.appends[0]))
        return refusal

    tap.on_append = newest_then_oldest
    server = await world.head(node, through=tap)
    session_id = await open_session(server, prompt(20))
    await read_all(generate(server, session_id, 4))
    await append(server, session_id, prompt(7, salt=1))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20) + prompt(7, salt=1), 16)
    assert answer.moves == []
    assert [refusal.code for refusal in again if refusal] == [RefusalCode.REPLAYED]


async def test_a_node_that_loses_every_append_is_left_for_another(world: World) -> None:
    loser, other = await local_nodes(world, 2)
    server = await world.head(loser, other)
    session_id = await open_session_on(server, loser, prompt(20))
    await loser.faults(on_append(LOSE, times=0))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20), 16)
    assert [move.to_node for move in answer.moves] == [loser.identity, other.identity]
    assert {move.cause for move in answer.moves} == {pb.MOVE_CAUSE_SESSION_LOST}


async def test_when_every_append_is_lost_everywhere_there_is_no_answer_rather_than_a_wrong_one(
    world: World,
) -> None:
    nodes = await local_nodes(world, 2)
    server = await world.head(*nodes)
    for node in nodes:
        await node.faults(on_append(LOSE, times=0))
    session_id = await open_session(server, prompt(20))
    answer = await read_all(generate(server, session_id, 16))
    assert (answer.tokens, answer.reason) == ([], "ERROR")
    assert answer.finished.error.reason == "ATTEMPTS_EXHAUSTED"
    assert answer.finished.attempts == 3


async def test_only_what_is_new_of_a_context_is_sent(world: World) -> None:
    node = await local_node(world, "node-1")
    tap = Tap()
    server = await world.head(node, through=tap)
    session_id = await open_session(server, prompt(100))
    await read_all(generate(server, session_id, 4))
    await read_all(generate(server, session_id, 4))
    await append(server, session_id, prompt(7, salt=1))
    await append(server, session_id, prompt(2, salt=2))
    answer = await read_all(generate(server, session_id, 8))
    assert answer.tokens == expected(prompt(100) + prompt(7, salt=1) + prompt(2, salt=2), 8)
    assert tap.sent == [(0, 100), (100, 9)]


async def test_a_context_is_cut_and_extended_in_one_step(world: World) -> None:
    node = await local_node(world, "node-1")
    tap = Tap()
    server = await world.head(node, through=tap)
    session_id = await open_session(server, prompt(100))
    await read_all(generate(server, session_id, 4))
    session = await append(server, session_id, prompt(5, salt=3), truncate_to=60)
    context = prompt(100)[:60] + prompt(5, salt=3)
    assert session.context_length == 65
    assert session.context_crc32 == zlib.crc32(array("I", context).tobytes())
    assert await context_of(server, session_id) == context
    answer = await read_all(generate(server, session_id, 8))
    assert answer.tokens == expected(context, 8)
    assert tap.sent == [(0, 100), (60, 5)]


async def test_a_context_is_cut_without_anything_added(world: World) -> None:
    node = await local_node(world, "node-1")
    tap = Tap()
    server = await world.head(node, through=tap)
    session_id = await open_session(server, prompt(100))
    await read_all(generate(server, session_id, 4))
    assert (await append(server, session_id, [], truncate_to=33)).context_length == 33
    answer = await read_all(generate(server, session_id, 8))
    assert (answer.tokens, answer.moves) == (expected(prompt(100)[:33], 8), [])
    assert tap.sent == [(0, 100), (33, 0)]


async def test_an_append_to_a_context_that_has_changed_is_refused_and_changes_nothing(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(20))
    await append(server, session_id, prompt(3, salt=1), expected_length=20)
    late = pb.AppendTokensRequest(session_id=session_id, token_ids=prompt(3, salt=2), expected_length=20)
    error = await refusal_of(server.fleet.AppendTokens(late))
    assert error.what == ("ABORTED", "CONTEXT_CHANGED")
    assert (error.metadata["expectedLength"], error.metadata["contextLength"]) == ("20", "23")
    assert await context_of(server, session_id) == prompt(20) + prompt(3, salt=1)


async def test_what_is_generated_joins_the_context_only_when_asked_for(world: World) -> None:
    node = await local_node(world, "node-1")
    tap = Tap()
    server = await world.head(node, through=tap)
    session_id = await open_session(server, prompt(20))
    await read_all(generate(server, session_id, 8))
    assert await context_of(server, session_id) == prompt(20)
    first = await read_all(generate(server, session_id, 8, extend_context=True))
    assert await context_of(server, session_id) == prompt(20) + first.tokens
    second = await read_all(generate(server, session_id, 8))
    assert first.tokens + second.tokens == expected(prompt(20), 16)
    assert second.finished.context_tokens == 28
    assert tap.sent == [(0, 20), (20, 8)]


async def test_what_was_delivered_before_a_cancel_joins_the_context_as_well(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(20))

    async def cancel_at_five(answer: Answer) -> None:
        if len(answer.tokens) >= 5:
            request = pb.CancelGenerationRequest(generation_id=answer.generation_id)
            await server.fleet.CancelGeneration(request)

    answer = await read_all(generate(server, session_id, 2000, extend_context=True), cancel_at_five)
    assert answer.reason == "CANCELLED"
    assert await context_of(server, session_id) == prompt(20) + answer.tokens


async def test_a_context_goes_along_whole_when_its_session_changes_nodes(world: World) -> None:
    first, second = await local_nodes(world, 2)
    tap = Tap()
    server = await world.head(first, second, through=tap)
    session_id = await open_session_on(server, first, prompt(20))
    await read_all(generate(server, session_id, 4, extend_context=True))
    await server.fleet.ParkSession(pb.ParkSessionRequest(session_id=session_id))
    await cordon(server, first)
    await server.fleet.ResumeSession(pb.ResumeSessionRequest(session_id=session_id))
    answer = await read_all(generate(server, session_id, 8))
    assert answer.started[0].node == second.identity
    assert answer.tokens == expected(prompt(20), 12)[4:]
    assert tap.sent == [(0, 20), (0, 24)]
