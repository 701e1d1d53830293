"""What is read when somebody scrapes: the state of the head and of its nodes (runtime.gauges).

Nothing is kept here, so a node that was removed is gone with the next scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet_service.domain.node_types import NodeState
from fleet_service.runtime.gauges import HeadGauges
from fleet_service.runtime.views import NodeInfo


@dataclass(frozen=True, slots=True)
class HeadLabels:
    """What a head is, for as long as it runs."""

    version: str
    fleet_id: str
    head_id: str
    policy: str


_OF_HEAD: tuple[tuple[str, str, Callable[[HeadGauges], float]], ...] = (
    ("fleet_head_ready", "1 while at least one node can be used", lambda head: head.ready),
    ("fleet_head_draining", "1 once the head was told to stop", lambda head: head.draining),
    ("fleet_store_failing", "1 while nothing can be kept on disk", lambda head: head.store_failing),
    (
        "fleet_books_balance",
        "1 while on every node the reservations are what is queued and running there",
        lambda head: head.books_balance,
    ),
    ("fleet_session_context_tokens", "Tokens of all contexts", lambda head: head.context_tokens),
    (
        "fleet_generations_running",
        "Generations that have not ended, those included that wait",
        lambda head: head.generations_running,
    ),
    (
        "fleet_generations_kept",
        "Generations that have ended and can still be read",
        lambda head: head.generations_kept,
    ),
)

_OF_NODE: tuple[tuple[str, str, Callable[[NodeInfo], float | None]], ...] = (
    ("fleet_node_cordoned", "1 while the node takes no new work", lambda node: node.cordoned),
    ("fleet_node_reports_stale", "1 while its reports are overdue", lambda node: node.reports_stale),
    ("fleet_node_report_age_seconds", "Age of its last report", lambda node: node.report_age_s),
    ("fleet_node_sessions", "Sessions bound to it", lambda node: node.sessions),
    ("fleet_node_lanes", "Attempts the head dispatches to it at once", lambda node: node.lanes),
    ("fleet_node_attempts_running", "Attempts dispatched to it", lambda node: node.running),
    ("fleet_node_queue_length", "Attempts that wait at the head for its lanes", lambda node: node.queued),
    ("fleet_node_reservations", "Reservations the head holds on it", lambda node: node.reservations),
    ("fleet_node_outbox_revokes", "Revokes still owed to it", lambda node: node.outbox),
    (
        "fleet_node_kv_blocks",
        "KV cache blocks it has, as it reports",
        lambda node: node.report.kv_blocks_total if node.report else None,
    ),
    (
        "fleet_node_kv_blocks_used",
        "KV cache blocks in use, as it reports",
        lambda node: node.report.kv_blocks_used if node.report else None,
    ),
    (
        "fleet_node_reported_lanes_active",
        "Generations running there for all heads, as it reports",
        lambda node: node.report.lanes_active if node.report else None,
    ),
    (
        "fleet_node_reported_queue_length",
        "Generations queued there for all heads, as it reports",
        lambda node: node.report.queue_depth if node.report else None,
    ),
)


class HeadReader:
    """Reads the head when it is scraped; before there is one it only says what it will be."""

    def __init__(self, labels: HeadLabels) -> None:
        self._labels = labels
        self.read: Callable[[], Awaitable[HeadGauges]] | None = None

    async def head(self) -> HeadGauges | None:
        """The head as it is; None before there is one."""
        return await self.read() if self.read is not None else None

    def families(self, head: HeadGauges | None) -> Iterator[Metric]:
        """Made of `head` as they are asked for."""
        return chain((self._info(),), _head(head) if head is not None else ())

    def _info(self) -> Metric:
        names = tuple(field.name for field in fields(HeadLabels))
        info = GaugeMetricFamily("fleet_head_info", "Always 1; its labels say what the head is", labels=names)
        info.add_metric(tuple(getattr(self._labels, name) for name in names), 1)
        return info


def _head(head: HeadGauges) -> Iterator[Metric]:
    for name, text, value_of in _OF_HEAD:
        yield GaugeMetricFamily(name, text, value=value_of(head))
    sessions = GaugeMetricFamily("fleet_sessions", "Sessions by state", labels=("state",))
    for state, count in head.sessions.items():
        sessions.add_metric((state.value,), count)
    yield sessions
    yield from _nodes(head.nodes)


def _nodes(nodes: Sequence[NodeInfo]) -> Iterator[Metric]:
    by_state = Counter(node.state for node in nodes)
    count = GaugeMetricFamily("fleet_nodes", "Nodes by state", labels=("state",))
    state = GaugeMetricFamily("fleet_node_state", "1 for the state it is in", labels=("node", "state"))
    for each in NodeState:
        count.add_metric((each.value,), by_state[each])
        for node in nodes:
            state.add_metric((node.name, each.value), node.state is each)
    yield count
    yield state
    for name, text, value_of in _OF_NODE:
        gauge = GaugeMetricFamily(name, text, labels=("node",))
        for node in nodes:
            if (value := value_of(node)) is not None:
                gauge.add_metric((node.name,), value)
        yield gauge
    failures = CounterMetricFamily(
        "fleet_node_failures", "Failures counted against it, by class", labels=("node", "failure")
    )
    for node in nodes:
        for failure, number in sorted(node.failures.items()):
            failures.add_metric((node.name, failure), number)
    yield failures
