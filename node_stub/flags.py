"""What flags of `fleet-node` mean: texts to values. What makes no sense is told by a typer.BadParameter."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import typer

from node_stub.faults import Fault, FaultError, ReportLies, parse_fault, parse_lie
from node_stub.tls import TlsError, TlsFiles
from node_stub.token import FleetToken, TokenError, read_token

DEFAULT_PORT = 8454

MOST_NODES = 10_000
"""In one process."""

_LAST_PORT = 65_535


def address(text: str, flag: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > _LAST_PORT:
        example = f"127.0.0.1:{text if text.isdecimal() else DEFAULT_PORT}"
        raise typer.BadParameter(f"{text!r} is not HOST:PORT, for example {example}", param_hint=flag)
    return text


def check_ports(listen: str, count: int) -> None:
    """So many nodes have ports from that of `listen` on; port 0 stands for free ones."""
    port = int(listen.rpartition(":")[2])
    if port and port + count - 1 > _LAST_PORT:
        raise typer.BadParameter(
            f"{count} nodes have no room from port {port} on; name a lower port, or 0 for free ones",
            param_hint="--listen",
        )


def otlp_endpoint(text: str, flag: str) -> str:
    """HOST:PORT, with or without http:// or https://, or nothing."""
    scheme, _, rest = text.rpartition("://")
    host, _, port = rest.removesuffix("/").rpartition(":")
    right = scheme in {"", "http", "https"} and host and port.isdecimal() and int(port) <= _LAST_PORT
    if text and not right:
        example = "for example 127.0.0.1:4317 or https://collector.example:4317"
        raise typer.BadParameter(f"{text!r} is no endpoint, {example}", param_hint=flag)
    return text


def models(texts: Sequence[str], window: int) -> list[tuple[str, int]]:
    found = [model(text, window) for text in texts]
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise typer.BadParameter("a model is named twice", param_hint="--model")
    return found


def model(text: str, window: int) -> tuple[str, int]:
    name, colon, number = text.rpartition(":")
    if not colon:
        name = text
    elif number.isdecimal():
        window = int(number)
    else:
        raise typer.BadParameter(
            f"{number!r} in {text!r} is no window in tokens: write NAME or NAME:WINDOW; "
            "a name that holds colons needs its window, 0 = none",
            param_hint="--model",
        )
    if not name:
        raise typer.BadParameter(f"{text!r} names no model", param_hint="--model")
    return name, window


def label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--label")
    return key, value


def faults(texts: Sequence[str]) -> list[Fault]:
    try:
        return [parse_fault(text) for text in texts]
    except FaultError as error:
        raise typer.BadParameter(str(error), param_hint="--fault") from error


def lies(texts: Sequence[str]) -> ReportLies:
    told = ReportLies()
    try:
        for text in texts:
            told = parse_lie(text, told)
    except FaultError as error:
        raise typer.BadParameter(str(error), param_hint="--lie") from error
    return told


def token(file: Path | None, listen: str, *, insecure: bool) -> FleetToken | None:
    """The fleet token of a node that serves on `listen`; only on this machine it may have none."""
    if file:
        try:
            return read_token(file)
        except TokenError as error:
            raise typer.BadParameter(str(error), param_hint="--token-file") from error
    if not insecure and not _is_loopback(listen.rpartition(":")[0].strip("[]")):
        raise typer.BadParameter(
            f"{listen} can be reached from other machines, and this node is without a fleet token: give "
            "--token-file FILE (`fleet token` makes one), or --insecure-no-auth to let anybody in",
            param_hint="--listen",
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls(cert: Path | None, key: Path | None, ca: Path | None, *, joins: bool) -> TlsFiles | None:
    """The TLS files, checked; None = no TLS. A dialed node needs a certificate, one that joins a CA."""
    if not (cert or key or ca):
        return None
    if (cert is None) != (key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together", param_hint="--tls-cert")
    if joins and not ca:
        raise typer.BadParameter("needed to check the head's certificate", param_hint="--tls-ca")
    if not joins and not cert:
        raise typer.BadParameter("needed for TLS, with --tls-key", param_hint="--tls-cert")
    files = TlsFiles(cert, key, ca)
    try:
        files.check()
    except TlsError as error:
        raise typer.BadParameter(str(error), param_hint="--tls-cert") from error
    return files
