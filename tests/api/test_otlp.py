"""Spans leave the process by OTLP/gRPC."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import SpanProcessor

from fleet_service.telemetry.tracing import CLOSE_S, Tracing, TracingSettings


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()

    async def Export(self, request: Any, context: object) -> Any:
        self.received.put_nowait(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_spans_reach_the_configured_endpoint_at_the_latest_on_close(scheme: str) -> None:
    sink = Sink()
    server = grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tracing = Tracing(TracingSettings(f"{scheme}127.0.0.1:{port}", instance_id="head-1", version="0.1.0"))
    tracing.rpc_observer.rpc_started("fleet.v1.FleetService/GetSession", ()).ended("OK", "")
    await tracing.close()
    (resource_spans,) = sink.received.get_nowait().resource_spans
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("fleet-head", "head-1")
    assert [span.name for span in resource_spans.scope_spans[0].spans] == ["fleet.v1.FleetService/GetSession"]
    await server.stop(0)


async def test_a_collector_that_never_answers_keeps_nobody_from_ending() -> None:
    connections: list[asyncio.StreamWriter] = []

    def listen_only(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    collector = await asyncio.start_server(listen_only, "127.0.0.1", 0)
    port = collector.sockets[0].getsockname()[1]
    tracing = Tracing(TracingSettings(f"127.0.0.1:{port}"))
    tracing.rpc_observer.rpc_started("fleet.v1.FleetService/GetSession", ()).ended("OK", "")
    # Left alone, the library tries again for longer than this.
    async with asyncio.timeout(5 * CLOSE_S):
        await tracing.close()
    assert connections, "it was not even tried"
    collector.close()
    for connection in connections:
        connection.close()
        await connection.wait_closed()


class NeverDone(SpanProcessor):
    """Its shutdown waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.asked = threading.Event()

    def shutdown(self) -> None:
        self.asked.set()
        self.let_go.wait()


async def test_an_ending_head_does_not_wait_for_spans_that_do_not_go() -> None:
    stuck = NeverDone()
    try:
        async with asyncio.timeout(10 * CLOSE_S):
            await Tracing(TracingSettings(""), stuck).close()
        assert stuck.asked.is_set()
    finally:
        stuck.let_go.set()
