"""A node over real gRPC: the contract as a head sees it."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.reference import StubModel
from node_stub.rules import Limits
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.node_stub.support import (
    E1,
    E2,
    PROMPT,
    TERM,
    Head,
    collect,
    eventually,
    head_of,
    sampled,
    until,
)

LENGTH, EOS = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_EOS
CANCELLED, WALL_CLOCK = types_pb2.FINISH_REASON_CANCELLED, types_pb2.FINISH_REASON_WALL_CLOCK
QUEUED, PREFILL, DECODE = (
    pb.GENERATION_PHASE_QUEUED,
    pb.GENERATION_PHASE_PREFILL,
    pb.GENERATION_PHASE_DECODE,
)
SLOW = EngineSettings(lanes=1, decode_tokens_per_s=50, prefill_tokens_per_s=0)


@pytest.fixture
async def node() -> AsyncIterator[StubNode]:
    async with StubNode() as node:
        yield node


@pytest.fixture
async def head(node: StubNode) -> AsyncIterator[Head]:
    async with head_of(node.address) as head:
        yield head


def hello(**fields: object) -> pb.HandshakeRequest:
    about = {"min_version": 1, "max_version": 1, "fleet_id": "fleet", "head_id": "head", "term": TERM}
    return pb.HandshakeRequest(**{**about, **fields})  # type: ignore[arg-type]


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type] # it reads only code, details and trailers
    assert status
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "fleet.v1"
    return info.reason


# ------------------------------------------------------------------------------------------------- handshake


async def test_a_node_introduces_itself() -> None:
    settings = StubSettings(identity="n1", labels={"zone": "a"}, models=[(StubModel("m"), 4096)])
    async with StubNode(settings) as node, head_of(node.address, "m") as head:
        reply = await head.stub.Handshake(hello(min_version=1, max_version=7))
        assert (reply.version, reply.identity, dict(reply.labels)) == (1, "n1", {"zone": "a"})
        assert [(m.name, m.max_context_tokens, m.vocab_size) for m in reply.models] == [("m", 4096, 32_000)]
        assert set(reply.features) == {
            admin_pb.NODE_FEATURE_INLINE_BIND,
            admin_pb.NODE_FEATURE_LINK,
            admin_pb.NODE_FEATURE_RESUME,
            admin_pb.NODE_FEATURE_RECONCILE,
        }
        assert (reply.report.max_lanes, reply.report.max_context_tokens) == (8, 4096)
        assert reply.highest_epoch == 0
        assert reply.incarnation
        await head.assign(epoch=E2)
        assert (await head.stub.Handshake(hello())).highest_epoch == E2


@pytest.mark.parametrize("versions", [(2, 3), (0, 0)])
async def test_a_head_of_another_protocol_version_is_refused(head: Head, versions: tuple[int, int]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await head.stub.Handshake(hello(min_version=versions[0], max_version=versions[1]))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "VERSION_UNSUPPORTED"


async def test_a_head_of_another_fleet_is_refused() -> None:
    async with StubNode(StubSettings(fleet_id="mine")) as node, head_of(node.address) as head:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await head.stub.Handshake(hello())
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(caught.value) == "FLEET_MISMATCH"
        assert "--fleet-id" in (caught.value.details() or "")
        assert (await head.stub.Handshake(hello(fleet_id="mine"))).identity == "stub"


async def test_a_node_without_a_fleet_works_for_one_at_a_time(head: Head) -> None:
    await head.assign(epoch=E2, lease_ms=60_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await head.stub.Handshake(hello(fleet_id="other"))
    assert reason_of(caught.value) == "FLEET_MISMATCH"
    assert "works for fleet 'fleet'" in (caught.value.details() or "")
    assert (await head.stub.Handshake(hello(head_id="another of the fleet"))).highest_epoch == E2
    lease = pb.RenewLeaseRequest(fleet_id="fleet", head_id="head", term=TERM, lease_ms=0)
    await head.stub.RenewLease(lease)
    assert (await head.stub.Handshake(hello(fleet_id="other"))).highest_epoch == 0


async def test_health_says_serving(node: StubNode) -> None:
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "fleet.v1.NodeService"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


# ------------------------------------------------------------------------------------------------ generation


async def test_a_generation_is_exactly_the_reference(node: StubNode, head: Head) -> None:
    await head.bind()
    stream = await collect(head.generate(PROMPT, 200))
    assert stream.tokens == node.reference(PROMPT, 200)
    assert stream.indexes == list(range(200))
    assert stream.finish == LENGTH
    assert stream.replies[-1].token_ids, "the finish comes with the last tokens"
    assert stream.phases == [PREFILL, DECODE]
    assert {reply.epoch for reply in stream.replies} == {E1}


async def test_a_generation_goes_on_after_a_prefix(node: StubNode, head: Head) -> None:
    await head.bind()
    whole = node.reference(PROMPT, 30, seed=5, temperature=0.8)
    rest = await collect(
        head.generate(PROMPT, 20, prefix_token_ids=whole[:10], first_index=10, sampling=sampled(5))
    )
    assert rest.tokens == whole[10:]
    assert rest.indexes == list(range(10, 30))


async def test_the_sessions_own_sampling_counts_where_the_generation_says_nothing(
    node: StubNode, head: Head
) -> None:
    await head.assign(sampling=sampled(6))
    await head.append(PROMPT)
    stream = await collect(head.generate(PROMPT, 20))
    assert stream.tokens == node.reference(PROMPT, 20, seed=6, temperature=0.8)


async def test_eos_ends_a_generation_and_is_its_last_token() -> None:
    settings = StubSettings(models=[(StubModel("stub", eos_per_mille=100), 0)])
    async with StubNode(settings) as node, head_of(node.address) as head:
        await head.bind()
        stream = await collect(head.generate(PROMPT, 10_000))
        assert stream.finish == EOS
        assert stream.tokens == node.reference(PROMPT, 10_000)
        assert stream.tokens[-1] == 2


async def test_a_full_window_ends_a_generation_with_length() -> None:
    settings = StubSettings(models=[(StubModel("stub"), 32)])
    async with StubNode(settings) as node, head_of(node.address) as head:
        await head.bind()
        stream = await collect(head.generate(PROMPT, 100))
        assert (len(stream.tokens), stream.finish) == (28, LENGTH)
        await head.append([1] * 28, base=4)
        full = await collect(head.generate([*PROMPT, *[1] * 28], 100, "full"))
        assert (full.tokens, full.finish) == ([], LENGTH)
        refusal = (await head.append([1], base=32)).refusal
        assert (refusal.code, refusal.max_context_tokens) == (pb.REFUSAL_CODE_CONTEXT_TOO_LONG, 32)


async def test_assign_and_append_may_come_along(node: StubNode, head: Head) -> None:
    call = head.generate(
        PROMPT, 20, assign=head.assign_request(), append=head.append_request(PROMPT), command_id=9
    )
    assert (await collect(call)).tokens == node.reference(PROMPT, 20)
    assert [entry.kind for entry in node.journal()] == ["assign", "append", "generate"]


async def test_without_the_feature_parts_that_come_along_are_not_executed() -> None:
    async with StubNode(StubSettings(inline_bind=False)) as node, head_of(node.address) as head:
        features = (await head.stub.Handshake(hello())).features
        assert admin_pb.NODE_FEATURE_INLINE_BIND not in features
        stream = await collect(head.generate(PROMPT, 20, assign=head.assign_request(), command_id=9))
        assert stream.refusal.code == pb.REFUSAL_CODE_UNKNOWN_SESSION


async def test_more_generations_than_lanes_wait_and_a_lower_class_goes_first() -> None:
    engine = EngineSettings(lanes=1, decode_tokens_per_s=100, prefill_tokens_per_s=0)
    async with StubNode(StubSettings(engine=engine)) as node, head_of(node.address) as head:
        ended = []

        async def run(name: str, qos: int) -> None:
            await head.bind(session=name)
            stream = await collect(head.generate(PROMPT, 5, session=name, qos_class=qos))
            assert stream.tokens == node.reference(PROMPT, 5)
            ended.append((name, stream.phases))

        load = node.node.engine.load
        node.set_faults(slow_down=50)  # until all of them wait
        tasks = [asyncio.create_task(run("first", 4))]
        await eventually(lambda: load().lanes_active == 1)
        for depth, (name, qos) in enumerate([("background", 4), ("agent", 3), ("person", 1)]):
            tasks.append(asyncio.create_task(run(name, qos)))
            await eventually(lambda depth=depth: load().queue_depth == depth + 1)  # type: ignore[misc]
        node.set_faults()
        await asyncio.gather(*tasks)
        assert [name for name, _ in ended] == ["first", "person", "agent", "background"]
        assert ended[0][1] == [PREFILL, DECODE]
        assert ended[1][1] == [QUEUED, PREFILL, DECODE]
        assert (await head.holdings()).peak_lanes_active == 1


# -------------------------------------------------------------------------------------------------- refusals


async def test_every_refusal_is_a_reply(node: StubNode, head: Head) -> None:
    assert (await head.append(PROMPT)).refusal.code == pb.REFUSAL_CODE_UNKNOWN_SESSION
    await head.bind(epoch=E2)
    stale = await head.assign(epoch=E1)
    assert (stale.code, stale.current_epoch) == (pb.REFUSAL_CODE_STALE_EPOCH, E2)
    replayed = await head.append(PROMPT, epoch=E2, command_id=1)
    assert replayed.refusal.code == pb.REFUSAL_CODE_REPLAYED
    mismatch = await collect(head.generate([1, 2], 5, epoch=E2))
    assert (mismatch.refusal.code, mismatch.refusal.context_length) == (pb.REFUSAL_CODE_CONTEXT_MISMATCH, 4)
    assert (await head.assign(session="t", model="none")).code == pb.REFUSAL_CODE_CONSTRAINT
    assert (await head.assign(session="x" * 200)).code == pb.REFUSAL_CODE_CONSTRAINT
    assert (await head.assign(session="t", qos_class=77)).code == pb.REFUSAL_CODE_CONSTRAINT
    odd = await collect(head.generate(PROMPT, 5, "", epoch=E2))
    assert odd.refusal.code == pb.REFUSAL_CODE_CONSTRAINT
    assert (await collect(head.generate(PROMPT, 5, epoch=E2))).tokens == node.reference(PROMPT, 5)


async def test_a_generation_sent_again_never_runs_twice(node: StubNode, head: Head) -> None:
    await head.bind()
    request = head.generate_request(PROMPT, 5)
    assert (await collect(head.stub.Generate(request))).finish == LENGTH
    assert (await collect(head.stub.Generate(request))).refusal.code == pb.REFUSAL_CODE_REPLAYED
    later = await collect(head.generate(PROMPT, 5))
    assert later.refusal.code == pb.REFUSAL_CODE_REPLAYED
    assert [entry.outcome for entry in node.journal(kind="generate")] == ["LENGTH", "REPLAYED", "REPLAYED"]


async def test_a_node_that_holds_all_it_can_says_busy() -> None:
    async with StubNode(StubSettings(limits=Limits(max_sessions=1))) as node, head_of(node.address) as head:
        await head.bind()
        busy = await head.assign(session="t")
        assert busy.code == pb.REFUSAL_CODE_BUSY
        assert busy.retry_after_ms > 0
        assert (await collect(head.generate(PROMPT, 5))).finish == LENGTH


async def test_a_message_too_large_hurts_nothing(node: StubNode, head: Head) -> None:
    await head.bind()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await head.append([31_000] * 6_000_000, base=4)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await collect(head.generate(PROMPT, 5))).tokens == node.reference(PROMPT, 5)


async def test_the_callers_trace_is_kept_with_the_generation(node: StubNode, head: Head) -> None:
    await head.bind()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await collect(head.stub.Generate(head.generate_request(PROMPT, 5), metadata=[("traceparent", trace)]))
    assert node.journal(kind="generate")[0].traceparent == trace


async def test_a_call_that_ends_before_all_was_sent_is_a_cancel(node: StubNode, head: Head) -> None:
    await head.bind()
    call = head.generate(PROMPT, 32_000)
    await until(call, lambda s: len(s.tokens) >= 1)
    call.cancel()
    await eventually(lambda: node.journal(kind="generate")[0].outcome == "CANCELLED")
    assert node.journal(kind="generate")[0].cancel_seen_ms is not None


# ---------------------------------------------------------------------------------- cancel, revoke, deadline


@pytest.mark.parametrize("by_call", [True, False])
async def test_a_cancel_reaches_queue_prefill_and_decode_and_frees_the_lane(by_call: bool) -> None:
    engine = EngineSettings(lanes=2, decode_tokens_per_s=50, prefill_tokens_per_s=100)
    async with StubNode(StubSettings(engine=engine)) as node, head_of(node.address) as head:
        long = [1] * 2000  # 20 s of prefill
        await head.bind([1], session="decode")
        await head.bind(long, session="prefill")
        await head.bind([1], session="queued")
        calls = {"decode": head.generate([1], 10_000, session="decode")}
        await until(calls["decode"], lambda s: DECODE in s.phases)
        calls["prefill"] = head.generate(long, 10, session="prefill")
        await until(calls["prefill"], lambda s: PREFILL in s.phases)
        calls["queued"] = head.generate([1], 10, session="queued")
        await until(calls["queued"], lambda s: QUEUED in s.phases)
        for session in ("queued", "prefill", "decode"):
            if by_call:
                calls[session].cancel()
            else:
                request = pb.CancelRequest(session_id=session, epoch=E1, generation_id="g")
                assert (await head.stub.Cancel(request)).was_running
                assert (await collect(calls[session])).finish == CANCELLED
                assert not (await head.stub.Cancel(request)).was_running
        await eventually(lambda: node.node.rules.active_runs == 0)
        entries = node.journal(kind="generate")
        assert [entry.outcome for entry in entries] == ["CANCELLED"] * 3
        assert all(entry.cancel_seen_ms is not None and entry.ended_ms is not None for entry in entries)
        holdings = await head.holdings()
        assert (holdings.lanes_active, holdings.queue_depth) == (0, 0)


async def test_a_channel_that_goes_away_is_a_cancel() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node:
        async with head_of(node.address) as head:
            await head.bind()
            await until(head.generate(PROMPT, 10_000), lambda s: len(s.tokens) >= 1)
        await eventually(lambda: node.journal(kind="generate")[0].outcome == "CANCELLED")
        assert node.journal(kind="generate")[0].tokens_sent < 100
        assert [h.fenced for h in node.node.rules.holdings()] == [False], "the session outlives its link"


async def test_a_revoke_stops_the_run_and_bars_the_epoch() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, head_of(node.address) as head:
        await head.bind()
        call = head.generate(PROMPT, 10_000)
        await until(call, lambda s: len(s.tokens) >= 1)
        revoke = pb.RevokeRequest(session_id="s", epoch=E1)
        assert not (await head.stub.Revoke(revoke)).HasField("refusal")
        assert (await collect(call)).refusal.code == pb.REFUSAL_CODE_STALE_EPOCH
        assert (await head.stub.Revoke(revoke)).refusal.code == pb.REFUSAL_CODE_UNKNOWN_SESSION
        assert (await head.assign(epoch=E1)).code == pb.REFUSAL_CODE_STALE_EPOCH
        holdings = await head.holdings()
        assert (list(holdings.holdings), holdings.kv_blocks_used, holdings.lanes_active) == ([], 0, 0)
        await head.bind(epoch=E2)
        again = await collect(head.generate(PROMPT, 3, epoch=E2))
        assert again.tokens == node.reference(PROMPT, 3)


async def test_a_newer_binding_stops_the_older_ones_run() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, head_of(node.address) as head:
        await head.bind()
        call = head.generate(PROMPT, 10_000)
        await until(call, lambda s: len(s.tokens) >= 1)
        await head.bind(epoch=E2)
        refusal = (await collect(call)).refusal
        assert (refusal.code, refusal.current_epoch) == (pb.REFUSAL_CODE_STALE_EPOCH, E2)


async def test_max_wall_ends_a_run_with_what_it_has() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, head_of(node.address) as head:
        await head.bind()
        stream = await collect(head.generate(PROMPT, 10_000, max_wall_ms=150))
        assert stream.finish == WALL_CLOCK
        assert stream.tokens == node.reference(PROMPT, len(stream.tokens))
        entry = node.journal(kind="generate")[0]
        assert (entry.outcome, entry.cancel_seen_ms) == ("WALL_CLOCK", None)


# ---------------------------------------------------------------------------------------------------- leases


async def test_an_expired_lease_ends_runs_fences_sessions_and_cannot_be_renewed() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, head_of(node.address) as head:
        lease = pb.RenewLeaseRequest(fleet_id="fleet", head_id="head", term=TERM, lease_ms=300)
        await head.assign(lease_ms=300)
        await head.append(PROMPT)
        call = head.generate(PROMPT, 10_000)
        await until(call, lambda s: len(s.tokens) >= 1)
        renewed = await head.stub.RenewLease(lease)
        assert (renewed.renewed, renewed.live_sessions) == (True, 1)
        stream = await collect(call)
        assert stream.refusal.code == pb.REFUSAL_CODE_FENCED
        expired = await head.stub.RenewLease(lease)
        assert (expired.renewed, expired.live_sessions) == (False, 0)
        assert (await head.append([1], base=4)).refusal.code == pb.REFUSAL_CODE_FENCED
        holdings = await head.holdings()
        assert [(h.session_id, h.fenced, h.context_length) for h in holdings.holdings] == [("s", True, 0)]
        assert (holdings.lanes_active, holdings.kv_blocks_used) == (0, 0)
        assert "fence" in [entry.kind for entry in node.journal("s")]
        await head.bind(epoch=E2)
        assert (await collect(head.generate(PROMPT, 3, epoch=E2))).finish == LENGTH


class Clock:
    """The real one, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def test_a_lease_is_judged_on_the_nodes_own_clock_before_each_command() -> None:
    clock = Clock()
    async with StubNode(clock=clock) as node, head_of(node.address) as head:
        await head.bind()
        clock.ahead_s = 30.0
        assert (await collect(head.generate(PROMPT, 5))).finish == LENGTH
        clock.ahead_s = 61.0
        stream = await collect(head.generate(PROMPT, 5, "h"))
        assert (stream.refusal.code, stream.tokens) == (pb.REFUSAL_CODE_FENCED, [])
        assert [entry.kind for entry in node.journal()][-2:] == ["fence", "generate"]


async def test_a_node_that_slept_over_its_lease_says_nothing_more_of_the_run() -> None:
    clock = Clock()
    async with StubNode(StubSettings(engine=SLOW), clock=clock) as node, head_of(node.address) as head:
        await head.bind()
        call = head.generate(PROMPT, 10_000)
        stream = await until(call, lambda s: len(s.tokens) >= 2)
        # No timer of the loop has noticed yet that a minute has passed.
        clock.ahead_s = 61.0
        sent = node.journal(kind="generate")[0].tokens_sent
        await collect(call, stream)
        assert stream.refusal.code == pb.REFUSAL_CODE_FENCED
        # What was being written just then may still arrive; nothing of the 10,000 after it.
        assert sent <= len(stream.tokens) <= sent + 1
        assert stream.tokens == node.reference(PROMPT, len(stream.tokens))
