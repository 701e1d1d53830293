"""`fleet drain`: moves a node's sessions away, and shows how far it is."""

from __future__ import annotations

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
    Drain,
    DrainNodeRequest,
    DrainNodeResponse,
)
from fleet_service.cli.kinds import HeadCommand
from fleet_service.cli.node_text import progress_text
from fleet_service.cli.options import ADMIN, TIMEOUT_S, AdminAddress, AsJson, Timeout, examples
from fleet_service.cli.output import plain, print_json, say, tell
from fleet_service.cli.running import FAILED, Head, run

By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Who orders it, for others to read.", show_default="you"),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=HeadCommand, epilog=examples('fleet drain node-a --note "new driver"', "fleet drain node-a --wait"))(drain)


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
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Move a node's sessions away: no new work, and what it runs goes on elsewhere.

    Nothing is cut off: what no other node can take runs to its end. `fleet uncordon` ends a drain.
    """
    head = Head.for_operators(admin_address, timeout)
    request = DrainNodeRequest(node=node, note=note, by=yourself() if by is None else by)
    try:
        run(_drain(head, request, wait=wait, as_json=as_json), head=head, as_json=as_json)
    except KeyboardInterrupt:
        say(f"the drain of {node} goes on; `fleet uncordon {node}` would end it")
        raise typer.Exit(FAILED) from None


async def _drain(head: Head, request: DrainNodeRequest, *, wait: bool, as_json: bool) -> int:
    printer, last = _printer(wait=wait, as_json=as_json), Drain()
    async with head.client() as client:
        messages = client.messages(client.admin.DrainNode(request), head.timeout_s)
        try:
            async with aclosing(messages):
                async for message in messages:
                    last = message.drain
                    printer.take(message)
                    if not wait:
                        break
        finally:
            printer.end()
    going_on = last.state == DRAIN_STATE_DRAINING and not wait
    return 0 if going_on or last.state == DRAIN_STATE_DRAINED else FAILED


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
            TextColumn("{task.completed:.0f}/{task.total:.0f} sessions"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[more]}"),
            console=Console(),
        )
        self._task = self._progress.add_task("", total=0, node="", more="")
        self._last = ""

    def take(self, message: DrainNodeResponse) -> None:
        self._progress.start()
        drain = message.drain
        gone = drain.moved + drain.unbound
        total = max(self._progress.tasks[0].total or 0, drain.sessions + gone)
        more = ", ".join(
            f"{number} {word}"
            for number, word in ((drain.waiting, "waiting"), (drain.staying, "staying"), (drain.owed, "owed"))
            if number
        )
        self._progress.update(
            self._task, total=total, completed=total - drain.sessions, node=message.node, more=more
        )
        self._last = f"{message.node}: {progress_text(drain)}"

    def end(self) -> None:
        self._progress.stop()
        if self._last:
            tell(self._last)
