"""What a caller reads in an error: code, reason, metadata, details and the hints for a retry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

_KINDS: tuple[type[Message], ...] = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.PreconditionFailure,
    error_details_pb2.QuotaFailure,
    error_details_pb2.RetryInfo,
    error_details_pb2.RequestInfo,
)


@dataclass(frozen=True, slots=True)
class Refused:
    """An error taken apart. `retry_after_s` None: asking again does not help."""

    code: str
    reason: str
    message: str
    metadata: Mapping[str, str]
    fields: tuple[str, ...]
    resource: str
    retry_after_s: float | None

    @property
    def what(self) -> tuple[str, str]:
        """Code and reason, what docs/errors.md promises."""
        return self.code, self.reason


def taken_apart(error: grpc.aio.AioRpcError) -> Refused:
    """The parts of an error of this API. Fails when it is none."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    parts: dict[str, Any] = {}
    for detail in status.details:
        for kind in _KINDS:
            part = kind()
            if detail.Unpack(part):
                parts[kind.DESCRIPTOR.name] = part
    info = parts["ErrorInfo"]
    assert info.domain == "fleet.v1"
    assert status.code == error.code().value[0]
    retry = parts.get("RetryInfo")
    return Refused(
        code=error.code().name,
        reason=info.reason,
        message=status.message,
        metadata=dict(info.metadata),
        fields=tuple(each.field for each in parts["BadRequest"].field_violations)
        if "BadRequest" in parts
        else (),
        resource=parts["ResourceInfo"].resource_name if "ResourceInfo" in parts else "",
        retry_after_s=None if retry is None else retry.retry_delay.ToMilliseconds() / 1000,
    )


async def refusal_of(call: Any) -> Refused:
    """Run a call, unary or streaming, that must be refused."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return taken_apart(error)
    raise AssertionError("the call was answered")
