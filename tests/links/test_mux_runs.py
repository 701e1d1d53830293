"""Runs over a multiplexed link, dialed or joined: many at once, every token to its sink, one clear end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleet.v1 import link_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.commands import Phase, Refusal, RefusalCode, RunFinish
from fleet_service.links import mux
from fleet_service.links.mux_runs import ACK_TOKENS
from fleet_service.runtime.protocols import LinkError, LinkLostError, LinkTimeoutError, NodeFaultError
from tests.links.scripted_link import FEATURES, PATIENT, WAYS, Linked, accepted, columns, linked, news
from tests.links.scripted_node import EPOCH, INTRODUCTION, RecordingSink, Step, a_run

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


@both_ways
async def test_a_run_passes_phases_tokens_and_finish_in_order(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        both.link.run(a_run(), sink)
        assert sink.steps == [], "nothing comes by the calling stack"
        await both.node.accept(1)
        await both.node.send(news(events=[phase(1, pb.GENERATION_PHASE_QUEUED)]))
        await both.node.send(news(events=[phase(1, pb.GENERATION_PHASE_PREFILL)]))
        await both.node.send(
            news(steps=columns((1, 0, [5, 6])), events=[phase(1, pb.GENERATION_PHASE_DECODE)])
        )
        await both.node.send(news(steps=columns((1, 2, [7])), events=[end(1, 3, EOS)]))
        await sink.ended.wait()
        assert both.listener.signs == 5
    assert sink.broken == []
    assert sink.steps == [
        Step(EPOCH, 0, [], Phase.QUEUED, None, None),
        Step(EPOCH, 0, [], Phase.PREFILL, None, None),
        Step(EPOCH, 0, [5, 6], None, None, None),
        Step(EPOCH, 2, [], Phase.DECODE, None, None),
        Step(EPOCH, 2, [7], None, None, None),
        Step(EPOCH, 3, [], None, RunFinish.EOS, None),
    ]


@both_ways
async def test_acceptance_tokens_and_finish_may_come_in_one_frame(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        both.link.run(a_run(), sink)
        command = await both.node.command()
        await both.node.send(
            news(
                replies=[accepted(command.call_id, 1)],
                steps=columns((1, 0, [5]), (1, 1, [6])),
                events=[end(1, 2)],
            )
        )
        await sink.ended.wait()
        assert both.listener.signs == 1
    assert sink.token_ids == [5, 6]
    assert sink.broken == []


@both_ways
async def test_a_refused_run_ends_with_its_refusal(way: str) -> None:
    sink = RecordingSink()
    refusal = pb.Refusal(code=pb.REFUSAL_CODE_CONTEXT_MISMATCH, context_length=2)
    async with linked(way) as both:
        run = both.link.run(a_run(), sink)
        command = await both.node.command()
        await both.node.send(news(replies=[accepted(command.call_id, 0, epoch=0, refusal=refusal)]))
        await sink.ended.wait()
        run.close()
        await settled(both)
        assert both.node.frames == 1 + 2, "what is refused need not be cancelled"
    assert sink.steps == [Step(0, 0, [], None, None, Refusal(RefusalCode.CONTEXT_MISMATCH, context_length=2))]
    assert sink.broken == []


@both_ways
async def test_a_run_that_is_stopped_ends_with_the_nodes_reason(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        both.link.run(a_run(), sink)
        await both.node.accept(1)
        refusal = pb.Refusal(code=pb.REFUSAL_CODE_FENCED)
        event = link_pb2.RunEvent(handle=1, refusal=refusal)
        await both.node.send(news(steps=columns((1, 0, [5])), events=[event]))
        await sink.ended.wait()
    assert sink.steps[-1].refusal == Refusal(RefusalCode.FENCED)
    assert sink.broken == []


@both_ways
async def test_a_hundred_runs_share_a_frame_and_each_gets_its_own(way: str) -> None:
    sinks = [RecordingSink() for _ in range(100)]
    async with linked(way) as both:
        for number, sink in enumerate(sinks, start=1):
            both.link.run(run_number(number), sink)
        for handle in range(1, 101):
            await both.node.accept(handle)
        signs_before = both.listener.signs
        for index in range(50):
            entries = [(handle, index, [handle * 1_000 + index]) for handle in range(1, 101)]
            ends = [end(handle, 50) for handle in range(1, 101)] if index == 49 else []
            await both.node.send(news(steps=columns(*entries), events=ends))
        for sink in sinks:
            await sink.ended.wait()
        # The acceptances before them may not all have been read when the count began.
        assert 50 <= both.listener.signs - signs_before <= 150
    for handle, sink in enumerate(sinks, start=1):
        assert sink.token_ids == [handle * 1_000 + index for index in range(50)]
        assert [each.first_index for each in sink.steps] == [*range(50), 50]
        assert sink.broken == []


@both_ways
async def test_runs_of_many_tokens_in_a_step_get_their_part_of_it(way: str) -> None:
    sinks = [RecordingSink() for _ in range(3)]
    parts: list[list[int]] = [[1] * 1_000, [], [3] * 7]
    async with linked(way) as both:
        for number, sink in enumerate(sinks, start=1):
            both.link.run(run_number(number), sink)
            await both.node.accept(number)
        entries = [(handle, 0, ids) for handle, ids in enumerate(parts, start=1)]
        ends = [end(handle, len(ids)) for handle, ids in enumerate(parts, start=1)]
        await both.node.send(news(steps=columns(*entries), events=ends))
        for sink in sinks:
            await sink.ended.wait()
    assert [sink.token_ids for sink in sinks] == parts


@both_ways
async def test_the_epoch_a_node_claims_reaches_the_sink(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        both.link.run(a_run(), sink)
        command = await both.node.command()
        await both.node.send(news(replies=[accepted(command.call_id, 1, epoch=EPOCH + 1)]))
        await both.node.send(news(steps=columns((1, 0, [5]))))
        await sink.stepped.wait()
    assert sink.steps[0].epoch == EPOCH + 1


@both_ways
async def test_a_run_taken_up_again_goes_on_at_the_index_asked_for(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        both.link.run(a_run(first_index=3, prefix_token_ids=[1, 2, 3]), sink)
        command = await both.node.command()
        assert (command.generate.first_index, list(command.generate.prefix_token_ids)) == (3, [1, 2, 3])
        await both.node.send(news(replies=[accepted(command.call_id, 1, resumed=True)]))
        await both.node.send(news(steps=columns((1, 3, [4])), events=[end(1, 4)]))
        await sink.ended.wait()
    assert (sink.token_ids, sink.steps[0].first_index) == ([4], 3)


# ---------------------------------------------------------------------------------------------- closing one


@both_ways
async def test_close_cancels_at_the_node_and_silences_the_run(way: str) -> None:
    sink, other = RecordingSink(), RecordingSink()
    async with linked(way) as both:
        run = both.link.run(run_number(1), sink)
        both.link.run(run_number(2), other)
        await both.node.accept(1)
        await both.node.accept(2)
        await both.node.send(news(steps=columns((1, 0, [5]), (2, 0, [5]))))
        await other.stepped.wait()
        run.close()
        run.close()
        command = await both.node.command()
        assert (command.cancel.session_id, command.cancel.generation_id) == ("s-1", "g-1")
        await both.node.send(news(steps=columns((1, 1, [6]), (2, 1, [6]))))
        cancelled = end(1, 2, types_pb2.FINISH_REASON_CANCELLED)
        reply = link_pb2.NodeReply(call_id=command.call_id, cancel=pb.CancelResponse(was_running=True))
        await both.node.send(news(replies=[reply], events=[cancelled, end(2, 2)]))
        await other.ended.wait()
        await settled(both)
    assert sink.token_ids == [5]
    assert sink.broken == []
    assert other.token_ids == [5, 6]
    assert both.listener.losses == []


@both_ways
async def test_a_run_closed_at_once_is_never_asked_for(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        both.link.run(a_run(), sink).close()
        await settled(both)
        assert both.node.frames == 1 + 1
    assert (sink.steps, sink.broken) == ([], [])


@both_ways
async def test_a_run_closed_before_its_acceptance_is_cancelled_and_stays_silent(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        run = both.link.run(a_run(), sink)
        asked = await both.node.command()
        run.close()
        cancel = await both.node.command()
        assert cancel.WhichOneof("command") == "cancel"
        replies = [
            accepted(asked.call_id, 1),
            link_pb2.NodeReply(call_id=cancel.call_id, cancel=pb.CancelResponse(was_running=True)),
        ]
        await both.node.send(news(replies=replies, steps=columns((1, 0, [5]))))
        await both.node.send(news(events=[end(1, 1, types_pb2.FINISH_REASON_CANCELLED)]))
        await settled(both)
    assert (sink.steps, sink.broken) == ([], [])
    assert both.listener.losses == []


@both_ways
async def test_closing_a_finished_run_sends_nothing(way: str) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        run = both.link.run(a_run(), sink)
        await both.node.accept(1)
        await both.node.send(news(steps=columns((1, 0, [5])), events=[end(1, 1)]))
        await sink.ended.wait()
        run.close()
        await settled(both)
        assert both.node.frames == 1 + 2
    assert sink.broken == []


@both_ways
async def test_a_run_closed_on_its_last_token_is_not_cancelled(way: str) -> None:
    class ClosingSink(RecordingSink):
        def on_step(self, *args: Any) -> None:
            super().on_step(*args)
            run.close()

    sink = ClosingSink()
    async with linked(way) as both:
        run = both.link.run(a_run(), sink)
        await both.node.accept(1)
        await both.node.send(news(steps=columns((1, 0, [5])), events=[end(1, 1)]))
        await sink.stepped.wait()
        await settled(both)
        assert both.node.frames == 1 + 2
    assert [each.token_ids for each in sink.steps] == [[5]]


@both_ways
async def test_a_run_that_the_node_is_slow_to_accept_waits_for_it(way: str) -> None:
    sink = RecordingSink()
    async with linked(way, settings=replace(PATIENT, command_timeout_s=0.05)) as both:
        both.link.run(a_run(), sink)
        asked = await both.node.command()
        with pytest.raises(LinkTimeoutError):
            await both.link.ping()
        assert sink.broken == []
        await both.node.send(news(replies=[accepted(asked.call_id, 1)], steps=columns((1, 0, [5]))))
        await sink.stepped.wait()
    assert sink.token_ids == [5]


@both_ways
async def test_a_run_carries_the_callers_trace(way: str) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    async with linked(way) as both:
        both.link.run(a_run(carrier=trace), RecordingSink())
        assert dict((await both.node.command()).trace) == trace


# ------------------------------------------------------------------------------------------ acknowledgements


async def stream(both: Linked, handles: Sequence[int], start: int, count: int) -> None:
    """`count` steps of one token for each of the runs."""
    for index in range(start, start + count):
        await both.node.send(news(steps=columns(*((handle, index, [index]) for handle in handles))))


@both_ways
async def test_what_was_taken_in_is_acknowledged_now_and_then_for_all_runs_together(way: str) -> None:
    sinks = [RecordingSink() for _ in range(8)]
    handles = range(1, 9)
    async with linked(way) as both:
        for number, sink in zip(handles, sinks, strict=True):
            both.link.run(run_number(number), sink)
            await both.node.accept(number)
        await stream(both, handles, 0, ACK_TOKENS - 1)
        await settled(both)
        frames_before = both.node.frames
        assert both.node.acks == []
        await stream(both, handles, ACK_TOKENS - 1, 1)
        await both.node.take_frame()
        assert both.node.acks == [(handle, ACK_TOKENS) for handle in handles]
        assert both.node.frames == frames_before + 1
        await stream(both, handles, ACK_TOKENS, 3 * ACK_TOKENS)
        await settled(both)
        await settled(both)  # what the head sent upon that has come as well
        assert {(handle, 4 * ACK_TOKENS) for handle in handles} <= set(both.node.acks)
        assert len(both.node.acks) <= 4 * 8


@both_ways
async def test_an_acknowledgement_never_makes_a_full_frame_too_large(way: str) -> None:
    class EagerSink(RecordingSink):
        def on_step(self, *args: Any) -> None:
            super().on_step(*args)
            both.link.run(run_number(2, prefix_token_ids=[1] * 9_800), RecordingSink())

    async with linked(way, settings=replace(PATIENT, max_message_bytes=10_000)) as both:
        both.link.run(run_number(1), EagerSink())
        await both.node.accept(1)
        await both.node.send(news(steps=columns((1, 0, [7] * ACK_TOKENS))))
        command = await both.node.command()
        assert len(command.generate.prefix_token_ids) == 9_800
        assert both.node.acks == [(1, ACK_TOKENS)]
        assert 9_800 < both.node.largest_bytes <= 10_000


@both_ways
async def test_a_node_that_keeps_nothing_gets_no_acknowledgement(way: str) -> None:
    sink = RecordingSink()
    async with linked(way, features=FEATURES[:1]) as both:
        both.link.run(a_run(), sink)
        await both.node.accept(1)
        await stream(both, [1], 0, 2 * ACK_TOKENS)
        await settled(both)
        assert both.node.acks == []


@both_ways
async def test_a_run_that_ended_or_was_closed_is_not_acknowledged(way: str) -> None:
    ended, closed = RecordingSink(), RecordingSink()
    async with linked(way) as both:
        both.link.run(run_number(1), ended)
        run = both.link.run(run_number(2), closed)
        await both.node.accept(1)
        await both.node.accept(2)
        ids = list(range(2 * ACK_TOKENS))
        await both.node.send(news(steps=columns((1, 0, ids)), events=[end(1, len(ids))]))
        await ended.ended.wait()
        run.close()
        await both.node.send(news(steps=columns((2, 0, ids))))
        await settled(both)
        assert both.node.acks == []


# ------------------------------------------------------------------------------------------------- ends of it


@both_ways
async def test_ten_thousand_runs_leave_nothing_behind(way: str) -> None:
    async with linked(way) as both:
        handle = 0
        for _ in range(100):
            sinks = [RecordingSink() for _ in range(100)]
            for sink in sinks:
                both.link.run(a_run(), sink)
            calls = [(await both.node.command()).call_id for _ in sinks]
            handles = range(handle + 1, handle + 101)
            handle += 100
            await both.node.send(
                news(
                    replies=[accepted(call, number) for call, number in zip(calls, handles, strict=True)],
                    steps=columns(*((number, 0, [7]) for number in handles)),
                    events=[end(number, 1) for number in handles],
                )
            )
            for sink in sinks:
                await sink.ended.wait()
        assert handle == 10_000
        assert not both.link._asked
        assert not both.link._runs._runs
        assert not both.link._outgoing


@both_ways
async def test_a_node_that_never_ends_what_is_cancelled_is_given_up(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mux, "MAX_UNANSWERED", 20)
    async with linked(way) as both:
        for handle in range(1, 22):
            run = both.link.run(run_number(handle), RecordingSink())
            await both.node.accept(handle)
            await both.node.send(news(steps=columns((handle, 0, [1]))))
            await settled(both)
            run.close()
            if handle <= 20:
                await settled(both)
        await both.listener.lost.wait()
        assert "did not end 21 runs" in str(both.listener.losses[0])


@both_ways
async def test_an_unknown_finish_breaks_its_run_alone(way: str) -> None:
    sink, other = RecordingSink(), RecordingSink()
    async with linked(way) as both:
        both.link.run(run_number(1), sink)
        both.link.run(run_number(2), other)
        await both.node.accept(1)
        await both.node.accept(2)
        event = link_pb2.RunEvent(handle=1, next_index=0)
        event.finish = 77  # type: ignore[assignment]
        await both.node.send(news(events=[event, end(2, 0)]))
        await other.ended.wait()
    assert [type(error) for error in sink.broken] == [NodeFaultError]
    assert both.listener.losses == []


@both_ways
async def test_a_sink_that_raises_costs_its_own_run_only(way: str) -> None:
    class FaultySink(RecordingSink):
        def on_step(self, *args: Any) -> None:
            raise RuntimeError("a bug of the head")

    sink, other = FaultySink(), RecordingSink()
    with capture_logs() as logs:
        async with linked(way) as both:
            both.link.run(run_number(1), sink)
            both.link.run(run_number(2), other)
            await both.node.accept(1)
            await both.node.accept(2)
            await both.node.send(news(steps=columns((1, 0, [5]), (2, 0, [6])), events=[end(2, 1)]))
            await other.ended.wait()
            command = await both.node.command()
            assert command.cancel.session_id == "s-1"
    assert [type(error) for error in sink.broken] == [NodeFaultError]
    assert "a bug of the head" in str(sink.broken[0])
    assert other.token_ids == [6]
    assert both.listener.losses == []
    assert [entry["event"] for entry in logs] == ["a run's sink raised"]


@both_ways
async def test_a_sink_that_raises_when_told_of_the_break_keeps_nobody_from_hearing(way: str) -> None:
    class FaultySink(RecordingSink):
        def on_broken(self, error: LinkError) -> None:
            super().on_broken(error)
            raise RuntimeError("another bug of the head")

    sinks = [FaultySink(), RecordingSink()]
    with capture_logs() as logs:
        async with linked(way) as both:
            for number, sink in enumerate(sinks, start=1):
                both.link.run(run_number(number), sink)
                await both.node.accept(number)
            await settled(both)
            await both.drop()
            await both.listener.lost.wait()
    assert [[type(error) for error in sink.broken] for sink in sinks] == [[LinkLostError]] * 2
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
        "a sink or listener raised"
    ]


@both_ways
async def test_closing_the_link_breaks_its_runs_and_leaves_no_task(way: str) -> None:
    sinks = [RecordingSink() for _ in range(5)]
    async with linked(way) as both:
        for number, sink in enumerate(sinks, start=1):
            both.link.run(run_number(number), sink)
        await both.node.accept(1)
        await both.link.close()
        assert [[type(error) for error in sink.broken] for sink in sinks] == [[LinkLostError]] * 5
        assert both.link._tasks == set()
        assert await both.link.ended() is None
    assert both.listener.losses == []


@both_ways
async def test_a_run_on_a_closed_link_breaks_but_not_in_the_callers_stack(way: str) -> None:
    sink, silenced = RecordingSink(), RecordingSink()
    async with linked(way) as both:
        await both.link.close()
        both.link.run(a_run(), sink)
        both.link.run(a_run(), silenced).close()
        assert sink.broken == []
        await sink.ended.wait()
    assert [type(error) for error in sink.broken] == [LinkLostError]
    assert silenced.broken == []


@both_ways
async def test_a_number_that_fits_no_field_is_refused_where_it_is_given(way: str) -> None:
    async with linked(way) as both:
        with pytest.raises(ValueError, match="out of range"):
            both.link.run(a_run(prefix_token_ids=[2**32]), RecordingSink())


@both_ways
async def test_an_index_beyond_all_costs_the_link(way: str) -> None:
    async with linked(way) as both:
        both.link.run(a_run(), RecordingSink())
        await both.node.accept(1)
        await both.node.send(news(steps=columns((1, 2**32 - 1, [5]))))
        await both.listener.lost.wait()
        assert "beyond every index" in str(both.listener.losses[0])
