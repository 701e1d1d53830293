"""The faults a node can be told to have, as a head sees them."""

import asyncio
import signal
from typing import Any

import grpc
import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.faults import Action, Fault, FaultError, Point, ReportLies, parse_fault, parse_lie
from node_stub.reference import StubModel, reference_tokens
from node_stub.rules import Code
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.node_stub.support import E1, E2, PROMPT, Head, Stream, collect, eventually, head_of, process, until
from tests.ports import quiet_port

LENGTH, CANCELLED = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_CANCELLED
ANSWER = reference_tokens(StubModel("stub"), 0, PROMPT, 40)
SLOW = StubSettings(engine=EngineSettings(decode_tokens_per_s=50, prefill_tokens_per_s=0))


def fault(point: str, action: str, **fields: Any) -> stub_pb.Fault:
    return stub_pb.Fault(point=f"FAULT_POINT_{point}", action=f"FAULT_ACTION_{action}", **fields)


async def broken(call: Any) -> Stream:
    """What came before the connection broke."""
    stream = Stream()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call, stream)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    return stream


# ------------------------------------------------------------------------------------------- a real process


@pytest.mark.parametrize("k", [0, 1, 7, 39, 40])
async def test_killed_after_k_tokens_exactly_k_tokens_have_arrived(k: int) -> None:
    async with process("--fault", f"after-tokens={k}:die") as (node, address), head_of(address) as head:
        await head.bind()
        stream = await broken(head.generate(PROMPT, 40))
        assert stream.tokens == ANSWER[:k]
        assert await node.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "point,assigned,appended,tokens",
    [
        ("before-assign", False, False, 0),
        ("after-assign", False, False, 0),
        ("after-append", True, False, 0),
        ("after-generate", True, True, 0),
        ("before-finish", True, True, 40),
    ],
)
async def test_killed_between_two_replies_everything_before_has_arrived(
    point: str, assigned: bool, appended: bool, tokens: int
) -> None:
    async with process("--fault", f"{point}:die") as (node, address), head_of(address) as head:
        done = []
        stream = Stream()

        async def whole() -> None:
            await head.assign()
            done.append("assign")
            await head.append(PROMPT)
            done.append("append")
            await collect(head.generate(PROMPT, 40), stream)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await whole()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert ("assign" in done, "append" in done) == (assigned, appended)
        assert stream.tokens == ANSWER[:tokens]
        assert await node.wait() == -signal.SIGKILL


async def test_frozen_it_says_nothing_until_it_is_continued() -> None:
    flags = ("--decode-rate", "100", "--fault", "after-tokens=5:freeze,times=1")
    async with process(*flags) as (node, address), head_of(address) as head:
        await head.bind()
        call = head.generate(PROMPT, 40)
        stream = await until(call, lambda s: len(s.tokens) >= 5)
        assert stream.tokens == ANSWER[:5]
        waiting = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done
        node.send_signal(signal.SIGCONT)
        stream.replies.append(await waiting)
        assert (await collect(call, stream)).tokens == ANSWER


# ------------------------------------------------------------------------------------------------ in a stream


async def test_a_dropped_link_breaks_every_call_of_the_connection_and_no_other() -> None:
    async with StubNode() as node, head_of(node.address) as head, head_of(node.address) as other:
        await other.bind(session="other")
        await head.bind()
        watch = head.stub.WatchStatus(pb.WatchStatusRequest(period_ms=60_000))
        await watch.read()
        spared = other.stub.WatchStatus(pb.WatchStatusRequest(period_ms=50))
        await spared.read()
        await head.set_faults(fault("AFTER_TOKENS", "DROP_LINK", after_tokens=3, times=1))
        stream = await broken(head.generate(PROMPT, 40))
        assert stream.tokens == ANSWER[:3]
        with pytest.raises(grpc.aio.AioRpcError):
            await watch.read()
        assert await spared.read() is not grpc.aio.EOF
        await eventually(lambda: node.node.rules.active_runs == 0)
        assert (await collect(head.generate(PROMPT, 40, "again"))).tokens == ANSWER


@pytest.mark.parametrize("after_tokens", [0, 7, 40])
async def test_an_engine_error_or_refusal_ends_a_run_with_what_was_sent(after_tokens: int) -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.bind()
        for action, code in (("ENGINE_ERROR", "ENGINE_ERROR"), ("REFUSE", "BUSY")):
            refusal_code = pb.RefusalCode.Value(f"REFUSAL_CODE_{code}")
            await head.set_faults(
                fault("AFTER_TOKENS", action, after_tokens=after_tokens, refusal_code=refusal_code)
            )
            stream = await collect(head.generate(PROMPT, 40, action))
            assert stream.refusal.code == refusal_code
            assert stream.tokens == ANSWER[:after_tokens]
            assert not stream.finish
        await head.set_faults()
        assert (await collect(head.generate(PROMPT, 40, "well"))).tokens == ANSWER
        assert node.node.engine.load().lanes_active == 0


async def test_a_stalled_generation_keeps_its_lane_while_the_node_is_well() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.bind()
        await head.set_faults(fault("AFTER_TOKENS", "STALL", after_tokens=4, times=1))
        call = head.generate(PROMPT, 100_000)
        stream = await until(call, lambda s: len(s.tokens) >= 4)
        assert stream.tokens == ANSWER[:4]
        await head.bind(session="t")
        assert (await collect(head.generate(PROMPT, 40, session="t"))).tokens == ANSWER
        holdings = await head.holdings()
        assert holdings.lanes_active == 1
        assert (await head.journal(session="s"))[0].tokens_sent == 4
        await head.stub.Cancel(pb.CancelRequest(session_id="s", epoch=E1, generation_id="g"))
        assert (await collect(call)).finish == CANCELLED


async def test_wrong_epoch_repeated_and_skipped_indexes() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.bind()
        await head.set_faults(fault("AFTER_TOKENS", "WRONG_EPOCH", after_tokens=5))
        wrong = await collect(head.generate(PROMPT, 40, "wrong"))
        assert wrong.tokens == ANSWER
        epochs = [reply.epoch for reply in wrong.replies for _ in reply.token_ids]
        assert epochs == [E1] * 5 + [E2] * 35

        await head.set_faults(fault("AFTER_TOKENS", "REPEAT_INDEX", after_tokens=5))
        repeated = await collect(head.generate(PROMPT, 40, "repeated"))
        assert repeated.indexes == [*range(5), 4, *range(5, 40)]
        assert repeated.tokens == [*ANSWER[:5], ANSWER[4], *ANSWER[5:]]

        await head.set_faults(fault("AFTER_TOKENS", "SKIP_INDEX", after_tokens=5))
        skipped = await collect(head.generate(PROMPT, 40, "skipped"))
        assert skipped.indexes == [*range(5), *range(6, 40)]
        assert skipped.tokens == [*ANSWER[:5], *ANSWER[6:]]
        assert skipped.finish == LENGTH


async def test_a_skipped_last_token_is_missing_and_the_finish_comes() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.bind()
        await head.set_faults(fault("AFTER_TOKENS", "SKIP_INDEX", after_tokens=39))
        stream = await collect(head.generate(PROMPT, 40))
        assert (stream.tokens, stream.finish) == (ANSWER[:39], LENGTH)


async def test_several_faults_strike_one_run_each_in_its_place() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.bind()
        await head.set_faults(
            fault("AFTER_TOKENS", "REPEAT_INDEX", after_tokens=2),
            fault("AFTER_TOKENS", "DELAY", after_tokens=2, delay_ms=20),
            fault("AFTER_TOKENS", "REPEAT_INDEX", after_tokens=9),
            fault("BEFORE_FINISH", "DELAY", delay_ms=20),
        )
        stream = await collect(head.generate(PROMPT, 40))
        assert stream.indexes == [0, 1, 1, *range(2, 9), 8, *range(9, 40)]
        assert not stream.replies[-1].token_ids, "the finish comes alone, after the fault before it"
        assert stream.finish == LENGTH


# -------------------------------------------------------------------------------------------- around commands


async def test_refused_commands_and_how_often() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        busy = pb.REFUSAL_CODE_BUSY
        await head.set_faults(
            fault("BEFORE_ASSIGN", "REFUSE", refusal_code=busy, times=2, session_prefix="bad-")
        )
        assert [(await head.assign(session="bad-1")).code for _ in range(3)] == [busy, busy, 0]
        assert (await head.assign(session="good")).code == pb.REFUSAL_CODE_UNSPECIFIED
        left = await head.control.GetFaults(stub_pb.GetFaultsRequest())
        assert list(left.faults) == []
        await head.set_faults(fault("AFTER_APPEND", "REFUSE", refusal_code=busy))
        assert (await head.append(PROMPT, session="good")).refusal.code == busy
        assert list(node.node.rules.context_of("good")) == PROMPT, "executed, though refused"


async def test_a_fault_between_parts_that_come_along_is_felt() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.set_faults(fault("AFTER_ASSIGN", "ENGINE_ERROR", times=1))

        def whole() -> pb.NodeServiceGenerateRequest:
            assign, append = head.assign_request(), head.append_request(PROMPT)
            return head.generate_request(PROMPT, 5, assign=assign, append=append)

        request = whole()
        first = await collect(head.stub.Generate(request))
        assert first.refusal.code == pb.REFUSAL_CODE_ENGINE_ERROR
        again = await collect(head.stub.Generate(request))
        assert again.refusal.code == pb.REFUSAL_CODE_ENGINE_ERROR, "the same command gets the same answer"


@pytest.mark.parametrize("action", ["LOSE_APPEND", "REPEAT_APPEND"])
async def test_a_lost_or_repeated_append_is_found_at_the_generate(action: str) -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.set_faults(fault("AFTER_APPEND", action, times=1))
        await head.assign()
        assert not (await head.append(PROMPT)).HasField("refusal")
        stream = await collect(head.generate(PROMPT, 5))
        assert stream.refusal.code == pb.REFUSAL_CODE_CONTEXT_MISMATCH
        assert stream.refusal.context_length == (0 if action == "LOSE_APPEND" else 2 * len(PROMPT))
        await head.append(PROMPT)
        assert (await collect(head.generate(PROMPT, 5, "h"))).tokens == ANSWER[:5]


async def test_a_delayed_command_is_executed_in_the_end() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        await head.set_faults(fault("BEFORE_ASSIGN", "DELAY", delay_ms=300))
        slow = asyncio.ensure_future(head.assign(session="slow"))
        done, _ = await asyncio.wait([slow], timeout=0.1)
        assert not done
        assert node.node.rules.holdings() == []
        assert (await slow).code == pb.REFUSAL_CODE_UNSPECIFIED


# ------------------------------------------------------------------------------------------- pace and reports


async def test_slowing_down_stretches_the_engines_time() -> None:
    async with StubNode(SLOW) as node, head_of(node.address) as head:
        await head.bind()
        loop = asyncio.get_running_loop()
        await head.set_faults(slow_down=3.0)
        start_s = loop.time()
        assert (await collect(head.generate(PROMPT, 10))).tokens == ANSWER[:10]
        assert loop.time() - start_s > 9 * 3 / 50
        reply = await head.control.GetFaults(stub_pb.GetFaultsRequest())
        assert reply.slow_down == 3.0


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_pace_that_is_none_is_refused(factor: float) -> None:
    async with StubNode() as node, head_of(node.address) as head:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await head.set_faults(slow_down=factor)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await head.bind()
        assert (await collect(head.generate(PROMPT, 40))).tokens == ANSWER


async def test_reports_lie_or_stop_as_told() -> None:
    async with StubNode() as node, head_of(node.address) as head:
        lies = stub_pb.ReportFaults(kv_blocks_used=90, kv_blocks_total=100, queue_depth=0)
        await head.set_faults(reports=lies)
        watch = head.stub.WatchStatus(pb.WatchStatusRequest(period_ms=20))
        report = (await watch.read()).report
        assert (report.kv_blocks_used, report.kv_blocks_total, report.max_lanes) == (90, 100, 8)
        assert (await head.control.GetFaults(stub_pb.GetFaultsRequest())).reports == lies
        await head.set_faults(reports=stub_pb.ReportFaults(silent=True))
        # What was on its way when the reports stopped may still come.
        while True:
            reading = asyncio.ensure_future(watch.read())
            done, _ = await asyncio.wait([reading], timeout=0.2)
            if not done:
                break
        await head.set_faults()
        assert (await reading).report.kv_blocks_total == 16_384


# --------------------------------------------------------------------------------------------- saying a fault


@pytest.mark.parametrize(
    "wrong",
    [
        stub_pb.Fault(),
        fault("AFTER_TOKENS", "REFUSE"),
        fault("AFTER_TOKENS", "REFUSE", refusal_code=77),
        fault("AFTER_TOKENS", "DELAY"),
        fault("AFTER_TOKENS", "REPEAT_INDEX"),
        fault("BEFORE_ASSIGN", "STALL"),
        fault("AFTER_ASSIGN", "LOSE_APPEND"),
    ],
)
async def test_a_fault_that_makes_no_sense_is_refused_and_changes_nothing(wrong: stub_pb.Fault) -> None:
    async with StubNode() as node, head_of(node.address) as head:
        good = fault("BEFORE_FINISH", "DELAY", delay_ms=1)
        await head.set_faults(good)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await head.set_faults(good, wrong)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert list((await head.control.GetFaults(stub_pb.GetFaultsRequest())).faults) == [good]


@pytest.mark.parametrize(
    "text,expected",
    [
        ("after-tokens=5:die", Fault(Point.AFTER_TOKENS, Action.DIE, after_tokens=5)),
        (
            "before-assign:refuse=BUSY,times=1,session=a-",
            Fault(Point.BEFORE_ASSIGN, Action.REFUSE, times=1, session_prefix="a-", refusal_code=Code.BUSY),
        ),
        ("after-append:delay=200", Fault(Point.AFTER_APPEND, Action.DELAY, delay_ms=200)),
    ],
)
def test_a_fault_is_written_in_a_few_words(text: str, expected: Fault) -> None:
    assert parse_fault(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "die",
        "nowhere:die",
        "after-tokens=x:die",
        "before-finish:explode",
        "before-finish:die=3",
        "before-finish:refuse=NOPE",
        "before-finish:die,often",
        "before-assign:wrong-epoch",
    ],
)
def test_a_fault_that_cannot_be_read_says_what_could(text: str) -> None:
    with pytest.raises(FaultError):
        parse_fault(text)


def test_lies_are_written_in_a_few_words() -> None:
    lies = parse_lie("silent", parse_lie("kv-blocks-used=7", ReportLies()))
    assert lies == ReportLies(silent=True, kv_blocks_used=7)
    for text in ("loud", "silent=1", "kv-blocks-used", "kv-blocks-used=x"):
        with pytest.raises(FaultError):
            parse_lie(text, ReportLies())


async def test_within_ones_own_process_die_ends_the_server_and_freeze_is_refused() -> None:
    node = StubNode(StubSettings(address=f"127.0.0.1:{quiet_port()}"))
    await node.start()
    async with head_of(node.address) as head:
        await head.bind()
        with pytest.raises(FaultError):
            node.set_faults(Fault(Point.AFTER_TOKENS, Action.FREEZE))
        first = node.node.settings.incarnation
        node.set_faults(Fault(Point.AFTER_TOKENS, Action.DIE, after_tokens=6))
        stream = await broken(head.generate(PROMPT, 40))
        assert stream.tokens == ANSWER[:6]
        await node.stop()
        await node.start()
        assert node.node.settings.incarnation != first
        assert isinstance(head, Head)
    await node.stop()
