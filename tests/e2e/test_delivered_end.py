"""A delivered end is the end, though its node never said so: no further attempt, the right finish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.types_pb2 import TokenSequence
from node_stub.reference import StubModel
from tests.e2e.callers import Answer, Reading, context_of, generate, open_session_on, read_all
from tests.e2e.harness import NodeProcess, World, expected, prompt

MODEL = StubModel("eos-model", eos_per_mille=40)
FLAGS = ("--eos-per-mille", "40", "--lanes", "16")
N = 40


def prompt_with_answer_of(least: int, most: int) -> list[int]:
    """A prompt whose answer ends with EOS, as its `least`-th to `most`-th token."""
    candidates = (prompt(18, salt) for salt in range(10_000))
    return next(context for context in candidates if least <= len(expected(context, N, MODEL)) <= most)


def stalled(point: stub_pb.FaultPoint, session_prefix: str, after_tokens: int = 0) -> stub_pb.Fault:
    """From that point on the session's node says nothing more of the answer."""
    return stub_pb.Fault(
        point=point,
        action=stub_pb.FAULT_ACTION_STALL,
        session_prefix=session_prefix,
        after_tokens=after_tokens,
    )


def sequences(*token_ids: Sequence[int]) -> list[TokenSequence]:
    return [TokenSequence(token_ids=each) for each in token_ids]


async def no_run_on(node: NodeProcess) -> bool:
    return await node.journal(kind="generate") == []


async def lanes_free(node: NodeProcess) -> None:
    """Until nothing runs on the node."""
    async with asyncio.timeout(30):
        while (await node.holdings()).lanes_active:
            await asyncio.sleep(0.02)


def check(answer: Answer, tokens: Sequence[int], reason: str, stop_index: int | None = None) -> None:
    assert answer.tokens == tokens
    assert answer.reason == reason
    assert answer.finished.HasField("stop_index") == (stop_index is not None)
    assert answer.finished.stop_index == (stop_index or 0)
    assert (answer.moves, answer.finished.attempts) == ([], 1)


async def test_a_delivered_end_needs_no_word_of_the_node(world: World) -> None:
    nodes = await asyncio.gather(
        *(world.node(name, *FLAGS, model=MODEL.name) for name in ("eos", "stop", "last", "spare"))
    )
    eos, stop, last, spare = nodes
    server = await world.head(*nodes)
    ends = prompt_with_answer_of(6, 30)
    goes_on = prompt_with_answer_of(N, N)
    answer = expected(goes_on, N, MODEL)
    before_finish, after_tokens = stub_pb.FAULT_POINT_BEFORE_FINISH, stub_pb.FAULT_POINT_AFTER_TOKENS
    await eos.faults(stalled(before_finish, "eos"))
    await stop.faults(stalled(after_tokens, "stop", after_tokens=12))
    await last.faults(stalled(before_finish, "last"))
    for node, context in ((eos, ends), (stop, goes_on), (last, goes_on)):
        await open_session_on(server, node, context, node.identity, MODEL.name)
    by_eos, by_stop, by_length = await asyncio.gather(
        read_all(generate(server, "eos", N, extend_context=True)),
        read_all(generate(server, "stop", N, stop=sequences([31_999, 5], answer[9:12]))),
        read_all(generate(server, "last", 20, extend_context=True)),
    )
    check(by_eos, expected(ends, N, MODEL), "EOS")
    check(by_stop, answer[:12], "STOP", stop_index=1)
    check(by_length, answer[:20], "LENGTH")
    assert await context_of(server, "eos") == [*ends, *by_eos.tokens]
    assert await context_of(server, "stop") == goes_on
    assert await context_of(server, "last") == [*goes_on, *by_length.tokens]
    assert await no_run_on(spare)
    # Nobody waits for that word: the nodes are told that it is not wanted, and their lanes are free.
    for node in (eos, stop, last):
        await lanes_free(node)


async def test_an_end_split_over_the_seam_of_a_failover_is_found(world: World) -> None:
    doomed, survivor = await asyncio.gather(
        world.node("doomed", *FLAGS, model=MODEL.name), world.node("survivor", *FLAGS, model=MODEL.name)
    )
    server = await world.head(doomed, survivor)
    goes_on, ends = prompt_with_answer_of(N, N), prompt_with_answer_of(10, 30)
    answer, short = expected(goes_on, N, MODEL), expected(ends, N, MODEL)
    # A sequence of four tokens with one, two or three of them before the seam; and EOS right behind it.
    cuts = {"stop-1": 11, "stop-2": 12, "stop-3": 13, "eos": len(short) - 1}
    after_tokens = stub_pb.FAULT_POINT_AFTER_TOKENS
    await doomed.faults(*(stalled(after_tokens, name, cut) for name, cut in cuts.items()))
    for name in cuts:
        await open_session_on(server, doomed, ends if name == "eos" else goes_on, name, MODEL.name)
    stop = sequences([*answer[12:14], 1], answer[10:14])
    readings = {name: Reading(generate(server, name, N, stop=stop, extend_context=True)) for name in cuts}
    for name, cut in cuts.items():
        await readings[name].until_tokens(cut)
    await doomed.kill()
    for name, cut in cuts.items():
        ended = await readings[name].end()
        assert [move.next_index for move in ended.moves] == [cut], name
        assert ended.moves[0].cause == pb.MOVE_CAUSE_LINK_LOST
        if name == "eos":
            assert (ended.tokens, ended.reason) == (short, "EOS")
        else:
            assert (ended.tokens, ended.reason) == (answer[:14], "STOP")
            assert ended.finished.HasField("stop_index")
            assert ended.finished.stop_index == 1
        context = ends if name == "eos" else goes_on
        assert await context_of(server, name) == [*context, *ended.tokens]
