"""`fleet drain`: moves a node's sessions away, and shows how far it is."""

from __future__ import annotations

import asyncio
import getpass
import socket
import sys
from contextlib import aclosing
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fleet.v1.admin_service_pb2 import (
    DRAIN_STATE_DRAINED,
    DRAIN_STATE_DRAINING,
    NODE_STATE_UP,
    Drain,
    DrainNodeRequest,
    DrainNodeResponse,
    ListNodesRequest,
)
from fleet_service.cli.kinds import HeadCommand
from fleet_service.cli.node_text import progress_text
from fleet_service.cli.options import ADMIN, TIMEOUT_S, AdminAddress, AsJson, examples
from fleet_service.cli.output import plain, print_json, say, tell
from fleet_service.cli.running import FAILED, Head, run
from fleet_service.client import CallError, FleetClient

DrainTimeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.1,
        metavar="SECONDS",
        help="How long to wait for the head, and with --wait for the node to be empty.",
        show_default="10 for the head, no limit for the node",
    ),
]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Who orders it, for others to read.", show_default="you"),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=HeadCommand,
        epilog=examples('fleet drain node-a --note "new driver"', "fleet drain node-a --wait"),
    )(drain)


def yourself() -> str:
    """USER@HOST, as far as the system says."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = ""
    return f"{user}@{socket.gethostname()}" if user else socket.gethostname()


def drain(
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name or address of the node.")],
    note: Annotated[str, typer.Option("--note", help="Why, for others to read.")] = "",
    by: By = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the progress until the node is empty. Ctrl-C ends only this.")
    ] = False,
    admin_address: AdminAddress = ADMIN,
    as_json: AsJson = False,
    timeout: DrainTimeout = None,
) -> None:
    """Move a node's sessions away: no new work, and what it runs goes on elsewhere.

    Nothing is cut off: what no other node can take runs to its end. `fleet uncordon` ends a drain.
    """
    head = Head.for_operators(admin_address, timeout or TIMEOUT_S)
    request = DrainNodeRequest(node=node, note=note, by=yourself() if by is None else by)
    goes_on = f"the drain of {node} goes on; `fleet uncordon {node}` would end it"
    try:
        printer = _printer(wait=wait, as_json=as_json)
        run(_drain(head, request, printer, wait=wait, longest_s=timeout), head=head, as_json=as_json)
    except KeyboardInterrupt:
        say(goes_on)
        raise typer.Exit(FAILED) from None
    except TimeoutError:
        say(f"not empty after {timeout:g} s; {goes_on}")
        raise typer.Exit(FAILED) from None


async def _drain(
    head: Head, request: DrainNodeRequest, printer: _Printer, *, wait: bool, longest_s: float | None
) -> int:
    """Raises TimeoutError when the node is not empty in time."""
    last = Drain()
    async with head.client() as client:
        await warn_of_last(client, request.node, head.timeout_s)
        messages = client.messages(client.admin.DrainNode(request), head.timeout_s)
        try:
            async with aclosing(messages), asyncio.timeout(None) as limit:
                async for message in messages:
                    if wait and longest_s is not None and limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + longest_s)
                    last = message.drain
                    # A node that was empty is told drained a moment later.
                    if not wait and not _is_empty(last):
                        printer.take(message)
                        break
                    if wait or last.state != DRAIN_STATE_DRAINING:
                        printer.take(message)
        finally:
            printer.end()
    going_on = last.state == DRAIN_STATE_DRAINING and not wait
    return 0 if going_on or last.state == DRAIN_STATE_DRAINED else FAILED


def _is_empty(drain: Drain) -> bool:
    return not (drain.sessions or drain.generations or drain.owed)


async def warn_of_last(client: FleetClient, name: str, timeout_s: float) -> None:
    """Say so when no node is left for new work without this one. Asking costs little, and may fail."""
    try:
        listed = await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=timeout_s))
    except CallError:
        return  # the order itself tells what is wrong
    takers = {node.name for node in listed.nodes if node.state == NODE_STATE_UP and not node.cordoned}
    meant = {node.name for node in listed.nodes if name in {node.name, node.address}}
    if takers and takers == meant:
        say(f"fleet: {name} is the last node that takes new work; until another does, callers are refused")


class _Printer(Protocol):
    """Shows what comes, and ends orderly."""

    def take(self, message: DrainNodeResponse) -> None: ...

    def end(self) -> None: ...


def _printer(*, wait: bool, as_json: bool) -> _Printer:
    if as_json:
        return _Json()
    return _Bar() if wait and sys.stdout.isatty() else _Lines()


class _Json:
    """One object per message."""

    def take(self, message: DrainNodeResponse) -> None:
        print_json(plain(message))

    def end(self) -> None:
        return


class _Lines:
    """A line whenever it would be another one."""

    def __init__(self) -> None:
        self._last = ""

    def take(self, message: DrainNodeResponse) -> None:
        line = f"{message.node}: {progress_text(message.drain)}"
        if line != self._last:
            self._last = line
            tell(line)

    def end(self) -> None:
        return


class _Bar:
    """A progress bar of the sessions that were there, and below it, at the end, how it ended."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[node]}"),
            BarColumn(),
            TextColumn("{task.fields[gone]} sessions"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[more]}"),
            console=Console(),
        )
        self._task = self._progress.add_task("", total=1, node="", gone="", more="")
        self._last = ""
        self._most = 0

    def take(self, message: DrainNodeResponse) -> None:
        self._progress.start()
        drain = message.drain
        gone = drain.moved + drain.unbound
        self._most = max(self._most, drain.sessions + gone)
        left = drain.sessions
        more = ", ".join(
            f"{number} {word}"
            for number, word in ((drain.waiting, "waiting"), (drain.staying, "staying"), (drain.owed, "owed"))
            if number
        )
        # A node that held nothing has a full bar, once it is drained.
        total, empty = self._most or 1, not self._most and drain.state == DRAIN_STATE_DRAINED
        completed = 1 if empty else self._most - left
        self._progress.update(
            self._task,
            total=total,
            completed=completed,
            node=message.node,
            gone=f"{self._most - left}/{self._most}",
            more=more,
        )
        self._last = f"{message.node}: {progress_text(drain)}"

    def end(self) -> None:
        self._progress.stop()
        if self._last:
            tell(self._last)
