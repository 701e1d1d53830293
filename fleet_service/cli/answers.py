"""An answer on the command line: printed as it comes, and how to take it up again where it was broken off."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import typer

from fleet.v1.fleet_service_pb2 import Finished, GenerationEvent, GenerationSpec, Moved
from fleet.v1.fleet_service_pb2 import MoveCause as MoveCauseEnum
from fleet.v1.types_pb2 import FinishReason
from fleet_service.cli.output import count, duration, enum_name, plain, print_json, say, terminal_width
from fleet_service.cli.running import FAILED, Head, facts_of, report
from fleet_service.client import REATTACH_GRACE_MS, CallError, Reattached

_WHOLE_ANSWERS = (
    FinishReason.FINISH_REASON_EOS,
    FinishReason.FINISH_REASON_STOP,
    FinishReason.FINISH_REASON_LENGTH,
)
# Refusals after which there is nothing to attach to, or nothing at that index.
_NOTHING_THERE = ("GENERATION_NOT_FOUND", "INDEX_OUT_OF_RANGE")


def given_address(context: typer.Context, address: str) -> str:
    """The words that say the same head in another command; empty where it needs none."""
    source = context.get_parameter_source("address")
    return f" --address {address}" if source is not None and source.name == "COMMANDLINE" else ""


class Printer:
    """Prints a stream's events, and keeps what the exit code and the summary need.

    `where` goes into the commands that it names; `asked` is what the summary measures the answer by. With
    `generation_id`, `next_index` and `branch`, what broke off is taken up; they move on with the stream.
    """

    def __init__(self, *, as_json: bool, where: str = "", asked: GenerationSpec | None = None) -> None:
        self._as_json = as_json
        self._where = where
        self._asked = asked or GenerationSpec()
        self._column = 0
        self._began = False
        self.generation_id = ""
        self.next_index = 0
        self.branch = 0
        self.tokens = 0
        self.exit_code = FAILED

    async def take_all(self, events: AsyncGenerator[GenerationEvent]) -> None:
        """Print a stream to its end. Raises CallError."""
        async with aclosing(events):
            async for event in events:
                self.take(event)

    def take(self, event: GenerationEvent) -> None:
        """Print one event."""
        kind = event.WhichOneof("event")
        self._began = True
        self.branch = event.branch
        if kind == "accepted":
            self.generation_id = event.accepted.generation_id
        elif kind == "finished" and event.finished.reason in _WHOLE_ANSWERS:
            self.exit_code = 0
        elif kind == "tokens":
            self.tokens += len(event.tokens.token_ids)
            self.next_index = event.tokens.first_index + len(event.tokens.token_ids)
        if self._as_json:
            if kind is not None:
                branch = {"branch": event.branch} if event.branch else {}
                print_json({"event": kind, **branch, **plain(getattr(event, kind))})
        elif kind == "tokens":
            self._print_ids(event.tokens.token_ids)
        elif kind == "moved":
            self.note(_moved_text(event.moved))
        elif kind == "finished":
            self.note(_finished_text(event.finished, self._asked))

    def _print_ids(self, token_ids: Iterable[int]) -> None:
        """One line; in a terminal as many as it takes, so that no id is broken in two."""
        width = terminal_width(sys.stdout)
        pieces = []
        for each in map(str, token_ids):
            if self._column:
                fits = width is None or self._column + 1 + len(each) < width
                pieces.append(" " if fits else "\n")
                self._column = self._column + 1 if fits else 0
            pieces.append(each)
            self._column += len(each)
        sys.stdout.write("".join(pieces))
        sys.stdout.flush()

    def reattached(self, what: Reattached) -> None:
        """Say that the connection was lost, or that there is none yet."""
        cause = facts_of(what.error.reason, what.error.message)
        if self._began:
            self.note(f"connection lost ({cause}); going on at index {what.next_index}")
        else:
            self.note(f"no answer yet ({cause}); trying for {REATTACH_GRACE_MS / 1000:.0f} s")

    def failed(self, error: CallError, *, head: Head, advice: str = "") -> None:
        """Say why the stream broke off, and with which command the rest is to be had."""
        self._end_line()
        lost = error.reason == "DATA_LOSS"
        if lost:
            self.next_index = int(error.metadata.get("nextIndex", "0"))
        more = lost or (self._began and error.reason not in _NOTHING_THERE)
        if self._as_json:
            if more:
                say(json.dumps({"attach": self._place()}), wrap=False)
            report(error, head=head, as_json=True, advice=advice)
            return
        if lost:
            say(_loss_text(self.next_index))
            say("  what to do: drop those, and take up what the answer is now:")
        else:
            report(error, head=head, as_json=False, advice=advice)
            if more:
                reached = f"generation {self.generation_id} has reached index {self.next_index}"
                say(f"  {reached}; once it can be called, the head may have the rest:")
        if more:
            self._say_how()

    def left(self) -> None:
        """Say that the answer may go on without its reader."""
        self.note(f"left at index {self.next_index}; the head may end it where nobody reads it; to go on:")
        self._say_how()

    def note(self, text: str) -> None:
        """A line on standard error, below the tokens printed so far."""
        self._end_line()
        say(text)

    def _end_line(self) -> None:
        if self._column:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._column = 0

    def _place(self) -> dict[str, str | int]:
        """What a reader has to keep, as the fields of AttachGenerationRequest."""
        return {
            "generation_id": self.generation_id,
            "from_index": self.next_index,
            "branch": self.branch,
        }

    def _say_how(self) -> None:
        branch = f" --branch {self.branch}" if self.branch else ""
        place = f"{shlex.quote(self.generation_id)} --from-index {self.next_index}{branch}"
        say(f"  fleet attach {place}{self._where}", wrap=False)


def _loss_text(index: int) -> str:
    return (
        f"fleet: the head lost tokens that it gave: those before index {index} are right, "
        f"those from index {index} on may not be [DATA_LOSS]"
    )


def _moved_text(moved: Moved) -> str:
    cause = enum_name(MoveCauseEnum.DESCRIPTOR, moved.cause)
    return (
        f"moved: {moved.from_node} -> {moved.to_node} at index {moved.next_index}"
        f" ({cause}), gap {duration(moved.gap_ms)}"
    )


def _finished_text(finished: Finished, asked: GenerationSpec) -> str:
    timings = finished.timings
    parts = [f"finished: {enum_name(FinishReason.DESCRIPTOR, finished.reason)}"]
    if finished.HasField("error"):
        parts[0] += f" [{finished.error.reason}] {finished.error.message}"
    if finished.HasField("stop_index"):
        parts[0] += f" (sequence {finished.stop_index})"
    short = asked.HasField("max_new_tokens") and finished.output_tokens < asked.max_new_tokens
    if finished.reason == FinishReason.FINISH_REASON_LENGTH and short:
        parts[0] += " (the window is full)"
    parts.append(f"{count(finished.output_tokens, 'token')} after {finished.context_tokens}")
    parts.append(count(finished.attempts, "attempt"))
    if timings.HasField("first_token_ms"):
        parts.append(f"first token after {duration(timings.first_token_ms)}")
    parts.append(f"{duration(timings.total_ms)} in all")
    return ", ".join(parts)
