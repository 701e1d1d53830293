"""`fleet explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from fleet.v1.admin_service_pb2 import (
    DrainState,
    ExplainPlacementRequest,
    ExplainPlacementResponse,
    ListNodesRequest,
    NodeVerdict,
)
from fleet.v1.fleet_service_pb2 import SessionSpec
from fleet_service.cli.kinds import HeadCommand
from fleet_service.cli.options import ADMIN, TIMEOUT_S, AdminAddress, AsJson, Timeout, examples, parse_labels
from fleet_service.cli.output import Column, duration, enum_name, plain, print_json, print_table, tell
from fleet_service.cli.running import UNKNOWN_MODEL, Head, advice_on, closest, facts_of, run
from fleet_service.client import CallError, FleetClient

_CORDONED = "cordoned"
_COLUMNS = (
    Column("NODE"),
    Column("VERDICT"),
    Column("ETA", right=True, drop=1),
    Column("AHEAD", right=True, drop=3),
    Column("DECODE", right=True, drop=2),
    Column("PREFILL", right=True, drop=4),
    Column("KV", right=True, drop=6),
    Column("SESSIONS", right=True, drop=7),
    Column("RESERVED", right=True, drop=8),
    Column("WINDOW", right=True, drop=5),
    Column("REPORT", right=True, drop=9),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=HeadCommand,
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

    head = Head.for_operators(admin_address, timeout)

    async def work() -> None:
        async with head.client() as client:
            reply = await client.ask(client.admin.ExplainPlacement(request, timeout=timeout))
            advice = ""
            if model and reply.refusal_reason in UNKNOWN_MODEL:
                listed = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=timeout))
                advice = closest(model, [each.name for node in listed.nodes for each in node.models])
            drains = {} if as_json else await _drains(client, reply, timeout)
        if as_json:
            print_json(plain(reply))
        else:
            _show(reply, advice or advice_on(reply.refusal_reason), drains)

    run(work(), head=head, as_json=as_json)


async def _drains(client: FleetClient, reply: ExplainPlacementResponse, timeout_s: float) -> dict[str, str]:
    """What the drains of nodes left out as cordoned have come to: draining or drained."""
    if all(verdict.left_out != _CORDONED for verdict in reply.verdicts):
        return {}
    try:
        listed = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=timeout_s))
    except CallError:
        return {}  # the verdicts are told without it
    return {
        node.name: enum_name(DrainState.DESCRIPTOR, node.drain.state).lower()
        for node in listed.nodes
        if node.HasField("drain")
    }


def _show(reply: ExplainPlacementResponse, advice: str, drains: Mapping[str, str]) -> None:
    if reply.chosen:
        tell(f"{reply.policy}: it would go to {reply.chosen}")
    else:
        facts = facts_of(reply.refusal_reason, reply.refusal_message)
        tell(f"{reply.policy}: it would go nowhere: {facts} [{reply.refusal_reason}]")
        if advice:
            tell(f"  what to do: {advice}")
    rows = [_row(verdict, drains) for verdict in reply.verdicts]
    print_table(_COLUMNS, rows)
    if any(cell.startswith("~") for row in rows for cell in row):
        tell("~ a stand-in: the node has not reported that rate yet")


def _row(verdict: NodeVerdict, drains: Mapping[str, str]) -> tuple[str, ...]:
    left_out = verdict.left_out
    if left_out == _CORDONED:  # which a drain does, too
        left_out = drains.get(verdict.node, left_out)
    return (
        verdict.node,
        "eligible" if verdict.eligible else f"left out: {left_out}",
        duration(verdict.eta_ms) if verdict.eligible and verdict.HasField("eta_ms") else "-",
        str(verdict.ahead),
        _rate(verdict, verdict.decode_tokens_per_s, reported=verdict.decode_reported),
        _rate(verdict, verdict.prefill_tokens_per_s, reported=verdict.prefill_reported),
        f"{verdict.kv_used_pct} %" if verdict.HasField("kv_used_pct") else "-",
        str(verdict.sessions),
        str(verdict.reservations),
        str(verdict.max_context_tokens) if verdict.max_context_tokens else "any",
        duration(verdict.report_age_ms) if verdict.HasField("report_age_ms") else "-",
    )


def _rate(verdict: NodeVerdict, tokens_per_s: int, *, reported: bool) -> str:
    if reported:
        return f"{tokens_per_s}/s"
    return f"~{tokens_per_s}/s" if verdict.eligible else "-"
