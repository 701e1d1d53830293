"""What docs/metrics.md lists, and a scrape that has all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from fleet_service.api.methods import METHODS
from fleet_service.domain.errors import Reason
from fleet_service.domain.events import ErrorCause, Finished, FinishReason, Timings
from fleet_service.domain.node_types import NodeState, Report
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import Qos
from fleet_service.runtime.gauges import HeadGauges
from fleet_service.runtime.observer import GenerationInfo
from fleet_service.runtime.views import NodeInfo
from tests.telemetry.scraping import new_metrics

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
_INFO = GenerationInfo("gen-1", "s-1", "toy", Qos.AGENT, 32, 40, 2.5)
_FINISHED = Finished(
    FinishReason.ERROR, 3, 4, 1, Timings(0.1, 0.2, 0.3, 0.1, 0.3), error=ErrorCause(Reason.NODE_LOST, "why")
)


class Family(NamedTuple):
    """A family; counters with the `_total` of their series."""

    name: str
    type: str
    labels: frozenset[str]


def rows(columns: int) -> list[list[str]]:
    """The cells of every line, of every table with so many columns, that begins with a name."""
    lines = [line.strip().strip("|").split(" | ") for line in DOCUMENT.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in cells] for cells in lines if len(cells) == columns]


def documented() -> list[Family]:
    """Every family of the document."""
    return [
        Family(name.strip("`"), kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _meaning in rows(4)
    ]


def _node() -> NodeInfo:
    values: dict[str, object] = dict.fromkeys(NodeInfo.__dataclass_fields__, 0)
    values |= {"name": "node-1", "state": NodeState.UP, "report": Report(), "failures": {"stalled": 1}}
    return NodeInfo(**values)  # type: ignore[arg-type]


async def everything() -> str:
    """A scrape of a head to which everything has happened once, so that every family has its labels."""
    metrics = new_metrics()
    sessions = dict.fromkeys(SessionState, 1)

    async def read() -> HeadGauges:
        return HeadGauges([_node()], sessions, 1, 1, 1, books_balance=True, ready=True, draining=False)

    metrics.watch(read)
    metrics.rpc_observer.rpc_started(METHODS[0], ()).ended("OK", "")
    metrics.fleet_observer.placement(Reason.NODE_LOST)
    metrics.fleet_observer.committed(0.002)
    metrics.fleet_observer.generation_started(_INFO, None).finished(_FINISHED)
    return (await metrics.exposition(""))[1].decode()
