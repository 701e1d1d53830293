"""`fleet nodes` with add, remove and probe; `fleet cordon` and `fleet uncordon`."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from fleet.v1.admin_service_pb2 import (
    AddNodeRequest,
    CordonNodeRequest,
    DnsName,
    ListNodesRequest,
    Node,
    NodeProbe,
    ProbeNodesRequest,
    RemoveNodeRequest,
    UncordonNodeRequest,
)
from fleet_service.cli.drain import By, warn_of_last, yourself
from fleet_service.cli.kinds import HeadCommand, HeadGroup
from fleet_service.cli.node_text import has_joined, kept_from_work, state_text
from fleet_service.cli.options import (
    ADMIN,
    TIMEOUT_S,
    AdminAddress,
    AsJson,
    Timeout,
    examples,
    node_address,
)
from fleet_service.cli.output import (
    Column,
    count,
    duration,
    plain,
    print_json,
    print_table,
    say,
    tell,
)
from fleet_service.cli.running import FAILED, Head, run
from fleet_service.cli.watch import watch

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name or address of the node.")]
NodeOrName = Annotated[
    str, typer.Argument(metavar="NODE", help="Name or address of the node, or dns:///NAME:PORT.")
]

_NODE_COLUMNS = (
    Column("NODE"),
    Column("ADDRESS"),
    Column("STATE"),
    Column("MODELS", shorten=True, drop=1),
    Column("LANES", right=True, drop=2),
    Column("QUEUED", right=True, drop=4),
    Column("SESSIONS", right=True, drop=3),
    Column("KV", right=True, drop=5),
    Column("REPORT", right=True, drop=6),
)
_PROBE_COLUMNS = (Column("NODE"), Column("ADDRESS"), Column("ANSWER"), Column("MODELS", shorten=True, drop=1))

# A probe of a node that does not answer takes the head's connect and handshake timeouts.
_PROBE_TIMEOUT_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(cls=HeadGroup, invoke_without_command=True, rich_markup_mode="rich")
    group.callback(
        epilog=examples("fleet nodes", "fleet nodes --watch", "fleet nodes --json", "fleet nodes probe")
    )(list_nodes)
    for command, shown in (
        (add, ("fleet nodes add node-1.example:8454", "fleet nodes add dns:///nodes.example:8454")),
        (remove, ("fleet nodes remove node-a",)),
        (probe, ("fleet nodes probe", "fleet nodes probe node-a node-1.example:8454")),
    ):
        group.command(cls=HeadCommand, epilog=examples(*shown))(command)
    app.add_typer(group, name="nodes")
    app.command(cls=HeadCommand, epilog=examples('fleet cordon node-a --note "new driver"'))(cordon)
    app.command(cls=HeadCommand, epilog=examples("fleet uncordon node-a"))(uncordon)


def list_nodes(
    *,
    context: typer.Context,
    watching: Annotated[
        bool, typer.Option("--watch", help="Show them as they change, and what moves, until Ctrl-C.")
    ] = False,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show the nodes, and add, remove or probe some."""
    if context.invoked_subcommand is not None:
        return
    head = Head.for_operators(admin_address, timeout)
    if not watching:
        run(_list(head, as_json=as_json), head=head, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):
        run(watch(head, as_json=as_json), head=head, as_json=as_json)


async def _list(head: Head, *, as_json: bool) -> None:
    async with head.client() as client:
        reply = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=head.timeout_s))
    if as_json:
        print_json(plain(reply))
        return
    if not reply.nodes and not reply.names:
        say("the head has no nodes; add one with `fleet nodes add HOST:PORT`")
        return
    if reply.nodes:
        _print_nodes(list(reply.nodes))
    for name in reply.names:
        tell(name_line(name))
    if not reply.books_balance:
        say("warning: reservations do not equal the work on the nodes; that is a fault of the head")


def add(
    *,
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            help="Address to dial, or dns:///NAME:PORT for all addresses of a name.",
            callback=node_address,
        ),
    ],
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = _PROBE_TIMEOUT_S,
) -> None:
    """Take a node into the fleet, or all that a name has the addresses of; they may be down."""
    head = Head.for_operators(admin_address, timeout)

    async def work() -> None:
        async with head.client() as client:
            request = AddNodeRequest(address=address)
            reply = await client.ask(client.admin.AddNode(request, timeout=timeout))
        if not reply.HasField("name"):
            _show_node(reply.node, as_json=as_json)
        elif as_json:
            print_json(plain(reply.name))
        else:
            tell(name_line(reply.name))

    run(work(), head=head, as_json=as_json)


def remove(
    *,
    node: NodeOrName,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Take a node out of the fleet, or a name and its nodes; what they run goes on elsewhere."""
    head = Head.for_operators(admin_address, timeout)

    async def work() -> None:
        async with head.client() as client:
            reply = await client.ask(client.admin.RemoveNode(RemoveNodeRequest(node=node), timeout=timeout))
        named = reply.HasField("name")
        if as_json:
            print_json(plain(reply.name if named else reply.node))
        elif named:
            typer.echo(f"removed {reply.name.name} and the nodes that only it lists")
        else:
            typer.echo(f"removed {reply.node.name} ({reply.node.address})")

    run(work(), head=head, as_json=as_json)


def probe(
    *,
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="NODE", help="Names or addresses; none = all nodes.")
    ] = None,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = _PROBE_TIMEOUT_S,
) -> None:
    """Shake hands with nodes on a fresh connection; exits with 1 when one does not answer.

    Nodes that dialed the head cannot be dialed: they are left alone, and are no failure.
    """
    head = Head.for_operators(admin_address, timeout)

    async def work() -> int:
        async with head.client() as client:
            request = ProbeNodesRequest(nodes=nodes or [])
            reply = await client.ask(client.admin.ProbeNodes(request, timeout=timeout))
        if as_json:
            print_json(plain(reply))
        else:
            print_table(_PROBE_COLUMNS, map(_probe_row, reply.probes))
            for each in reply.probes:
                if each.detail and not has_joined(each):
                    tell(f"{each.name}: {each.detail}")
        return 0 if all(each.reachable or has_joined(each) for each in reply.probes) else FAILED

    run(work(), head=head, as_json=as_json)


def cordon(
    *,
    node: NodeName,
    note: Annotated[str, typer.Option("--note", help="Why, for others to read.")] = "",
    by: By = None,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Keep new work off a node; what it runs goes on."""
    head = Head.for_operators(admin_address, timeout)

    async def work() -> None:
        async with head.client() as client:
            await warn_of_last(client, node, timeout)
            request = CordonNodeRequest(node=node, note=note, by=yourself() if by is None else by)
            reply = await client.ask(client.admin.CordonNode(request, timeout=timeout))
        _show_node(reply.node, as_json=as_json)

    run(work(), head=head, as_json=as_json)


def uncordon(
    *,
    node: NodeName,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Let new work on a node again; ends a drain of it."""
    head = Head.for_operators(admin_address, timeout)

    async def work() -> None:
        async with head.client() as client:
            request = UncordonNodeRequest(node=node)
            reply = await client.ask(client.admin.UncordonNode(request, timeout=timeout))
        _show_node(reply.node, as_json=as_json)

    run(work(), head=head, as_json=as_json)


def _show_node(node: Node, *, as_json: bool) -> None:
    if as_json:
        print_json(plain(node))
    else:
        _print_nodes([node])


def _print_nodes(nodes: list[Node]) -> None:
    print_table(_NODE_COLUMNS, map(_node_row, nodes))
    # Too long for a column.
    for node in nodes:
        if note := _note(node):
            tell(f"{node.name}: {note}")


def _node_row(node: Node) -> tuple[str, ...]:
    total = node.report.kv_blocks_total
    return (
        node.name,
        node.address,
        state_text(node),
        ", ".join(model.name for model in node.models) or "-",
        f"{node.running}/{node.lanes}",
        str(node.queued),
        str(node.sessions),
        f"{100 * node.report.kv_blocks_used // total} %" if total else "-",
        duration(node.report_age_ms) if node.HasField("report") else "-",
    )


def _note(node: Node) -> str:
    parts = [node.state_detail, kept_from_work(node)]
    if node.unlisted:
        parts.append(f"no new work: no more listed by {node.found_by}")
    if node.reports_stale:
        parts.append("reports are stale")
    if node.outbox:
        parts.append(f"owed {count(node.outbox, 'revoke')}")
    parts += [f"{count} x {name}" for name, count in sorted(node.failures.items()) if count]
    return "; ".join(part for part in parts if part)


def name_line(name: DnsName) -> str:
    """A name, how many addresses it has and what became of them, and why it could not be looked up."""
    parts = [count(len(name.addresses), "address")]
    if name.other_ways:
        parts.append(f"{len(name.other_ways)} lead to nodes connected by another one")
    if name.removed:
        parts.append(f"{len(name.removed)} removed")
    if name.left_out:
        parts.append(f"{name.left_out} left out, by a limit")
    if name.failure:
        parts.append(f"not looked up: {name.failure}")
    return f"{name.name}: {'; '.join(parts)}"


def _probe_row(found: NodeProbe) -> tuple[str, ...]:
    return (
        found.identity or found.name,
        found.address,
        duration(found.latency_ms) if found.reachable else "not dialed" if has_joined(found) else "none",
        ", ".join(model.name for model in found.models) or "-",
    )
