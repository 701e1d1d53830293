"""`fleet access`: who may call a head, in the file that it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fleet_service.access_file import (
    NAME,
    AccessFileError,
    Entry,
    add_entry,
    hash_of,
    new_token,
    read_access,
    remove_entry,
)
from fleet_service.cli.kinds import PlainCommand, PlainGroup
from fleet_service.cli.options import AsJson, examples
from fleet_service.cli.output import Column, print_json, print_table, say
from fleet_service.cli.running import WRONG_USE, fail
from fleet_service.domain.access import Caller, Permission

File = Annotated[
    Path,
    typer.Option("--file", envvar="FLEET_ACCESS_FILE", metavar="FILE", help="The file that the head reads."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who it is: the owner of the sessions it makes.")]

access = typer.Typer(cls=PlainGroup, no_args_is_help=True, help="Say who may call the head.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(access, name="access")


@access.command(
    cls=PlainCommand,
    epilog=examples(
        "fleet access add frontend --may call --file access.toml --token-file frontend.token",
        "fleet access add dashboards --may read --file access.toml --token-file dashboards.token",
        "fleet access add gateway --may call --model demo --certificate gateway.example --file access.toml",
    ),
)
def add(
    name: Name,
    *,
    file: File,
    may: Annotated[
        list[Permission],
        typer.Option(
            "--may",
            metavar="call|read|operate",
            help="call: sessions and tokens; read: look at the fleet; operate: change it.",
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="Only this model; repeatable.", show_default="all"),
    ] = None,
    certificate: Annotated[
        str, typer.Option(metavar="NAME", help="Known by a client certificate of that name, not by a token.")
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the token there, for its owner only; else it is printed."),
    ] = None,
) -> None:
    """Let somebody call, with a new token that is told this once; the file keeps only its hash."""
    if not NAME.fullmatch(name):
        raise typer.BadParameter("1 to 64 characters of A-Z a-z 0-9 . _ -", param_hint="NAME")
    token = "" if certificate else new_token()
    caller = Caller(name, frozenset(may), frozenset(model or ()))
    try:
        if token and token_file:
            _write_token(token_file, token)
        add_entry(file, Entry(caller, hash_of(token) if token else "", certificate))
    except (AccessFileError, OSError) as error:
        fail(str(error), WRONG_USE)
    if token and not token_file:
        typer.echo(token)
    say(
        f"fleet: {name} may {' and '.join(sorted(may))}; a head with access_file {file} knows within a second"
    )


@access.command(cls=PlainCommand)
def remove(name: Name, *, file: File) -> None:
    """Let somebody call no more; a running head knows within a second. Its streams run to their end."""
    try:
        remove_entry(file, name)
    except AccessFileError as error:
        fail(str(error), WRONG_USE)
    say(f"fleet: {name} may call no more")


@access.command("list", cls=PlainCommand)
def list_(*, file: File, as_json: AsJson = False) -> None:
    """Show who may call; tokens are not to be had from here."""
    try:
        entries = read_access(file).entries.values()
    except AccessFileError as error:
        fail(str(error), WRONG_USE)
    if as_json:
        print_json({"access": [_as_object(entry) for entry in entries]})
        return
    rows = [
        (
            entry.caller.name,
            _known_by(entry),
            ", ".join(sorted(entry.caller.may)),
            ", ".join(sorted(entry.caller.models)) or "all",
        )
        for entry in entries
    ]
    print_table([Column(title) for title in ("NAME", "KNOWN BY", "MAY", "MODELS")], rows)


def _as_object(entry: Entry) -> dict[str, Any]:
    caller = entry.caller
    return {
        "name": caller.name,
        "known_by": _known_by(entry),
        "may": sorted(caller.may),
        "models": sorted(caller.models),
    }


def _known_by(entry: Entry) -> str:
    return f"certificate {entry.certificate}" if entry.certificate else "token"


def _write_token(path: Path, token: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise AccessFileError(
            f"{path} exists, and may hold a token in use: choose another --token-file, or remove it"
        ) from None
    except OSError as error:
        raise AccessFileError(f"the token cannot be written to {path}: {error.strerror}") from error
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{token}\n")
