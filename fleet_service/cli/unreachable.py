"""What to say of a listener that could not be called: what is there, as far as it shows, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from fleet_service.client import UnreachableError
from fleet_service.credentials import Credentials, split_scheme
from fleet_service.grpc_causes import (
    CERTIFICATE_EARLY,
    CERTIFICATE_EXPIRED,
    CERTIFICATE_NAME,
    CERTIFICATE_UNKNOWN,
    CLOSED,
    CONNECTING,
    NOT_GRPC,
    NOT_TLS,
    TLS_FAILED,
    connection_cause,
)
from fleet_service.tls import ClientTls

# Advice on TLS, by what went wrong with it.
_TLS_ADVICE = {
    CERTIFICATE_UNKNOWN: "name the CA that signed it with --tls-ca FILE",
    CERTIFICATE_NAME: "call it by the name in its certificate, or give the head one for {host}",
    CERTIFICATE_EXPIRED: "give the head a new one: it reads the files again without a restart",
    CERTIFICATE_EARLY: "compare the clocks of this machine and the head's",
    TLS_FAILED: "see that both ends agree on TLS; the head's log may say more",
    NOT_TLS: "leave --tls-ca and FLEET_TLS_CA out, or only for this listener: {flag} http://{target}",
}


def where_option(flag: str) -> str:
    """How to say where the head is."""
    return f"{flag} HOST:PORT, or FLEET_{flag[2:].replace('-', '_').upper()}"


def other_service(address: str, flag: str) -> tuple[str, list[str]]:
    """The same, of something that is not what was called for."""
    return f"what listens at {split_scheme(address)[1]} is not this service of a head", [
        "a head has an address for callers (8455) and one for operators (8456)",
        f"say where: {where_option(flag)}",
    ]


def what_and_do(
    error: UnreachableError, address: str, flag: str, credentials: Credentials
) -> tuple[str, list[str]]:
    """What was seen at the address, and what to do, a line each. `flag` says where the listener is."""
    _, target = split_scheme(address)
    cause = connection_cause(error.message)
    if cause == NOT_GRPC:
        return other_service(address, flag)
    if cause == CLOSED and CONNECTING not in error.message:
        return f"the connection to the head at {target} was lost", [
            "the head may have been stopped: see whether it runs, and try again"
        ]
    if cause == CLOSED:
        advice = list(_of_closed(flag, credentials.tls_for(address)))
        return f"something listens at {target}, but closes the connection", advice
    if cause in _TLS_ADVICE:
        host = target.rpartition(":")[0]
        do = _TLS_ADVICE[cause].format(flag=flag, target=target, host=host)
        return f"something listens at {target}, but {cause}", [do]
    return f"no head listens at {target} ({cause or error.message})", [
        "start one:    fleet serve --node HOST:PORT",
        f"or say where: {where_option(flag)}",
    ]


def _of_closed(flag: str, tls: ClientTls | None) -> Iterator[str]:
    if tls is None:
        yield "it may speak TLS: name the CA that signed its certificate with --tls-ca FILE"
    else:
        yield "it may ask for a client certificate: give one with --tls-cert FILE --tls-key FILE"
    yield f"or it is no head: say where one is with {where_option(flag)}"
