"""A node over a multiplexed link: the frames as a head sees them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from fleet.v1 import link_pb2 as link_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.link import LinkLimits
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.node_stub.link_support import DialedLink, hello_frame, link_of
from tests.node_stub.support import E1, E2, PROMPT, TERM, eventually, head_of

LENGTH, CANCELLED = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_CANCELLED
PREFILL, DECODE = pb.GENERATION_PHASE_PREFILL, pb.GENERATION_PHASE_DECODE
SLOW = EngineSettings(decode_tokens_per_s=50, prefill_tokens_per_s=0)


@pytest.fixture
async def node() -> AsyncIterator[StubNode]:
    async with StubNode() as node:
        yield node


@pytest.fixture
async def link(node: StubNode) -> AsyncIterator[DialedLink]:
    async with link_of(node.address) as link:
        yield link


# ---------------------------------------------------------------------------------------------------- hellos


async def test_a_node_introduces_itself_as_at_the_handshake(node: StubNode) -> None:
    async with link_of(node.address) as link, head_of(node.address) as head:
        request = hello_frame().hello
        plain = await head.stub.Handshake(request)
        assert link.hello
        link.hello.report.ClearField("sampled_at_ms")
        plain.report.ClearField("sampled_at_ms")
        assert link.hello == plain


@pytest.mark.parametrize(
    "hello,reason",
    [
        ({"min_version": 2, "max_version": 3}, "VERSION_UNSUPPORTED"),
        ({"fleet_id": "other"}, "FLEET_MISMATCH"),
    ],
)
async def test_a_head_that_is_not_served_is_told_why(hello: dict[str, Any], reason: str) -> None:
    async with StubNode(StubSettings(fleet_id="fleet")) as node, head_of(node.address) as head:
        link = DialedLink(head, head.channel)
        await link.send(hello_frame(**hello))
        frame = await link.next_frame()
        assert (frame.type, frame.refused.reason) == (link_pb.FRAME_TYPE_REFUSED, reason)
        assert frame.refused.message
        assert (await link.status())[0] is grpc.StatusCode.OK


async def test_a_peer_that_says_no_hello_is_hung_up_on() -> None:
    limits = LinkLimits(hello_timeout_s=0.1)
    async with StubNode(StubSettings(link_limits=limits)) as node, head_of(node.address) as head:
        code, text = await DialedLink(head, head.channel).status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "no hello" in text


async def test_a_node_without_the_feature_serves_no_links() -> None:
    async with StubNode(StubSettings(link=False)) as node, head_of(node.address) as head:
        code, _ = await DialedLink(head, head.channel).status()
        assert code is grpc.StatusCode.UNIMPLEMENTED


# ------------------------------------------------------------------------------------------ broken contracts


def commands_frame(*commands: link_pb.HeadCommand, **fields: Any) -> link_pb.HeadFrame:
    return link_pb.HeadFrame(type=link_pb.FRAME_TYPE_COMMANDS, commands=commands, **fields)


def cancel(call_id: int) -> link_pb.HeadCommand:
    return link_pb.HeadCommand(call_id=call_id, cancel=pb.CancelRequest(session_id="s"))


HELLO = hello_frame()


@pytest.mark.parametrize(
    "frames,said",
    [
        ([commands_frame(cancel(1))], "before the hello"),
        ([link_pb.HeadFrame(type=link_pb.FRAME_TYPE_HELLO)], "without its body"),
        ([HELLO, HELLO], "a second hello"),
        ([HELLO, link_pb.HeadFrame()], "without a type"),
        ([HELLO, link_pb.HeadFrame(type=77, must_understand=True)], "type 77 must be understood"),  # type: ignore[arg-type]
        ([link_pb.HeadFrame(type=77, must_understand=True)], "type 77 must be understood"),  # type: ignore[arg-type]
        ([HELLO, commands_frame(cancel(5), cancel(5))], "call id 5"),
        ([HELLO, commands_frame(cancel(5)), commands_frame(cancel(4))], "call id 4"),
        ([HELLO, commands_frame(link_pb.HeadCommand(call_id=1))], "command 1"),
        ([HELLO, commands_frame(acks=[link_pb.RunAck(handle=1)])], "handle 1"),
        ([HELLO, commands_frame(acks=[link_pb.RunAck()])], "handle 0"),
    ],
)
async def test_a_broken_contract_closes_the_link_with_a_clear_text_and_no_other(
    node: StubNode, link: DialedLink, frames: Sequence[link_pb.HeadFrame], said: str
) -> None:
    async with head_of(node.address) as head:
        wrong = DialedLink(head, head.channel)
        for frame in frames:
            await wrong.send(frame)
        code, text = await wrong.status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert said in text
    await link.bind()
    assert (await link.run(20)).tokens == node.reference(PROMPT, 20)


async def test_tokens_never_sent_cannot_be_acknowledged(link: DialedLink) -> None:
    await link.bind()
    accepted = await link.start(30_000)
    await link.ack(accepted.handle, 30_001)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await link.finished(accepted.handle)
    assert "not all were sent" in (caught.value.details() or "")


async def test_bytes_that_are_no_frame_end_that_call_only(node: StubNode, link: DialedLink) -> None:
    async with head_of(node.address) as head:
        raw: Any = head.channel.stream_stream("/fleet.v1.LinkService/Link")
        call = raw()
        await call.write(b"\xff" * 100)
        assert await call.code() is not grpc.StatusCode.OK
    await link.bind()
    assert (await link.run(20)).tokens == node.reference(PROMPT, 20)


async def test_frames_of_unknown_types_are_skipped(node: StubNode) -> None:
    async with head_of(node.address) as head:
        link = DialedLink(head, head.channel)
        unknown = link_pb.HeadFrame(type=77)  # type: ignore[arg-type]
        await link.send(unknown)
        await link.say_hello()
        await link.send(unknown)
        await link.bind()
        assert (await link.run(20)).tokens == node.reference(PROMPT, 20)
        link.call.cancel()


# ------------------------------------------------------------------------------------------------ generations


async def test_a_generation_is_exactly_the_reference(node: StubNode, link: DialedLink) -> None:
    await link.bind()
    accepted = await link.start(200)
    assert (accepted.handle, accepted.epoch, accepted.resumed) == (1, E1, False)
    seen = await link.finished(1)
    assert seen.tokens == node.reference(PROMPT, 200)
    assert seen.indexes == list(range(200))
    assert (seen.finish, seen.next_index) == (LENGTH, 200)
    assert seen.phases == [PREFILL, DECODE]
    assert link.frames[-1].steps.token_ids, "the finish comes with the last tokens"


async def test_commands_of_one_frame_are_executed_in_order_and_answered(
    node: StubNode, link: DialedLink
) -> None:
    maker = link.maker
    ids = await link.commands(
        {"assign": maker.assign_request()},
        {"append": maker.append_request(PROMPT)},
        {"generate": maker.generate_request(PROMPT, 20)},
        {"cancel": pb.CancelRequest(session_id="s", epoch=E2, generation_id="g")},
        {"renew_lease": pb.RenewLeaseRequest(fleet_id="fleet", head_id="head", term=TERM, lease_ms=9_000)},
    )
    await link.until(lambda: all(each in link.replies for each in ids))
    kinds = [link.replies[each].WhichOneof("reply") for each in ids]
    assert kinds == ["assign", "append", "generate", "cancel", "renew_lease"]
    assert link.replies[ids[1]].append.context_length == len(PROMPT)
    assert link.replies[ids[3]].cancel.refusal.code == pb.REFUSAL_CODE_STALE_EPOCH
    assert link.replies[ids[4]].renew_lease.renewed
    assert (await link.finished(1)).tokens == node.reference(PROMPT, 20)


async def test_a_refused_generate_gets_no_handle(link: DialedLink) -> None:
    await link.bind()
    wrong = await link.start(5, context=[*PROMPT, 1])
    assert (wrong.handle, wrong.refusal.code) == (0, pb.REFUSAL_CODE_CONTEXT_MISMATCH)
    assert (wrong.refusal.context_length, wrong.resumed) == (len(PROMPT), False)
    handles = [(await link.start(5, f"g{n}")).handle for n in range(3)]
    assert handles == [1, 2, 3]
    for handle in handles:
        assert (await link.finished(handle)).finish == LENGTH


async def test_one_decode_step_of_all_sessions_is_one_frame() -> None:
    engine = EngineSettings(lanes=16, decode_tokens_per_s=50, prefill_tokens_per_s=0)
    async with StubNode(StubSettings(engine=engine)) as node, link_of(node.address) as link:
        sessions = [f"s{n}" for n in range(16)]
        for session in sessions:
            await link.bind([*PROMPT, len(session)], session)
        await link.commands(
            *({"generate": link.maker.generate_request([*PROMPT, len(s)], 40, s, s)} for s in sessions)
        )
        await link.until(lambda: len(link.runs) == 16 and all(run.over for run in link.runs.values()))
        for session, run in zip(sessions, link.runs.values(), strict=True):
            assert run.tokens == node.reference([*PROMPT, len(session)], 40)
        steps = [frame.steps for frame in link.frames if frame.HasField("steps")]
        assert len(steps) <= 40
        assert all(sorted(set(step.handles)) == list(range(1, 17)) for step in steps)


async def test_a_cancel_ends_a_run_and_says_that_it_ran() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, link_of(node.address) as link:
        await link.bind()
        accepted = await link.start(10_000)
        await link.tokens(accepted.handle, 3)
        request = pb.CancelRequest(session_id="s", epoch=E1, generation_id="g")
        assert (await link.ask(cancel=request)).cancel.was_running
        seen = await link.finished(accepted.handle)
        assert seen.finish == CANCELLED
        assert seen.next_index == len(seen.tokens)
        assert not (await link.ask(cancel=request)).cancel.was_running
        # What it has read of an ended run, a head may acknowledge late.
        await link.ack(accepted.handle, 1)
        await link.bind(session="t")
        assert node.node.engine.load().lanes_active == 0


async def test_a_revoked_run_ends_with_a_refusal() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, link_of(node.address) as link:
        await link.bind()
        accepted = await link.start(10_000)
        await link.tokens(accepted.handle, 1)
        reply = await link.ask(revoke=pb.RevokeRequest(session_id="s", epoch=E1))
        assert not reply.revoke.HasField("refusal")
        refusal = (await link.finished(accepted.handle)).refusal
        assert refusal
        assert refusal.code == pb.REFUSAL_CODE_STALE_EPOCH


async def test_a_head_learns_what_the_node_holds_of_its_fleet() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, link_of(node.address) as link:
        await link.bind(session="mine")
        await link.bind(session="idle", epoch=E2)
        await link.bind(session="foreign", fleet_id="other")
        await link.tokens((await link.start(10_000, "g1", "mine")).handle, 1)
        request = pb.ReconcileRequest(fleet_id="fleet", head_id="head")
        over_link = (await link.ask(reconcile=request)).reconcile
        held = {each.session_id: each for each in over_link.sessions}
        assert sorted(held) == ["idle", "mine"]
        mine = held["mine"]
        assert (mine.epoch, mine.head_id, mine.context_length, mine.fenced) == (E1, "head", 4, False)
        assert (list(mine.generation_ids), list(held["idle"].generation_ids)) == (["g1"], [])
        assert held["idle"].epoch == E2
        async with head_of(node.address) as head:
            assert (await head.stub.Reconcile(request)) == over_link


async def test_without_the_feature_nothing_is_reconciled() -> None:
    async with StubNode(StubSettings(reconcile=False)) as node, link_of(node.address) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.ask(reconcile=pb.ReconcileRequest(fleet_id="fleet"))
        assert "does not announce" in (caught.value.details() or "")
        async with head_of(node.address) as head:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await head.stub.Reconcile(pb.ReconcileRequest(fleet_id="fleet"))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------------------------------- reports and readers


async def test_reports_come_at_the_period_the_head_asked_for() -> None:
    async with (
        StubNode(StubSettings(engine=SLOW)) as node,
        link_of(node.address, report_period_ms=30) as link,
    ):
        await link.bind()
        await link.tokens((await link.start(10_000)).handle, 1)
        await link.until(lambda: sum(frame.HasField("report") for frame in link.frames) >= 5)
        report = [frame.report for frame in link.frames if frame.HasField("report")][-1]
        assert (report.lanes_active, report.own_lanes_active, report.max_lanes) == (1, 1, 8)


async def test_one_that_reads_nothing_holds_its_own_runs_and_nobody_elses() -> None:
    settings = StubSettings(buffer_tokens=64)
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    narrow.append(("grpc.http2.lookahead_bytes", 16_384))
    async with (
        StubNode(settings) as node,
        link_of(node.address) as other,
        grpc.aio.insecure_channel(node.address, options=narrow) as channel,
    ):
        slow = DialedLink(other.maker, channel)
        await slow.say_hello()
        await slow.bind()
        await slow.start(30_000)
        run = next(iter(node.node._runs.values()))
        await eventually(lambda: run.job.held)
        await other.bind(session="t")
        sent, others = -1, 0
        while run.sent != sent:
            sent, others = run.sent, others + 1
            seen = await other.run(500, f"t{others}", session="t")
            assert seen.tokens == node.reference(PROMPT, 500)
        assert sent < 30_000, "what is not read is not generated"
        # Once it reads, all comes, in order.
        seen = await slow.finished(1)
        assert seen.tokens == node.reference(PROMPT, 30_000)
        assert seen.indexes == list(range(30_000))


async def test_commands_are_not_read_on_while_their_replies_are_not() -> None:
    limits = LinkLimits(max_waiting=4)
    async with StubNode(StubSettings(link_limits=limits)) as node, link_of(node.address) as link:
        ids = await link.commands(*({"cancel": pb.CancelRequest(session_id="s")} for _ in range(1_000)))
        await link.until(lambda: all(each in link.replies for each in ids))
        assert list(link.replies) == ids
        assert max(len(frame.replies) for frame in link.frames) <= 4


async def test_sigterm_lets_the_runs_of_a_link_end_and_takes_no_more() -> None:
    node = StubNode(StubSettings(engine=SLOW))
    await node.start()
    async with link_of(node.address) as link:
        await link.bind()
        await link.bind(session="t")
        accepted = await link.start(40)
        await link.tokens(accepted.handle, 1)
        stopping = asyncio.create_task(node.stop(30.0))
        answers = [await link.start(1, "t0", session="t")]
        while not answers[-1].HasField("refusal"):
            answers.append(await link.start(1, f"t{len(answers)}", session="t"))
        assert answers[-1].refusal.code == pb.REFUSAL_CODE_BUSY
        assert (await link.finished(accepted.handle)).tokens == node.reference(PROMPT, 40)
        assert (await link.status())[0] is grpc.StatusCode.OK
        await stopping
