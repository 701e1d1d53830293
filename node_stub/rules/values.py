"""What goes into the node rules and what comes out: commands, admissions, refusals, as plain values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

TERM_SHIFT = 32


def term_of(epoch: int) -> int:
    """Term of the head that issued `epoch` (an epoch is term << 32 | n)."""
    return epoch >> TERM_SHIFT


class Code(Enum):
    """Why a command was refused; the names are those of fleet.v1.RefusalCode without their prefix."""

    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    STALE_EPOCH = "STALE_EPOCH"
    FENCED = "FENCED"
    REPLAYED = "REPLAYED"
    CONTEXT_MISMATCH = "CONTEXT_MISMATCH"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    CONSTRAINT = "CONSTRAINT"
    BUSY = "BUSY"
    ENGINE_ERROR = "ENGINE_ERROR"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command refused; the numbers are set where the code calls for them. `detail` is for logs."""

    code: Code
    current_epoch: int = 0
    context_length: int = 0
    max_context_tokens: int = 0
    retry_after_ms: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the node serves it. vocab_size and max_context_tokens: 0 = no limit known."""

    name: str
    revision: str = ""
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    max_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the default is greedy."""

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Assign:
    """Bind a session under a new epoch, with an empty context. lease_ms 0 = the node's default."""

    session_id: str
    epoch: int
    command_id: int
    fleet_id: str
    head_id: str
    model: str
    model_revision: str = ""
    sampling: Sampling = Sampling()
    qos: int = 1
    engine_options: bytes = b""
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Append:
    """context = context[:base_length] + token_ids (each an unsigned 32-bit id)."""

    session_id: str
    epoch: int
    command_id: int
    base_length: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Generate:
    """Run a generation on the context of that length and CRC-32, after `prefix_token_ids`.

    `assign` and `append`, where given, are executed first and must name the same session and epoch.
    sampling None and qos 0 stand for the session's.
    """

    session_id: str
    epoch: int
    command_id: int
    generation_id: str
    context_length: int
    context_crc32: int
    max_new_tokens: int
    prefix_token_ids: Sequence[int] = ()
    first_index: int = 0
    max_wall_ms: int = 0
    sampling: Sampling | None = None
    qos: int = 0
    assign: Assign | None = None
    append: Append | None = None


Command = Assign | Append | Generate


@dataclass(frozen=True, slots=True)
class Admission:
    """A generation that may run: everything its engine needs.

    `prompt_token_ids` is the context and then the prefix, a copy of its own. The output's first token has
    index `first_index`; `max_new_tokens` is already cut to the room left in the model's window.
    max_wall_ms 0 = no limit.
    """

    session_id: str
    epoch: int
    generation_id: str
    model: Model
    prompt_token_ids: array[int]
    first_index: int
    max_new_tokens: int
    max_wall_ms: int
    sampling: Sampling
    qos: int
    engine_options: bytes
    context_length: int


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """Answer to a cancel: refused, or done and whether a run was there to stop."""

    refusal: Refusal | None
    was_running: bool
