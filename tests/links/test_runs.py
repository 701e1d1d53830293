"""Runs over a plain link: every message to the sink, in order, and one clear end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.domain.commands import CancelRun, Phase, Refusal, RefusalCode, RunFinish
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import LinkError, LinkLostError, LinkTimeoutError, NodeFaultError
from tests.links.scripted_node import (
    EPOCH,
    RecordingListener,
    RecordingSink,
    ScriptedNode,
    Step,
    Stream,
    a_run,
)
from tests.links.test_commands import linked

Context = grpc.aio.ServicerContext[Any, Any]


def step(first_index: int, token_ids: Sequence[int], **changes: Any) -> pb.NodeServiceGenerateResponse:
    return pb.NodeServiceGenerateResponse(
        epoch=EPOCH, first_index=first_index, token_ids=token_ids, **changes
    )


def node_that_sends(*messages: Any, then: Stream | None = None) -> ScriptedNode:
    async def generate(request: Any, context: Context) -> None:
        for message in messages:
            await context.write(message)
        if then is not None:
            await then(request, context)

    node = ScriptedNode()
    node.streams["Generate"] = generate
    return node


async def hang(request: Any, context: Context) -> None:
    await asyncio.Event().wait()


async def test_a_run_passes_phases_tokens_and_finish_in_order() -> None:
    node, listener, sink = (
        node_that_sends(
            step(0, [], phase=pb.GENERATION_PHASE_QUEUED),
            step(0, [], phase=pb.GENERATION_PHASE_PREFILL),
            step(0, [5, 6], phase=pb.GENERATION_PHASE_DECODE),
            step(2, [7], finish=types_pb2.FINISH_REASON_EOS),
        ),
        RecordingListener(),
        RecordingSink(),
    )
    async with linked(node, listener) as link:
        await listener.reported.wait()
        signs_before = listener.signs
        link.run(a_run(), sink)
        assert sink.steps == [], "nothing comes by the calling stack"
        await sink.ended.wait()
        assert listener.signs == signs_before + 4
    assert sink.broken == []
    assert sink.steps == [
        Step(EPOCH, 0, [], Phase.QUEUED, None, None),
        Step(EPOCH, 0, [], Phase.PREFILL, None, None),
        Step(EPOCH, 0, [5, 6], Phase.DECODE, None, None),
        Step(EPOCH, 2, [7], None, RunFinish.EOS, None),
    ]


async def test_a_refused_run_ends_with_its_refusal() -> None:
    refusal = pb.Refusal(code=pb.REFUSAL_CODE_CONTEXT_MISMATCH, context_length=2)
    sink = RecordingSink()
    async with linked(node_that_sends(pb.NodeServiceGenerateResponse(refusal=refusal))) as link:
        link.run(a_run(), sink)
        await sink.ended.wait()
    assert sink.steps == [Step(0, 0, [], None, None, Refusal(RefusalCode.CONTEXT_MISMATCH, context_length=2))]
    assert sink.broken == []


async def test_ten_thousand_tokens_arrive_once_and_in_order() -> None:
    async def generate(request: Any, context: Context) -> None:
        for index in range(10_000):
            finish = types_pb2.FINISH_REASON_LENGTH if index == 9_999 else 0
            await context.write(step(index, [index * 7], finish=finish))

    node, sink = ScriptedNode(), RecordingSink()
    node.streams["Generate"] = generate
    async with linked(node) as link:
        link.run(a_run(), sink)
        await sink.ended.wait()
    assert [each.first_index for each in sink.steps] == list(range(10_000))
    assert sink.token_ids == [index * 7 for index in range(10_000)]
    assert sink.broken == []


async def test_the_request_carries_the_command_and_the_callers_trace() -> None:
    node, sink = ScriptedNode(), RecordingSink()
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    async with linked(node) as link:
        link.run(a_run(prefix_token_ids=[1, 2], first_index=2, carrier=trace), sink)
        await sink.ended.wait()
    assert list(node.received["Generate"][0].prefix_token_ids) == [1, 2]
    assert node.received["Generate"][0].first_index == 2
    assert trace.items() <= node.metadata["Generate"].items()


async def test_close_cancels_at_the_node_and_silences_the_run() -> None:
    node, sink = node_that_sends(step(0, [1]), then=hang), RecordingSink()
    async with linked(node) as link:
        run = link.run(a_run(), sink)
        await sink.stepped.wait()
        run.close()
        await node.left_generate.wait()
    assert [each.token_ids for each in sink.steps] == [[1]]
    assert sink.broken == []


async def test_a_run_closed_at_once_never_speaks() -> None:
    sink = RecordingSink()
    async with linked(node_that_sends(step(0, [1]), then=hang)) as link:
        link.run(a_run(), sink).close()
        other = RecordingSink()
        link.run(a_run(), other)
        await other.stepped.wait()
    assert sink.steps == []
    assert sink.broken == []


async def test_close_from_within_a_step_lets_nothing_more_through() -> None:
    class ClosingSink(RecordingSink):
        def on_step(self, *args: Any) -> None:
            super().on_step(*args)
            run.close()

    node, sink = node_that_sends(step(0, [1]), step(1, [2]), step(2, [3]), then=hang), ClosingSink()
    async with linked(node) as link:
        run = link.run(a_run(), sink)
        await node.left_generate.wait()
    assert sink.token_ids == [1]
    assert sink.broken == []


async def test_closing_a_finished_run_is_no_cancel_to_the_node() -> None:
    ended_in_peace = asyncio.Event()

    async def end(request: Any, context: Context) -> None:
        await asyncio.sleep(0)
        await released.wait()
        ended_in_peace.set()

    released = asyncio.Event()
    sink = RecordingSink()
    finish = step(0, [1], finish=types_pb2.FINISH_REASON_LENGTH)
    async with linked(node_that_sends(finish, then=end)) as link:
        run = link.run(a_run(), sink)
        await sink.ended.wait()
        run.close()
        released.set()
        assert await ended_in_peace.wait()


async def test_a_node_that_never_ends_its_call_after_the_finish_is_cut_off() -> None:
    finish = step(0, [1], finish=types_pb2.FINISH_REASON_LENGTH)
    node, sink = node_that_sends(finish, then=hang), RecordingSink()
    settings = LinkSettings(command_timeout_s=0.05)
    async with linked(node, settings=settings) as link:
        link.run(a_run(), sink)
        await node.left_generate.wait()
    assert sink.broken == []
    assert len(sink.steps) == 1


async def test_what_follows_a_finish_is_dropped() -> None:
    sink = RecordingSink()
    finish = step(0, [1], finish=types_pb2.FINISH_REASON_LENGTH)
    node = node_that_sends(finish, step(1, [2]), step(2, [3]), then=hang)
    async with linked(node) as link:
        link.run(a_run(), sink)
        await node.left_generate.wait()
    assert sink.token_ids == [1]
    assert sink.broken == []


def aborting(code: grpc.StatusCode) -> Stream:
    async def abort(request: Any, context: Context) -> None:
        await context.abort(code, "in the node's words")

    return abort


@pytest.mark.parametrize(
    "messages, then, kind, text",
    [
        ([step(0, [1])], None, NodeFaultError, "without a finish"),
        ([step(0, [1])], aborting(grpc.StatusCode.UNAVAILABLE), LinkLostError, "UNAVAILABLE"),
        ([step(0, [1])], aborting(grpc.StatusCode.DEADLINE_EXCEEDED), LinkTimeoutError, "DEADLINE"),
        ([step(0, [1])], aborting(grpc.StatusCode.INTERNAL), NodeFaultError, "INTERNAL"),
        ([step(0, [1])], aborting(grpc.StatusCode.UNIMPLEMENTED), NodeFaultError, "UNIMPLEMENTED"),
        ([step(0, [1]), b"\xff\xff\xff"], hang, NodeFaultError, "decoded"),
        ([step(0, [1]), bytes([0x28, 99])], hang, NodeFaultError, "unknown finish 99"),
        (
            [step(0, [1]), step(1, [], finish=types_pb2.FINISH_REASON_STOP)],
            hang,
            NodeFaultError,
            "unknown finish",
        ),
    ],
    ids=[
        "just ends",
        "unavailable",
        "deadline",
        "internal",
        "unimplemented",
        "undecodable",
        "unknown finish",
        "the head's own finish",
    ],
)
async def test_a_run_without_an_end_breaks_once_with_what_it_was(
    messages: list[Any], then: Stream | None, kind: type[LinkError], text: str
) -> None:
    sink = RecordingSink()
    async with linked(node_that_sends(*messages, then=then)) as link:
        link.run(a_run(), sink)
        await sink.ended.wait()
    assert sink.token_ids == [1]
    assert [type(error) for error in sink.broken] == [kind]
    assert text in str(sink.broken[0])


async def test_an_unknown_phase_changes_nothing() -> None:
    sink = RecordingSink()
    unknown = step(0, [1]).SerializeToString() + bytes([0x20, 99])
    async with linked(node_that_sends(unknown, step(1, [2], finish=types_pb2.FINISH_REASON_EOS))) as link:
        link.run(a_run(), sink)
        await sink.ended.wait()
    assert sink.token_ids == [1, 2]
    assert [each.phase for each in sink.steps] == [None, None]


async def test_a_sink_that_raises_breaks_its_run_loudly() -> None:
    class FaultySink(RecordingSink):
        def on_step(self, *args: Any) -> None:
            raise RuntimeError("a bug of the head")

    node, sink = node_that_sends(step(0, [1]), then=hang), FaultySink()
    with capture_logs() as logs:
        async with linked(node) as link:
            link.run(a_run(), sink)
            await sink.ended.wait()
            await node.left_generate.wait()
    assert [type(error) for error in sink.broken] == [NodeFaultError]
    assert "a bug of the head" in str(sink.broken[0])
    assert [entry["event"] for entry in logs] == ["reading a run failed"]


async def test_a_sink_that_raises_when_told_of_the_break_is_logged() -> None:
    class FaultySink(RecordingSink):
        def on_broken(self, error: LinkError) -> None:
            super().on_broken(error)
            raise RuntimeError("another bug of the head")

    sink = FaultySink()
    with capture_logs() as logs:
        async with linked(node_that_sends()) as link:
            link.run(a_run(), sink)
            await sink.ended.wait()
    assert [entry["event"] for entry in logs] == ["a sink or listener raised"]


async def test_closing_the_link_breaks_its_runs_and_leaves_no_task() -> None:
    node, sinks = node_that_sends(step(0, [1]), then=hang), [RecordingSink() for _ in range(5)]
    tasks_before = asyncio.all_tasks()
    listener = RecordingListener()
    async with linked(node, listener) as link:
        for sink in sinks:
            link.run(a_run(), sink)
        for sink in sinks:
            await sink.stepped.wait()
        await link.close()
        for sink in sinks:
            assert [type(error) for error in sink.broken] == [LinkLostError]
        await node.left_generate.wait()
    async with asyncio.timeout(30):  # the node's side of each call ends a moment later
        while asyncio.all_tasks() != tasks_before:
            await asyncio.sleep(0.01)
    assert listener.losses == []


async def test_a_run_on_a_closed_link_breaks_but_not_in_the_callers_stack() -> None:
    sink, silenced = RecordingSink(), RecordingSink()
    async with linked(ScriptedNode()) as link:
        await link.close()
        link.run(a_run(), sink)
        link.run(a_run(), silenced).close()
        assert sink.broken == []
        await sink.ended.wait()
    assert [type(error) for error in sink.broken] == [LinkLostError]
    assert silenced.broken == []


async def test_the_loss_of_the_link_breaks_its_runs() -> None:
    end_reports = asyncio.Event()

    async def watch(request: Any, context: Context) -> None:
        await end_reports.wait()

    node, sink, listener = node_that_sends(step(0, [1]), then=hang), RecordingSink(), RecordingListener()
    node.streams["WatchStatus"] = watch
    async with linked(node, listener) as link:
        link.run(a_run(), sink)
        await sink.stepped.wait()
        end_reports.set()
        await listener.lost.wait()
        await sink.ended.wait()
    assert [type(error) for error in sink.broken] == [LinkLostError]
    assert len(listener.losses) == 1


async def test_a_cancel_after_the_run_reaches_the_node() -> None:
    node, sink = node_that_sends(step(0, [1]), then=hang), RecordingSink()
    async with linked(node) as link:
        run = link.run(a_run(), sink)
        await sink.stepped.wait()
        assert await link.cancel(CancelRun("s-1", EPOCH, "g-1")) is None
        run.close()
    assert node.received["Cancel"] == [pb.CancelRequest(session_id="s-1", epoch=EPOCH, generation_id="g-1")]


async def test_a_number_that_fits_no_field_is_refused_where_it_is_given() -> None:
    async with linked(ScriptedNode()) as link:
        with pytest.raises(ValueError, match="out of range"):
            link.run(a_run(prefix_token_ids=[2**32]), RecordingSink())
