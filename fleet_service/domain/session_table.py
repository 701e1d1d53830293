"""What may happen to a session in each of its states: one table, every cell written out.

A session that leaves a node owes it a revoke: whatever the reason, the node may live on and still hold the
cache (Nothing is freed on a promise).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fleet_service.domain.errors import FleetError, Reason


class SessionState(Enum):
    """Where a session is."""

    UNBOUND = "unbound"
    """The head alone keeps it."""
    BOUND = "bound"
    """A node holds its context, or will be sent it."""
    GENERATING = "generating"
    """A generation of it is queued, running or moving."""
    PARKED = "parked"
    """Set aside by its caller until resumed."""


class SessionOp(Enum):
    """What happens to a session: callers' requests first, then what befalls it."""

    APPEND = "append"
    GENERATE = "generate"
    PARK = "park"
    RESUME = "resume"
    FINISH = "finish"
    NODE_LOST = "node_lost"
    IDLE = "idle"
    """Nothing was asked of it for so long that its node's room goes to others."""
    EXPIRED = "expired"
    """Nothing was asked of it for so long that it is given up."""
    GENERATION_ENDED = "generation_ended"


@dataclass(frozen=True, slots=True)
class Transition:
    """`to` None: the session is gone. `owes_revoke`: the node it was bound to is owed a revoke."""

    to: SessionState | None
    owes_revoke: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The operation is refused and changes nothing."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class _Depends:
    """The cell depends on the node: `stays` when the session still fits or keeps its node."""

    stays: Transition
    leaves: Transition


_S, _O = SessionState, SessionOp
_UNBOUND, _BOUND = Transition(_S.UNBOUND), Transition(_S.BOUND)
_GENERATING, _PARKED = Transition(_S.GENERATING), Transition(_S.PARKED)
_LEFT_NODE = Transition(_S.UNBOUND, owes_revoke=True)
_BUSY = Refused(Reason.GENERATION_IN_PROGRESS)
_IS_PARKED = Refused(Reason.SESSION_PARKED)
_NOT_PARKED = Refused(Reason.SESSION_NOT_PARKED)
# Only a fault of the head itself ends a generation that the session does not have.
_FAULT = Refused(Reason.INTERNAL)

TABLE: dict[tuple[SessionState, SessionOp], Transition | Refused | _Depends] = {
    (_S.UNBOUND, _O.APPEND): _UNBOUND,
    (_S.UNBOUND, _O.GENERATE): _GENERATING,
    (_S.UNBOUND, _O.PARK): _PARKED,
    (_S.UNBOUND, _O.RESUME): _NOT_PARKED,
    (_S.UNBOUND, _O.FINISH): Transition(None),
    (_S.UNBOUND, _O.NODE_LOST): _UNBOUND,
    (_S.UNBOUND, _O.IDLE): _UNBOUND,
    (_S.UNBOUND, _O.EXPIRED): Transition(None),
    (_S.UNBOUND, _O.GENERATION_ENDED): _FAULT,
    (_S.BOUND, _O.APPEND): _Depends(stays=_BOUND, leaves=_LEFT_NODE),
    (_S.BOUND, _O.GENERATE): _GENERATING,
    (_S.BOUND, _O.PARK): Transition(_S.PARKED, owes_revoke=True),
    (_S.BOUND, _O.RESUME): _NOT_PARKED,
    (_S.BOUND, _O.FINISH): Transition(None, owes_revoke=True),
    (_S.BOUND, _O.NODE_LOST): _LEFT_NODE,
    (_S.BOUND, _O.IDLE): _LEFT_NODE,
    (_S.BOUND, _O.EXPIRED): Transition(None, owes_revoke=True),
    (_S.BOUND, _O.GENERATION_ENDED): _FAULT,
    (_S.GENERATING, _O.APPEND): _BUSY,
    (_S.GENERATING, _O.GENERATE): _BUSY,
    (_S.GENERATING, _O.PARK): _BUSY,
    (_S.GENERATING, _O.RESUME): _NOT_PARKED,
    (_S.GENERATING, _O.FINISH): Transition(None, owes_revoke=True),
    # The attempt on that node fails; the generation, and with it the session, goes on.
    (_S.GENERATING, _O.NODE_LOST): _GENERATING,
    (_S.GENERATING, _O.IDLE): _GENERATING,
    (_S.GENERATING, _O.EXPIRED): _GENERATING,
    # A generation that ends without a node left it in its last attempt, which owed the revoke.
    (_S.GENERATING, _O.GENERATION_ENDED): _Depends(stays=_BOUND, leaves=_UNBOUND),
    (_S.PARKED, _O.APPEND): _IS_PARKED,
    (_S.PARKED, _O.GENERATE): _IS_PARKED,
    (_S.PARKED, _O.PARK): _PARKED,
    (_S.PARKED, _O.RESUME): _BOUND,
    (_S.PARKED, _O.FINISH): Transition(None),
    (_S.PARKED, _O.NODE_LOST): _PARKED,
    (_S.PARKED, _O.IDLE): _PARKED,
    (_S.PARKED, _O.EXPIRED): Transition(None),
    (_S.PARKED, _O.GENERATION_ENDED): _FAULT,
}

_MESSAGES = {
    Reason.GENERATION_IN_PROGRESS: (
        "session {id} has a generation queued or running; wait for its finish or cancel it, then retry"
    ),
    Reason.SESSION_PARKED: "session {id} is parked; resume it first",
    Reason.SESSION_NOT_PARKED: "session {id} is not parked; use it as it is, there is nothing to resume",
    Reason.INTERNAL: "session {id} has no generation that could end; report this as a fault of the head",
}


def apply(
    state: SessionState, op: SessionOp, *, session_id: str, fits: bool = True, keeps_node: bool = True
) -> Transition:
    """What `op` makes of a session in `state`.

    `fits` (with APPEND): the grown context still fits its node. `keeps_node` (with GENERATION_ENDED): the
    generation ended with the session bound to a node. Raises FleetError: GENERATION_IN_PROGRESS,
    SESSION_PARKED, SESSION_NOT_PARKED, or INTERNAL for an operation that the head must not bring about.
    """
    cell = TABLE[state, op]
    if isinstance(cell, Refused):
        raise FleetError(
            cell.reason,
            _MESSAGES[cell.reason].format(id=session_id),
            metadata={"sessionId": session_id},
            resource=("fleet.v1.Session", f"sessions/{session_id}"),
        )
    if isinstance(cell, _Depends):
        return cell.stays if (fits if op is SessionOp.APPEND else keeps_node) else cell.leaves
    return cell
