"""`fleet store`: what a head keeps on disk, whether it is whole, and copies. Also while the head runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fleet_service.cli.kinds import PlainCommand
from fleet_service.cli.options import AsJson, examples
from fleet_service.cli.output import Column, count, print_json, print_table, say, tell
from fleet_service.cli.running import FAILED, WRONG_USE, fail
from fleet_service.stores.sqlite_files import STORE_FILE
from fleet_service.stores.sqlite_look import LookError, NothingThereError, StoreCheck, StoreStats, stats_of
from fleet_service.stores.sqlite_look import check as check_file
from fleet_service.stores.sqlite_look import copy as copy_file

T = TypeVar("T")

_USUAL = "that of a head with the settings of FLEET_CONFIG and FLEET_*"
Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="FOLDER",
        help="Where a head keeps what it has, or a file: a copy.",
        show_default=_USUAL,
    ),
]

_FACTS = (Column("WHAT"), Column("VALUE", right=True))
_KINDS = (Column("TABLE"), Column("ROWS", right=True), Column("CONTENT", right=True))
_PLACES = "[FOLDER] TO"
_PROGRESS_EVERY_S = 0.2

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


class _CopyCommand(PlainCommand):
    """Takes an argument that may be left out before one that may not, which the library cannot say."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", _PLACES]


@store.command(
    cls=_CopyCommand,
    epilog=examples("fleet store copy backup.db", "fleet store copy /var/lib/fleet /backup/fleet.db"),
)
def copy(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar=_PLACES,
            help=f"What to copy, and the file to make. Without a folder it is {_USUAL}.",
            show_default=False,
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Copy it into one file, as it is at one moment, and check the copy. A head may run on it meanwhile.

    Ends with 1 when the copy is not whole. A head that is started on a copy begins a new branch.
    """
    *given, to = places
    if len(given) > 1:
        raise typer.BadParameter("says too much: name a folder and the file to make", param_hint="TO")
    progress = _Progress()
    try:
        file, found = _look(given[0] if given else None, lambda file: copy_file(file, to, progress.show))
    finally:
        progress.end()
    if as_json:
        whole = not found.problems_in_all
        print_json({"file": str(file), "copy": str(to), "whole": whole} | asdict(found))
    elif found.problems_in_all:
        _tell_problems(found)
        say(f"fleet: {to} is damaged, as {file} is")
    else:
        tell(f"{to} is a copy of {file}, and whole: {_amount(found)}")
    if found.problems_in_all:
        raise typer.Exit(FAILED)


def _look(given: Path | None, look: Callable[[Path], T]) -> tuple[Path, T]:
    """The file that was looked into, and what was seen."""
    folder = given or _usual_folder()
    try:
        file = folder / STORE_FILE if given is None or given.is_dir() else given
        return file, look(file)
    except NothingThereError as error:
        advice = "" if given else "; name the FOLDER, if the head was given another"
        fail(f"{error}{advice}")
    except LookError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{folder} cannot be read: {error}")


class _Progress:
    """How much is copied, on one line of a terminal."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._next_s = time.monotonic() + _PROGRESS_EVERY_S
        self._began = False

    def show(self, part: float) -> None:
        if self._shows and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            self._began = True
            sys.stderr.write(f"\rcopied: {part:4.0%}")
            sys.stderr.flush()

    def end(self) -> None:
        """Leave the line to what comes next."""
        if self._began:
            sys.stderr.write("\r            \r")
            sys.stderr.flush()


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
    _tell_problems(found)
    if not found.witnessed:
        say("fleet: another file than the newest head wrote: a head that starts on it begins a new branch")
    if found.problems_in_all == 1 and found.log_damaged_at is not None:
        say(f"fleet: the rest of {file} is whole; a head that starts on it begins a new branch")
    elif found.problems_in_all:
        advice = "; put a copy back, or move it away to start anew" if file.name == STORE_FILE else ""
        say(f"fleet: {file} is damaged{advice}")
    else:
        tell(f"{file} is whole: {_amount(found)}")


def _tell_problems(found: StoreCheck) -> None:
    for problem in found.problems:
        tell(problem)
    more = found.problems_in_all - len(found.problems)
    if more:
        tell(f"and {count(more, 'problem')} more")


def _amount(found: StoreCheck) -> str:
    return (
        f"{count(found.sessions, 'session')} with {count(found.context_tokens, 'token')},"
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
