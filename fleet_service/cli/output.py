"""How the command line prints: tables, JSON, and messages of the contract as plain values."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len, set_cell_size

_GAP = "  "
# Of a terminal that does not say.
_USUAL_WIDTH = 80
# A cell that may be shortened keeps this many characters.
_SHORTEST_CELL = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. In a terminal too narrow for all, those with the highest `drop` go first; 0 stays.

    `shorten`: its cells may be cut before anything is dropped.
    """

    title: str
    right: bool = False
    drop: int = 0
    shorten: bool = False


def print_json(value: Any) -> None:
    """One JSON value on one line, at once."""
    sys.stdout.write(json.dumps(value, separators=(", ", ": "), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """A table for people. Nothing in it is wrapped; what is left out for want of width is told."""
    lines, dropped = table_lines(columns, list(rows), terminal_width(sys.stdout))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    if dropped:
        say(f"left out for want of width: {', '.join(dropped)} (--json has all)")


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None
) -> tuple[list[str], list[str]]:
    """A table's lines, at most `width` wide where that can be had, and the titles of the columns dropped.

    `width` None = as wide as it is, without a rule below the heading: for a pipe or file.
    """
    widths, dropped = fitting(columns, rows, width)
    lines = [_line(columns, cells, widths) for cells in ([column.title for column in columns], *rows)]
    if width is not None:
        lines.insert(1, _GAP.join("─" * each for each in widths.values()))
    return lines, dropped


def fitting(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None
) -> tuple[dict[int, int], list[str]]:
    """The columns that fit, by their number, with the width of each; and the titles of the others."""
    shown = list(range(len(columns)))
    dropped: list[str] = []
    widths = _widths(columns, rows, shown, width)
    while width is not None and _total(widths) > width:
        expendable = max(shown, key=lambda index: columns[index].drop)
        if not columns[expendable].drop:
            break
        shown.remove(expendable)
        dropped.append(columns[expendable].title)
        widths = _widths(columns, rows, shown, width)
    return widths, dropped


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: list[int], width: int | None
) -> dict[int, int]:
    """Width of each column shown: as its cells need, less where it may be shortened and has to be."""
    widths = {
        index: max(map(cell_len, (columns[index].title, *(row[index] for row in rows)))) for index in shown
    }
    for index in shown:
        missing = 0 if width is None else _total(widths) - width
        if missing > 0 and columns[index].shorten:
            least = max(_SHORTEST_CELL, len(columns[index].title))
            widths[index] = min(widths[index], max(least, widths[index] - missing))
    return widths


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def _line(columns: Sequence[Column], cells: Sequence[str], widths: dict[int, int]) -> str:
    parts = []
    for index, width in widths.items():
        text = (
            cells[index] if cell_len(cells[index]) <= width else set_cell_size(cells[index], width - 1) + "…"
        )
        blank = " " * (width - cell_len(text))
        parts.append(blank + text if columns[index].right else text + blank)
    return _GAP.join(parts).rstrip()


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` is; None when it is none."""
    if not stream.isatty():
        return None
    return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH


def say(text: str, *, wrap: bool = True) -> None:
    """A line for people beside the output proper: to standard error, in a terminal broken between words."""
    _write_line(sys.stderr, text, wrap=wrap)


def tell(text: str) -> None:
    """A line for people that is the output itself: to standard output, in a terminal broken between words."""
    _write_line(sys.stdout, text, wrap=True)


def _write_line(stream: TextIO, text: str, *, wrap: bool) -> None:
    width = terminal_width(stream)
    if wrap and width is not None and len(text) >= width:
        indent = " " * (len(text) - len(text.lstrip()))
        text = textwrap.fill(
            text.strip(),
            width - 1,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    stream.write(text + "\n")
    stream.flush()


def count(number: int, word: str) -> str:
    """1 token, 2 tokens, 2 addresses."""
    if number == 1:
        return f"1 {word}"
    return f"{number} {word}{'es' if word.endswith('s') else 's'}"


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON takes it: proto field names, whole numbers as numbers, enum names without prefix.

    Absent optional fields, messages and oneof members are left out; everything else is there.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            found[field.name] = [_plain_value(field.enum_type, each) for each in value]
        else:
            found[field.name] = _plain_value(field.enum_type, value)
    return found


def _plain_value(enum: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return timestamp(value)
    if isinstance(value, Message):
        return plain(value)
    if enum is not None:
        return enum_name(enum, value)
    if isinstance(value, bytes):
        return value.hex()
    return value


def timestamp(value: Timestamp) -> str:
    """ISO 8601 in UTC, to the millisecond; empty when unset."""
    if not value.seconds:
        return ""
    moment = datetime.fromtimestamp(value.seconds + value.nanos / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """A value's name without its enum's prefix; its number when this version does not know it."""
    value = enum.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = "".join(f"_{char}" if char.isupper() else char.upper() for char in enum.name).lstrip("_") + "_"
    return str(value.name).removeprefix(prefix)


def duration(milliseconds: float) -> str:
    """A duration for people: 85 ms, 2.4 s, 3 min."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 120_000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds / 60_000:.0f} min"
