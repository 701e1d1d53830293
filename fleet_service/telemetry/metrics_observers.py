"""What is counted as it happens: calls, and the turns of generations (runtime.observer).

Every label set is bound once, ahead of its first use or at it, so that counting looks nothing up by labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fleet_service.domain.errors import Reason
from fleet_service.domain.events import Finished, FinishReason, MoveCause, Moved
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.domain.specs import Qos
from fleet_service.runtime.observer import GenerationInfo

UNKNOWN_METHOD = "unknown"
PLACED = "PLACED"
"""The outcome of a placement that found a node; the others are reasons."""

_CALL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WAIT_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MEAN_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_GAP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_COMMIT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOTAL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RpcMeter:
    """Calls by method, code and duration (api.interceptors.RpcObserver). `methods` are those there are."""

    def __init__(
        self, registry: CollectorRegistry, methods: Iterable[str], clock: Callable[[], float]
    ) -> None:
        self.clock = clock
        duration = Histogram(
            "fleet_rpc_duration_seconds",
            "Calls that have ended, from their arrival to their status; a stream lasts until its end",
            ("method", "code"),
            registry=registry,
            buckets=_CALL_BUCKETS_S,
        )
        in_flight = Gauge("fleet_rpcs_in_flight", "Calls that have not ended", ("method",), registry=registry)
        self._methods = {
            method: _Method(self, method, duration, in_flight.labels(method))
            for method in (*methods, UNKNOWN_METHOD)
        }

    def rpc_started(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> MeteredRpc:
        return MeteredRpc(self._methods.get(method) or self._methods[UNKNOWN_METHOD])


class _Method:
    """One method's metrics; those of a code from its first call on."""

    __slots__ = ("_by_code", "_duration", "clock", "in_flight", "name")

    def __init__(self, meter: RpcMeter, name: str, duration: Histogram, in_flight: Gauge) -> None:
        self.clock = meter.clock
        self.name = name
        self.in_flight = in_flight
        self._duration = duration
        self._by_code: dict[str, Histogram] = {}

    def ended(self, code: str, took_s: float) -> None:
        histogram = self._by_code.get(code)
        if histogram is None:
            histogram = self._by_code[code] = self._duration.labels(self.name, code)
        histogram.observe(took_s)


class MeteredRpc:
    """One call (api.interceptors.RpcTrace)."""

    __slots__ = ("_method", "_started_s")

    context = None
    trace_id = ""

    def __init__(self, method: _Method) -> None:
        self._method = method
        self._started_s = method.clock()
        method.in_flight.inc()

    def ended(self, code: str, reason: str) -> None:
        method = self._method
        method.in_flight.dec()
        method.ended(code, method.clock() - self._started_s)


class _Counts:
    """The counters of generations."""

    def __init__(self, registry: CollectorRegistry, policy: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        placements = counter(
            "fleet_placements_total",
            "Looks for a node by policy and outcome, each with its waits and second tries",
            *("policy", "outcome"),
        )
        self.placed = placements.labels(policy, PLACED)
        self.not_placed = _LazyCounters(lambda reason: placements.labels(policy, reason))
        finishes = counter("fleet_generations_total", "Generations that have ended, by finish", "finish")
        self.finishes = {reason: finishes.labels(reason.value) for reason in FinishReason}
        errors = counter(
            "fleet_generation_errors_total", "Generations that ended with ERROR, by its cause", "reason"
        )
        self.errors = _LazyCounters(errors.labels)
        self.attempts = counter("fleet_attempts_total", "Attempts dispatched to a node")
        failures = counter(
            "fleet_attempt_failures_total",
            "Tries that failed, dispatched or still waiting for a lane, by class",
            "failure",
        )
        self.failures = {kind: failures.labels(kind.value) for kind in FailureClass}
        self.output_tokens = counter(
            "fleet_output_tokens_total",
            "Tokens that attempts added to their generations, counted at the end of each attempt",
        )
        self.imbalances = counter(
            "fleet_books_imbalances_total",
            "Background ticks at which the books of some node did not balance",
        )


class _Times:
    """The histograms of generations and commits, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        gaps = histogram(
            "fleet_failover_gap_seconds",
            "From the last sign of one attempt to the dispatch of the next, by the cause of the move",
            _GAP_BUCKETS_S,
            "cause",
        )
        self.failover_gaps = {cause: gaps.labels(cause.value) for cause in MoveCause}
        waits = histogram(
            "fleet_queue_wait_seconds",
            "Waits for a lane, each until it got one, looked elsewhere or ended, by class of service",
            _WAIT_BUCKETS_S,
            "qos",
        )
        self.queue_waits = {qos: waits.labels(qos.name) for qos in Qos}
        self.first_token = histogram(
            "fleet_time_to_first_token_seconds",
            "From the acceptance of a generation to its first token",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self.mean_gap = histogram(
            "fleet_generation_mean_inter_token_gap_seconds",
            "A generation's mean time between two tokens, (last - first) / (tokens - 1), at its end",
            _MEAN_GAP_BUCKETS_S,
        )
        self.longest_gap = histogram(
            "fleet_generation_longest_inter_token_gap_seconds",
            "A generation's longest time without a token after its first, at its end",
            _GAP_BUCKETS_S,
        )
        self.duration = histogram(
            "fleet_generation_duration_seconds",
            "From the acceptance of a generation to its end",
            _TOTAL_BUCKETS_S,
        )
        self.commits = histogram(
            "fleet_store_commit_seconds",
            "Commits of what is to outlive the head, each of all that was ready",
            _COMMIT_BUCKETS_S,
        )


class GenerationMeter:
    """Generations, attempts, placements and the books (runtime.observer.FleetObserver)."""

    def __init__(self, registry: CollectorRegistry, policy: str, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.counts = _Counts(registry, policy)
        self.times = _Times(registry)
        self.attempt = MeteredAttempt(self.counts.output_tokens)

    def generation_started(self, info: GenerationInfo, parent: object | None) -> MeteredGeneration:
        return MeteredGeneration(self, info.qos)

    def placement(self, refused: Reason | None) -> None:
        (self.counts.placed if refused is None else self.counts.not_placed[refused]).inc()

    def books_checked(self, wrong_nodes: int) -> None:
        if wrong_nodes:
            self.counts.imbalances.inc()

    def committed(self, took_s: float) -> None:
        self.times.commits.observe(took_s)


class MeteredGeneration:
    """One generation (runtime.observer.GenerationTrace)."""

    __slots__ = ("_meter", "_qos", "_started_s")

    def __init__(self, meter: GenerationMeter, qos: Qos) -> None:
        self._meter = meter
        self._qos = qos
        self._started_s = meter.clock()

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        """Counted by GenerationMeter.placement, which also hears of those that failed."""

    def waited(self, waited_s: float) -> None:
        self._meter.times.queue_waits[self._qos].observe(waited_s)

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> MeteredAttempt:
        self._meter.counts.attempts.inc()
        return self._meter.attempt

    def first_token(self) -> None:
        self._meter.times.first_token.observe(self._meter.clock() - self._started_s)

    def failed(self, kind: FailureClass) -> None:
        self._meter.counts.failures[kind].inc()

    def moved(self, event: Moved) -> None:
        self._meter.times.failover_gaps[event.cause].observe(event.gap_s)

    def finished(self, event: Finished) -> None:
        counts, times, timings = self._meter.counts, self._meter.times, event.timings
        counts.finishes[event.reason].inc()
        if event.error is not None:
            counts.errors[event.error.reason].inc()
        times.duration.observe(timings.total_s)
        first_s, last_s = timings.first_token_s, timings.last_token_s
        if first_s is not None and last_s is not None and event.output_tokens > 1:
            times.mean_gap.observe((last_s - first_s) / (event.output_tokens - 1))
            times.longest_gap.observe(timings.longest_gap_s)


class MeteredAttempt:
    """Any node's try (runtime.observer.AttemptTrace)."""

    __slots__ = ("_output_tokens",)

    def __init__(self, output_tokens: Counter) -> None:
        self._output_tokens = output_tokens

    def carrier(self) -> Mapping[str, str]:
        return _NO_HEADERS

    def ended(self, failure: str | None, tokens: int) -> None:
        self._output_tokens.inc(tokens)


class _LazyCounters(dict[Reason, Counter]):
    """A counter by reason, from its first use on: most reasons never occur in one place."""

    def __init__(self, bind: Callable[[str], Counter]) -> None:
        super().__init__()
        self._bind = bind

    def __missing__(self, reason: Reason) -> Counter:
        self[reason] = counter = self._bind(reason.value)
        return counter
