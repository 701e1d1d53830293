"""How the command line prints: tables, JSON, and messages of the contract as plain values."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich import box
from rich.console import Console
from rich.table import Table

# Wide enough that a table into a pipe or file is never wrapped.
_PIPE_WIDTH = 400


def print_json(value: Any) -> None:
    """One JSON value on one line, at once."""
    sys.stdout.write(json.dumps(value, separators=(", ", ": "), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """A table for people; `right` names the columns of numbers."""
    console = stdout_console()
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    numbers = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def stdout_console() -> Console:
    """A console for standard output as it is now."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)


def say(text: str) -> None:
    """A line for people beside the output proper: to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


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
