"""Spans of what a node generates, by OTLP/gRPC: one per run, under the span of the head's attempt.

A node starts no trace of its own: what the head does not trace, it doesn't either. Nothing is recorded per
token. Attribute names are those of the OpenTelemetry semantic conventions for RPC; ours begin with "fleet.".
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from node_stub.engine import Finish, Phase
from node_stub.rules import Admission

RUN_SPAN = "fleet.v1.NodeService/Generate"
_SCOPE = "node_stub"
_SERVICE = "fleet-node"
_EXPORT_TIMEOUT_S = 5
CLOSE_S = 2.0
"""How long an ending node waits for its last spans to go."""
_NO_ERRORS = frozenset({Finish.EOS.name, Finish.LENGTH.name, Finish.CANCELLED.name})


class RunSpan:
    """One run (runs.RunTrace)."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def phase(self, phase: Phase) -> None:
        self._span.add_event(phase.name.lower())

    def ended(self, outcome: str, tokens: int) -> None:
        span = self._span
        if span.is_recording():
            span.set_attributes({"fleet.outcome": outcome, "fleet.tokens": tokens})
            if outcome not in _NO_ERRORS:
                span.set_attribute("error.type", outcome)
                span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()


class Tracing:
    """Where a node's spans are made. `processor` takes them away; by default batched to the OTLP endpoint.

    `otlp_endpoint` is http://, https:// or plain host:port (as http).
    """

    def __init__(
        self, otlp_endpoint: str, identity: str, incarnation: str, processor: SpanProcessor | None = None
    ) -> None:
        self._identity = identity
        about = {SERVICE_NAME: _SERVICE, SERVICE_INSTANCE_ID: incarnation}
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_OFF), resource=Resource.create(about), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor or _otlp(otlp_endpoint))
        self._tracer = self._provider.get_tracer(_SCOPE)
        self._propagator = TraceContextTextMapPropagator()

    def run_started(self, admission: Admission, headers: Mapping[str, str]) -> RunSpan:
        """The span of a run that was admitted; `headers` are the W3C ones that its call carried."""
        span = self._tracer.start_span(
            RUN_SPAN,
            context=self._propagator.extract(headers, context=Context()),
            kind=SpanKind.SERVER,
            attributes={
                "rpc.system.name": "grpc",
                "rpc.method": RUN_SPAN,
                "fleet.node": self._identity,
                "fleet.session.id": admission.session_id,
                "fleet.generation.id": admission.generation_id,
                "fleet.epoch": _signed(admission.epoch),
                "fleet.next_index": admission.first_index,
                "fleet.prompt_tokens": len(admission.prompt_token_ids),
            },
        )
        return RunSpan(span)

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


def _signed(epoch: int) -> int:
    """Span attributes hold 63 bits and a sign; an epoch of a term above 2^31 - 1 wraps."""
    return epoch - 2**64 if epoch >= 2**63 else epoch
