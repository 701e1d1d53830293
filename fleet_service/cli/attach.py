"""`fleet attach`: reads an answer that was asked for elsewhere, or before, from an index on."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from fleet_service.cli.answers import Printer, given_address
from fleet_service.cli.kinds import HeadCommand
from fleet_service.cli.options import CALLERS, Address, examples
from fleet_service.cli.running import FAILED, Head, run
from fleet_service.client import CallError

_LARGEST = (1 << 32) - 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=HeadCommand,
        epilog=examples(
            "fleet attach cli-6f1d0b52 --from-index 57",
            "fleet attach cli-6f1d0b52 --json",
        ),
    )(attach)


def attach(
    context: typer.Context,
    *,
    generation: Annotated[
        str,
        typer.Argument(
            metavar="GENERATION", help="The answer's id, as `fleet generate` and `fleet sessions` say it."
        ),
    ],
    from_index: Annotated[
        int,
        typer.Option(
            "--from-index", min=0, max=_LARGEST, metavar="N", help="First token wanted: how many you have."
        ),
    ] = 0,
    branch: Annotated[
        int,
        typer.Option(
            "--branch", min=0, max=_LARGEST, metavar="B", help="Branch of the newest event you have."
        ),
    ] = 0,
    address: Address = CALLERS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON event per line.")] = False,
) -> None:
    """Print the tokens of an answer from an index on, to its end; a head that is away is waited for.

    Ctrl-C leaves the answer as it is. Several may read one.

    Exits with 0 when the answer is whole (EOS, STOP, LENGTH), with 1 when it ended otherwise.
    """
    if not generation:
        raise typer.BadParameter("say which", param_hint="GENERATION")
    head = Head.for_callers(address)
    printer = Printer(as_json=as_json, where=given_address(context, address))
    printer.generation_id, printer.next_index, printer.branch = generation, from_index, branch
    run(_attach(printer, head), head=head, as_json=as_json)


async def _attach(printer: Printer, head: Head) -> int:
    async with head.client() as client:
        place = (printer.generation_id, printer.next_index, printer.reattached)
        try:
            await printer.take_all(client.attach(*place, branch=printer.branch))
        except CallError as error:
            printer.failed(error, head=head)
            return FAILED
        except asyncio.CancelledError:
            printer.left()
            raise
        return printer.exit_code
