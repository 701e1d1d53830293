"""`fleet explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from fleet.v1.admin_service_pb2 import ExplainPlacementRequest, ExplainPlacementResponse, NodeVerdict
from fleet.v1.fleet_service_pb2 import SessionSpec
from fleet_service.cli.options import ADMIN, TIMEOUT_S, AdminAddress, AsJson, Timeout, examples, parse_labels
from fleet_service.cli.output import duration, plain, print_json, print_table
from fleet_service.cli.running import run
from fleet_service.client import FleetClient


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "fleet explain --session chat-7",
            "fleet explain --model demo --prompt-tokens 4000 --label zone=a",
        ),
    )(explain)


def explain(
    *,
    session: Annotated[str, typer.Option("--session", metavar="ID", help="A session that is there.")] = "",
    model: Annotated[str, typer.Option("--model", help="A request that is not made: its model.")] = "",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=0, help="Length of its prompt, in tokens.")
    ] = 0,
    expected_output: Annotated[
        int, typer.Option("--expected-output", min=0, help="Output to expect, in tokens; 0 = the default.")
    ] = 0,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label the node must carry.")
    ] = None,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show where something would be placed now, and why; changes nothing."""
    if bool(session) == bool(model):
        raise typer.BadParameter("say either --session ID or --model NAME")
    request = ExplainPlacementRequest(session_id=session)
    if model:
        request.prompt_tokens = prompt_tokens
        request.spec.CopyFrom(
            SessionSpec(
                model=model,
                expected_output_tokens=expected_output,
                node_selector=parse_labels(label or []),
            )
        )

    async def work() -> None:
        async with FleetClient(admin_address=admin_address) as client:
            reply = await client.ask(client.admin.ExplainPlacement(request, timeout=timeout))
        if as_json:
            print_json(plain(reply))
        else:
            _show(reply)

    run(work(), address=admin_address, as_json=as_json)


def _show(reply: ExplainPlacementResponse) -> None:
    if reply.chosen:
        typer.echo(f"{reply.policy}: it would go to {reply.chosen}")
    else:
        typer.echo(f"{reply.policy}: nowhere. {reply.refusal_message} [{reply.refusal_reason}]")
    numbers = ("ETA", "AHEAD", "DECODE", "PREFILL", "KV", "SESSIONS", "RESERVED", "WINDOW", "REPORT")
    print_table(("NODE", "VERDICT", *numbers), map(_row, reply.verdicts), right=numbers)


def _row(verdict: NodeVerdict) -> tuple[str, ...]:
    return (
        verdict.node,
        "eligible" if verdict.eligible else f"left out: {verdict.left_out}",
        duration(verdict.eta_ms) if verdict.eligible and verdict.HasField("eta_ms") else "-",
        str(verdict.ahead),
        f"{verdict.decode_tokens_per_s}/s",
        f"{verdict.prefill_tokens_per_s}/s",
        f"{verdict.kv_used_pct} %" if verdict.HasField("kv_used_pct") else "-",
        str(verdict.sessions),
        str(verdict.reservations),
        str(verdict.max_context_tokens) if verdict.max_context_tokens else "any",
        duration(verdict.report_age_ms) if verdict.HasField("report_age_ms") else "-",
    )
