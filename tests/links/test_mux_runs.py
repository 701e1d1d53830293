"""Runs over a multiplexed link, dialed or joined: many at once, every token to its sink, one clear end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.v1 import link_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.commands import Phase, Refusal, RefusalCode, RunFinish
from fleet_service.runtime.protocols import LinkTimeoutError
from tests.links.mux_support import EOS, both_ways, end, phase, run_number, settled
from tests.links.scripted_link import PATIENT, accepted, columns, linked, news
from tests.links.scripted_node import EPOCH, RecordingSink, Step, a_run


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
