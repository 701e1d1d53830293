"""Spans leave the process by OTLP/gRPC."""

import asyncio
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fleet_service.telemetry.tracing import Tracing, TracingSettings


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
