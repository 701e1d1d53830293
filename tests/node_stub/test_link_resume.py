"""Runs that outlive their link: taken up over another, kept for a while, bounded."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import link_pb2 as link_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.faults import Action, Fault, Point
from node_stub.reference import StubModel, reference_tokens
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.node_stub.link_support import DialedLink, link_of
from tests.node_stub.support import E1, E2, PROMPT, Head, collect, eventually, head_of

LENGTH, CANCELLED = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_CANCELLED
ANSWER = reference_tokens(StubModel("stub"), 0, PROMPT, 200)
PACED = EngineSettings(decode_tokens_per_s=200, prefill_tokens_per_s=0)
REPLAYED = pb.REFUSAL_CODE_REPLAYED


def settings(**fields: Any) -> StubSettings:
    return StubSettings(**{"engine": PACED, **fields})


async def broken_off(node: StubNode, n: int, after: int, acked: int = 0) -> tuple[Head, list[int]]:
    """A run whose link was lost when `after` tokens had come; who commanded it, and what had come."""
    async with link_of(node.address) as link:
        await link.bind()
        accepted = await link.start(n)
        seen = await link.tokens(accepted.handle, after)
        if acked:
            await link.ack(accepted.handle, acked)
            await link.ask(cancel=pb.CancelRequest(session_id="another"))
        await link.lose()
        return link.maker, seen.tokens


async def resume(link: DialedLink, tokens: list[int], n: int, **fields: Any) -> link_pb.RunAccepted:
    return await link.start(n - len(tokens), prefix_token_ids=tokens, first_index=len(tokens), **fields)


def outcome(node: StubNode) -> str:
    return node.journal(kind="generate")[0].outcome


async def test_a_run_goes_on_over_another_link_exactly_where_the_head_says() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 200, after=3)
        async with link_of(node.address, maker) as link:
            accepted = await resume(link, tokens, 200)
            assert (accepted.handle, accepted.epoch, accepted.resumed) == (1, E1, True)
            seen = await link.finished(1)
            assert tokens + seen.tokens == ANSWER
            assert seen.indexes == list(range(len(tokens), 200))
            assert (seen.finish, seen.next_index) == (LENGTH, 200)
        entries = node.journal(kind="generate")
        assert [(entry.resumes, entry.tokens_sent) for entry in entries] == [(1, 200)], "one run, no second"


async def test_what_was_lost_on_the_way_comes_again() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 200, after=20)
        async with link_of(node.address, maker) as link:
            accepted = await resume(link, tokens[:5], 200)
            assert accepted.resumed
            assert (await link.finished(1)).tokens == ANSWER[5:]


async def test_the_same_command_sent_again_takes_the_run_up_too() -> None:
    async with StubNode(settings()) as node:
        async with link_of(node.address) as link:
            await link.bind()
            request = link.maker.generate_request(PROMPT, 200)
            first = (await link.ask(generate=request)).generate
            await link.tokens(first.handle, 5)
            await link.lose()
        async with link_of(node.address, link.maker) as again:
            assert (await again.ask(generate=request)).generate.resumed
            assert (await again.finished(1)).tokens == ANSWER


async def test_two_links_of_one_head_the_newer_takes_over() -> None:
    async with StubNode(settings()) as node, link_of(node.address) as old:
        await old.bind()
        accepted = await old.start(200)
        seen = await old.tokens(accepted.handle, 5)
        async with link_of(node.address, old.maker) as new:
            assert (await resume(new, ANSWER[:2], 200)).resumed
            assert (await new.finished(1)).tokens == ANSWER[2:]
        await old.finished(accepted.handle)
        assert seen.refusal
        assert seen.refusal.code == REPLAYED
        assert seen.tokens == ANSWER[: len(seen.tokens)]
        # The old link is well otherwise.
        await old.bind(session="t")
        assert (await old.run(20, session="t")).tokens == ANSWER[:20]


async def test_a_run_taken_up_again_and_again_loses_nothing() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 200, after=10)
        while len(tokens) < 150:
            async with link_of(node.address, maker) as link:
                assert (await resume(link, tokens, 200)).resumed
                tokens += (await link.tokens(1, 20)).tokens
                await link.lose()
        async with link_of(node.address, maker) as link:
            await resume(link, tokens, 200)
            assert tokens + (await link.finished(1)).tokens == ANSWER


async def test_acknowledged_tokens_are_not_kept() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 200, after=20, acked=15)
        async with link_of(node.address, maker) as link:
            refused = await resume(link, tokens[:14], 200)
            assert (refused.refusal.code, refused.handle) == (REPLAYED, 0)
            beyond = await link.start(1, first_index=199, prefix_token_ids=ANSWER[:199])
            assert beyond.refusal.code == REPLAYED
            assert (await resume(link, tokens[:15], 200)).resumed
            assert (await link.finished(1)).tokens == ANSWER[15:]


@pytest.mark.parametrize("lost_tokens", [0, 7])
async def test_a_finish_that_was_lost_with_its_link_comes_again(lost_tokens: int) -> None:
    async with StubNode() as node:
        async with link_of(node.address) as link:
            await link.bind()
            await link.run(40)
            await link.lose()
        had = ANSWER[: 40 - lost_tokens]
        async with link_of(node.address, link.maker) as again:
            assert (await resume(again, had, 40)).resumed
            seen = await again.finished(1)
            assert (seen.tokens, seen.finish, seen.next_index) == (ANSWER[40 - lost_tokens : 40], LENGTH, 40)


async def test_a_run_that_ends_while_its_link_is_gone_is_told_to_the_end() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 40, after=3)
        await eventually(lambda: outcome(node) == "LENGTH")
        assert node.node.engine.load().lanes_active == 0
        async with link_of(node.address, maker) as link:
            assert (await resume(link, tokens, 40)).resumed
            seen = await link.finished(1)
            assert (tokens + seen.tokens, seen.finish) == (ANSWER[:40], LENGTH)


async def test_nobody_comes_back_in_time_and_the_run_is_cancelled() -> None:
    async with StubNode(settings(keep_s=0.2)) as node:
        maker, tokens = await broken_off(node, 30_000, after=3)
        assert node.node.engine.load().lanes_active == 1, "it keeps its lane meanwhile"
        await eventually(lambda: outcome(node) == "CANCELLED")
        assert node.node.engine.load().lanes_active == 0
        async with link_of(node.address, maker) as link:
            assert (await resume(link, tokens, 30_000)).refusal.code == REPLAYED


async def test_a_finished_run_is_not_kept_for_ever() -> None:
    async with StubNode(StubSettings(keep_s=0.05)) as node, link_of(node.address) as link:
        await link.bind()
        await link.run(40)
        held = {"reconcile": pb.ReconcileRequest(fleet_id="fleet")}
        while (await link.ask(**held)).reconcile.sessions[0].generation_ids:
            pass
        assert (await resume(link, ANSWER[:39], 40)).refusal.code == REPLAYED


async def test_more_than_the_buffer_takes_stops_the_run() -> None:
    async with StubNode(settings(buffer_tokens=16)) as node:
        maker, tokens = await broken_off(node, 30_000, after=3)
        await eventually(lambda: outcome(node) == "BUSY")
        assert node.node.engine.load().lanes_active == 0
        async with link_of(node.address, maker) as link:
            assert (await resume(link, tokens, 30_000)).refusal.code == REPLAYED


async def test_of_what_was_sent_the_buffer_keeps_the_newest() -> None:
    async with StubNode(settings(buffer_tokens=16)) as node, link_of(node.address) as link:
        await link.bind()
        await link.tokens((await link.start(200)).handle, 100)
        async with link_of(node.address, link.maker) as again:
            assert (await resume(again, ANSWER[:80], 200)).refusal.code == REPLAYED
        assert (await link.finished(1)).tokens == ANSWER, "a resume that is refused disturbs nobody"


async def test_an_explicit_cancel_ends_a_run_whose_link_is_gone() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 30_000, after=3)
        async with link_of(node.address, maker) as link:
            request = pb.CancelRequest(session_id="s", epoch=E1, generation_id="g")
            assert (await link.ask(cancel=request)).cancel.was_running
            assert node.node.engine.load().lanes_active == 0
            assert (await resume(link, tokens, 30_000)).resumed
            assert (await link.finished(1)).finish == CANCELLED


async def test_a_newer_epoch_ends_a_run_whose_link_is_gone() -> None:
    async with StubNode(settings()) as node:
        maker, tokens = await broken_off(node, 30_000, after=3)
        async with link_of(node.address, maker) as link:
            await link.bind(epoch=E2)
            assert node.node.engine.load().lanes_active == 0
            refusal = (await resume(link, tokens, 30_000)).refusal
            assert (refusal.code, refusal.current_epoch) == (pb.REFUSAL_CODE_STALE_EPOCH, E2)
            assert (await link.run(20, "h", epoch=E2)).tokens == ANSWER[:20]


async def test_a_lease_runs_out_while_the_link_is_gone() -> None:
    async with StubNode(settings()) as node:
        async with link_of(node.address) as link:
            await link.bind(lease_ms=200)
            await link.tokens((await link.start(30_000)).handle, 3)
            await link.lose()
        await eventually(lambda: outcome(node) == "FENCED")
        async with link_of(node.address, link.maker) as again:
            assert (await resume(again, ANSWER[:3], 30_000)).refusal.code == pb.REFUSAL_CODE_FENCED


async def test_what_is_kept_for_a_head_is_listed() -> None:
    async with StubNode(settings()) as node:
        maker, _ = await broken_off(node, 30_000, after=3)
        async with link_of(node.address, maker) as link:
            reply = await link.ask(reconcile=pb.ReconcileRequest(fleet_id="fleet"))
            assert [list(each.generation_ids) for each in reply.reconcile.sessions] == [["g"]]


async def test_without_the_feature_losing_the_link_is_a_cancel() -> None:
    async with StubNode(settings(resume=False)) as node:
        maker, tokens = await broken_off(node, 30_000, after=3)
        await eventually(lambda: outcome(node) == "CANCELLED")
        assert node.node.engine.load().lanes_active == 0
        async with link_of(node.address, maker) as link:
            assert (await resume(link, tokens, 30_000)).refusal.code == REPLAYED


async def test_a_plain_call_takes_nothing_up() -> None:
    async with StubNode(settings()) as node, head_of(node.address) as head:
        maker, tokens = await broken_off(node, 200, after=3)
        request = maker.generate_request(PROMPT, 197, prefix_token_ids=tokens, first_index=len(tokens))
        assert (await collect(head.stub.Generate(request))).refusal.code == REPLAYED


async def test_a_phase_told_over_a_lost_link_is_told_again() -> None:
    slow_prefill = EngineSettings(decode_tokens_per_s=50, prefill_tokens_per_s=20)
    async with StubNode(settings(engine=slow_prefill)) as node, link_of(node.address) as link:
        await link.bind()
        await link.start(20)
        await link.until(lambda: link.runs[1].phases)
        await link.lose()
        async with link_of(node.address, link.maker) as again:
            assert (await resume(again, [], 20)).resumed
            seen = await again.finished(1)
            assert seen.tokens == ANSWER[:20]
            assert seen.phases == [pb.GENERATION_PHASE_PREFILL, pb.GENERATION_PHASE_DECODE]


async def test_a_link_that_drops_is_no_loss() -> None:
    async with StubNode(settings()) as node, link_of(node.address) as link:
        await link.bind()
        node.set_faults(Fault(Point.AFTER_TOKENS, Action.DROP_LINK, after_tokens=30, times=1))
        await link.start(200)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.finished(1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        tokens = link.runs[1].tokens
        assert tokens == ANSWER[:30]
        async with link_of(node.address, link.maker) as again:
            assert (await resume(again, tokens, 200)).resumed
            assert tokens + (await again.finished(1)).tokens == ANSWER


async def test_a_cut_takes_no_calls_for_a_while_and_the_run_goes_on_meanwhile() -> None:
    async with StubNode(settings()) as node, link_of(node.address) as link, head_of(node.address) as head:
        await link.bind()
        cut = stub_pb.Fault(
            point=stub_pb.FAULT_POINT_AFTER_TOKENS,
            action=stub_pb.FAULT_ACTION_CUT_LINK,
            after_tokens=10,
            times=1,
            delay_ms=300,
        )
        await head.set_faults(cut)
        await link.start(100)
        with pytest.raises(grpc.aio.AioRpcError):
            await link.finished(1)
        tokens = link.runs[1].tokens
        assert tokens == ANSWER[:10]
        assert (await DialedLink(head, head.channel).status())[0] is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await head.stub.Revoke(pb.RevokeRequest(session_id="other", epoch=E1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: outcome(node) == "LENGTH")
        async with link_of(node.address, link.maker) as again:
            assert (await resume(again, tokens, 100)).resumed
            assert tokens + (await again.finished(1)).tokens == ANSWER[:100]
