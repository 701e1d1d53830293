"""The events of a generation's stream, in the order a reader sees them (design: The contract)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum

from fleet_service.domain.errors import Reason
from fleet_service.domain.value import value


class FinishReason(Enum):
    """Why a generation ended."""

    EOS = "EOS"
    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    WALL_CLOCK = "WALL_CLOCK"
    ERROR = "ERROR"


class MoveCause(Enum):
    """Why an attempt ended and another one follows."""

    LINK_LOST = "LINK_LOST"
    NODE_SILENT = "NODE_SILENT"
    STALLED = "STALLED"
    SESSION_LOST = "SESSION_LOST"
    ENGINE_ERROR = "ENGINE_ERROR"
    PROTOCOL_ERROR = "PROTOCOL_ERROR"
    NO_ROOM = "NO_ROOM"
    REBALANCED = "REBALANCED"
    NODE_REMOVED = "NODE_REMOVED"
    DRAIN = "DRAIN"
    HEAD_RESTARTED = "HEAD_RESTARTED"


@value
class ErrorCause:
    """What ended a generation with finish ERROR."""

    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@value
class Accepted:
    """The head has taken the generation."""

    generation_id: str
    session_id: str


@value
class Started:
    """The generation's first dispatch to a node."""

    node: str
    epoch: int


@value
class Tokens:
    """All tokens new to the reader, the first at `first_index`."""

    first_index: int
    token_ids: Sequence[int]


@value
class Moved:
    """A further attempt goes on at `next_index`; `gap_s` since the last sign of the one before."""

    from_node: str
    to_node: str
    cause: MoveCause
    next_index: int
    gap_s: float
    epoch: int


@value
class Timings:
    """Seconds. The first and the last token's count from acceptance; None when there was no token."""

    queued_s: float
    first_token_s: float | None
    total_s: float
    longest_gap_s: float
    last_token_s: float | None = None


@value
class Finished:
    """The one terminal event."""

    reason: FinishReason
    context_tokens: int
    output_tokens: int
    attempts: int
    timings: Timings
    stop_index: int | None = None
    error: ErrorCause | None = None


Event = Accepted | Started | Tokens | Moved | Finished
