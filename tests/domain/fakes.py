"""Nodes as placement sees them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet_service.domain.node_types import ModelInfo, NodeState, Report
from fleet_service.domain.placement import Demand, Policy, choose

MODEL = "m"
NOW_S = 1000.0


def serving(*names: str, window: int = 0, revision: str = "") -> dict[str, ModelInfo]:
    return {name: ModelInfo(name, revision=revision, max_context_tokens=window) for name in names}


@dataclass
class FakeNode:
    name: str
    state: NodeState = NodeState.UP
    state_detail: str = ""
    cordoned: bool = False
    unlisted: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, ModelInfo] = field(default_factory=lambda: serving(MODEL))
    report: Report | None = None
    report_at_s: float | None = None
    was_hot: bool = False
    sessions: int = 0
    reservations: int = 0
    busy_until_s: float = 0.0
    lanes: int = 8
    waiting: int = 0

    def reporting(self, report: Report, age_s: float = 0.0) -> FakeNode:
        self.report, self.report_at_s = report, NOW_S - age_s
        return self


def unlearned(name: str, state: NodeState = NodeState.DOWN) -> FakeNode:
    return FakeNode(name, state=state, models={})


def place(nodes: Sequence[FakeNode], policy: Policy, demand: Demand | None = None) -> FakeNode:
    """Choose as the head does, among all nodes, and bind and reserve in the same step."""
    chosen = choose(nodes, nodes, demand or Demand(MODEL), policy, NOW_S)
    assert isinstance(chosen, FakeNode)
    chosen.sessions += 1
    chosen.reservations += 1
    return chosen
