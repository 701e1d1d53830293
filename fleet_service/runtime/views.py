"""What the head shows of its state: immutable pictures for the api, the command line and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fleet_service.domain.errors import FleetError
from fleet_service.domain.events import Finished
from fleet_service.domain.node_types import Feature, ModelInfo, NodeState, Report
from fleet_service.domain.placement import Verdict
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import SessionSpec


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names a request for idempotency; `fingerprint` tells another body under the same id."""

    request_id: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session at one moment. Times are unix seconds; node "" and epoch 0 = unbound."""

    session_id: str
    spec: SessionSpec
    state: SessionState
    context_length: int
    context_crc32: int
    node: str
    epoch: int
    generation_id: str
    created_at: float
    last_used_at: float


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node at one moment (fleet.v1.Node)."""

    name: str
    address: str
    incarnation: str
    state: NodeState
    state_detail: str
    cordoned: bool
    cordon_note: str
    reports_stale: bool
    labels: Mapping[str, str]
    models: tuple[ModelInfo, ...]
    features: frozenset[Feature]
    report: Report | None
    report_age_s: float | None
    lanes: int
    sessions: int
    running: int
    queued: int
    reservations: int
    outbox: int
    failures: Mapping[str, int]
    last_seen_at: float | None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe of one node found."""

    name: str
    address: str
    reachable: bool
    detail: str
    identity: str
    models: tuple[ModelInfo, ...]
    latency_s: float


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model and how many nodes serve it."""

    model: ModelInfo
    nodes_up: int
    nodes_known: int


class CancelOutcome(Enum):
    """What a cancel did."""

    CANCELLED = "cancelled"
    ALREADY_FINISHED = "already_finished"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class CancelResult:
    """Answer to a cancel; `finished` is None for HELD."""

    outcome: CancelOutcome
    finished: Finished | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """How something would be placed now; `refusal` says why nowhere."""

    policy: str
    chosen: str
    refusal: FleetError | None
    verdicts: Sequence[Verdict]
