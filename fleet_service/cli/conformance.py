"""`fleet conformance`: tries the node rules on a node and says, rule by rule, which hold."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fleet_service.cli.kinds import PlainCommand
from fleet_service.cli.options import AsJson, examples, node_address
from fleet_service.cli.output import print_json, tell
from fleet_service.cli.running import FAILED, WRONG_USE, fail
from fleet_service.conformance.engine import PROPERTIES
from fleet_service.conformance.runner import (
    NodeUnusableError,
    Target,
    Verdict,
    WrongUseError,
    all_rules,
    check_node,
)
from fleet_service.conformance.verdicts import Outcome, Result
from fleet_service.tls import ClientTls, TlsError
from fleet_service.token import FleetToken, TokenError, read_token

_TIMEOUT_S = 20.0
_NUMBER_WIDTH = 5
_OUTCOME_WIDTH = 9


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=PlainCommand,
        epilog=examples(
            "fleet conformance 127.0.0.1:8454",
            "fleet conformance 127.0.0.1:8454 --rule N17 --rule N32",
            "fleet conformance node.example:8454 --token-file /etc/fleet/token --node-ca ca.pem --json",
        ),
    )(conformance)


def conformance(  # noqa: PLR0913 - one parameter per flag
    node: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the node listens.")],
    *,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model to try it with.", show_default="the first it names")
    ] = "",
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", metavar="NUMBER", help="Only this rule, N1 and so on; may be repeated."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="FLEET_TOKEN_FILE", metavar="FILE", help="The fleet token, where the node has one."
        ),
    ] = None,
    fleet_id: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Fleet to speak as: that of a node which is in service, or serves no other.",
            show_default="a new one",
        ),
    ] = "",
    node_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Dial with TLS; what signed the node's certificate."),
    ] = None,
    node_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A head's certificate, where the node asks for one.")
    ] = None,
    node_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    server_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name in the node's certificate, where it is another.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest time for one rule.")
    ] = _TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Try the node rules on a node and say which hold; for authors of nodes.

    The rules are those of docs/node-contract.md. Exits with 0 when all hold, 1 when one is broken, 2 on wrong
    use. A node in service may be tried: everything is done in sessions of its own and revoked at the end.
    """
    known = {each.number for each in all_rules()}
    if unknown := sorted(set(rule or ()) - known):
        raise typer.BadParameter(f"{unknown[0]} is no rule: N1 to N{len(known)}", param_hint="--rule")
    target = Target(
        address=node_address(node),
        name=f"conformance-{secrets.token_hex(4)}",
        fleet_id=fleet_id,
        model=model,
        token=_token(token_file),
        tls=_tls(node_ca, node_cert, node_key, server_name),
        timeout_s=timeout,
    )
    try:
        verdict = asyncio.run(check_node(target, frozenset(rule or ()), _quiet if as_json else _print_result))
    except (WrongUseError, TlsError) as error:
        fail(str(error), WRONG_USE)
    except NodeUnusableError as error:
        fail(str(error))
    if as_json:
        print_json(_as_object(verdict))
    else:
        _print_summary(verdict)
    if not verdict.holds:
        raise typer.Exit(FAILED)


def _token(path: Path | None) -> FleetToken | None:
    try:
        return read_token(path) if path else None
    except TokenError as error:
        fail(str(error), WRONG_USE)


def _tls(ca: Path | None, cert: Path | None, key: Path | None, server_name: str) -> ClientTls | None:
    return ClientTls(ca, cert, key, server_name) if ca or cert or key or server_name else None


def _quiet(result: Result) -> None:
    pass


def _print_result(result: Result) -> None:
    """A row as soon as it is known: a rule may take its time."""
    tell(f"{result.number:<{_NUMBER_WIDTH}}{result.outcome:<{_OUTCOME_WIDTH}}{result.what}")
    if result.seen:
        blank = " " * (_NUMBER_WIDTH + _OUTCOME_WIDTH)
        title = "seen: " if result.outcome is Outcome.BROKEN else ""
        tell(f"{blank}{title}{result.seen}")


def _print_summary(verdict: Verdict) -> None:
    tell("")
    for name, answer in verdict.engine.items():
        tell(f"engine: {name}: {answer} ({PROPERTIES[name]})")
    counts = {outcome: sum(each.outcome is outcome for each in verdict.results) for outcome in Outcome}
    told = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
    untried = [each.number for each in verdict.results if each.untried]
    tell(f"{verdict.identity}, model {verdict.model or '-'}: {told}")
    if untried:
        tell(f"not tried, as something before them did not work: {', '.join(untried)}")


def _as_object(verdict: Verdict) -> dict[str, object]:
    return {
        "holds": verdict.holds,
        "identity": verdict.identity,
        "incarnation": verdict.incarnation,
        "model": verdict.model,
        "engine": dict(verdict.engine),
        "rules": [asdict(each) | {"took_s": round(each.took_s, 3)} for each in verdict.results],
    }
