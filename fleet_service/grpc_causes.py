"""Why a connection failed, in a few words, out of what gRPC says about it.

gRPC tells all such failures by one code, UNAVAILABLE, and a long text for its own developers. The texts are
those of the core that grpcio 1.85 carries.
"""

from __future__ import annotations

import re

REFUSED = "connection refused"
NO_ANSWER = "no answer"
NAME_NOT_FOUND = "name not found"
NOT_GRPC = "it does not speak gRPC"
CLOSED = "the connection was closed"
CERTIFICATE_EXPIRED = "its certificate has expired"
CERTIFICATE_EARLY = "its certificate is not valid yet"
CERTIFICATE_UNKNOWN = "its certificate is signed by nobody that is believed"
CERTIFICATE_NAME = "its certificate is for another name"
NOT_TLS = "it does not speak TLS"
TLS_FAILED = "the TLS handshake failed"
CONNECTING = "failed to connect"
"""In gRPC's details where no connection came about; without it, one that was there is lost."""

# The first that fits: a failed look-up may have timed out, too.
_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), cause)
    for pattern, cause in (
        (r"parsing HTTP/2", NOT_GRPC),
        (r"certificate has expired", CERTIFICATE_EXPIRED),
        (r"certificate is not yet valid", CERTIFICATE_EARLY),
        (r"CERTIFICATE_VERIFY_FAILED", CERTIFICATE_UNKNOWN),
        (r"hostname verification", CERTIFICATE_NAME),
        (r"WRONG_VERSION_NUMBER", NOT_TLS),
        (r"TSI_PROTOCOL_FAILURE", TLS_FAILED),
        (r"name not found|host not found", NAME_NOT_FOUND),
        (r"resolv|DNS|lookup", "its name cannot be looked up"),
        (r"refused", REFUSED),
        (r"timed out|timeout|handshaker shutdown", NO_ANSWER),
        (r"no route to host", "no route to host"),
        (r"network is unreachable", "network is unreachable"),
        (r"socket closed|connection reset|broken pipe|goaway|connection closed", CLOSED),
    )
)


def connection_cause(details: str) -> str:
    """The cause of an UNAVAILABLE that gRPC itself made, from its details; "" where that is not known."""
    return next((cause for pattern, cause in _CAUSES if pattern.search(details)), "")
