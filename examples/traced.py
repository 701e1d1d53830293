"""A generation that fails over, traced from its caller to its nodes: `.venv/bin/python -m examples.traced`.

Needs a collector that takes OTLP over gRPC at 127.0.0.1:4317, or at the HOST:PORT that is given: `make
jaeger` starts one, which shows the trace at the address that is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from examples.processes import Child, Children, command_of, run_to_exit_code
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.admin_service_pb2 import ListNodesRequest, NodeState
from fleet.v1.admin_service_pb2_grpc import AdminServiceStub
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

MODEL = "demo"
NODES = ("node-1", "node-2")
PROMPT_TOKENS = 4_000
NEW_TOKENS = 48
KILL_AFTER_TOKENS = 18
DEADLINE_S = 60
CALL = "fleet.v1.FleetService/Complete"
# So that all is sent when the processes end: how often they send spans that have ended, in ms.
_SOON = "OTEL_BSP_SCHEDULE_DELAY=100"


class Caller:
    """A program that traces a call of its own and hands the trace on in the call's metadata."""

    def __init__(self, otlp: str) -> None:
        about = Resource.create({SERVICE_NAME: "caller"})
        self._provider = TracerProvider(resource=about, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=otlp, insecure=True)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._span = self._provider.get_tracer("examples").start_span(
            CALL, kind=SpanKind.CLIENT, attributes={"rpc.system.name": "grpc", "rpc.method": CALL}
        )
        here = self._span.get_span_context()
        self.trace_id, self.span_id = format_trace_id(here.trace_id), format_span_id(here.span_id)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, set_span_in_context(self._span))
        return tuple(headers.items())

    async def done(self) -> None:
        """End the span and send it."""

        def send() -> None:
            self._span.end()
            self._provider.shutdown()

        await asyncio.to_thread(send)


async def start_node(children: Children, name: str, otlp: str, *flags: str) -> tuple[Child, str]:
    """A node that sends spans; gives its address as well."""
    command = [command_of("fleet-node"), "--listen", "127.0.0.1:0", "--identity", name, "--model", MODEL]
    command += ["--decode-rate", "40", "--otlp-endpoint", otlp, *flags]
    child, line = await children.start(name, ["env", _SOON, *command], f"fleet-node: {name} on ")
    return child, line.rpartition(" ")[2]


async def start_head(
    children: Children, nodes: Sequence[str], otlp: str, sampling_ratio: float = 1.0
) -> tuple[str, str]:
    """A head that sends spans, once all its nodes are up; gives its addresses for callers and operators."""
    variables = [_SOON, f"FLEET_TELEMETRY__OTLP_ENDPOINT=http://{otlp}"]
    variables += [f"FLEET_TELEMETRY__SAMPLING_RATIO={sampling_ratio}"]
    command = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command += [f"--node={address}" for address in nodes]
    _, line = await children.start("head", ["env", *variables, *command], "fleet: serving")
    words = line.replace(",", "").split()
    callers, admin = words[words.index("callers") + 2], words[words.index("admin") + 2]
    async with grpc.aio.insecure_channel(admin) as channel:
        while True:
            answer = await AdminServiceStub(channel).ListNodes(ListNodesRequest())
            if sum(node.state == NodeState.NODE_STATE_UP for node in answer.nodes) == len(nodes):
                return callers, admin
            await asyncio.sleep(0.05)


async def demonstrate(folder: Path, otlp: str) -> int:
    async with Children(folder) as children, asyncio.timeout(DEADLINE_S):
        # The prompt takes a moment, so that its prefill is to be seen.
        started = await asyncio.gather(
            *(start_node(children, name, otlp, "--prefill-rate", "10000") for name in NODES)
        )
        nodes = {name: child for name, (child, _) in zip(NODES, started, strict=True)}
        callers, _ = await start_head(children, [address for _, address in started], otlp)
        request = pb.CompleteRequest(
            session=pb.SessionSpec(model=MODEL),
            token_ids=range(3, PROMPT_TOKENS + 3),
            spec=pb.GenerationSpec(max_new_tokens=NEW_TOKENS),
        )
        caller = Caller(otlp)
        tokens, node = 0, ""
        async with grpc.aio.insecure_channel(callers) as channel:
            async for response in FleetServiceStub(channel).Complete(request, metadata=caller.metadata):
                event = response.event
                tokens += len(event.tokens.token_ids)
                node = event.started.node or node
                if tokens >= KILL_AFTER_TOKENS and not nodes[node].killed:
                    nodes[node].kill()
        await caller.done()
    print(
        f"traced: {tokens} tokens, {node} killed on the way: http://127.0.0.1:16686/trace/{caller.trace_id}"
    )
    return 0 if tokens == NEW_TOKENS else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.traced")
    parser.add_argument("endpoint", nargs="?", default="127.0.0.1:4317", metavar="HOST:PORT")
    endpoint = parser.parse_args().endpoint
    sys.exit(run_to_exit_code("traced", lambda folder: demonstrate(folder, endpoint)))
