"""Every error the head gives to a caller or operator: one class, told apart by its reason.

The reasons are those of proto/fleet/v1/errors.proto that reach callers; api/errors.py turns them into
google.rpc.Status. Raising one changes nothing: a refused request loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Values are the names in errors.proto without their prefix."""

    INVALID_FIELD = "INVALID_FIELD"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    SESSION_ALREADY_EXISTS = "SESSION_ALREADY_EXISTS"
    SESSION_PARKED = "SESSION_PARKED"
    SESSION_NOT_PARKED = "SESSION_NOT_PARKED"
    GENERATION_IN_PROGRESS = "GENERATION_IN_PROGRESS"
    CONTEXT_CHANGED = "CONTEXT_CHANGED"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_UNPLACEABLE = "MODEL_UNPLACEABLE"
    NO_ELIGIBLE_NODE = "NO_ELIGIBLE_NODE"
    FLEET_SATURATED = "FLEET_SATURATED"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    GENERATION_NOT_FOUND = "GENERATION_NOT_FOUND"
    GENERATION_ALREADY_EXISTS = "GENERATION_ALREADY_EXISTS"
    INDEX_OUT_OF_RANGE = "INDEX_OUT_OF_RANGE"
    DATA_LOSS = "DATA_LOSS"
    CONTEXT_LOST = "CONTEXT_LOST"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    HEAD_DRAINING = "HEAD_DRAINING"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    OWNER_CHANGED = "OWNER_CHANGED"
    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    NODE_ALREADY_EXISTS = "NODE_ALREADY_EXISTS"
    CREDENTIALS_REFUSED = "CREDENTIALS_REFUSED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"
    # Causes of finish ERROR.
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    POISON_REQUEST = "POISON_REQUEST"
    ENGINE_ERROR = "ENGINE_ERROR"
    NODE_LOST = "NODE_LOST"
    CONSTRAINT_UNSATISFIABLE = "CONSTRAINT_UNSATISFIABLE"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is wrong, by its path in the request, and what it must be."""

    field: str
    description: str


@dataclass(slots=True, eq=False)
class FleetError(Exception):
    """A refusal with a reason.

    `metadata` holds every value the message names (keys in lowerCamelCase, as google.rpc.ErrorInfo asks).
    `retry_after_s` is given where trying the same request again can help. `resource` is the (type, name)
    the error is about. `state_dependent` tells a CONTEXT_TOO_LONG of a grown session from a prompt's.
    """

    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    resource: tuple[str, str] | None = None
    violations: tuple[FieldViolation, ...] = ()
    state_dependent: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def invalid(field_name: str, description: str) -> FleetError:
    """INVALID_FIELD about one field."""
    return FleetError(
        Reason.INVALID_FIELD,
        f"{field_name}: {description}",
        metadata={"field": field_name},
        violations=(FieldViolation(field_name, description),),
    )
