"""What the head shows of its state: immutable pictures for the api, the command line and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from fleet_service.domain.errors import FleetError
from fleet_service.domain.events import Finished, Moved
from fleet_service.domain.node_types import Feature, ModelInfo, NodeState, Report
from fleet_service.domain.placement import Verdict
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import SessionSpec
from fleet_service.domain.value import value

if TYPE_CHECKING:  # it needs this module itself
    from fleet_service.runtime.journal import Durability


@value
class RequestKey:
    """Names a request for idempotency; `fingerprint` tells another body under the same id."""

    request_id: str
    fingerprint: bytes
    owner: str = ""
    """Whose id it is: callers may choose the same."""


@value
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
    owner: str = ""


class DrainState(Enum):
    """How far a drain has come."""

    DRAINING = "draining"
    DRAINED = "drained"
    ENDED = "ended"
    NODE_REMOVED = "node_removed"


@value
class DrainInfo:
    """A drain at one moment (fleet.v1.Drain)."""

    state: DrainState
    by: str
    note: str
    started_at: float
    ended_at: float | None
    sessions: int
    generations: int
    waiting: int
    staying: int
    owed: int
    moved: int
    unbound: int


@value
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
    version: int = 0
    """Of the protocol spoken; 0 before the first handshake."""
    authenticated: bool = False
    encrypted: bool = False
    found_by: str = ""
    unlisted: bool = False
    cordoned_by: str = ""
    cordoned_at: float | None = None
    drain: DrainInfo | None = None


@value
class NameInfo:
    """A name whose addresses are nodes, at one moment (fleet.v1.DnsName)."""

    entry: str
    addresses: tuple[str, ...]
    other_ways: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: int
    failure: str
    resolved_at: float | None


@value
class ProbeResult:
    """What a probe of one node found."""

    name: str
    address: str
    reachable: bool
    detail: str
    identity: str
    models: tuple[ModelInfo, ...]
    latency_s: float
    version: int = 0
    authenticated: bool = False
    encrypted: bool = False


@value
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


@value
class CancelResult:
    """Answer to a cancel; `finished` is None for HELD."""

    outcome: CancelOutcome
    finished: Finished | None


@value
class Explanation:
    """How something would be placed now; `refusal` says why nowhere."""

    policy: str
    chosen: str
    refusal: FleetError | None
    verdicts: Sequence[Verdict]


@value
class FleetSummary:
    """What a head holds, in numbers, and how it is kept (fleet.v1.FleetSummary)."""

    sessions: Mapping[SessionState, int]
    generations: int
    queued: int
    context_tokens: int
    books_balance: bool
    stopping: bool
    durability: Durability
    store_trouble: str
    """Why nothing can be kept now; "" = all is well."""


@value
class PlacedOn:
    """A node was chosen for a generation."""

    node: str


@value
class EndedOn:
    """A generation ended; its last attempt was on `node`, "" where there was none."""

    node: str
    finished: Finished


@value
class Turn:
    """A turn of one generation (fleet.v1.FleetEvent). `at` in unix seconds."""

    at: float
    generation_id: str
    session_id: str
    model: str
    what: PlacedOn | Moved | EndedOn


@value
class FleetChange:
    """What is new to a watcher (fleet.v1.WatchFleetResponse). `summary` None: as it was."""

    snapshot: bool
    nodes: Sequence[NodeInfo]
    removed: Sequence[str]
    summary: FleetSummary | None
    turns: Sequence[Turn]
    skipped: int
