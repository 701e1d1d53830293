"""What a node says of its load, and how it behaves when there is too much or nothing to do."""

import asyncio
from typing import Any

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.node_stub.support import PROMPT, TERM, Head, collect, eventually, head_of, until

LENGTH = types_pb2.FINISH_REASON_LENGTH
QUEUED, PREFILL, DECODE = (
    pb.GENERATION_PHASE_QUEUED,
    pb.GENERATION_PHASE_PREFILL,
    pb.GENERATION_PHASE_DECODE,
)
SLOW = EngineSettings(lanes=1, decode_tokens_per_s=50, prefill_tokens_per_s=0)


async def test_reports_come_at_once_and_then_every_period_with_the_heads_own_part() -> None:
    async with StubNode(StubSettings(engine=SLOW)) as node, head_of(node.address) as head:
        await head.bind()
        await head.bind(session="t")
        runs = [head.generate(PROMPT, 10_000, session=session) for session in ("s", "t")]
        await until(runs[0], lambda s: len(s.tokens) >= 1)
        await eventually(lambda: node.node.engine.load().queue_depth == 1)
        for term, own in ((TERM, 1), (TERM + 1, 0)):
            watch = head.stub.WatchStatus(
                pb.WatchStatusRequest(period_ms=30, fleet_id="fleet", head_id="head", term=term)
            )
            first, second = await watch.read(), await watch.read()
            report = first.report
            assert (report.lanes_active, report.queue_depth, report.active_sessions) == (1, 1, 2)
            assert (report.own_lanes_active, report.own_queue_depth) == (own, own)
            assert report.kv_blocks_used >= 2
            assert first.models
            assert not second.models
            assert second.report.sampled_at_ms > report.sampled_at_ms
            watch.cancel()


async def test_rates_are_measured_over_busy_time() -> None:
    engine = EngineSettings(lanes=2, decode_tokens_per_s=100, prefill_tokens_per_s=2000)
    async with StubNode(StubSettings(engine=engine)) as node, head_of(node.address) as head:
        assert node.node.report().decode_tokens_per_s == 0
        prompt = [1] * 1000
        for session in ("s", "t"):
            await head.bind(prompt, session=session)
        runs = [collect(head.generate(prompt, 60, session=session)) for session in ("s", "t")]
        await asyncio.gather(*runs)
        report = node.node.report()
        assert 0 < report.decode_tokens_per_s < 1000
        assert 0 < report.prefill_tokens_per_s < 10_000
        await asyncio.sleep(0.3)
        assert node.node.report().decode_tokens_per_s == report.decode_tokens_per_s


async def test_a_run_waits_for_kv_blocks_as_for_a_lane() -> None:
    engine = EngineSettings(decode_tokens_per_s=100, prefill_tokens_per_s=0, kv_blocks_total=8)
    async with StubNode(StubSettings(engine=engine)) as node, head_of(node.address) as head:
        prefix = [1] * 64
        for session in ("s", "t"):
            await head.bind(session=session)
        about: dict[str, Any] = {"prefix_token_ids": prefix, "first_index": 64}
        first = head.generate(PROMPT, 10, session="s", **about)
        await until(first, lambda s: PREFILL in s.phases)
        second = await collect(head.generate(PROMPT, 10, session="t", **about))
        assert second.phases == [QUEUED, PREFILL, DECODE]
        assert second.tokens == node.reference([*PROMPT, *prefix], 10)
        assert (await head.holdings()).peak_lanes_active == 1
        assert (await head.append([1] * 125, base=4)).refusal.code == pb.REFUSAL_CODE_BUSY


async def test_an_idle_connection_is_closed_and_its_sessions_stay() -> None:
    settings = StubSettings(idle_timeout_s=0.2)
    async with StubNode(settings) as node, grpc.aio.insecure_channel(node.address) as channel:
        head = Head(channel)
        watch = head.stub.WatchStatus(pb.WatchStatusRequest(period_ms=100))
        await head.bind()
        for _ in range(6):
            await watch.read()
        assert channel.get_state() == grpc.ChannelConnectivity.READY, "a watched connection is not idle"
        watch.cancel()
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert (await collect(head.generate(PROMPT, 5))).tokens == node.reference(PROMPT, 5)


async def test_stopping_ends_watches_and_lets_a_run_finish() -> None:
    engine = EngineSettings(decode_tokens_per_s=100, prefill_tokens_per_s=0)
    node = StubNode(StubSettings(engine=engine))
    await node.start()
    async with head_of(node.address) as head:
        await head.bind()
        watch = head.stub.WatchStatus(pb.WatchStatusRequest(period_ms=60_000))
        await watch.read()
        call = head.generate(PROMPT, 20)
        await until(call, lambda s: len(s.tokens) >= 1)
        stopping = asyncio.create_task(node.stop(grace_s=10))
        goodbye = await watch.read()
        assert goodbye.leaving
        assert await watch.read() is grpc.aio.EOF
        rest = await collect(call)
        assert rest.finish == LENGTH
        await stopping
