"""Runs on a multiplexed link: what is acknowledged, and how runs and links end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleet.v1 import link_pb2
from fleet_service.links import mux
from fleet_service.links.mux_runs import ACK_TOKENS, UNACKED_TOKENS
from fleet_service.runtime.protocols import LinkError, LinkLostError, NodeFaultError
from tests.links.mux_support import both_ways, end, run_number, settled
from tests.links.scripted_link import FEATURES, PATIENT, Linked, accepted, columns, linked, news
from tests.links.scripted_node import RecordingSink, a_run

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
        first = UNACKED_TOKENS + ACK_TOKENS
        await stream(both, handles, 0, first - 1)
        await settled(both)
        frames_before = both.node.frames
        assert both.node.acks == []
        await stream(both, handles, first - 1, 1)
        await both.node.take_frame()
        assert both.node.acks == [(handle, ACK_TOKENS) for handle in handles]
        assert both.node.frames == frames_before + 1
        await stream(both, handles, first, 3 * ACK_TOKENS)
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
        await both.node.send(news(steps=columns((1, 0, [7] * (UNACKED_TOKENS + ACK_TOKENS)))))
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
        await stream(both, [1], 0, 2 * UNACKED_TOKENS + 2 * ACK_TOKENS)
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
        ids = list(range(2 * ACK_TOKENS + UNACKED_TOKENS))
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
