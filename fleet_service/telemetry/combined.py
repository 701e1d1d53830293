"""Two observers where one is asked for: traces and metrics at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fleet_service.domain.errors import Reason
from fleet_service.domain.events import Finished, Moved
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.runtime.observer import AttemptTrace, FleetObserver, GenerationInfo, GenerationTrace

_Metadata = Sequence[tuple[str, str | bytes]]


class _RpcTrace(Protocol):
    @property
    def context(self) -> object | None: ...

    @property
    def trace_id(self) -> str: ...

    def ended(self, code: str, reason: str) -> None: ...


class _RpcObserver(Protocol):
    def rpc_started(self, method: str, metadata: _Metadata) -> _RpcTrace: ...


class BothRpcObservers:
    """Tells both of every call; what is hung on a call is `tracing`'s."""

    def __init__(self, tracing: _RpcObserver, metrics: _RpcObserver) -> None:
        self._tracing = tracing
        self._metrics = metrics

    def rpc_started(self, method: str, metadata: _Metadata) -> BothRpcTraces:
        return BothRpcTraces(
            self._tracing.rpc_started(method, metadata), self._metrics.rpc_started(method, metadata)
        )


class BothRpcTraces:
    """One call."""

    __slots__ = ("_metrics", "_tracing", "context", "trace_id")

    def __init__(self, tracing: _RpcTrace, metrics: _RpcTrace) -> None:
        self._tracing = tracing
        self._metrics = metrics
        self.context = tracing.context
        self.trace_id = tracing.trace_id

    def ended(self, code: str, reason: str) -> None:
        self._tracing.ended(code, reason)
        self._metrics.ended(code, reason)


class BothFleetObservers:
    """Tells both of everything; the headers that go to nodes are `tracing`'s."""

    def __init__(self, tracing: FleetObserver, metrics: FleetObserver) -> None:
        self._tracing = tracing
        self._metrics = metrics

    def generation_started(self, info: GenerationInfo, parent: object | None) -> BothGenerationTraces:
        return BothGenerationTraces(
            self._tracing.generation_started(info, parent), self._metrics.generation_started(info, parent)
        )

    def placement(self, refused: Reason | None) -> None:
        self._tracing.placement(refused)
        self._metrics.placement(refused)

    def books_checked(self, wrong_nodes: int) -> None:
        self._tracing.books_checked(wrong_nodes)
        self._metrics.books_checked(wrong_nodes)

    def committed(self, took_s: float) -> None:
        self._tracing.committed(took_s)
        self._metrics.committed(took_s)


class BothGenerationTraces:
    """One generation."""

    __slots__ = ("_metrics", "_tracing")

    def __init__(self, tracing: GenerationTrace, metrics: GenerationTrace) -> None:
        self._tracing = tracing
        self._metrics = metrics

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        self._tracing.placed(node, verdicts)
        self._metrics.placed(node, verdicts)

    def waited(self, waited_s: float) -> None:
        self._tracing.waited(waited_s)
        self._metrics.waited(waited_s)

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> BothAttemptTraces:
        return BothAttemptTraces(
            self._tracing.attempt_started(node, epoch, number, next_index),
            self._metrics.attempt_started(node, epoch, number, next_index),
        )

    def first_token(self) -> None:
        self._tracing.first_token()
        self._metrics.first_token()

    def failed(self, kind: FailureClass) -> None:
        self._tracing.failed(kind)
        self._metrics.failed(kind)

    def moved(self, event: Moved) -> None:
        self._tracing.moved(event)
        self._metrics.moved(event)

    def finished(self, event: Finished) -> None:
        self._tracing.finished(event)
        self._metrics.finished(event)


class BothAttemptTraces:
    """One node's try."""

    __slots__ = ("_metrics", "_tracing")

    def __init__(self, tracing: AttemptTrace, metrics: AttemptTrace) -> None:
        self._tracing = tracing
        self._metrics = metrics

    def carrier(self) -> Mapping[str, str]:
        return self._tracing.carrier()

    def ended(self, failure: str | None, tokens: int) -> None:
        self._tracing.ended(failure, tokens)
        self._metrics.ended(failure, tokens)
