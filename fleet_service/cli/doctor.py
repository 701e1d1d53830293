"""`fleet doctor`: looks at the head and each node, says what is wrong and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict

import typer
from grpc_health.v1 import health_pb2

from fleet.v1.admin_service_pb2 import (
    DURABILITY_MEMORY,
    DURABILITY_RELAXED,
    DURABILITY_STRICT,
    Durability,
    FleetSummary,
    ListNodesRequest,
    ListNodesResponse,
    Node,
    NodeFeature,
    NodeProbe,
    ProbeNodesRequest,
    WatchFleetRequest,
)
from fleet_service.cli.findings import (
    Callers,
    Finding,
    HeadSeen,
    Severity,
    findings,
    healthy,
    window,
)
from fleet_service.cli.kinds import HeadCommand, credentials
from fleet_service.cli.node_text import has_joined, kept_from_work, state_text
from fleet_service.cli.options import (
    ADMIN,
    CALLERS,
    Address,
    AdminAddress,
    AsJson,
    Timeout,
    examples,
)
from fleet_service.cli.output import count, duration, enum_name, plain, print_json, tell
from fleet_service.cli.running import FAILED, Head, run
from fleet_service.cli.unreachable import what_and_do
from fleet_service.client import CallError, FleetClient, UnreachableError

# A probe of a node that does not answer takes the head's connect and handshake timeouts.
_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 5.0
_CALLERS_SERVICE = "fleet.v1.FleetService"
_KEPT = {
    DURABILITY_STRICT: "on disk, strict",
    DURABILITY_RELAXED: "on disk, relaxed",
    DURABILITY_MEMORY: "in memory only: sessions end with the head",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=HeadCommand, epilog=examples("fleet doctor", "fleet doctor --json"))(doctor)


def doctor(
    *,
    address: Address = CALLERS,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = _TIMEOUT_S,
) -> None:
    """Examine the head and each node; say what is wrong and what to do. Exits with 1 when something is."""
    head = Head.for_operators(admin_address, timeout)
    run(_examine(head, address, as_json=as_json), head=head, as_json=as_json)


async def _examine(head: Head, callers_address: str, *, as_json: bool) -> int:
    async with FleetClient(
        callers_address, head.address, connect_timeout_s=head.timeout_s, credentials=credentials()
    ) as client:
        # The list comes last: a state that is older than its probe would be hard to make sense of.
        probes, (callers, detail, advice) = await asyncio.gather(
            client.ask(client.admin.ProbeNodes(ProbeNodesRequest(), timeout=head.timeout_s)),
            _callers_health(client, min(head.timeout_s, _HEALTH_TIMEOUT_S)),
        )
        summary = await _summary_of(client, head.timeout_s)
        listed = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=head.timeout_s))
    by_address = {probe.address: probe for probe in probes.probes}
    seen = HeadSeen(callers, detail, listed.books_balance, advice, summary.store_trouble)
    found = findings(seen, listed.nodes, by_address, listed.names)
    if as_json:
        print_json(_as_object(seen, summary, listed, by_address, found))
    else:
        for line in _lines(seen, summary, listed.nodes, by_address, found):
            tell(line)
    return 0 if healthy(found) else FAILED


async def _summary_of(client: FleetClient, timeout_s: float) -> FleetSummary:
    """The head's own account; empty where it gives none, which must not keep the rest from being told."""
    call = client.admin.WatchFleet(WatchFleetRequest(without_events=True))
    try:
        async with aclosing(client.messages(call, timeout_s)) as messages:
            async for message in messages:
                return message.summary
    except CallError:
        pass
    return FleetSummary()


async def _callers_health(client: FleetClient, timeout_s: float) -> tuple[Callers, str, str]:
    """Health at the callers' listener; where it cannot be had, why, and what to do."""

    async def serving(service: str) -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await client.ask(client.health.Check(request, timeout=timeout_s))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    try:
        # The process is SERVING until it drains, whatever its nodes do.
        if not await serving(""):
            return Callers.DRAINING, "", ""
        return Callers.SERVING if await serving(_CALLERS_SERVICE) else Callers.NOT_SERVING, "", ""
    except UnreachableError as error:
        what, do = what_and_do(error, client.address, "--address", credentials())
        advice = "" if what.startswith("no head listens") else " ".join(do)
        return Callers.UNREACHABLE, what, advice
    except CallError as error:
        return Callers.UNREACHABLE, f"{client.address}: {error.message}", ""


def _as_object(
    head: HeadSeen,
    summary: FleetSummary,
    listed: ListNodesResponse,
    probes: Mapping[str, NodeProbe],
    found: Sequence[Finding],
) -> dict[str, object]:
    return {
        "healthy": healthy(found),
        "head": {
            "callers": head.callers,
            "callers_detail": head.callers_detail,
            "books_balance": head.books_balance,
            "durability": enum_name(Durability.DESCRIPTOR, summary.durability).lower(),
            "store_trouble": head.store_trouble,
        },
        "nodes": [
            {
                "node": plain(node),
                "handshake": _handshake(node, probes.get(node.address)),
                "probe": plain(probes[node.address]) if node.address in probes else None,
            }
            for node in listed.nodes
        ],
        "findings": [asdict(each) for each in found],
    }


def _lines(
    head: HeadSeen,
    summary: FleetSummary,
    nodes: Sequence[Node],
    probes: Mapping[str, NodeProbe],
    found: Sequence[Finding],
) -> Iterator[str]:
    yield "head"
    yield _field("callers", head.callers.replace("_", " "))
    yield _field("books", "balance" if head.books_balance else "do not balance")
    if summary.durability in _KEPT:
        yield _field("kept", _KEPT[summary.durability])
    for node in nodes:
        yield ""
        yield node.name if node.name == node.address else f"{node.name} at {node.address}"
        for title, text in _facts(node, probes.get(node.address)):
            yield _field(title, text)
    yield ""
    for each in found:
        yield f"{each.severity}: {each.node + ': ' if each.node else ''}{each.what}"
        yield f"  what to do: {each.do}"
    yield _summary(nodes, found)


def _field(title: str, text: str) -> str:
    return f"  {title:<10}{text}"


def _facts(node: Node, probe: NodeProbe | None) -> Iterator[tuple[str, str]]:
    yield "state", state_text(node)
    if order := kept_from_work(node):
        yield "order", order
    handshake = _handshake(node, probe)
    took = f" in {duration(probe.latency_ms)}" if probe is not None and handshake == "accepted" else ""
    yield "handshake", handshake.replace("_", " ") + took
    seen = probe if probe is not None and probe.reachable else node
    if seen.protocol_version:
        yield "protocol", f"version {seen.protocol_version}"
        proven = "proven by both" if seen.authenticated else "none: anybody can be this node, or its head"
        yield "token", proven
        yield "link", "TLS" if seen.encrypted else "not encrypted"
    if not node.incarnation:
        return  # never met: there is nothing to tell
    if node.HasField("report"):
        stale = ", stale" if node.reports_stale else ""
        yield "report", f"{duration(node.report_age_ms)} old{stale}"
    own = f"; it has {node.report.max_lanes}" if node.report.max_lanes else ""
    yield "lanes", f"{node.running} of {node.lanes} in use, {node.queued} queued{own}"
    for model in node.models:
        revision = f" revision {model.revision}" if model.revision else ""
        yield "model", f"{model.name}{revision}, window {window(model.max_context_tokens)}"
    features = (enum_name(NodeFeature.DESCRIPTOR, each).lower() for each in node.features)
    yield "features", ", ".join(features) or "-"
    balance = "balanced" if node.reservations == node.running + node.queued else "not balanced"
    yield (
        "books",
        f"{count(node.reservations, 'reservation')}, {balance}; {count(node.outbox, 'revoke')} owed",
    )
    counted = ", ".join(f"{number} x {kind}" for kind, number in sorted(node.failures.items()) if number)
    yield "failures", counted or "none"


def _handshake(node: Node, probe: NodeProbe | None) -> str:
    """What became of it: accepted, with token and version; refused; none; not_dialed where it joined."""
    if has_joined(node):
        return "not_dialed"
    if probe is None:
        return "not_tried"
    if probe.reachable:
        return "accepted"
    return "refused" if "refused the handshake" in probe.detail else "none"


def _summary(nodes: Sequence[Node], found: Sequence[Finding]) -> str:
    counts = {severity: sum(each.severity is severity for each in found) for severity in Severity}
    told = ", ".join(count(number, severity) for severity, number in counts.items() if number)
    well = f"all is well with the head and {count(len(nodes), 'node')}"
    if healthy(found):
        return f"{well} ({told})" if told else well
    return told
