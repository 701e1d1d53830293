"""Traces as a collector gets them: a tree per request, from its caller's span down to those of the nodes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import error_attributes

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import node_service_pb2 as node_pb
from fleet_service.telemetry.tracing import Tracing, TracingSettings
from node_stub.server import NodeServicer
from node_stub.tracing import Tracing as NodeTracing
from tests.e2e.callers import Answer, Reading, complete, open_session_on, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import LocalNode, local_nodes

CALLER_TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
CALLERS = (("traceparent", f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"),)
UNWANTED = (("traceparent", f"00-{CALLER_TRACE}-{CALLER_SPAN}-00"),)
ATTEMPT = "fleet.v1.NodeService/Generate"


@dataclass
class Sink(otlp_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it is sent."""

    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    async def Export(
        self, request: otlp.ExportTraceServiceRequest, context: object
    ) -> otlp.ExportTraceServiceResponse:
        for group in request.resource_spans:
            self.resources.append(values(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += scope.spans
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return sorted(
            (span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano
        )


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    server = grpc.aio.server()
    kept = Sink()
    otlp_grpc.add_TraceServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    kept.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield kept
    await server.stop(0)


@pytest.fixture
async def tracing(sink: Sink) -> AsyncIterator[Tracing]:
    made = Tracing(TracingSettings(otlp_endpoint=sink.address, instance_id="head-1", version="1.2.3"))
    yield made
    await made.close()


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The traceparent of every Generate that a node received, in order."""
    seen: list[str] = []
    serve = NodeServicer.Generate

    async def noting(self: NodeServicer, request: node_pb.NodeServiceGenerateRequest, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()).get("traceparent", ""))
        await serve(self, request, context)

    monkeypatch.setattr(NodeServicer, "Generate", noting)
    return seen


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as plain values; a list of texts as a list."""
    found: dict[str, Any] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


async def failed_over(world: World, tracing: Tracing) -> tuple[HeadServer, Answer]:
    """A generation of 12 tokens whose node is lost after the fifth."""
    first, second = await local_nodes(world, 2)
    server = await world.head(
        first, second, observer=tracing.fleet_observer, rpc_observer=tracing.rpc_observer
    )
    session_id = await open_session_on(server, first, prompt(20), "the-session")
    await first.faults(
        stub_pb.Fault(
            point=stub_pb.FAULT_POINT_AFTER_TOKENS, action=stub_pb.FAULT_ACTION_STALL, after_tokens=5
        )
    )
    request = pb.GenerateRequest(
        session_id=session_id, generation_id="mine", spec=pb.GenerationSpec(max_new_tokens=12)
    )
    reading = Reading(server.fleet.Generate(request, metadata=CALLERS))
    await reading.until_tokens(5)
    await first.kill()
    answer = await reading.end()
    assert answer.tokens == expected(prompt(20), 12)
    return server, answer


async def test_a_failed_over_generation_is_one_tree_under_its_callers_span(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    await failed_over(world, tracing)
    await world.close()
    await tracing.close()
    (call,) = sink.named("fleet.v1.FleetService/Generate")
    (generation,) = sink.named("generation")
    placed, again = sink.named("placement")
    one, two = sink.named(ATTEMPT)
    tree = [call, generation, placed, one, again, two]
    assert {span.trace_id.hex() for span in tree} == {CALLER_TRACE}
    assert call.parent_span_id.hex() == CALLER_SPAN
    assert generation.parent_span_id == call.span_id
    assert {span.parent_span_id for span in (placed, one, again, two)} == {generation.span_id}
    assert [span.kind for span in tree] == [
        Span.SPAN_KIND_SERVER,
        Span.SPAN_KIND_INTERNAL,
        Span.SPAN_KIND_INTERNAL,
        Span.SPAN_KIND_CLIENT,
        Span.SPAN_KIND_INTERNAL,
        Span.SPAN_KIND_CLIENT,
    ]
    of_this_trace = [span for span in sink.spans if span.trace_id.hex() == CALLER_TRACE]
    assert len(of_this_trace) == len(tree), "no span per token, or any other"
    assert generation.start_time_unix_nano <= one.start_time_unix_nano
    assert one.end_time_unix_nano <= again.start_time_unix_nano <= two.start_time_unix_nano
    assert sink.resources[0]["service.name"] == "fleet-head"
    assert sink.resources[0]["service.instance.id"] == "head-1"


async def test_its_spans_say_what_was_asked_and_what_became_of_it(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    _, answer = await failed_over(world, tracing)
    await world.close()
    await tracing.close()
    (call,) = sink.named("fleet.v1.FleetService/Generate")
    assert values(call.attributes)["rpc.response.status_code"] == "OK"
    (generation,) = sink.named("generation")
    told = values(generation.attributes)
    assert told["gen_ai.request.model"] == "stub-model"
    assert (told["fleet.session.id"], told["fleet.generation.id"]) == ("the-session", "mine")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (20, 12)
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["fleet.attempts"] == 2
    one, two = sink.named(ATTEMPT)
    first, second = values(one.attributes), values(two.attributes)
    assert (first["fleet.node"], second["fleet.node"]) == ("node-1", "node-2")
    assert (first["fleet.attempt"], second["fleet.attempt"]) == (1, 2)
    assert (first["fleet.next_index"], second["fleet.next_index"]) == (0, 5)
    assert (first["fleet.tokens"], second["fleet.tokens"]) == (5, 7)
    assert first["fleet.epoch"] == answer.started[0].epoch
    assert second["fleet.epoch"] == answer.moves[0].epoch
    assert one.status.code == Status.STATUS_CODE_ERROR
    assert first["error.type"] == "link_lost"
    for span in (call, generation, two):
        assert span.status.code == Status.STATUS_CODE_UNSET


async def test_its_turns_are_events_in_their_order(world: World, sink: Sink, tracing: Tracing) -> None:
    await failed_over(world, tracing)
    await world.close()
    await tracing.close()
    (generation,) = sink.named("generation")
    events = [(event.name, values(event.attributes)) for event in generation.events]
    assert [name for name, _ in events] == ["first_token", "moved", "finished"]
    moved, finished = (told for name, told in events if name != "first_token")
    placed, again = (values(span.attributes) for span in sink.named("placement"))
    assert placed["fleet.node"] == "node-1"
    assert len(placed["fleet.candidates"]) == 2
    assert any(line.startswith("node-1 eta=") for line in placed["fleet.candidates"])
    assert again["fleet.node"] == "node-2"
    assert "node-1 left out: down" in again["fleet.candidates"]
    assert (moved["fleet.from_node"], moved["fleet.to_node"]) == ("node-1", "node-2")
    assert (moved["fleet.cause"], moved["fleet.next_index"]) == ("LINK_LOST", 5)
    assert moved["fleet.gap_ms"] >= 0
    assert finished["fleet.finish_reason"] == "LENGTH"


@pytest.mark.parametrize("world", ["plain"], indirect=True)  # where it shows on the wire
async def test_every_node_gets_the_context_of_its_own_attempt(
    world: World, sink: Sink, tracing: Tracing, carried: list[str]
) -> None:
    await failed_over(world, tracing)
    await world.close()
    await tracing.close()
    attempts = sink.named(ATTEMPT)
    assert carried == [f"00-{CALLER_TRACE}-{span.span_id.hex()}-01" for span in attempts]


async def asked(server: HeadServer, metadata: tuple[tuple[str, str], ...]) -> None:
    request = pb.CompleteRequest(
        session=pb.SessionSpec(model=MODEL.name),
        token_ids=prompt(20),
        spec=pb.GenerationSpec(max_new_tokens=3),
    )
    await read_all(server.fleet.Complete(request, metadata=metadata))


def node_tracing(sink: Sink, node: LocalNode) -> NodeTracing:
    """Lets a node send its spans to the sink."""
    made = NodeTracing(sink.address, node.identity, "one-run")
    node.stub.node.trace_run = made.run_started
    return made


async def test_a_node_adds_its_own_span_to_the_attempt_it_ran(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    (node,) = await local_nodes(world, 1)
    nodes_own = node_tracing(sink, node)
    server = await world.head(node, observer=tracing.fleet_observer, rpc_observer=tracing.rpc_observer)
    await read_all(complete(server, prompt(20), 12))
    await world.close()
    await tracing.close()
    await nodes_own.close()
    attempt, run = sink.named(ATTEMPT)
    assert (attempt.kind, run.kind) == (Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER)
    assert (run.trace_id, run.parent_span_id) == (attempt.trace_id, attempt.span_id)
    told = values(run.attributes)
    assert (told["fleet.node"], told["fleet.tokens"], told["fleet.prompt_tokens"]) == ("node-1", 12, 20)
    assert (told["rpc.system.name"], told["rpc.method"]) == ("grpc", ATTEMPT)
    assert [event.name for event in run.events] == ["prefill", "decode"]
    assert {"service.name": "fleet-node", "service.instance.id": "one-run"}.items() <= sink.resources[
        -1
    ].items()


async def test_a_cancelled_run_is_no_error_and_one_whose_engine_fails_is(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    (node,) = await local_nodes(world, 1)
    nodes_own = node_tracing(sink, node)
    server = await world.head(node, observer=tracing.fleet_observer, rpc_observer=tracing.rpc_observer)
    reading = Reading(complete(server, prompt(20), 10_000))
    await reading.until_tokens(1)
    await reading.leave()
    await until(lambda: not server.head.generations.running, "the generation was cancelled")
    await node.faults(
        stub_pb.Fault(point=stub_pb.FAULT_POINT_AFTER_GENERATE, action=stub_pb.FAULT_ACTION_ENGINE_ERROR)
    )
    await read_all(complete(server, prompt(20), 12))
    await world.close()
    await tracing.close()
    await nodes_own.close()
    runs = [span for span in sink.named(ATTEMPT) if span.kind == Span.SPAN_KIND_SERVER]
    cancelled, failed = (values(run.attributes) for run in runs)
    assert cancelled["fleet.outcome"] == "CANCELLED"
    assert failed["error.type"] == "ENGINE_ERROR"
    assert [run.status.code for run in runs] == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]
    ended = [values(span.attributes)["gen_ai.response.finish_reasons"] for span in sink.named("generation")]
    assert ended == [["cancelled"], ["error"]]
    codes = [span.status.code for span in sink.named("generation")]
    assert codes == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]


async def test_a_ratio_of_0_keeps_nothing_but_what_a_caller_wants_kept(world: World, sink: Sink) -> None:
    (node,) = await local_nodes(world, 1)
    tracing = Tracing(TracingSettings(sink.address, sampling_ratio=0.0))
    nodes_own = node_tracing(sink, node)
    server = await world.head(node, observer=tracing.fleet_observer, rpc_observer=tracing.rpc_observer)
    for metadata in ((), CALLERS, UNWANTED):
        await asked(server, metadata)
    await world.close()
    await tracing.close()
    await nodes_own.close()
    assert {span.trace_id.hex() for span in sink.spans} == {CALLER_TRACE}
    assert len(sink.named("generation")) == 1
    assert len(sink.named(ATTEMPT)) == 2, "the head's attempt and the node's run of it"


async def test_a_caller_that_wants_nothing_kept_is_obeyed_at_a_ratio_of_1(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    (node,) = await local_nodes(world, 1)
    nodes_own = node_tracing(sink, node)
    server = await world.head(node, observer=tracing.fleet_observer, rpc_observer=tracing.rpc_observer)
    await asked(server, UNWANTED)
    await world.close()
    await tracing.close()
    await nodes_own.close()
    assert CALLER_TRACE not in {span.trace_id.hex() for span in sink.spans}
    assert not sink.named("generation")


async def test_attributes_are_those_of_the_document_and_named_by_the_conventions(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    server, _ = await failed_over(world, tracing)
    second = world.nodes[1]
    assert isinstance(second, LocalNode)
    nodes_own = node_tracing(sink, second)
    await read_all(complete(server, prompt(20), 3))
    with pytest.raises(grpc.aio.AioRpcError):
        await server.fleet.GetSession(pb.GetSessionRequest(session_id="nobody-s"))
    await world.close()
    await tracing.close()
    await nodes_own.close()
    used = {key for span in sink.spans for key in values(span.attributes)}
    used |= {key for span in sink.spans for event in span.events for key in values(event.attributes)}
    text = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")
    assert used == set(re.findall(r"`((?:error|fleet|gen_ai|rpc)\.[a-z_.]+)`", text))
    conventions = {
        value
        for module in (error_attributes, gen_ai_attributes, rpc_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    assert {key for key in used if not key.startswith("fleet.")} <= conventions


async def test_a_generation_that_ends_with_an_error_says_so_in_its_span(
    world: World, sink: Sink, tracing: Tracing
) -> None:
    nodes = await local_nodes(world, 2)
    server = await world.head(*nodes, observer=tracing.fleet_observer, rpc_observer=tracing.rpc_observer)
    for node in nodes:
        await node.faults(
            stub_pb.Fault(point=stub_pb.FAULT_POINT_AFTER_GENERATE, action=stub_pb.FAULT_ACTION_ENGINE_ERROR)
        )
    answer = await read_all(complete(server, prompt(20), 12))
    assert answer.finished.error.reason == "ENGINE_ERROR"
    await world.close()
    await tracing.close()
    (generation,) = sink.named("generation")
    assert (generation.status.code, generation.status.message) == (Status.STATUS_CODE_ERROR, "ENGINE_ERROR")
    assert {values(span.attributes)["error.type"] for span in sink.named(ATTEMPT)} == {"engine_error"}


async def test_without_a_collector_generations_go_on(world: World) -> None:
    """Nobody listens at the endpoint: spans are lost, tokens are not."""
    tracing = Tracing(TracingSettings(otlp_endpoint="127.0.0.1:1"))
    _, answer = await failed_over(world, tracing)
    assert answer.reason == "LENGTH"
    await tracing.close()
