"""The one place where an error becomes a google.rpc.Status: code, details, retry hint, size.

Every status carries ErrorInfo (domain "fleet.v1"). What else it carries stands in RULES, reason by reason;
docs/errors.md says the same for readers, and a test holds the two and errors.proto together.
An error nobody foresaw becomes INTERNAL with an id to look for in the log, and nothing of its text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fleet.v1 import fleet_service_pb2
from fleet_service.domain.errors import FieldViolation, FleetError, Reason

DOMAIN = "fleet.v1"
MAX_STATUS_BYTES = 4096
"""Trailers beyond 8 KiB may be dropped on the way, and the error with them."""

RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
RETRIED_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Codes that the published retry policy retries; on others a pushback has no meaning."""

_RETRY_JITTER = 0.25
_MAX_KEY_BYTES = 64  # google.rpc.ErrorInfo: a metadata key's limit


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as it goes out: `status` in full, and the trailers that carry it."""

    code: grpc.StatusCode
    reason: Reason
    message: str
    status: status_pb2.Status
    trailers: tuple[tuple[str, str | bytes], ...]
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True)
class _Budget:
    """How much of an error's own text goes in: entries of a list or map, and bytes of each text."""

    entries: int
    text_bytes: int


# The last one fits whatever the error says: (8 values + 8 violations) * (64 + 64) bytes and some fixed text.
_BUDGETS = (_Budget(32, 512), _Budget(16, 128), _Budget(8, 64))


@dataclass(frozen=True, slots=True)
class _Case:
    """One error to describe; `request_id` names the call it ended."""

    error: FleetError
    request_id: str
    budget: _Budget

    def text(self, value: str) -> str:
        return _cut(value, self.budget.text_bytes)


_Detail = Callable[[_Case], Message]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a reason goes out. `retry_after_s` is the hint where the error itself gives none."""

    code: grpc.StatusCode
    details: tuple[_Detail, ...] = ()
    retry_after_s: float | None = None


def _bad_request(case: _Case) -> Message:
    violations = case.error.violations
    if not violations:
        name = case.error.metadata.get("field", _DEFAULT_FIELDS.get(case.error.reason, "request"))
        violations = (FieldViolation(name, case.error.message),)
    kept = violations[: case.budget.entries]
    detail = error_details_pb2.BadRequest()
    for violation in kept:
        detail.field_violations.add(
            field=_cut(violation.field, _MAX_KEY_BYTES), description=case.text(violation.description)
        )
    if len(kept) < len(violations):
        detail.field_violations.add(field="request", description=f"{len(violations) - len(kept)} more")
    return detail


def _resource_info(case: _Case) -> Message:
    kind, key, collection = _RESOURCES[case.error.reason]
    return error_details_pb2.ResourceInfo(
        resource_type=f"{DOMAIN}/{kind}",
        resource_name=case.text(_full_name(case.error, key, collection)),
        description=case.text(case.error.message),
    )


def _precondition(case: _Case) -> Message:
    kind, key, collection = _PRECONDITIONS[case.error.reason]
    detail = error_details_pb2.PreconditionFailure()
    detail.violations.add(
        type=kind,
        subject=case.text(_full_name(case.error, key, collection)),
        description=case.text(case.error.message),
    )
    return detail


def _full_name(error: FleetError, key: str, collection: str) -> str:
    """Collection and id of what the error is about: as its metadata say, else its resource."""
    if key in error.metadata:
        return collection + error.metadata[key]
    name = error.resource[1] if error.resource else ""
    return name if name.startswith(_COLLECTIONS) else collection + name


def _quota(case: _Case) -> Message:
    detail = error_details_pb2.QuotaFailure()
    subject = _QUOTA_SUBJECTS.get(case.error.reason) or "limit:" + case.error.metadata.get("limit", "")
    detail.violations.add(subject=case.text(subject), description=case.text(case.error.message))
    return detail


def _request_info(case: _Case) -> Message:
    return error_details_pb2.RequestInfo(request_id=case.request_id)


_DEFAULT_FIELDS = MappingProxyType(
    {Reason.CONTEXT_TOO_LONG: "token_ids", Reason.INDEX_OUT_OF_RANGE: "from_index"}
)
# Type, the metadata key that names it, and its collection.
_SESSION = ("Session", "sessionId", "sessions/")
_GENERATION = ("Generation", "generationId", "generations/")
_NODE = ("Node", "node", "nodes/")
_COLLECTIONS = ("sessions/", "generations/", "nodes/", "models/", "requests/")
_RESOURCES: Mapping[Reason, tuple[str, str, str]] = MappingProxyType(
    {
        Reason.SESSION_NOT_FOUND: _SESSION,
        Reason.SESSION_ALREADY_EXISTS: _SESSION,
        Reason.GENERATION_IN_PROGRESS: _SESSION,
        Reason.CONTEXT_CHANGED: _SESSION,
        Reason.CONTEXT_LOST: _SESSION,
        Reason.OWNER_CHANGED: _SESSION,
        Reason.GENERATION_NOT_FOUND: _GENERATION,
        Reason.DATA_LOSS: _GENERATION,
        Reason.GENERATION_ALREADY_EXISTS: _GENERATION,
        Reason.NODE_NOT_FOUND: _NODE,
        Reason.NODE_ALREADY_EXISTS: _NODE,
        Reason.MODEL_NOT_FOUND: ("Model", "model", "models/"),
        Reason.REQUEST_ID_REUSED: ("Request", "requestId", "requests/"),
    }
)
_PRECONDITIONS: Mapping[Reason, tuple[str, str, str]] = MappingProxyType(
    {
        Reason.SESSION_PARKED: ("SESSION_STATE", "sessionId", "sessions/"),
        Reason.SESSION_NOT_PARKED: ("SESSION_STATE", "sessionId", "sessions/"),
        Reason.CONTEXT_TOO_LONG: ("CONTEXT_WINDOW", "sessionId", "sessions/"),
        Reason.MODEL_UNPLACEABLE: ("NODE_SELECTOR", "model", "models/"),
    }
)
_QUOTA_SUBJECTS: Mapping[Reason, str] = MappingProxyType(
    {Reason.FLEET_SATURATED: "fleet:queue", Reason.REQUEST_TOO_LARGE: "request:bytes"}
)

_INTERNAL = Rule(grpc.StatusCode.INTERNAL, (_request_info,))
RULES: Mapping[Reason, Rule] = MappingProxyType(
    {
        Reason.INVALID_FIELD: Rule(grpc.StatusCode.INVALID_ARGUMENT, (_bad_request,)),
        Reason.REQUEST_TOO_LARGE: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, (_quota,)),
        Reason.SESSION_NOT_FOUND: Rule(grpc.StatusCode.NOT_FOUND, (_resource_info,)),
        Reason.SESSION_ALREADY_EXISTS: Rule(grpc.StatusCode.ALREADY_EXISTS, (_resource_info,)),
        Reason.SESSION_PARKED: Rule(grpc.StatusCode.FAILED_PRECONDITION, (_precondition,)),
        Reason.SESSION_NOT_PARKED: Rule(grpc.StatusCode.FAILED_PRECONDITION, (_precondition,)),
        Reason.GENERATION_IN_PROGRESS: Rule(grpc.StatusCode.ABORTED, (_resource_info,)),
        Reason.CONTEXT_CHANGED: Rule(grpc.StatusCode.ABORTED, (_resource_info,)),
        Reason.CONTEXT_TOO_LONG: Rule(grpc.StatusCode.INVALID_ARGUMENT, (_bad_request,)),
        Reason.MODEL_NOT_FOUND: Rule(grpc.StatusCode.NOT_FOUND, (_resource_info,)),
        Reason.MODEL_UNPLACEABLE: Rule(grpc.StatusCode.FAILED_PRECONDITION, (_precondition,)),
        Reason.NO_ELIGIBLE_NODE: Rule(grpc.StatusCode.UNAVAILABLE, retry_after_s=1.0),
        Reason.FLEET_SATURATED: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, (_quota,), retry_after_s=1.0),
        Reason.LIMIT_EXCEEDED: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, (_quota,)),
        Reason.GENERATION_NOT_FOUND: Rule(grpc.StatusCode.NOT_FOUND, (_resource_info,)),
        Reason.GENERATION_ALREADY_EXISTS: Rule(grpc.StatusCode.ALREADY_EXISTS, (_resource_info,)),
        Reason.INDEX_OUT_OF_RANGE: Rule(grpc.StatusCode.OUT_OF_RANGE, (_bad_request,)),
        Reason.DATA_LOSS: Rule(grpc.StatusCode.DATA_LOSS, (_resource_info,)),
        Reason.CONTEXT_LOST: Rule(grpc.StatusCode.DATA_LOSS, (_resource_info,)),
        Reason.REQUEST_ID_REUSED: Rule(grpc.StatusCode.ALREADY_EXISTS, (_resource_info,)),
        Reason.HEAD_DRAINING: Rule(grpc.StatusCode.UNAVAILABLE, retry_after_s=1.0),
        Reason.STORE_UNAVAILABLE: Rule(grpc.StatusCode.UNAVAILABLE, retry_after_s=1.0),
        Reason.OWNER_CHANGED: Rule(grpc.StatusCode.ABORTED, (_resource_info,)),
        Reason.NODE_NOT_FOUND: Rule(grpc.StatusCode.NOT_FOUND, (_resource_info,)),
        Reason.NODE_ALREADY_EXISTS: Rule(grpc.StatusCode.ALREADY_EXISTS, (_resource_info,)),
        Reason.CREDENTIALS_REFUSED: Rule(grpc.StatusCode.UNAUTHENTICATED),
        Reason.PERMISSION_DENIED: Rule(grpc.StatusCode.PERMISSION_DENIED),
        Reason.INTERNAL: _INTERNAL,
    }
)
"""Reasons that end a call. The rest are causes of finish ERROR and never a call's status."""

GROWN_RULES: Mapping[Reason, Rule] = MappingProxyType(
    {Reason.CONTEXT_TOO_LONG: Rule(grpc.StatusCode.OUT_OF_RANGE, (_precondition,))}
)
"""What holds instead where the error depends on a session's state (FleetError.state_dependent)."""


def rule_of(error: FleetError) -> Rule:
    """The rule that `error` goes out by."""
    if error.state_dependent and error.reason in GROWN_RULES:
        return GROWN_RULES[error.reason]
    return RULES[error.reason]


def is_foreseen(error: BaseException) -> bool:
    """False for faults of the head: an unexpected exception, or a reason that cannot end a call."""
    return isinstance(error, FleetError) and error.reason in RULES and error.reason is not Reason.INTERNAL


class ErrorTranslator:
    """Turns errors into what goes out. `rng` spreads retry hints, so that callers refused together part."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def translate(self, error: BaseException, request_id: str) -> WireError:
        """Describe `error` in a status of at most MAX_STATUS_BYTES. `request_id` names the call it ended."""
        known = error if isinstance(error, FleetError) and is_foreseen(error) else _opaque(request_id)
        rule = rule_of(known)
        hint_s = known.retry_after_s if known.retry_after_s is not None else rule.retry_after_s
        if hint_s is not None:
            hint_s = max(0.0, hint_s) * (1.0 + _RETRY_JITTER * self._rng.random())
        status = _status(known, rule, hint_s, request_id)
        hint_ms = None if hint_s is None else _milliseconds(hint_s)
        trailers: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_KEY, status.SerializeToString())]
        if rule.code in RETRIED_CODES:
            trailers.append((RETRY_PUSHBACK_KEY, "-1" if hint_ms is None else str(hint_ms)))
        return WireError(rule.code, known.reason, status.message, status, tuple(trailers), hint_ms)


def call_error(error: WireError) -> fleet_service_pb2.CallError:
    """The error as one call of a connection is answered with it."""
    return fleet_service_pb2.CallError(
        code=_number(error.code),
        reason=error.reason.value,
        message=error.message,
        retry_after_ms=error.retry_after_ms,
        status=error.status.SerializeToString(),
    )


def _opaque(request_id: str) -> FleetError:
    return FleetError(
        Reason.INTERNAL,
        f"internal error; the head's log has it under request id {request_id}",
        metadata={"requestId": request_id},
    )


def _status(error: FleetError, rule: Rule, hint_s: float | None, request_id: str) -> status_pb2.Status:
    """The status in the largest budget that keeps it within MAX_STATUS_BYTES."""
    status = status_pb2.Status()
    for budget in _BUDGETS:
        status = _build(_Case(error, request_id, budget), rule, hint_s)
        if status.ByteSize() <= MAX_STATUS_BYTES:
            break
    return status


def _build(case: _Case, rule: Rule, hint_s: float | None) -> status_pb2.Status:
    error = case.error
    status = status_pb2.Status(code=_number(rule.code), message=case.text(error.message))
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN)
    for key, value in islice(error.metadata.items(), case.budget.entries):
        info.metadata[_cut(key, _MAX_KEY_BYTES)] = case.text(value)
    status.details.add().Pack(info)
    for detail in rule.details:
        status.details.add().Pack(detail(case))
    if hint_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(_milliseconds(hint_s))
        status.details.add().Pack(retry)
    return status


def _number(code: grpc.StatusCode) -> int:
    number, _name = code.value
    return int(number)


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000.0)


def _cut(text: str, max_bytes: int) -> str:
    """`text` in valid UTF-8 of at most `max_bytes` bytes, the cut marked."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode("utf-8")
    return raw[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def invalid_fields(violations: list[FieldViolation]) -> FleetError:
    """INVALID_FIELD about all of `violations` (at least one); the message names the first."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return FleetError(
        Reason.INVALID_FIELD,
        f"{first.field}: {first.description}{more}",
        metadata={"field": first.field},
        violations=tuple(violations),
    )


def too_large(size_bytes: int, max_bytes: int) -> FleetError:
    """REQUEST_TOO_LARGE."""
    return FleetError(
        Reason.REQUEST_TOO_LARGE,
        f"the request has {size_bytes} bytes; the head takes at most {max_bytes}. "
        "Send a long context in several AppendTokens calls",
        metadata={"sizeBytes": str(size_bytes), "maxBytes": str(max_bytes)},
    )
