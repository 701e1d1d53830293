"""A generation's trace in a real Jaeger: spans of the caller, the head and the nodes, each its own process.

`make jaeger` builds the program once. Without it these tests are skipped, unless REQUIRE_TOOLCHAINS=1.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from examples.processes import Child, Children
from examples.traced import CALL, MODEL, Caller, start_head, start_node
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from node_stub.reference import StubModel
from tests.e2e.callers import Reading, read_all
from tests.e2e.harness import PATIENCE_S, expected, prompt
from tests.lacking import lacking
from tests.ports import quiet_port

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ATTEMPT = "fleet.v1.NodeService/Generate"


def program() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fleet-head" / "jaeger-v1.76.0" / "jaeger"


@dataclass(frozen=True)
class Shown:
    """One span as Jaeger tells of it."""

    span_id: str
    parent_id: str
    name: str
    service: str
    start_us: int
    end_us: int
    tags: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]

    @property
    def failed(self) -> bool:
        return bool(self.tags.get("error"))


def _shown(span: dict[str, Any], processes: dict[str, Any]) -> Shown:
    events = []
    for log in span["logs"]:
        fields = {field["key"]: field["value"] for field in log["fields"]}
        events.append((fields.pop("event"), fields))
    return Shown(
        span_id=span["spanID"],
        parent_id=next((each["spanID"] for each in span["references"]), ""),
        name=span["operationName"],
        service=processes[span["processID"]]["serviceName"],
        start_us=span["startTime"],
        end_us=span["startTime"] + span["duration"],
        tags={tag["key"]: tag["value"] for tag in span["tags"]},
        events=events,
    )


@dataclass(frozen=True)
class Jaeger:
    """A Jaeger, and its query API."""

    otlp: str
    http: str

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{self.http}/api/{path}", timeout=10) as answer:
                return json.load(answer)["data"] or []
        except urllib.error.HTTPError as error:
            if error.code == 404:  # a trace of which nothing has come yet
                return []
            raise

    async def trace(self, trace_id: str, complete: Callable[[list[Shown]], bool]) -> list[Shown]:
        """The spans of a trace in the order of their starts, once they are `complete`."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            traces = await asyncio.to_thread(self._get, f"traces/{trace_id}")
            spans = [_shown(span, trace["processes"]) for trace in traces for span in trace["spans"]]
            if complete(spans):
                return sorted(spans, key=lambda span: span.start_us)
            assert time.monotonic() < give_up, f"not complete: {[(s.service, s.name) for s in spans]}"
            await asyncio.sleep(0.1)

    async def traces_of(self, service: str) -> set[str]:
        """The ids of all traces that have spans of a service."""
        query = urllib.parse.urlencode({"service": service, "limit": 1000})
        traces = await asyncio.to_thread(self._get, f"traces?{query}")
        return {trace["traceID"] for trace in traces}

    def answers(self) -> bool:
        try:
            self._get("services")
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def jaeger() -> Iterator[Jaeger]:
    if not program().exists():
        lacking(f"there is no {program()}: `make jaeger` builds it")
    made = Jaeger(f"127.0.0.1:{quiet_port()}", f"127.0.0.1:{quiet_port()}")
    addresses = {
        "JAEGER_OTLP": made.otlp,
        "JAEGER_HTTP": made.http,
        "JAEGER_GRPC": f"127.0.0.1:{quiet_port()}",
    }
    with subprocess.Popen(
        [program(), "--config", "deploy/jaeger/jaeger.yaml"], cwd=ROOT, env=os.environ | addresses
    ) as process:
        try:
            give_up = time.monotonic() + PATIENCE_S
            while not made.answers():
                assert process.poll() is None, "Jaeger has ended"
                assert time.monotonic() < give_up, "Jaeger does not answer"
                time.sleep(0.05)
            yield made
        finally:
            process.kill()  # its memory is all it has; an orderly end would wait for connections


@dataclass(frozen=True)
class Processes:
    """A head and nodes, each a process that sends its spans to Jaeger."""

    nodes: dict[str, Child]
    fleet: FleetServiceAsyncStub

    def complete(
        self, tokens: int, caller: Caller | None = None, timeout: float | None = None, **spec: int
    ) -> object:
        request = pb.CompleteRequest(
            session=pb.SessionSpec(model=MODEL),
            token_ids=prompt(20),
            spec=pb.GenerationSpec(max_new_tokens=tokens, **spec),  # type: ignore[arg-type]
        )
        return self.fleet.Complete(request, metadata=caller.metadata if caller else (), timeout=timeout)


@asynccontextmanager
async def processes(
    folder: Path, jaeger: Jaeger, ratio: float = 1.0, *flags: str
) -> AsyncIterator[Processes]:
    """Nodes "a" and "b", started with `flags`, and a head that keeps `ratio` of the traces."""
    async with Children(folder) as children:
        (a, a_at), (b, b_at) = await asyncio.gather(
            *(start_node(children, name, jaeger.otlp, *flags) for name in ("a", "b"))
        )
        callers, _ = await start_head(children, [a_at, b_at], jaeger.otlp, ratio)
        async with grpc.aio.insecure_channel(callers) as channel:
            yield Processes({"a": a, "b": b}, FleetServiceStub(channel))


async def test_a_failed_over_generation_is_one_trace_from_its_caller_to_its_nodes(
    tmp_path: Path, jaeger: Jaeger
) -> None:
    caller = Caller(jaeger.otlp)
    async with processes(tmp_path, jaeger) as real:
        reading = Reading(real.complete(30, caller))
        answer = await reading.until_tokens(8)
        first = answer.started[0].node
        real.nodes[first].kill()
        answer = await reading.end()
        assert answer.tokens == expected(prompt(20), 30, StubModel(MODEL))
        await caller.done()
        # The killed node took the span of its run with it; all others come.
        spans = await jaeger.trace(caller.trace_id, lambda spans: len(spans) >= 8)

    (second,) = {"a", "b"} - {first}
    asked, call, generation, placed, one, again, two, run = spans
    tree = [(span.service, span.name, span.tags["span.kind"]) for span in spans]
    assert tree == [
        ("caller", CALL, "client"),
        ("fleet-head", CALL, "server"),
        ("fleet-head", "generation", "internal"),
        ("fleet-head", "placement", "internal"),
        ("fleet-head", ATTEMPT, "client"),
        ("fleet-head", "placement", "internal"),
        ("fleet-head", ATTEMPT, "client"),
        ("fleet-node", ATTEMPT, "server"),
    ]
    assert asked.span_id == caller.span_id
    assert call.parent_id == asked.span_id
    assert generation.parent_id == call.span_id
    assert {span.parent_id for span in (placed, one, again, two)} == {generation.span_id}
    assert run.parent_id == two.span_id
    assert one.end_us <= again.start_us <= again.end_us <= two.start_us

    assert [span.name for span in spans if span.failed] == [ATTEMPT]
    assert (one.failed, one.tags["otel.status_code"], one.tags["error.type"]) == (True, "ERROR", "link_lost")
    assert (one.tags["fleet.node"], two.tags["fleet.node"], run.tags["fleet.node"]) == (first, second, second)
    assert (placed.tags["fleet.node"], again.tags["fleet.node"]) == (first, second)
    assert one.tags["fleet.tokens"] + two.tags["fleet.tokens"] == 30
    assert two.tags["fleet.next_index"] == run.tags["fleet.next_index"] == one.tags["fleet.tokens"]

    assert [name for name, _ in generation.events] == ["first_token", "moved", "finished"]
    moved = generation.events[1][1]
    assert (moved["fleet.from_node"], moved["fleet.to_node"]) == (first, second)
    assert (moved["fleet.cause"], moved["fleet.next_index"]) == ("LINK_LOST", one.tags["fleet.tokens"])
    assert [name for name, _ in run.events] == ["prefill", "decode"], "its phases, and nothing per token"
    asked_for = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 30,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.response.id": answer.generation_id,
    }
    assert asked_for.items() <= generation.tags.items()
    assert {"rpc.system.name": "grpc", "rpc.method": CALL}.items() <= call.tags.items()
    assert call.tags["rpc.response.status_code"] == "OK"


async def test_a_cancel_is_no_error_while_a_passed_deadline_and_a_failure_are(
    tmp_path: Path, jaeger: Jaeger
) -> None:
    left, late, out_of_time, broken = callers = [Caller(jaeger.otlp) for _ in range(4)]
    async with processes(tmp_path, jaeger) as real:
        reading = Reading(real.complete(10_000, left))
        await reading.until_tokens(1)
        await reading.leave()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(real.complete(10_000, late, timeout=0.5))
        cut_off = await read_all(real.complete(10_000, out_of_time, max_wall_ms=300))
        assert cut_off.reason == "WALL_CLOCK"
        cancelled, hung_up, ended = [
            {
                (span.service, span.name): span
                for span in await jaeger.trace(each.trace_id, lambda spans: len(spans) >= 5)
            }
            for each in (left, late, out_of_time)
        ]
    async with processes(tmp_path, jaeger, 1.0, "--fault", "after-generate:engine-error,times=9") as real:
        failed = await read_all(real.complete(10, broken))
        assert failed.finished.error.reason == "ENGINE_ERROR"
        # Both nodes are tried.
        spans = await jaeger.trace(broken.trace_id, lambda spans: len(spans) >= 8)
    await asyncio.gather(*(each.done() for each in callers))

    head, node = ("fleet-head", "generation"), ("fleet-node", ATTEMPT)
    assert not any(span.failed for span in cancelled.values())
    assert cancelled["fleet-head", CALL].tags["rpc.response.status_code"] == "CANCELLED"
    assert cancelled[node].tags["fleet.outcome"] == "CANCELLED"

    assert hung_up["fleet-head", CALL].tags["error.type"] == "DEADLINE_EXCEEDED"
    assert hung_up["fleet-head", CALL].failed

    assert (ended[head].failed, ended[head].tags["error.type"]) == (True, "WALL_CLOCK")
    assert ended["fleet-head", CALL].tags["rpc.response.status_code"] == "OK", "the caller was told so"
    assert not ended["fleet-head", ATTEMPT].failed
    assert not ended[node].failed, "it is not to blame"

    told = {(span.service, span.name, span.tags.get("error.type")) for span in spans if span.failed}
    assert told == {
        (*head, "ENGINE_ERROR"),
        ("fleet-head", ATTEMPT, "engine_error"),
        (*node, "ENGINE_ERROR"),
    }


async def test_a_ratio_of_0_keeps_no_trace_but_one_whose_caller_wants_it(
    tmp_path: Path, jaeger: Jaeger
) -> None:
    before = await jaeger.traces_of("fleet-head")
    caller = Caller(jaeger.otlp)
    async with processes(tmp_path, jaeger, 0.0) as real:
        await read_all(real.complete(3))
        await read_all(real.complete(3, caller))
        await read_all(real.complete(3))
    # Both ended in order, so all that they kept has been sent.
    await caller.done()
    spans = await jaeger.trace(caller.trace_id, lambda spans: len(spans) >= 6)
    assert len(spans) == 6
    assert await jaeger.traces_of("fleet-head") - before == {caller.trace_id}
    assert await jaeger.traces_of("fleet-node") <= before | {caller.trace_id}


def test_a_page_shows_traces_where_jaeger_has_none_of_its_own(jaeger: Jaeger) -> None:
    with urllib.request.urlopen(f"http://{jaeger.http}/trace/0af7651916cd43dd", timeout=10) as answer:
        page = answer.read().decode()
    assert "fetched(`api/traces/${traceID}`)" in page, "ours, over the query API"
    assert '"gitVersion":"v2.13.0"' in page, "Jaeger has written its version into it"
