"""What a head writes down, each thing once, as it happens; and what of it there is when it starts again.

A record is one change. Those of one batch are kept together or not at all. Ids, owners and names are those
that callers and operators know; times are unix seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_service.domain.events import Finished, Moved, Started
from fleet_service.domain.specs import GenerationSpec, Sampling, SessionSpec
from fleet_service.domain.value import value
from fleet_service.runtime.views import SessionView


@value
class SessionKept:
    """A session as it is now, but for its context. `number` gives the order in which sessions were made."""

    session_id: str
    number: int
    owner: str
    spec: SessionSpec
    sampling: Sampling
    created_at: float
    last_used_at: float
    parked: bool = False
    ephemeral: bool = False


@value
class SessionGone:
    """A session is over, its context with it."""

    session_id: str


@value
class ContextExtended:
    """context = context[:base_length] + token_ids; `crc32` is that of the whole then."""

    session_id: str
    base_length: int
    token_ids: Sequence[int]
    crc32: int


@value
class SessionBound:
    """The node that has the session, by identity and incarnation, and the epoch; node "" = none."""

    session_id: str
    node: str = ""
    incarnation: str = ""
    epoch: int = 0


@value
class GenerationStarted:
    """A generation was accepted. `max_new_tokens` and the EOS ids are those fixed at its start.

    `branch`: that of the run which accepted it.
    """

    generation_id: str
    session_id: str
    owner: str
    spec: GenerationSpec
    sampling: Sampling
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    context_tokens: int
    accepted_at: float
    deadline_at: float
    branch: int = 0


@value
class TokensDelivered:
    """The next tokens of a generation."""

    generation_id: str
    first_index: int
    token_ids: Sequence[int]


@value
class AttemptStarted:
    """What readers see between tokens: `index` tokens came before it."""

    generation_id: str
    index: int
    event: Started | Moved
    attempts: int


@value
class BranchCut:
    """From `index` on, readers may have been given tokens that are lost: what follows is of that branch."""

    generation_id: str
    branch: int
    index: int


@value
class TermRaised:
    """The run goes on in that term."""

    term: int


@value
class GenerationEnded:
    """The one decision; what it adds to the context is another record of the same batch."""

    generation_id: str
    finished: Finished
    ended_at: float


@value
class GenerationGone:
    """A generation that had ended is no longer kept."""

    generation_id: str


@value
class RequestAnswered:
    """The answer that a request_id gets again: the session as it was then, or a generation's id."""

    owner: str
    request_id: str
    fingerprint: bytes
    answer: SessionView | str
    until: float


@value
class CancelHeld:
    """A cancel that waits for its generation until then; `until` 0 = it waits no more."""

    owner: str
    generation_id: str
    until: float


@value
class RevokeOwed:
    """A node, by identity and incarnation, is owed the revoke of a session's epoch; settled = no longer."""

    node: str
    incarnation: str
    session_id: str
    epoch: int
    settled: bool = False


@value
class NodeListed:
    """An operator added a node's address or a name, or took it out."""

    address: str
    listed: bool = True


@value
class NodeMarked:
    """An operator cordons or drains a node (`mark` "cordon" or "drain"), or ends that ("").

    `cordoned_by`, `cordoned_at`, `cordon_note`: of the cordon that a drained node has. "ended": the same as
    "" for a node whose identity, by which it may be marked, is not known.
    """

    node: str
    mark: str
    by: str = ""
    at: float = 0.0
    note: str = ""
    cordoned_by: str = ""
    cordoned_at: float = 0.0
    cordon_note: str = ""


Record = (
    SessionKept
    | SessionGone
    | ContextExtended
    | SessionBound
    | GenerationStarted
    | TokensDelivered
    | AttemptStarted
    | BranchCut
    | TermRaised
    | GenerationEnded
    | GenerationGone
    | RequestAnswered
    | CancelHeld
    | RevokeOwed
    | NodeListed
    | NodeMarked
)


@dataclass(slots=True)
class SavedSession:
    """A session as it was last written down; its context is read when it is used."""

    kept: SessionKept
    context_length: int = 0
    context_crc32: int = 0
    bound: SessionBound | None = None


@dataclass(slots=True)
class SavedGeneration:
    """A generation as it was last written down."""

    started: GenerationStarted
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    marks: list[tuple[int, Started | Moved]] = field(default_factory=list)
    cuts: list[BranchCut] = field(default_factory=list)
    attempts: int = 0
    ended: GenerationEnded | None = None


@dataclass(slots=True)
class Saved:
    """All there was, but for contexts and answers to requests, which the store is asked for.

    `term` is the one that the newest run began in; 0 = a new store.

    `branch` is the term of the last run before which the end of the log may have been lost; `torn` says that
    it may be now, and `why_torn` why.
    """

    term: int = 0
    raised_term: int = 0
    """The highest that a run has gone on in."""
    branch: int = 0
    torn: bool = False
    why_torn: str = ""
    sessions: dict[str, SavedSession] = field(default_factory=dict)
    generations: dict[str, SavedGeneration] = field(default_factory=dict)
    cancels: dict[tuple[str, str], CancelHeld] = field(default_factory=dict)
    revokes: dict[tuple[str, str, str, int], RevokeOwed] = field(default_factory=dict)
    listed: dict[str, bool] = field(default_factory=dict)
    """Addresses and names that operators added (True) or took out (False), on top of the settings."""
    marks: dict[str, NodeMarked] = field(default_factory=dict)
