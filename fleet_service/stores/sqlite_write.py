"""Records to rows: what each kind does to the tables. Runs in the writer's thread, in a transaction."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_service.runtime.records import (
    AttemptStarted,
    BranchCut,
    CancelHeld,
    ContextExtended,
    GenerationEnded,
    GenerationGone,
    GenerationStarted,
    NodeListed,
    NodeMarked,
    Record,
    RequestAnswered,
    RevokeOwed,
    SessionBound,
    SessionGone,
    SessionKept,
    TermRaised,
    TokensDelivered,
)
from fleet_service.stores import codec


@dataclass(slots=True)
class Numbers:
    """What rows are called, for what is in use; the rest is asked of the tables."""

    generations: dict[str, int] = field(default_factory=dict)
    """Those kept: bounded by head.max_generations."""
    first_batches: dict[int, int] = field(default_factory=dict)
    """Of each of those, by number: the first batch that may have tokens which `outputs` has not."""
    last_generation: int = 0
    last_batch: int = 0
    batches_bytes: int = 0
    gone: int = 0
    """How many are kept no longer, since the file was opened."""


class RowWriter:
    """Carries out the records of one batch."""

    def __init__(self, connection: sqlite3.Connection, numbers: Numbers) -> None:
        self._connection = connection
        self._numbers = numbers
        self._before = (numbers.last_generation, numbers.last_batch, numbers.batches_bytes)
        self._tokens: list[tuple[int, int, Sequence[int]]] = []
        self._started: list[str] = []
        self._gone: dict[str, tuple[int, int]] = {}

    def write(self, batch: Sequence[Record]) -> None:
        """Raises sqlite3.Error; the transaction is the caller's to begin and end."""
        for record in batch:
            self._write_one(record)
        if self._tokens:
            numbers = self._numbers
            numbers.last_batch += 1
            body = codec.batch_to(self._tokens)
            numbers.batches_bytes += len(body)
            self._connection.execute("INSERT INTO batches VALUES (?, ?)", (numbers.last_batch, body))

    def undo(self) -> None:
        """The transaction failed: nothing of it is there."""
        numbers = self._numbers
        for generation_id in self._started:
            numbers.first_batches.pop(numbers.generations.pop(generation_id, 0), None)
        last_generation = self._before[0]
        for generation_id, (number, first_batch) in self._gone.items():
            if number <= last_generation:
                numbers.generations[generation_id] = number
                numbers.first_batches[number] = first_batch
        numbers.last_generation, numbers.last_batch, numbers.batches_bytes = self._before

    def _write_one(self, record: Record) -> None:
        match record:
            case TokensDelivered():
                number = self._numbers.generations[record.generation_id]
                self._tokens.append((number, record.first_index, record.token_ids))
            case SessionKept() | SessionGone() | ContextExtended() | SessionBound():
                self._session(record)
            case GenerationStarted() | AttemptStarted() | BranchCut() | GenerationEnded() | GenerationGone():
                self._generation(record)
            case _:
                self._other(record)

    def _session(self, record: SessionKept | SessionGone | ContextExtended | SessionBound) -> None:
        run = self._connection.execute
        match record:
            case SessionKept():
                spec, options = codec.session_spec_to(record)
                run(
                    "INSERT INTO sessions (no, id, owner, spec, engine_options, sampling, created_at,"
                    " last_used_at, parked, ephemeral) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                    " ON CONFLICT (no) DO UPDATE SET last_used_at = excluded.last_used_at,"
                    " parked = excluded.parked, spec = excluded.spec",
                    (
                        record.number,
                        record.session_id,
                        record.owner,
                        spec,
                        options,
                        codec.sampling_to(record.sampling),
                        record.created_at,
                        record.last_used_at,
                        record.parked,
                        record.ephemeral,
                    ),
                )
            case SessionGone():
                run(
                    "DELETE FROM context WHERE session_no = (SELECT no FROM sessions WHERE id = ?)",
                    (record.session_id,),
                )
                run("DELETE FROM sessions WHERE id = ?", (record.session_id,))
            case ContextExtended():
                self._extend(record)
            case SessionBound():
                run(
                    "UPDATE sessions SET node = ?, incarnation = ?, epoch = ? WHERE id = ?",
                    (record.node, record.incarnation, record.epoch, record.session_id),
                )

    def _extend(self, record: ContextExtended) -> None:
        run = self._connection.execute
        number, length = run(
            "SELECT no, context_length FROM sessions WHERE id = ?", (record.session_id,)
        ).fetchone()
        if record.base_length < length:
            self._cut(number, record.base_length)
        if len(record.token_ids):
            row = (number, record.base_length, codec.ids_to(record.token_ids))
            run("INSERT INTO context VALUES (?, ?, ?)", row)
        run(
            "UPDATE sessions SET context_length = ?, context_crc32 = ? WHERE no = ?",
            (record.base_length + len(record.token_ids), record.crc32, number),
        )

    def _cut(self, number: int, length: int) -> None:
        """Keep the first `length` tokens of a context."""
        run = self._connection.execute
        run("DELETE FROM context WHERE session_no = ? AND start >= ?", (number, length))
        last = run(
            "SELECT start, ids FROM context WHERE session_no = ? ORDER BY start DESC LIMIT 1", (number,)
        ).fetchone()
        if last is not None:
            start, data = last
            ids: array[int] = codec.ids_from(data)
            if start + len(ids) > length:
                kept = codec.ids_to(ids[: length - start])
                run("UPDATE context SET ids = ? WHERE session_no = ? AND start = ?", (kept, number, start))

    def _generation(
        self, record: GenerationStarted | AttemptStarted | BranchCut | GenerationEnded | GenerationGone
    ) -> None:
        run, numbers = self._connection.execute, self._numbers
        match record:
            case GenerationStarted():
                numbers.last_generation += 1
                numbers.generations[record.generation_id] = numbers.last_generation
                numbers.first_batches[numbers.last_generation] = numbers.last_batch + 1
                self._started.append(record.generation_id)
                run(
                    "INSERT INTO generations (no, id, session_id, owner, body, accepted_at, deadline_at,"
                    " first_batch) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        numbers.last_generation,
                        record.generation_id,
                        record.session_id,
                        record.owner,
                        codec.generation_to(record),
                        record.accepted_at,
                        record.deadline_at,
                        numbers.last_batch + 1,
                    ),
                )
            case AttemptStarted():
                number = numbers.generations[record.generation_id]
                run(
                    "INSERT INTO marks SELECT ?, coalesce(max(nth), 0) + 1, ?, ? FROM marks"
                    " WHERE generation_no = ?",
                    (number, record.index, codec.mark_to(record.event), number),
                )
                run("UPDATE generations SET attempts = ? WHERE no = ?", (record.attempts, number))
            case BranchCut():
                number = numbers.generations[record.generation_id]
                run("INSERT OR REPLACE INTO cuts VALUES (?, ?, ?)", (number, record.branch, record.index))
            case GenerationEnded():
                run(
                    "UPDATE generations SET finished = ?, ended_at = ? WHERE no = ?",
                    (
                        codec.finished_to(record.finished),
                        record.ended_at,
                        numbers.generations[record.generation_id],
                    ),
                )
            case GenerationGone():
                number = numbers.generations.pop(record.generation_id)
                self._gone.setdefault(record.generation_id, (number, numbers.first_batches.pop(number)))
                numbers.gone += 1
                for table, column in (
                    ("generations", "no"),
                    ("marks", "generation_no"),
                    ("cuts", "generation_no"),
                    ("outputs", "generation_no"),
                ):
                    run(f"DELETE FROM {table} WHERE {column} = ?", (number,))  # noqa: S608 - fixed names

    def _other(
        self, record: RequestAnswered | CancelHeld | RevokeOwed | NodeListed | NodeMarked | TermRaised
    ) -> None:
        run = self._connection.execute
        match record:
            case TermRaised():
                run("INSERT OR REPLACE INTO meta VALUES ('raised_term', ?)", (record.term,))
            case RequestAnswered():
                run(
                    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        record.owner,
                        record.request_id,
                        record.fingerprint,
                        *codec.answer_to(record.answer),
                        record.until,
                    ),
                )
            case CancelHeld(until=0):
                key = (record.owner, record.generation_id)
                run("DELETE FROM cancels WHERE owner = ? AND generation_id = ?", key)
            case CancelHeld():
                held = (record.owner, record.generation_id, record.until)
                run("INSERT OR REPLACE INTO cancels VALUES (?, ?, ?)", held)
            case RevokeOwed():
                owed = (record.node, record.incarnation, record.session_id, record.epoch)
                run(
                    "DELETE FROM revokes WHERE node = ? AND incarnation = ? AND session_id = ? AND epoch = ?"
                    if record.settled
                    else "INSERT OR REPLACE INTO revokes VALUES (?, ?, ?, ?)",
                    owed,
                )
            case NodeListed():
                run("INSERT OR REPLACE INTO listed VALUES (?, ?)", (record.address, record.listed))
            case NodeMarked(mark=""):
                run("DELETE FROM node_marks WHERE node = ?", (record.node,))
            case NodeMarked():
                order = (record.node, record.mark, record.by, record.at, record.note)
                cordon = (record.cordoned_by, record.cordoned_at, record.cordon_note)
                run("INSERT OR REPLACE INTO node_marks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*order, *cordon))
