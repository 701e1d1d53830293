"""`fleet token`: the file with the fleet's secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleet_service.cli.kinds import PlainCommand
from fleet_service.cli.options import AsJson, examples
from fleet_service.cli.output import print_json, say
from fleet_service.cli.running import WRONG_USE, fail
from fleet_service.token import TokenError, make_token, readable_by_others

TokenFile = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="FLEET_TOKEN_FILE",
        metavar="FILE",
        help="Where the token is, or is to be.",
        show_default="~/.config/fleet/token",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=PlainCommand,
        epilog=examples(
            "fleet token --file /etc/fleet/token",
            "fleet serve --token-file /etc/fleet/token --join-listen 0.0.0.0:8457",
            "fleet-node --model demo --token-file /etc/fleet/token --join head.example:8457",
        ),
    )(token)


def token(*, file: TokenFile = Path("~/.config/fleet/token"), as_json: AsJson = False) -> None:
    """Make the fleet's token, once: the secret that head and nodes prove to each other to know.

    It is written to a file that only its owner may read, and never shown. Where the file exists, it stays as
    it is. Give every head and node of the fleet a copy, with --token-file.
    """
    path = file.expanduser()
    try:
        made = make_token(path)
    except TokenError as error:
        fail(str(error), WRONG_USE)
    if readable_by_others(path):
        say(f"fleet: others can read {path}; `chmod 600 {path}` keeps them out")
    if as_json:
        print_json({"file": str(path), "made": made})
        return
    what = "a new fleet token" if made else "the fleet token there is, unchanged"
    typer.echo(f"{path}: {what}; give it to the head and to every node with --token-file")
