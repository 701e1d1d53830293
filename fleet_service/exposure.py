"""What listens beyond this machine, and what it lacks there: proof of who calls, or TLS."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import structlog

from fleet_service.addresses import split_address

if TYPE_CHECKING:
    from fleet_service.config import FleetConfig

_log = structlog.get_logger(__name__)

_TOKEN = "without a fleet token: set token_file (`fleet token` makes one)"  # noqa: S105 - no token itself
_ACCESS = "without asking who calls: set access_file (`fleet access` makes one)"
_TLS = "without TLS: set admin_tls.cert_file and admin_tls.key_file"
_ALL_THE_SAME = "or set insecure_no_auth (--insecure-no-auth) to let anybody in, at every listener"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    host = split_address(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposed(config: FleetConfig) -> list[str]:
    """A line for each thing that a listener lacks where other machines can connect."""
    if config.insecure_no_auth:
        return []
    operators = not (config.access_file or config.admin_tls.client_ca_file) and _ACCESS
    lines = []
    for name, lacks in (
        ("callers", not (config.access_file or config.callers_tls.client_ca_file) and _ACCESS),
        ("admin", operators),
        ("page", operators),
        ("page", not config.admin_tls.cert_file and _TLS),
        ("join", not config.token_file and _TOKEN),
    ):
        address = getattr(config.listen, name)
        if lacks and address and not is_loopback(address):
            lines.append(f"listen.{name} is {address}, which other machines can reach, {lacks}")
    return [*lines, _ALL_THE_SAME] if lines else []


def warn_of_clear_tokens(config: FleetConfig) -> None:
    """Log where access tokens cross the network so that anybody on the way can read them."""
    if not config.access_file:
        return
    clear = [
        f"listen.{name} {address}"
        for name, address, tls in (
            ("callers", config.listen.callers, config.callers_tls),
            ("admin", config.listen.admin, config.admin_tls),
            ("page", config.listen.page, config.admin_tls),
        )
        if address and not tls.cert_file and not is_loopback(address)
    ]
    if clear:
        _log.warning(
            "access_tokens_in_clear",
            listeners=", ".join(clear),
            effect="whoever is on the way can read and use them",
            advice="set callers_tls and admin_tls, or let a proxy on this machine do TLS",
        )
