"""What a failed RPC means to the head: gRPC statuses -> LinkError, with what to do where a person must act.

Nothing here reaches a caller: the texts are for logs and for the operators' list of nodes.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fleet_service.grpc_causes import CLOSED, NO_ANSWER, NOT_GRPC, REFUSED, connection_cause
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkError,
    LinkLostError,
    LinkTimeoutError,
    NodeFaultError,
)

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_TEXT_LIMIT_CHARS = 200

_ERRORS: dict[grpc.StatusCode, type[LinkError]] = {
    grpc.StatusCode.UNAVAILABLE: LinkLostError,
    grpc.StatusCode.DEADLINE_EXCEEDED: LinkTimeoutError,
}

_REASON_ADVICE = {
    "VERSION_UNSUPPORTED": "upgrade the older of the two, head or node",
    "FLEET_TOKEN_REFUSED": "give both the same fleet token",
    "FLEET_MISMATCH": "give both the same fleet id, or take the node out of this head's list",
}

_CODE_ADVICE = {
    grpc.StatusCode.UNIMPLEMENTED: (
        "it speaks gRPC but is no fleet node (fleet.v1.NodeService is not there): check address and port"
    ),
    grpc.StatusCode.UNAUTHENTICATED: "it wants credentials the head did not give: check the node's token",
    grpc.StatusCode.PERMISSION_DENIED: "it does not let this head in: check the node's token and access list",
}


def refusal_advice(reason: str) -> str:
    """What to do about a node that refused the head for `reason` (errors.proto, without the prefix)."""
    return _REASON_ADVICE.get(reason, "see the node's log")


def link_error(error: grpc.aio.AioRpcError, what: str) -> LinkError:
    """The error for a call that failed on a connection that was well before. `what` names the call."""
    kind = _ERRORS.get(error.code(), NodeFaultError)
    return kind(f"{what}: {_text(error)}")


def handshake_error(
    error: grpc.aio.AioRpcError, address: str, connect_timeout_s: float, *, encrypted: bool
) -> LinkError:
    """The error for a dial or handshake that failed: lost, timed out, or refused with advice."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LinkTimeoutError(f"{address} took the connection but did not answer the handshake in time")
    if code is grpc.StatusCode.UNAVAILABLE:
        cause = _text(error)
        refused = cause == REFUSED
        if cause == NOT_GRPC:
            return HandshakeRefusedError(
                f"{address} does not speak gRPC: check address and port, and that the node serves without TLS"
            )
        if cause == NO_ANSWER:
            cause = f"no answer within {connect_timeout_s:g} s"
        elif cause == CLOSED:
            what = "that takes no such certificate of the head" if encrypted else "with TLS"
            cause = f"{cause} at once, as a node {what} does"
        return LinkLostError(f"cannot connect to {address}: {cause}", refused=refused)
    advice = _REASON_ADVICE.get(_reason(error)) or _CODE_ADVICE.get(code) or "see the node's log"
    return HandshakeRefusedError(f"{address} refused the handshake: {advice} ({_text(error)})")


def _text(error: grpc.aio.AioRpcError) -> str:
    """Of a connection that failed the cause alone; else the code and what the node said, within a limit."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and (cause := connection_cause(details)):
        return cause
    return f"{error.code().name} {details}".rstrip()[:_TEXT_LIMIT_CHARS]


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The reason in the status details (google.rpc.ErrorInfo); "" when there is none to be read."""
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            return _reason_of_details(value)
    return ""


def _reason_of_details(serialized: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(serialized).details:
            if detail.Unpack(info):
                return info.reason
    except DecodeError:
        return ""  # no details then: the status itself still tells the error
    return ""
