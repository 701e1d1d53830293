"""Spans of generations (runtime.observer): one each, with a child per placement and per attempt.

Their turns are events; nothing is recorded per token. Attribute names are those of the OpenTelemetry semantic
conventions for generative AI and RPC where they have one; ours begin with "fleet.".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet_service.domain.errors import Reason
from fleet_service.domain.events import Finished, FinishReason, Moved
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.runtime.observer import GenerationInfo

GENERATION_SPAN = "generation"
PLACEMENT_SPAN = "placement"
ATTEMPT_SPAN = "fleet.v1.NodeService/Generate"
_PROVIDER = "fleet"
_MAX_CANDIDATES = 32
_PROPAGATOR = TraceContextTextMapPropagator()


class GenerationTracer:
    """Traces every generation (runtime.observer.FleetObserver). `now_ns` is the wall clock."""

    def __init__(self, tracer: Tracer, now_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._now_ns = now_ns

    def generation_started(self, info: GenerationInfo, parent: object | None) -> GenerationSpan:
        """A span under `parent`, the context of the call that asked for it; a trace of its own without."""
        span = self._tracer.start_span(
            GENERATION_SPAN,
            context=parent if isinstance(parent, Context) else Context(),
            kind=SpanKind.INTERNAL,
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": info.model,
                "gen_ai.request.max_tokens": info.max_new_tokens,
                "gen_ai.usage.input_tokens": info.context_tokens,
                "gen_ai.conversation.id": info.session_id,
                "gen_ai.response.id": info.generation_id,
                "fleet.session.id": info.session_id,
                "fleet.generation.id": info.generation_id,
                "fleet.qos_class": info.qos.name,
                "fleet.max_wall_ms": round(info.max_wall_s * 1000),
            },
        )
        return GenerationSpan(self._tracer, span, self._now_ns)

    def placement(self, refused: Reason | None) -> None:
        """In the span of the call or the generation that it was for."""

    def books_checked(self, wrong_nodes: int) -> None:
        """No span: the head logs it."""

    def committed(self, took_s: float) -> None:
        """No span: it is of all generations together."""


class GenerationSpan:
    """One generation (runtime.observer.GenerationTrace)."""

    __slots__ = ("_context", "_homeless_since_ns", "_now_ns", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span, now_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._now_ns = now_ns
        self._context = set_span_in_context(span, Context())
        self._homeless_since_ns = now_ns() if span.is_recording() else 0

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        """A span from when a node was needed, so that it shows a wait for one."""
        if self._span.is_recording():
            shown = [_terms(verdict) for verdict in verdicts()[:_MAX_CANDIDATES]]
            self._tracer.start_span(
                PLACEMENT_SPAN,
                context=self._context,
                attributes={"fleet.node": node, "fleet.candidates": shown},
                start_time=self._homeless_since_ns,
            ).end(self._now_ns())

    def waited(self, waited_s: float) -> None:
        """Told with the finish, for all waits together."""

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

    def failed(self, kind: FailureClass) -> None:
        """Told by the attempt's own span. The next node is looked for from now on."""
        if self._span.is_recording():
            self._homeless_since_ns = self._now_ns()

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
                first_s = round(event.timings.first_token_s, 6)
                span.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
            cause = _error_of(event)
            if cause:
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


def _error_of(event: Finished) -> str:
    """What makes it an error; empty: it ended as asked, and to be cancelled is to end as asked."""
    if event.reason is FinishReason.ERROR:
        return Reason.INTERNAL.value if event.error is None else event.error.reason.value
    return FinishReason.WALL_CLOCK.value if event.reason is FinishReason.WALL_CLOCK else ""


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
