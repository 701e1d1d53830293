"""The text of the metrics: its formats, what never enters it, and that a large one leaves the loop free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from fleet_service.api.methods import METHODS
from fleet_service.domain.errors import Reason
from fleet_service.domain.events import ErrorCause, Finished, FinishReason, MoveCause, Moved, Timings
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import NodeState
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import Qos
from fleet_service.runtime.gauges import HeadGauges
from fleet_service.runtime.observer import GenerationInfo
from fleet_service.runtime.views import NodeInfo
from fleet_service.telemetry.combined import BothFleetObservers, BothRpcObservers
from fleet_service.telemetry.metrics import SAMPLES_AT_ONCE, Metrics
from fleet_service.telemetry.tracing import Tracing, TracingSettings
from tests.telemetry.scraping import Scrape, new_metrics, parsed

PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
INFO = GenerationInfo("gen-1", "s-1", "toy", Qos.AGENT, 32, 40, 2.5)
MOVED = Moved("node-a", "node-b", MoveCause.LINK_LOST, 17, 0.35, 2)


def finished(reason: FinishReason, tokens: int, error: ErrorCause | None = None) -> Finished:
    first_s, last_s = (0.5, 0.5 + 0.25 * (tokens - 1)) if tokens else (None, None)
    return Finished(reason, 32, tokens, 1, Timings(0.1, first_s, 9.0, 0.3, last_s), error=error)


def node(name: str, failures: Mapping[str, int] | None = None) -> NodeInfo:
    values: dict[str, object] = dict.fromkeys(NodeInfo.__dataclass_fields__, 0)
    values |= {"name": name, "state": NodeState.UP, "report": None, "report_age_s": None}
    return NodeInfo(**values | {"failures": failures or {}})  # type: ignore[arg-type]


def reading(read: Callable[[], HeadGauges]) -> Callable[[], Awaitable[HeadGauges]]:
    async def at_once() -> HeadGauges:
        return read()

    return at_once


def gauges(nodes: Sequence[NodeInfo] = ()) -> HeadGauges:
    return HeadGauges(
        nodes=nodes,
        sessions=dict.fromkeys(SessionState, 0),
        context_tokens=0,
        generations_running=0,
        generations_kept=0,
        books_balance=True,
        ready=True,
        draining=False,
    )


def openmetrics_families(text: str) -> list[Metric]:
    return list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


async def text_of(metrics: Metrics, accept: str = "") -> str:
    return (await metrics.exposition(accept))[1].decode()


async def scrape_of(metrics: Metrics) -> Scrape:
    return parsed(await text_of(metrics))


@pytest.mark.parametrize(
    "accept, content_type",
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"),
        ("application/openmetrics-text; version=x.y", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=", "application/openmetrics-text; version=1.0.0"),
        ("\xff;;=,=;version", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
async def test_every_accept_header_gets_a_format_that_can_be_read(accept: str, content_type: str) -> None:
    metrics = new_metrics()
    metrics.watch(reading(gauges))
    metrics.fleet_observer.placement(None)
    told, body = await metrics.exposition(accept)
    assert told.startswith(content_type)
    if told.startswith("application/openmetrics-text"):
        families = openmetrics_families(body.decode())
    else:
        families = list(parsed(body.decode()).families.values())
    samples = {sample.name for family in families for sample in family.samples}
    assert {"fleet_placements_total", "fleet_books_balance", "process_cpu_seconds_total"} <= samples
    assert [name for name in samples if name.endswith("_created")] == []


async def test_before_there_is_a_head_it_says_what_it_will_be() -> None:
    scrape = await scrape_of(new_metrics())
    told = scrape.families["fleet_head_info"].samples[0].labels
    assert told == {"version": "9.9", "fleet_id": "default", "head_id": "head-1", "policy": "load-aware"}
    assert "fleet_nodes" not in scrape.families


@pytest.mark.parametrize("accept", ["", PROMETHEUS])
async def test_many_nodes_are_written_in_pieces_that_make_one_text(accept: str) -> None:
    names = [f"node-{number}" for number in range(SAMPLES_AT_ONCE + 7)]
    metrics = new_metrics()
    metrics.watch(reading(lambda: gauges([node(name, {"stalled": 2}) for name in names])))
    text = await text_of(metrics, accept)
    assert text.count("# TYPE fleet_node_sessions gauge\n") == 1
    assert text.count("# EOF") == bool(accept)
    scrape = (
        Scrape({family.name: family for family in openmetrics_families(text)}) if accept else parsed(text)
    )
    assert len(scrape.samples("fleet_node_sessions")) == len(names)
    assert len(scrape.samples("fleet_node_state")) == len(names) * len(NodeState)
    assert scrape.of("fleet_node_failures_total") == 2 * len(names)


async def test_a_scrape_gives_the_loop_its_turn_and_is_of_one_moment() -> None:
    moments: list[int] = []
    metrics = new_metrics()

    def read() -> HeadGauges:
        moments.append(turns)
        return gauges([node(f"node-{number}") for number in range(2 * SAMPLES_AT_ONCE)])

    metrics.watch(reading(read))
    turns = 0
    scraping = asyncio.create_task(text_of(metrics))
    while not scraping.done():
        await asyncio.sleep(0)
        turns += 1
        metrics.fleet_observer.placement(None)
    assert turns > 2 * len(NodeState), "a turn for every piece"
    assert len(moments) == 1
    counted = parsed(scraping.result()).samples("fleet_placements_total")
    assert sum(counted.values()) <= moments[0] + 1, "counted after the gauges were read"


async def test_scrapes_wait_for_each_other() -> None:
    metrics = new_metrics()
    reads = 0

    def read() -> HeadGauges:
        nonlocal reads
        reads += 1
        return gauges()

    metrics.watch(reading(read))
    first, second = asyncio.create_task(text_of(metrics)), asyncio.create_task(text_of(metrics))
    while not first.done():
        assert reads <= 1
        await asyncio.sleep(0)
    await second
    assert reads == 2


async def test_a_name_of_any_letters_does_not_break_the_text() -> None:
    name = 'node "a"\\\nfleet_fake 1'
    metrics = new_metrics()
    metrics.watch(reading(lambda: gauges([node(name)])))
    scrape = await scrape_of(metrics)
    assert scrape.label_values("node") == {name}
    assert "fleet_fake" not in scrape.families


async def test_callers_can_add_no_series() -> None:
    metrics = new_metrics()
    for number in range(50):
        metrics.rpc_observer.rpc_started(f"fleet.v1.FleetService/Made{number}", ()).ended("UNIMPLEMENTED", "")
    scrape = await scrape_of(metrics)
    assert scrape.of("fleet_rpc_duration_seconds_count", method="unknown", code="UNIMPLEMENTED") == 50
    assert scrape.label_values("method") == {*METHODS, "unknown"}


async def test_gaps_between_tokens_are_told_of_answers_that_have_some() -> None:
    metrics = new_metrics()
    for tokens in (0, 1, 5):
        trace = metrics.fleet_observer.generation_started(INFO, None)
        trace.finished(finished(FinishReason.LENGTH, tokens))
    scrape = await scrape_of(metrics)
    assert scrape["fleet_generation_mean_inter_token_gap_seconds_count"] == 1
    assert scrape["fleet_generation_mean_inter_token_gap_seconds_sum"] == pytest.approx(0.25)
    assert scrape["fleet_generation_longest_inter_token_gap_seconds_sum"] == pytest.approx(0.3)
    assert scrape.of("fleet_generations_total", finish="LENGTH") == 3


async def test_every_class_and_cause_there_is_can_be_counted() -> None:
    metrics = new_metrics()
    trace = metrics.fleet_observer.generation_started(INFO, None)
    for kind in FailureClass:
        trace.failed(kind)
    for cause in MoveCause:
        trace.moved(Moved("a", "b", cause, 1, 0.1, 2))
    for reason in Reason:
        metrics.fleet_observer.placement(reason)
        trace.finished(finished(FinishReason.ERROR, 3, ErrorCause(reason, "why")))
    scrape = await scrape_of(metrics)
    assert set(scrape.samples("fleet_attempt_failures_total").values()) == {1}
    assert len(scrape.samples("fleet_attempt_failures_total")) == len(FailureClass)
    assert set(scrape.samples("fleet_failover_gap_seconds_count").values()) == {1}
    assert len(scrape.samples("fleet_placements_total", policy="load-aware")) == len(Reason) + 1
    assert set(scrape.samples("fleet_generation_errors_total").values()) == {1}
    assert scrape.of("fleet_generations_total", finish="ERROR") == len(Reason)


async def test_traces_and_metrics_are_both_told_of_everything() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(TracingSettings(""), SimpleSpanProcessor(exporter))
    metrics = new_metrics()
    call = BothRpcObservers(tracing.rpc_observer, metrics.rpc_observer).rpc_started(METHODS[0], ())
    assert len(call.trace_id) == 32
    both = BothFleetObservers(tracing.fleet_observer, metrics.fleet_observer)
    trace = both.generation_started(INFO, call.context)
    trace.placed("node-a", list)
    both.placement(None)
    trace.waited(0.2)
    first = trace.attempt_started("node-a", 1, 1, 0)
    assert first.carrier()["traceparent"].split("-")[1] == call.trace_id
    trace.first_token()
    first.ended("link_lost", 17)
    trace.failed(FailureClass.LINK_LOST)
    trace.moved(MOVED)
    trace.attempt_started("node-b", 2, 2, 17).ended(None, 23)
    trace.finished(finished(FinishReason.LENGTH, 40))
    both.books_checked(1)
    call.ended("OK", "")
    await tracing.close()

    spans = exporter.get_finished_spans()
    assert [span.name for span in spans].count("fleet.v1.NodeService/Generate") == 2
    (generation,) = (span for span in spans if span.name == "generation")
    assert {"first_token", "moved", "finished"} <= {event.name for event in generation.events}
    assert spans[-1].name == METHODS[0]
    scrape = await scrape_of(metrics)
    assert scrape.of("fleet_rpc_duration_seconds_count", method=METHODS[0], code="OK") == 1
    assert scrape["fleet_attempts_total"] == 2
    assert scrape["fleet_output_tokens_total"] == 40
    assert scrape["fleet_time_to_first_token_seconds_count"] == 1
    assert scrape.of("fleet_queue_wait_seconds_sum", qos="AGENT") == pytest.approx(0.2)
    assert scrape.of("fleet_attempt_failures_total", failure="link_lost") == 1
    assert scrape.of("fleet_failover_gap_seconds_sum", cause="LINK_LOST") == pytest.approx(0.35)
    assert scrape.of("fleet_placements_total", outcome="PLACED") == 1
    assert scrape["fleet_books_imbalances_total"] == 1
