"""Spans of calls, generations and attempts, as an exporter gets them."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from fleet.v1 import fleet_service_pb2 as fleet
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import ErrorCause, Finished, FinishReason, MoveCause, Moved
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.domain.specs import Qos
from fleet_service.runtime.observer import FleetObserver, GenerationInfo, NullObserver
from tests.api.conftest import Edge
from tests.api.fakes import FINISHED, STORY, TIMINGS, VERDICT, FakeReader, not_found, refusal_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
GET = fleet.GetSessionRequest(session_id="s1")
INFO = GenerationInfo("gen-1", "s1", "toy", Qos.AGENT, 32, 40, 2.5)
MOVED = Moved("node-a", "node-b", MoveCause.LINK_LOST, 17, 0.35, 2**32 * 1_800_000_000 + 2)


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans}


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def spans_after(edge: Edge, count: int) -> Sequence[ReadableSpan]:
    """The spans, once so many have ended: a client can have its answer before the server's span ends."""
    while len(edge.spans.get_finished_spans()) < count:
        await asyncio.sleep(0.01)
    return edge.spans.get_finished_spans()


async def test_a_call_is_a_server_span_under_its_caller_s(edge: Edge) -> None:
    await edge.fleet.GetSession(GET, metadata=(("traceparent", f"00-{TRACE}-{CALLER_SPAN}-01"),))
    (span,) = await spans_after(edge, 1)
    assert (span.name, span.kind) == ("fleet.v1.FleetService/GetSession", SpanKind.SERVER)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CALLER_SPAN)
    assert attributes(span) == {
        "rpc.system.name": "grpc",
        "rpc.method": "fleet.v1.FleetService/GetSession",
        "rpc.response.status_code": "OK",
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_a_caller_that_does_not_sample_is_obeyed(edge: Edge) -> None:
    await edge.fleet.GetSession(GET, metadata=(("traceparent", f"00-{TRACE}-{CALLER_SPAN}-00"),))
    await edge.fleet.ListModels(fleet.ListModelsRequest())
    assert [span.name for span in await spans_after(edge, 1)] == ["fleet.v1.FleetService/ListModels"]


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE}-0000000000000000-01", "00-" + "z" * 50])
async def test_a_broken_trace_header_starts_a_new_trace(edge: Edge, header: str) -> None:
    await edge.fleet.GetSession(GET, metadata=(("traceparent", header),))
    (span,) = await spans_after(edge, 1)
    assert span.parent is None


@pytest.mark.parametrize(
    "error, code, status",
    [
        (not_found(), "NOT_FOUND", StatusCode.UNSET),
        (FleetError(Reason.FLEET_SATURATED, "full"), "RESOURCE_EXHAUSTED", StatusCode.UNSET),
        (FleetError(Reason.NO_ELIGIBLE_NODE, "down"), "UNAVAILABLE", StatusCode.ERROR),
        (RuntimeError("secret"), "INTERNAL", StatusCode.ERROR),
    ],
)
async def test_only_the_server_s_own_failures_are_errors(
    edge: Edge, error: Exception, code: str, status: StatusCode
) -> None:
    edge.head.errors["get_session"] = error
    await refusal_of(edge.fleet.GetSession(GET))
    (span,) = await spans_after(edge, 1)
    assert attributes(span)["rpc.response.status_code"] == code
    assert attributes(span).get("error.type") == (code if status is StatusCode.ERROR else None)
    assert attributes(span)["fleet.error.reason"] == (
        error.reason.value if isinstance(error, FleetError) else "INTERNAL"
    )
    assert span.status.status_code is status
    assert "secret" not in span.to_json()


async def test_a_cancelled_stream_s_span_ends_as_cancelled(edge: Edge) -> None:
    edge.head.generation.reader = FakeReader([STORY[:3]])
    call = edge.fleet.Generate(fleet.GenerateRequest(session_id="s1"))
    await call.read()
    call.cancel()
    (span,) = await spans_after(edge, 1)
    assert attributes(span)["rpc.response.status_code"] == "CANCELLED"
    assert span.status.status_code is StatusCode.UNSET


async def test_a_passed_deadline_is_an_error_of_that_name(edge: Edge) -> None:
    edge.head.generation.reader = FakeReader([STORY[:3]])
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in edge.fleet.Generate(fleet.GenerateRequest(session_id="s1"), timeout=0.2):
            pass
    (span,) = await spans_after(edge, 1)
    assert attributes(span)["error.type"] == "DEADLINE_EXCEEDED"
    assert span.status.status_code is StatusCode.ERROR


async def test_a_method_that_there_is_not_is_called_other(edge: Edge) -> None:
    nobodys: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = edge.channel.unary_unary(
        "/fleet.v1.FleetService/Nobodys"
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await nobodys(b"")
    (span,) = await spans_after(edge, 1)
    assert attributes(span)["rpc.method"] == "_OTHER", "a caller's invention is no name of ours"
    assert attributes(span)["rpc.response.status_code"] == "UNIMPLEMENTED"


async def test_a_failed_over_generation_is_one_tree_with_its_turns_as_events(edge: Edge) -> None:
    async for _ in edge.fleet.Generate(fleet.GenerateRequest(session_id="s1")):
        pass
    parent = edge.head.calls["generate"][4]
    trace = edge.tracing.fleet_observer.generation_started(INFO, parent)
    trace.placed("node-a", lambda: [VERDICT])
    first = trace.attempt_started("node-a", 7, 1, 0)
    headers = first.carrier()
    trace.first_token()
    first.ended("LINK_LOST", 17)
    trace.moved(MOVED)
    second = trace.attempt_started("node-b", MOVED.epoch, 2, 17)
    second.ended(None, 23)
    trace.finished(FINISHED)

    spans = await spans_after(edge, 5)
    call = by_name(spans)["fleet.v1.FleetService/Generate"]
    generation = by_name(spans)["generation"]
    lost, good = (span for span in spans if span.name == "fleet.v1.NodeService/Generate")
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    assert call.context is not None
    assert generation.context is not None
    assert generation.parent is not None
    assert generation.parent.span_id == call.context.span_id
    assert generation.kind is SpanKind.INTERNAL
    placement = by_name(spans)["placement"]
    assert (placement.kind, placement.parent) == (SpanKind.INTERNAL, lost.parent)
    for attempt in (lost, good):
        assert attempt.kind is SpanKind.CLIENT
        assert attempt.parent is not None
        assert attempt.parent.span_id == generation.context.span_id
    assert lost.context is not None
    version, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (version, int(trace_id, 16), int(span_id, 16)) == (
        "00",
        lost.context.trace_id,
        lost.context.span_id,
    )
    assert int(flags, 16) & 1, "sampled"
    assert (lost.status.status_code, attributes(lost)["error.type"]) == (StatusCode.ERROR, "LINK_LOST")
    assert (good.status.status_code, attributes(good)["fleet.tokens"]) == (StatusCode.UNSET, 23)
    assert attributes(good)["fleet.next_index"] == 17

    assert attributes(placement)["fleet.node"] == "node-a"
    assert attributes(placement)["fleet.candidates"] == (
        "node-a eta=812ms ahead=2 decode=20/s prefill=200/s kv=30% sessions=2 reservations=1",
    )
    assert [event.name for event in generation.events] == ["first_token", "moved", "finished"]
    assert dict(generation.events[1].attributes or {})["fleet.next_index"] == 17
    assert attributes(generation)["gen_ai.request.model"] == "toy"
    assert attributes(generation)["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes(generation)["fleet.attempts"] == 1
    assert generation.status.status_code is StatusCode.UNSET


async def test_a_generation_that_ends_with_an_error_says_which(edge: Edge) -> None:
    trace = edge.tracing.fleet_observer.generation_started(INFO, None)
    cause = ErrorCause(Reason.POISON_REQUEST, "two nodes were lost")
    trace.finished(Finished(FinishReason.ERROR, 3, 4, 2, TIMINGS, error=cause))
    (span,) = await spans_after(edge, 1)
    assert span.parent is None
    assert (span.status.status_code, attributes(span)["error.type"]) == (StatusCode.ERROR, "POISON_REQUEST")


@pytest.mark.parametrize(
    "reason, error_type",
    [
        (FinishReason.EOS, None),
        (FinishReason.STOP, None),
        (FinishReason.LENGTH, None),
        (FinishReason.CANCELLED, None),
        (FinishReason.WALL_CLOCK, "WALL_CLOCK"),
        (FinishReason.ERROR, "INTERNAL"),
    ],
)
async def test_a_cancel_is_no_error_and_a_passed_deadline_is_one(
    edge: Edge, reason: FinishReason, error_type: str | None
) -> None:
    trace = edge.tracing.fleet_observer.generation_started(INFO, None)
    trace.finished(Finished(reason, 3, 4, 1, TIMINGS))
    (span,) = await spans_after(edge, 1)
    assert attributes(span).get("error.type") == error_type
    assert span.status.status_code is (StatusCode.ERROR if error_type else StatusCode.UNSET)


async def test_a_placement_after_a_failure_is_as_long_as_the_search_for_a_node(edge: Edge) -> None:
    trace = edge.tracing.fleet_observer.generation_started(INFO, None)
    trace.placed("node-a", lambda: [VERDICT])
    trace.attempt_started("node-a", 7, 1, 0).ended("link_lost", 0)
    trace.failed(FailureClass.LINK_LOST)
    lost = (await spans_after(edge, 2))[-1]
    trace.placed("node-b", lambda: [VERDICT])
    placement = (await spans_after(edge, 3))[-1]
    trace.finished(FINISHED)
    assert placement.start_time is not None
    assert lost.end_time is not None
    assert placement.end_time is not None
    assert lost.end_time <= placement.start_time <= placement.end_time


async def test_candidates_are_not_looked_at_for_a_trace_nobody_keeps(edge: Edge) -> None:
    def never() -> Sequence[Verdict]:
        raise AssertionError("asked for nothing")

    await edge.fleet.GenerateAll(
        fleet.GenerateAllRequest(session_id="s1"),
        metadata=(("traceparent", f"00-{TRACE}-{CALLER_SPAN}-00"),),
    )
    unsampled = edge.head.calls["generate"][4]
    observers: list[tuple[FleetObserver, object | None]] = [
        (edge.tracing.fleet_observer, unsampled),
        (NullObserver(), None),
    ]
    for observer, parent in observers:
        trace = observer.generation_started(INFO, parent)
        trace.placed("node-a", never)
        attempt = trace.attempt_started("node-a", 7, 1, 0)
        attempt.carrier()
        trace.first_token()
        trace.moved(MOVED)
        attempt.ended("LINK_LOST", 3)
        trace.finished(FINISHED)
    assert not edge.spans.get_finished_spans()
