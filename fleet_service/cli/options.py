"""Options that several commands share, and how help texts show examples."""

from __future__ import annotations

from typing import Annotated

import typer

from fleet_service.addresses import ADMIN_PORT, CALLERS_PORT, node_entry, split_address
from fleet_service.client import DEFAULT_ADMIN_ADDRESS, DEFAULT_CALLERS_ADDRESS
from fleet_service.credentials import split_scheme


def _whole(text: str, usual_port: int) -> str:
    """HOST:PORT, with the usual port where none is named; http:// or https:// before it stays."""
    scheme, rest = split_scheme(text.strip())
    try:
        host, port = split_address(rest, usual_port)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None
    return f"{scheme}{host}:{port}"


def _callers(text: str) -> str:
    return _whole(text, CALLERS_PORT)


def _operators(text: str) -> str:
    return _whole(text, ADMIN_PORT)


def node_address(text: str) -> str:
    """HOST:PORT of a node or dns:///NAME:PORT, with the usual port where none is named; or BadParameter."""
    try:
        return node_entry(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None


Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="FLEET_ADDRESS",
        metavar="HOST:PORT",
        callback=_callers,
        help="Where the head listens for callers; http:// before it: without TLS, https://: with.",
    ),
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--admin-address",
        envvar="FLEET_ADMIN_ADDRESS",
        metavar="HOST:PORT",
        callback=_operators,
        help="Where the head listens for operators; http:// before it: without TLS, https://: with.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="How long to wait.")]

CALLERS = DEFAULT_CALLERS_ADDRESS
ADMIN = DEFAULT_ADMIN_ADDRESS
TIMEOUT_S = 10.0


def examples(*commands: str) -> str:
    """An epilog that shows commands, one a line."""
    return "\n".join(["[bold]Examples:[/bold]", *(f"  {command}" for command in commands)])


def parse_tokens(text: str) -> list[int]:
    """Token ids out of "1,2,3" or "1 2 3"; BadParameter says what is wrong."""
    tokens = []
    for part in text.replace(",", " ").split():
        if not part.isdecimal() or int(part) >= 1 << 32:
            raise typer.BadParameter(f"{part!r} is no token id: whole numbers from 0 to {(1 << 32) - 1}")
        tokens.append(int(part))
    return tokens


def parse_labels(pairs: list[str]) -> dict[str, str]:
    """Labels out of KEY=VALUE; BadParameter says what is wrong."""
    labels = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not key or not sign:
            raise typer.BadParameter(f"{pair!r} is no label: write KEY=VALUE")
        labels[key] = value
    return labels
