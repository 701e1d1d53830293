"""What the demonstration shows while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.ledger import HEAD_DIED, UNDISTURBED, Entry, by_fate, total

_LINE_EVERY_S = 2.0

# What happened, or a first move's cause (fleet.v1.MoveCause), as it looked from outside.
_FATES = {
    UNDISTURBED: "undisturbed",
    HEAD_DIED: "head died",
    "LINK_LOST": "node died",
    "NODE_SILENT": "node fell silent",
    "REBALANCED": "moved to a freer node",
}


class Screen(Protocol):
    """Shows progress; a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, text: str) -> None:
        """Something happened."""

    def update(self, answered: int, streaming: int, tokens: int) -> None:
        """How far it is."""


class BarScreen:
    """A progress bar with the events above it."""

    def __init__(self, console: Console, sessions: int) -> None:
        self._progress = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[streaming]} streaming, {task.fields[tokens]:,} tokens"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID = self._progress.add_task("", total=sessions, streaming=0, tokens=0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def event(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def update(self, answered: int, streaming: int, tokens: int) -> None:
        self._progress.update(self._task, completed=answered, streaming=streaming, tokens=tokens)


class LineScreen:
    """A line every two seconds, and one per event."""

    def __init__(self, out: TextIO, sessions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._sessions = sessions
        self._clock = clock
        self._began_s = clock()
        self._last_s = self._began_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def event(self, text: str) -> None:
        self._line(text)

    def update(self, answered: int, streaming: int, tokens: int) -> None:
        if self._clock() - self._last_s >= _LINE_EVERY_S:
            self._last_s = self._clock()
            self._line(f"{answered}/{self._sessions} answered, {streaming} streaming, {tokens:,} tokens")

    def _line(self, text: str) -> None:
        print(f"{self._clock() - self._began_s:5.1f} s  {text}", file=self._out, flush=True)


def make_screen(sessions: int, *, as_json: bool) -> Screen:
    """A bar on a terminal, lines elsewhere; with JSON on standard output, lines on standard error."""
    console = Console()
    if console.is_terminal and not as_json:
        return BarScreen(console, sessions)
    return LineScreen(sys.stderr if as_json else sys.stdout, sessions)


def print_table(entries: list[Entry]) -> None:
    """Sessions, moves, longest gap and tokens, by what happened to the sessions."""
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "sessions", "moved", "longest gap", "tokens", "exact"):
        table.add_column(column, justify="left" if not column else "right")
    for fate, group in by_fate(entries).items():
        table.add_row(_FATES.get(fate, fate.lower().replace("_", " ")), *_cells(group))
    table.add_section()
    table.add_row("all", *_cells(entries))
    console.print(table)


def _cells(entries: list[Entry]) -> tuple[str, ...]:
    sums = total(entries)
    return (
        str(sums.sessions),
        str(sums.moved),
        f"{sums.longest_gap_s:.2f} s",
        f"{sums.tokens:,}",
        str(sums.exact),
    )
