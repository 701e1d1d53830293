"""`fleet store`: what a head keeps on disk, and whether it is whole. Also while the head runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fleet_service.cli.kinds import PlainCommand
from fleet_service.cli.options import AsJson, examples
from fleet_service.cli.output import Column, count, print_json, print_table, say, tell
from fleet_service.cli.running import FAILED, WRONG_USE, fail
from fleet_service.stores.sqlite_files import STORE_FILE
from fleet_service.stores.sqlite_look import LookError, StoreCheck, StoreStats, stats_of
from fleet_service.stores.sqlite_look import check as check_file

T = TypeVar("T")

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="FOLDER",
        help="The head's --data-dir.",
        show_default="that of a head with the settings of FLEET_CONFIG and FLEET_*",
    ),
]

_FACTS = (Column("WHAT"), Column("VALUE", right=True))
_KINDS = (Column("TABLE"), Column("ROWS", right=True), Column("CONTENT", right=True))

store = typer.Typer(no_args_is_help=True, help="Look into what a head keeps on disk.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(store, name="store")


@store.command(
    cls=PlainCommand, epilog=examples("fleet store check", "fleet store check /var/lib/fleet --json")
)
def check(folder: Folder = None, *, as_json: AsJson = False) -> None:
    """Read everything in it, and say whether it is what was written. Ends with 1 when it is not.

    Nothing is changed, and a head may run on it meanwhile.
    """
    file, found = _look(folder, check_file)
    if as_json:
        print_json({"file": str(file), "whole": not found.problems_in_all} | asdict(found))
    else:
        _tell(file, found)
    if found.problems_in_all:
        raise typer.Exit(FAILED)


@store.command(
    cls=PlainCommand, epilog=examples("fleet store stats", "fleet store stats /var/lib/fleet --json")
)
def stats(folder: Folder = None, *, as_json: AsJson = False) -> None:
    """Count what is in it, and how much room that takes. A head may run on it meanwhile."""
    file, found = _look(folder, stats_of)
    if as_json:
        print_json({"file": str(file)} | asdict(found))
        return
    print_table(_FACTS, _facts(found))
    tell("")
    rows = [(name, f"{kind.rows:,}", _size(kind.content_bytes)) for name, kind in found.kinds.items()]
    print_table(_KINDS, rows)


def _look(folder: Path | None, look: Callable[[Path], T]) -> tuple[Path, T]:
    """The file that was looked into, and what was seen."""
    file = (folder or _usual_folder()) / STORE_FILE
    try:
        return file, look(file)
    except LookError as error:
        fail(f"{error}" if folder else f"{error}; name the head's --data-dir if it has another")


def _usual_folder() -> Path:
    # Takes longer to import than the rest of the command does.
    from fleet_service.config_sources import ConfigError, load
    from fleet_service.keeping import folder_of

    try:
        config = load().config
    except ConfigError as error:
        fail(f"the settings cannot be used:\n{error}", WRONG_USE)
    return folder_of(config.store, config.head.head_id, os.environ)


def _tell(file: Path, found: StoreCheck) -> None:
    for problem in found.problems:
        tell(problem)
    more = found.problems_in_all - len(found.problems)
    if more:
        tell(f"and {count(more, 'problem')} more")
    if not found.witnessed:
        say("fleet: another file than the newest head wrote: a head that starts on it begins a new branch")
    if found.problems_in_all:
        say(f"fleet: {file} is damaged; put a copy back, or move it away to start anew")
        return
    tell(
        f"{file} is whole: {count(found.sessions, 'session')} with {count(found.context_tokens, 'token')},"
        f" {count(found.generations, 'generation')} with {count(found.output_tokens, 'token')}"
    )


def _facts(found: StoreStats) -> list[tuple[str, str]]:
    return [
        ("in use", "yes" if found.in_use else "no"),
        ("version", str(found.version)),
        ("term", str(found.term)),
        ("branch", str(found.branch)),
        ("sessions", f"{found.sessions:,}"),
        ("context tokens", f"{found.context_tokens:,}"),
        ("generations running", f"{found.running:,}"),
        ("generations ended", f"{found.ended:,}"),
        ("output tokens", f"{found.output_tokens:,}"),
        ("oldest session", _when(found.oldest_session_at)),
        ("newest session", _when(found.newest_session_at)),
        ("file", _size(found.file_bytes)),
        ("free in it", _size(found.free_bytes)),
        ("log", _size(found.log_bytes)),
    ]


def _when(unix_s: float | None) -> str:
    if unix_s is None:
        return "–"
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _size(size_bytes: float) -> str:
    """For people: 812 B, 4.0 KB, 1.2 GB."""
    if size_bytes < 1_000:
        return f"{size_bytes:.0f} B"
    units = ["KB", "MB", "GB"]
    while (size_bytes := size_bytes / 1_000) >= 1_000 and len(units) > 1:
        units.pop(0)
    return f"{size_bytes:.1f} {units[0]}"
