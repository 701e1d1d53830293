"""The head's commands to a node and the node's answers, as plain values (design: Node rules)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum

from fleet_service.domain.specs import Qos, Sampling
from fleet_service.domain.value import value


class RefusalCode(Enum):
    """Why a node refused a command. A refusal is a reply, never a broken link."""

    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    STALE_EPOCH = "STALE_EPOCH"
    FENCED = "FENCED"
    REPLAYED = "REPLAYED"
    CONTEXT_MISMATCH = "CONTEXT_MISMATCH"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    CONSTRAINT = "CONSTRAINT"
    BUSY = "BUSY"
    ENGINE_ERROR = "ENGINE_ERROR"
    UNRECOGNISED = "UNRECOGNISED"


@value
class Refusal:
    """A command refused. `detail` is for the head's log and never reaches a caller."""

    code: RefusalCode
    current_epoch: int = 0
    context_length: int = 0
    max_context_tokens: int = 0
    retry_after_s: float = 0.0
    detail: str = ""


class Phase(Enum):
    """Where a generation stands on its node."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class RunFinish(Enum):
    """Why a node says a run ended."""

    EOS = "EOS"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    WALL_CLOCK = "WALL_CLOCK"
    ERROR = "ERROR"


@value
class Introduction:
    """Who the head is, for the handshake, leases and reports."""

    fleet_id: str
    head_id: str
    term: int


@value
class Assign:
    """Bind a session under a new epoch, with an empty context."""

    session_id: str
    epoch: int
    command_id: int
    model: str
    model_revision: str
    sampling: Sampling
    qos: Qos
    engine_options: bytes
    lease_s: float


@value
class Append:
    """context = context[:base_length] + token_ids."""

    session_id: str
    epoch: int
    command_id: int
    base_length: int
    token_ids: Sequence[int]


@value
class Run:
    """Generate on exactly the context named; `assign` and `append` ride along where the node takes them.

    `carrier` holds W3C trace headers (lower-case names) that go with the call.
    """

    session_id: str
    epoch: int
    command_id: int
    generation_id: str
    context_length: int
    context_crc32: int
    prefix_token_ids: Sequence[int]
    first_index: int
    max_new_tokens: int
    max_wall_s: float
    sampling: Sampling
    qos: Qos
    assign: Assign | None = None
    append: Append | None = None
    carrier: Mapping[str, str] = field(default_factory=dict)


@value
class CancelRun:
    """End a generation on its node."""

    session_id: str
    epoch: int
    generation_id: str


@value
class Revoke:
    """Free a session on a node; bars `epoch` and all older ones."""

    session_id: str
    epoch: int


@value
class HeldSession:
    """A session as a node holds it (its answer to Reconcile)."""

    session_id: str
    epoch: int
    head_id: str
    context_length: int = 0
    fenced: bool = False
    generation_ids: tuple[str, ...] = ()
