"""`fleet nodes --watch`: the fleet as it changes; live in a terminal, else a line or an object per change."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet.v1.admin_service_pb2 import (
    NODE_STATE_CONNECTING,
    NODE_STATE_DOWN,
    NODE_STATE_SUSPECT,
    NODE_STATE_UP,
    FleetEvent,
    FleetSummary,
    Node,
    WatchFleetRequest,
    WatchFleetResponse,
)
from fleet.v1.fleet_service_pb2 import MoveCause
from fleet.v1.types_pb2 import FinishReason
from fleet_service.cli.findings import nothing_kept
from fleet_service.cli.node_text import kept_from_work, state_text
from fleet_service.cli.output import Column, count, duration, enum_name, fitting, plain, print_json, say, tell
from fleet_service.cli.running import Head

_MOVES_SHOWN = 8
_BAR_CELLS = 8
# Where there is no room for all columns with longer ones.
_SHORT_BAR_CELLS = 4
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLUMNS = (
    Column("NODE"),
    Column("STATE"),
    Column("LANES", drop=1),
    Column("KV", drop=4),
    Column("QUEUED", right=True, drop=3),
    Column("SESSIONS", right=True, drop=2),
    # What the node last did while it was busy: an idle one goes on telling it.
    Column("WHEN BUSY", right=True, drop=6),
    Column("REPORT", right=True, drop=5),
)
_REFRESHES_PER_S = 4
_KEPT_AGAIN = "what the head has is kept on disk again"
_COLOURS = {
    NODE_STATE_UP: "green",
    NODE_STATE_SUSPECT: "yellow",
    NODE_STATE_CONNECTING: "yellow",
    NODE_STATE_DOWN: "red",
}


async def watch(head: Head, *, as_json: bool) -> None:
    """Until the head ends, or the task is cancelled. Raises CallError."""
    async with head.client() as client:
        request = WatchFleetRequest()
        messages = client.messages(client.admin.WatchFleet(request), head.timeout_s)
        async with aclosing(messages):
            if as_json:
                async for message in messages:
                    print_json(plain(message))
            elif sys.stdout.isatty():
                screen = Screen()
                with Live(screen, console=Console(), refresh_per_second=_REFRESHES_PER_S):
                    async for message in messages:
                        screen.seen.take(message)
            else:
                lines = _Lines()
                async for message in messages:
                    for line in lines.of(message):
                        tell(line)
    say("the head has ended")


@dataclass
class FleetSeen:
    """The fleet as the messages so far show it. `at` of a node: when its picture came, on this clock."""

    nodes: dict[str, Node] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)
    summary: FleetSummary = field(default_factory=FleetSummary)
    moves: deque[FleetEvent] = field(default_factory=lambda: deque(maxlen=_MOVES_SHOWN))
    skipped: int = 0

    def take(self, message: WatchFleetResponse) -> None:
        """One message of WatchFleet."""
        for name in message.removed_nodes:
            self.nodes.pop(name, None)
        for node in message.nodes:
            self.nodes[node.name] = node
            self.at[node.name] = time.monotonic()
        if message.HasField("summary"):
            self.summary = message.summary
        self.moves.extend(event for event in message.events if event.HasField("moved"))
        self.skipped += message.skipped_events


class Screen:
    """What a terminal shows; rich asks for it again and again."""

    def __init__(self) -> None:
        self.seen = FleetSeen()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen = self.seen
        parts: list[RenderableType] = [
            Text(summary_text(seen.summary), style="bold"),
            self._table(options.max_width),
        ]
        if seen.summary.store_trouble:
            parts.insert(0, Text(nothing_kept(seen.summary.store_trouble), style="bold red"))
        notes = ((node.name, _note(node)) for node in _by_name(seen))
        parts += [Text(f"{name}: {note}", style="dim") for name, note in notes if note]
        if seen.moves:
            parts.append(Text("moves", style="bold"))
            parts += [Text(event_text(event)) for event in seen.moves]
        if seen.skipped:
            parts.append(Text(f"{count(seen.skipped, 'event')} skipped", style="yellow"))
        parts.append(Text("Ctrl-C ends", style="dim"))
        yield Group(*parts)

    def _table(self, width: int) -> Table:
        """As wide as there is room: with shorter bars first, then with fewer columns."""
        rows, shown, dropped = self._fitting(_BAR_CELLS, width)
        if dropped:
            rows, shown, _ = self._fitting(_SHORT_BAR_CELLS, width)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in (_COLUMNS[index] for index in shown):
            table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[index] for index in shown))
        return table

    def _fitting(self, bar_cells: int, width: int) -> tuple[list[list[Text]], dict[int, int], list[str]]:
        rows = [self._row(node, bar_cells) for node in _by_name(self.seen)]
        return rows, *fitting(_COLUMNS, [[cell.plain for cell in row] for row in rows], width)

    def _row(self, node: Node, bar_cells: int) -> list[Text]:
        report, told = node.report, node.HasField("report")
        older_ms = 1000 * (time.monotonic() - self.seen.at[node.name])
        return [
            Text(node.name),
            Text(state_text(node), style=_COLOURS.get(node.state, "")),
            bar(node.running, node.lanes, bar_cells),
            bar(report.kv_blocks_used, report.kv_blocks_total, bar_cells),
            Text(str(node.queued)),
            Text(str(node.sessions)),
            Text(f"{report.decode_tokens_per_s}/s" if report.decode_tokens_per_s else "-"),
            Text(duration(node.report_age_ms + older_ms) if told else "-"),
        ]


class _Lines:
    """For a pipe or file: what is new, a line each; what only grew older is not."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._store_trouble = ""
        self._latest_s = 0

    def of(self, message: WatchFleetResponse) -> Iterator[str]:
        """The lines that a message is worth."""
        if message.skipped_events:
            yield f"{self._now()} {count(message.skipped_events, 'event')} skipped"
        for event in message.events:  # they happened before this message was made
            self._latest_s = max(self._latest_s, event.time.seconds)
            yield event_text(event)
        now = self._now()
        if message.HasField("summary") and message.summary.store_trouble != self._store_trouble:
            self._store_trouble = message.summary.store_trouble
            told = nothing_kept(self._store_trouble) if self._store_trouble else _KEPT_AGAIN
            yield f"{now} {told}"
        for name in message.removed_nodes:
            self._told.pop(name, None)
            yield f"{now} {name}: gone"
        for node in message.nodes:
            text = node_text(node)
            if self._told.get(node.name) != text:
                self._told[node.name] = text
                yield f"{now} {text}"

    def _now(self) -> str:
        """By the clock here, but never before an event: the head's clock may be another."""
        self._latest_s = max(self._latest_s, int(time.time()))
        return _clock(self._latest_s)


def _by_name(seen: FleetSeen) -> list[Node]:
    return [seen.nodes[name] for name in sorted(seen.nodes)]


def _note(node: Node) -> str:
    return "; ".join(part for part in (node.state_detail, kept_from_work(node)) if part)


def bar(part: int, whole: int, cells: int = _BAR_CELLS) -> Text:
    """A bar, to the nearest eighth of a cell, and the numbers; `whole` 0 = unknown."""
    if not whole:
        return Text("-")
    full, eighths = divmod(min(8 * cells, round(8 * cells * part / whole)), 8)
    begun = _EIGHTHS[eighths] if eighths else ""
    colour = "red" if part * 10 >= whole * 9 else "green"
    rest = "░" * (cells - full - len(begun))
    return Text.assemble(("█" * full + begun, colour), (rest, "dim"), f" {part}/{whole}")


def summary_text(summary: FleetSummary) -> str:
    """The head's counts in a line."""
    sessions = (
        (summary.sessions_generating, "generating"),
        (summary.sessions_bound, "bound"),
        (summary.sessions_unbound, "unbound"),
        (summary.sessions_parked, "parked"),
    )
    total = sum(number for number, _ in sessions)
    told = ", ".join(f"{number} {word}" for number, word in sessions if number)
    text = count(total, "session") + (f" ({told})" if told else "")
    text += f"; {count(summary.generations, 'generation')}, {summary.queued} queued"
    if not summary.books_balance:
        text += "; the books do not balance"
    if summary.stopping:
        text += "; the head is shutting down"
    return text


def node_text(node: Node) -> str:
    """A node in a line."""
    text = f"{node.name}: {state_text(node)}, {node.running}/{node.lanes} lanes"
    if node.queued:
        text += f", {node.queued} queued"
    text += f", {count(node.sessions, 'session')}"
    note = _note(node)
    return f"{text} ({note})" if note else text


def event_text(event: FleetEvent) -> str:
    """A turn of a generation in a line."""
    start = f"{_clock(event.time.seconds)} {event.generation_id}"
    match event.WhichOneof("event"):
        case "placed":
            return f"{start}: placed on {event.placed.node}"
        case "moved":
            moved = event.moved
            cause = enum_name(MoveCause.DESCRIPTOR, moved.cause)
            return (
                f"{start}: {moved.from_node} -> {moved.to_node} at index {moved.next_index}"
                f" ({cause}), gap {duration(moved.gap_ms)}"
            )
        case "ended":
            finished = event.ended.finished
            reason = enum_name(FinishReason.DESCRIPTOR, finished.reason)
            where = f" on {event.ended.node}" if event.ended.node else ""
            return f"{start}: {reason} after {count(finished.output_tokens, 'token')}{where}"
    return f"{start}: something this version does not know"


def _clock(at_s: int) -> str:
    """HH:MM:SS here."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))
