"""Traces by OTLP/gRPC: set-up, W3C context, and a server span per call.

Nothing global is set: a Tracing is made when an endpoint is configured, and handed to who uses it. Attribute
names are those of the OpenTelemetry semantic conventions for RPC (1.45); ours begin with "fleet.".
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet_service.telemetry.generation_tracer import GenerationTracer

_SCOPE = "fleet_service"
_EXPORT_TIMEOUT_S = 5
CLOSE_S = 2.0
"""How long an ending head waits for its last spans to go."""
_W3C_KEYS = frozenset({"traceparent", "tracestate"})
_OTHER_METHOD = "_OTHER"
"""What the conventions call a method that there is not."""
_SERVER_FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes that the conventions count as errors of a server; the others are the caller's affair."""


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where traces go, and which.

    `otlp_endpoint` is http://, https:// or plain host:port (as http). `sampling_ratio` (0..1) holds where
    the caller has not decided.
    """

    otlp_endpoint: str
    sampling_ratio: float = 1.0
    service_name: str = "fleet-head"
    instance_id: str = ""
    version: str = ""


class Tracing:
    """Where spans are made. `processor` takes them away; by default they are batched to the OTLP endpoint."""

    def __init__(self, settings: TracingSettings, processor: SpanProcessor | None = None) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sampling_ratio)),
            resource=Resource.create(
                {
                    SERVICE_NAME: settings.service_name,
                    SERVICE_INSTANCE_ID: settings.instance_id,
                    SERVICE_VERSION: settings.version,
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor or _otlp(settings.otlp_endpoint))
        tracer = self._provider.get_tracer(_SCOPE, settings.version)
        self.rpc_observer = RpcTracer(tracer)
        self.fleet_observer = GenerationTracer(tracer, time.time_ns)

    async def close(self) -> None:
        """Send what is left, for CLOSE_S at most; a collector that is away keeps nobody from ending."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                loop.call_soon_threadsafe(done.set)

        # A daemon: nothing waits for it at the interpreter's end.
        threading.Thread(target=shut_down, name="flush traces", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), CLOSE_S)


def _otlp(endpoint: str) -> SpanProcessor:
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
    )
    return BatchSpanProcessor(exporter)


class RpcTracer:
    """A server span per call (api.interceptors.RpcObserver)."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def rpc_started(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> RpcSpan:
        """A span named after `method`, a child of the caller's where the metadata say one."""
        carrier = {key: value for key, value in metadata if key in _W3C_KEYS and isinstance(value, str)}
        span = self._tracer.start_span(
            method,
            context=self._propagator.extract(carrier, context=Context()),
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method if "/" in method else _OTHER_METHOD},
        )
        return RpcSpan(span)


class RpcSpan:
    """One call's span (api.interceptors.RpcTrace)."""

    __slots__ = ("_span", "context", "trace_id")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.context: object | None = set_span_in_context(span, Context())
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    def ended(self, code: str, reason: str) -> None:
        """End the span with a status code's name, and the ErrorInfo reason where there is one."""
        span = self._span
        if span.is_recording():
            span.set_attribute("rpc.response.status_code", code)
            if reason:
                span.set_attribute("fleet.error.reason", reason)
            if code in _SERVER_FAULTS:
                span.set_attribute("error.type", code)
                span.set_status(Status(StatusCode.ERROR))
        span.end()
