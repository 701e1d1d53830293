"""Who may use the page's calls: by the same gate as AdminService, and only from the page itself.

A browser sends requests for any site it shows. So a call must be a POST of JSON, which other sites may not
send; one that says where it comes from must come from here; and a head that asks nobody who he is answers
only to names that no stranger can point at it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from fleet_service.api.access import AUTHORIZATION_KEY, Gate
from fleet_service.domain.access import Caller
from fleet_service.http_server import Exchange, HttpError, Request

ADMIN = "fleet.v1.AdminService/"
_PEER_KEYS = {"alternative": "x509_subject_alternative_name", "common": "x509_common_name"}


@dataclass(frozen=True, slots=True)
class _Peer:
    """The client's certificate as the gate takes it."""

    names: Mapping[str, Iterable[str]]

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {_PEER_KEYS[kind]: [name.encode() for name in names] for kind, names in self.names.items()}


@dataclass(frozen=True, slots=True)
class Door:
    """`hosts` None: the gate asks who calls. Else it asks nobody, and Host must be one of them or numeric."""

    gate: Gate
    hosts: frozenset[str] | None

    def admit(self, exchange: Exchange, method: str) -> Caller:
        """Who makes the call. Raises FleetError as the gate does, HttpError for a call from elsewhere."""
        _check_from_here(exchange.request, self.hosts)
        value = exchange.request.headers.get(AUTHORIZATION_KEY)
        metadata = [] if value is None else [(AUTHORIZATION_KEY, value)]
        return self.gate.admit(ADMIN + method, metadata, _Peer(exchange.certificate_names()))


def _check_from_here(request: Request, hosts: frozenset[str] | None) -> None:
    headers = request.headers
    host = headers.get("host", "")
    if hosts is not None and not _is_ours(host, hosts):
        text = "call it by its address in numbers or as localhost: names that others choose are not answered"
        raise HttpError(HTTPStatus.MISDIRECTED_REQUEST, text)
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise HttpError(HTTPStatus.FORBIDDEN, "another site sent this")
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HttpError(HTTPStatus.FORBIDDEN, "another site sent this")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the request as application/json")


def _is_ours(host: str, hosts: frozenset[str]) -> bool:
    name, colon, port = host.lower().rpartition(":")
    if not colon or not port.isdecimal():
        name = host.lower()
    if name in hosts:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
