"""A span per generation and a child per attempt (runtime.observer); events at their turns, none per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet_service.domain.events import Finished, FinishReason, Moved
from fleet_service.domain.placement import Verdict
from fleet_service.runtime.observer import GenerationInfo

GENERATION_SPAN = "generation"
ATTEMPT_SPAN = "fleet.v1.NodeService/Generate"
_MAX_CANDIDATES = 32
_PROPAGATOR = TraceContextTextMapPropagator()


class GenerationTracer:
    """Traces every generation (runtime.observer.FleetObserver)."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def generation_started(self, info: GenerationInfo, parent: object | None) -> GenerationSpan:
        """A span under `parent`, the context of the call that asked for it; a trace of its own without."""
        span = self._tracer.start_span(
            GENERATION_SPAN,
            context=parent if isinstance(parent, Context) else Context(),
            kind=SpanKind.INTERNAL,
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": info.model,
                "gen_ai.request.max_tokens": info.max_new_tokens,
                "gen_ai.usage.input_tokens": info.context_tokens,
                "fleet.session.id": info.session_id,
                "fleet.generation.id": info.generation_id,
                "fleet.qos_class": info.qos.name,
                "fleet.max_wall_ms": round(info.max_wall_s * 1000),
            },
        )
        return GenerationSpan(self._tracer, span)


class GenerationSpan:
    """One generation (runtime.observer.GenerationTrace)."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        if self._span.is_recording():
            shown = [_terms(verdict) for verdict in verdicts()[:_MAX_CANDIDATES]]
            self._span.add_event("placement", {"fleet.node": node, "fleet.candidates": shown})

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> AttemptSpan:
        span = self._tracer.start_span(
            ATTEMPT_SPAN,
            context=self._context,
            kind=SpanKind.CLIENT,
            attributes={
                "rpc.system.name": "grpc",
                "rpc.method": ATTEMPT_SPAN,
                "fleet.node": node,
                "fleet.epoch": _signed(epoch),
                "fleet.attempt": number,
                "fleet.next_index": next_index,
            },
        )
        return AttemptSpan(span)

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def moved(self, event: Moved) -> None:
        self._span.add_event(
            "moved",
            {
                "fleet.from_node": event.from_node,
                "fleet.to_node": event.to_node,
                "fleet.cause": event.cause.value,
                "fleet.next_index": event.next_index,
                "fleet.gap_ms": round(event.gap_s * 1000),
                "fleet.epoch": _signed(event.epoch),
            },
        )

    def finished(self, event: Finished) -> None:
        span = self._span
        if span.is_recording():
            reason = event.reason.value
            span.add_event("finished", {"fleet.finish_reason": reason})
            span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": (reason.lower(),),
                    "gen_ai.usage.output_tokens": event.output_tokens,
                    "fleet.attempts": event.attempts,
                    "fleet.queued_ms": round(event.timings.queued_s * 1000),
                    "fleet.longest_gap_ms": round(event.timings.longest_gap_s * 1000),
                }
            )
            if event.timings.first_token_s is not None:
                span.set_attribute("fleet.first_token_ms", round(event.timings.first_token_s * 1000))
            if event.reason is FinishReason.ERROR:
                cause = "INTERNAL" if event.error is None else event.error.reason.value
                span.set_attribute("error.type", cause)
                span.set_status(Status(StatusCode.ERROR, cause))
        span.end()


class AttemptSpan:
    """One node's try (runtime.observer.AttemptTrace)."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def carrier(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, context=set_span_in_context(self._span, Context()))
        return headers

    def ended(self, failure: str | None, tokens: int) -> None:
        self._span.set_attribute("fleet.tokens", tokens)
        if failure is not None:
            self._span.set_attribute("error.type", failure)
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


def _terms(verdict: Verdict) -> str:
    """One candidate in a line: what the choice went by, or why it was left out."""
    if not verdict.eligible:
        return f"{verdict.node} left out: {verdict.left_out}"
    eta = "" if verdict.eta_ms is None else f" eta={verdict.eta_ms}ms"
    kv = "" if verdict.kv_used_pct is None else f" kv={verdict.kv_used_pct}%"
    return (
        f"{verdict.node}{eta} ahead={verdict.ahead} decode={verdict.decode_tokens_per_s}/s "
        f"prefill={verdict.prefill_tokens_per_s}/s{kv} sessions={verdict.sessions} "
        f"reservations={verdict.reservations}"
    )


def _signed(epoch: int) -> int:
    """Span attributes hold 63 bits and a sign; an epoch of a term above 2^31 - 1 wraps."""
    return epoch - 2**64 if epoch >= 2**63 else epoch
