"""The command `fleet` with its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from fleet_service import __version__
from fleet_service.cli import (
    access,
    attach,
    conformance,
    doctor,
    drain,
    explain,
    generate,
    nodes,
    serve,
    sessions,
    store,
    token,
)
from fleet_service.cli.kinds import Files, PlainGroup, TlsCa, TlsCert, TlsKey, TokenFile, show
from fleet_service.cli.options import examples

app = typer.Typer(
    name="fleet",
    cls=PlainGroup,
    help=(
        "A head for a fleet of language-model nodes: places sessions, relays their tokens, and carries them "
        "over the death of a node."
    ),
    epilog=examples(
        "fleet serve --node 127.0.0.1:8454",
        "fleet nodes",
        "fleet generate --model demo --tokens 1,2,3",
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
serve.register(app)
nodes.register(app)
drain.register(app)
sessions.register(app)
generate.register(app)
attach.register(app)
explain.register(app)
doctor.register(app)
conformance.register(app)
token.register(app)
access.register(app)
store.register(app)


def _show_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        typer.echo(f"fleet {__version__}")
        raise typer.Exit


@app.callback()
def _fleet(
    *,
    access_token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    show(Files(access_token_file, tls_ca, tls_cert, tls_key))
