"""The faults a node can be told to have, as a head sees them over a multiplexed link."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.faults import Action, Fault, Point, ReportLies, parse_fault
from node_stub.reference import StubModel, reference_tokens
from node_stub.rules import Code
from node_stub.stub_node import StubNode
from tests.node_stub.link_support import DialedLink, RunSeen, link_of
from tests.node_stub.support import E1, E2, PROMPT, eventually, process

LENGTH, CANCELLED = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_CANCELLED
ANSWER = reference_tokens(StubModel("stub"), 0, PROMPT, 40)


async def broken(link: DialedLink, handle: int = 1) -> RunSeen:
    """What came of a run before its link broke."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await link.finished(handle)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return link.runs.get(handle, RunSeen())


@pytest.mark.parametrize("k", [0, 1, 7, 39, 40])
async def test_killed_after_k_tokens_exactly_k_tokens_have_arrived(k: int) -> None:
    async with process("--fault", f"after-tokens={k}:die") as (node, address), link_of(address) as link:
        await link.bind()
        await link.command(generate=link.maker.generate_request(PROMPT, 40))
        assert (await broken(link)).tokens == ANSWER[:k]
        assert await node.wait() == -signal.SIGKILL


@pytest.mark.parametrize("point,accepted", [("after-generate", False), ("before-finish", True)])
async def test_killed_around_a_run_everything_before_has_arrived(point: str, accepted: bool) -> None:
    async with process("--fault", f"{point}:die") as (node, address), link_of(address) as link:
        await link.bind()
        await link.command(generate=link.maker.generate_request(PROMPT, 40))
        seen = await broken(link) if accepted else None
        if seen is None:
            code, _ = await link.status()
            assert code is grpc.StatusCode.UNAVAILABLE
        assert bool(link.runs) == accepted
        assert seen is None or seen.tokens == ANSWER
        assert await node.wait() == -signal.SIGKILL


async def test_a_dropped_link_breaks_itself_and_no_other() -> None:
    async with StubNode() as node, link_of(node.address) as link, link_of(node.address) as other:
        await link.bind()
        await other.bind(session="other")
        node.set_faults(Fault(Point.AFTER_TOKENS, Action.DROP_LINK, after_tokens=3, session_prefix="s"))
        await link.start(40)
        assert (await broken(link)).tokens == ANSWER[:3]
        assert (await other.run(40, session="other")).tokens == ANSWER


@pytest.mark.parametrize("point", [Point.BEFORE_ASSIGN, Point.AFTER_ASSIGN])
async def test_a_link_dropped_at_a_command_leaves_it_unanswered(point: Point) -> None:
    async with StubNode() as node, link_of(node.address) as link:
        node.set_faults(Fault(point, Action.DROP_LINK))
        call_id = await link.command(assign=link.maker.assign_request())
        assert (await link.status())[0] is grpc.StatusCode.UNAVAILABLE
        assert call_id not in link.replies
        assert len(node.node.rules.holdings()) == (1 if point is Point.AFTER_ASSIGN else 0)


@pytest.mark.parametrize("after_tokens", [0, 7, 40])
@pytest.mark.parametrize(
    "action,code", [(Action.ENGINE_ERROR, Code.ENGINE_ERROR), (Action.REFUSE, Code.BUSY)]
)
async def test_an_engine_error_or_refusal_ends_a_run_with_what_was_sent(
    after_tokens: int, action: Action, code: Code
) -> None:
    async with StubNode() as node, link_of(node.address) as link:
        await link.bind()
        fault = Fault(Point.AFTER_TOKENS, action, after_tokens=after_tokens, refusal_code=Code.BUSY)
        node.set_faults(fault)
        seen = await link.run(40)
        assert seen.refusal
        assert seen.refusal.code == pb.RefusalCode.Value(f"REFUSAL_CODE_{code.name}")
        assert (seen.tokens, seen.finish) == (ANSWER[:after_tokens], 0)
        node.set_faults()
        assert (await link.run(40, "well")).tokens == ANSWER
        assert node.node.engine.load().lanes_active == 0


@pytest.mark.parametrize("point", [Point.AFTER_GENERATE, Point.AFTER_TOKENS])
async def test_a_stalled_run_is_accepted_and_keeps_its_lane_while_others_run(point: Point) -> None:
    async with StubNode() as node, link_of(node.address) as link:
        await link.bind()
        await link.bind(session="t")
        after = 4 if point is Point.AFTER_TOKENS else 0
        node.set_faults(Fault(point, Action.STALL, after_tokens=after, times=1))
        accepted = await link.start(10_000)
        seen = await link.tokens(accepted.handle, after)
        assert (await link.run(40, session="t")).tokens == ANSWER
        assert seen.tokens == ANSWER[:after]
        assert node.node.engine.load().lanes_active == 1
        request = pb.CancelRequest(session_id="s", epoch=E1, generation_id="g")
        assert (await link.ask(cancel=request)).cancel.was_running
        assert (await link.finished(accepted.handle)).finish == CANCELLED


async def test_a_delay_holds_up_the_commands_of_its_session_only() -> None:
    async with StubNode() as node, link_of(node.address) as link:
        fault = Fault(Point.BEFORE_ASSIGN, Action.DELAY, delay_ms=400, session_prefix="slow", times=1)
        node.set_faults(fault)
        slow = await link.commands(
            {"assign": link.maker.assign_request("slow")},
            {"append": link.maker.append_request(PROMPT, session="slow")},
        )
        await link.bind(session="t")
        assert (await link.run(40, session="t")).tokens == ANSWER
        assert not set(slow) & set(link.replies), "still held up"
        await link.until(lambda: slow[1] in link.replies)
        assert list(link.replies).index(slow[0]) < list(link.replies).index(slow[1])
        assert (await link.run(40, "u", session="slow")).tokens == ANSWER


@pytest.mark.parametrize("point", [Point.AFTER_GENERATE, Point.AFTER_TOKENS, Point.BEFORE_FINISH])
async def test_a_wrong_epoch_is_told_where_a_link_tells_an_epoch(point: Point) -> None:
    async with StubNode() as node, link_of(node.address) as link:
        await link.bind()
        node.set_faults(Fault(point, Action.WRONG_EPOCH, times=1))
        accepted = await link.start(40)
        assert accepted.epoch == E2
        assert (await link.finished(accepted.handle)).tokens == ANSWER
        assert (await link.start(40, "right")).epoch == E1


async def test_repeated_and_skipped_indexes_show_in_the_columns() -> None:
    async with StubNode() as node, link_of(node.address) as link:
        await link.bind()
        node.set_faults(Fault(Point.AFTER_TOKENS, Action.REPEAT_INDEX, after_tokens=5))
        repeated = await link.run(40, "repeated")
        assert repeated.indexes == [*range(5), 4, *range(5, 40)]
        assert repeated.tokens == [*ANSWER[:5], ANSWER[4], *ANSWER[5:]]
        node.set_faults(Fault(Point.AFTER_TOKENS, Action.SKIP_INDEX, after_tokens=5))
        skipped = await link.run(40, "skipped")
        assert skipped.indexes == [*range(5), *range(6, 40)]
        assert (skipped.tokens, skipped.finish) == ([*ANSWER[:5], *ANSWER[6:]], LENGTH)
        assert skipped.next_index == 40


async def test_several_faults_strike_one_run_each_in_its_place() -> None:
    async with StubNode() as node, link_of(node.address) as link:
        await link.bind()
        node.set_faults(
            Fault(Point.AFTER_GENERATE, Action.DELAY, delay_ms=20),
            Fault(Point.AFTER_TOKENS, Action.REPEAT_INDEX, after_tokens=2),
            Fault(Point.AFTER_TOKENS, Action.DELAY, after_tokens=2, delay_ms=20),
            Fault(Point.BEFORE_FINISH, Action.DELAY, delay_ms=20),
        )
        seen = await link.run(40)
        assert seen.indexes == [0, 1, 1, *range(2, 40)]
        assert not link.frames[-1].steps.token_ids, "the finish comes alone, after the fault before it"


@pytest.mark.parametrize("action", [Action.LOSE_APPEND, Action.REPEAT_APPEND])
async def test_a_lost_or_repeated_append_is_found_at_the_generate(action: Action) -> None:
    async with StubNode() as node, link_of(node.address) as link:
        node.set_faults(Fault(Point.AFTER_APPEND, action, times=1))
        await link.bind()
        refusal = (await link.start(5)).refusal
        length = 0 if action is Action.LOSE_APPEND else 2 * len(PROMPT)
        assert (refusal.code, refusal.context_length) == (pb.REFUSAL_CODE_CONTEXT_MISMATCH, length)


async def test_reports_stop_as_told() -> None:
    async with StubNode() as node, link_of(node.address, report_period_ms=20) as link:
        await link.until(lambda: any(frame.HasField("report") for frame in link.frames))
        node.set_faults(lies=ReportLies(silent=True))
        while True:
            reading = asyncio.ensure_future(link.next_frame())
            done, _ = await asyncio.wait([reading], timeout=0.2)
            if not done:
                break
        node.set_faults(lies=ReportLies(queue_depth=77))
        await reading
        assert link.frames[-1].report.queue_depth == 77


async def test_a_run_is_ended_by_its_wall_clock_while_its_sender_is_held_up() -> None:
    async with StubNode() as node, link_of(node.address) as link:
        await link.bind()
        node.set_faults(Fault(Point.AFTER_TOKENS, Action.STALL, after_tokens=4))
        accepted = await link.start(10_000, max_wall_ms=100)
        seen = await link.finished(accepted.handle)
        assert seen.finish == types_pb2.FINISH_REASON_WALL_CLOCK
        await eventually(lambda: node.node.engine.load().lanes_active == 0)


def test_a_cut_is_written_in_a_few_words() -> None:
    cut = Fault(Point.AFTER_TOKENS, Action.CUT_LINK, after_tokens=5, delay_ms=200)
    assert parse_fault("after-tokens=5:cut-link=200") == cut
