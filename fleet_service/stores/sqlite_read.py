"""Rows to what is saved: read once, when a head starts."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleet_service.domain.context import crc32_of
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.records import (
    BranchCut,
    CancelHeld,
    GenerationEnded,
    NodeMarked,
    RequestAnswered,
    RevokeOwed,
    Saved,
    SavedGeneration,
    SavedSession,
    SessionBound,
    SessionKept,
)
from fleet_service.stores import codec
from fleet_service.stores.sqlite_files import FileDamagedError
from fleet_service.stores.sqlite_write import Numbers

# All that a head reads when it starts. Contexts and answers to requests are looked at when they are used.
_READ_AT_START = (*("meta", "sessions", "generations", "marks", "cuts", "batches", "outputs", "cancels"),)


def check_tables(connection: sqlite3.Connection) -> None:
    """Whether what is read at the start is well built. Raises FileDamagedError, sqlite3.Error."""
    for table in _READ_AT_START:
        found = connection.execute(f"PRAGMA integrity_check({table})").fetchone()[0]
        if found != "ok":
            raise FileDamagedError(" ".join(found.split()))


def read_meta(connection: sqlite3.Connection) -> dict[str, Any]:
    return dict(connection.execute("SELECT key, value FROM meta"))


def read_saved(connection: sqlite3.Connection) -> tuple[Saved, Numbers]:
    """All that a head reads when it starts. Raises FileDamagedError, sqlite3.Error."""
    meta = read_meta(connection)
    saved, numbers = Saved(meta.get("term", 0), meta.get("raised_term", 0), meta.get("branch", 0)), Numbers()
    with _reading("sessions"):
        _read_sessions(connection, saved)
    with _reading("generations"):
        _read_generations(connection, saved, numbers)
    with _reading("requests and nodes"):
        _read_others(connection, saved)
    return saved, numbers


def read_context(connection: sqlite3.Connection, session_id: str) -> array[int]:
    """A session's context. Raises KeyError, FileDamagedError, sqlite3.Error."""
    found = connection.execute(
        "SELECT no, context_length, context_crc32 FROM sessions WHERE id = ?", (session_id,)
    ).fetchone()
    if found is None:
        raise KeyError(session_id)
    number, length, crc32 = found
    ids = array("I")
    pieces = "SELECT start, ids FROM context WHERE session_no = ? ORDER BY start"
    with _reading(f"context of session {session_id}"):
        for start, data in connection.execute(pieces, (number,)):
            if start != len(ids):
                raise FileDamagedError(f"the context of session {session_id} lacks tokens at {len(ids)}")
            ids.extend(codec.ids_from(data))
    if len(ids) != length or crc32_of(ids) != crc32:
        raise FileDamagedError(f"the context of session {session_id} is not what was written")
    return ids


def read_answered(connection: sqlite3.Connection, owner: str, request_id: str) -> RequestAnswered | None:
    """The answer that a request got. Raises FileDamagedError, sqlite3.Error."""
    row = connection.execute(
        "SELECT fingerprint, answer, engine_options, until FROM requests WHERE owner = ? AND request_id = ?",
        (owner, request_id),
    ).fetchone()
    if row is None:
        return None
    fingerprint, answer, options, until = row
    with _reading(f"request {request_id}"):
        return RequestAnswered(owner, request_id, fingerprint, codec.answer_from(answer, options), until)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """What a row cannot mean is damage."""
    try:
        yield
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise FileDamagedError(f"{what}: {error}") from error


def _read_sessions(connection: sqlite3.Connection, saved: Saved) -> None:
    specs: dict[tuple[str, bytes], SessionSpec] = {}  # there may be very many sessions, of few kinds
    rows = connection.execute(
        "SELECT id, no, owner, spec, engine_options, sampling, created_at, last_used_at, parked, ephemeral,"
        " context_length, context_crc32, node, incarnation, epoch FROM sessions ORDER BY no"
    )
    for row in rows:
        (session_id, number, owner, spec, options, sampling, created_at, last_used_at, parked, ephemeral) = (
            row[:10]
        )
        length, crc32, node, incarnation, epoch = row[10:]
        kept = SessionKept(
            session_id,
            number,
            owner,
            codec.session_spec_from(session_id, number, owner, spec, options, specs),
            codec.sampling_from(sampling),
            created_at,
            last_used_at,
            bool(parked),
            bool(ephemeral),
        )
        bound = SessionBound(session_id, node, incarnation, epoch) if node else None
        saved.sessions[session_id] = SavedSession(kept, length, crc32, bound)


def _read_generations(connection: sqlite3.Connection, saved: Saved, numbers: Numbers) -> None:
    by_number: dict[int, SavedGeneration] = {}
    rows = connection.execute(
        "SELECT no, first_batch, id, session_id, owner, body, accepted_at, deadline_at, attempts, finished,"
        " ended_at FROM generations ORDER BY no"
    )
    for number, first_batch, *about, attempts, finished, ended_at in rows:
        started = codec.generation_from(*about)
        generation = SavedGeneration(started, attempts=attempts)
        if finished is not None:
            generation.ended = GenerationEnded(started.generation_id, codec.finished_from(finished), ended_at)
        saved.generations[started.generation_id] = by_number[number] = generation
        numbers.generations[started.generation_id] = number
        numbers.first_batches[number] = first_batch
        numbers.last_generation = number
        # Batches may have been deleted up to there, and their numbers are not given again.
        numbers.last_batch = max(numbers.last_batch, first_batch - 1)
    marks = "SELECT generation_no, token_index, event FROM marks ORDER BY generation_no, nth"
    for number, index, event in connection.execute(marks):
        if number in by_number:
            by_number[number].marks.append((index, codec.mark_from(event)))
    cuts = "SELECT generation_no, branch, token_index FROM cuts ORDER BY generation_no, branch"
    for number, branch, index in connection.execute(cuts):
        if number in by_number:
            generation_id = by_number[number].started.generation_id
            by_number[number].cuts.append(BranchCut(generation_id, branch, index))
    _read_tokens(connection, by_number, numbers)


def _read_tokens(
    connection: sqlite3.Connection, by_number: dict[int, SavedGeneration], numbers: Numbers
) -> None:
    outputs = "SELECT generation_no, first_index, ids FROM outputs ORDER BY generation_no, first_index"
    for number, first_index, data in connection.execute(outputs):
        if number in by_number:
            _extend(by_number[number], first_index, codec.ids_from(data))
    previous = 0
    for seq, body in connection.execute("SELECT seq, body FROM batches ORDER BY seq"):
        if previous and seq != previous + 1:
            raise FileDamagedError(f"batch {previous + 1} is missing")
        previous = seq
        numbers.batches_bytes += len(body)
        for number, first_index, ids in codec.batch_from(body):
            # Before its first batch the number was another's, or the tokens are in `outputs` by now.
            if numbers.first_batches.get(number, seq + 1) <= seq:
                _extend(by_number[number], first_index, ids)
    numbers.last_batch = max(numbers.last_batch, previous)


def _extend(generation: SavedGeneration, first_index: int, ids: array[int]) -> None:
    have = len(generation.token_ids)
    if first_index != have:
        name = generation.started.generation_id
        raise FileDamagedError(f"generation {name} has tokens up to {have}, and the next from {first_index}")
    generation.token_ids.extend(ids)


def _read_others(connection: sqlite3.Connection, saved: Saved) -> None:
    for row in connection.execute("SELECT owner, generation_id, until FROM cancels"):
        saved.cancels[row[0], row[1]] = CancelHeld(*row)
    for row in connection.execute("SELECT node, incarnation, session_id, epoch FROM revokes"):
        saved.revokes[row] = RevokeOwed(*row)
    for address, listed in connection.execute("SELECT address, listed FROM listed"):
        saved.listed[address] = bool(listed)
    marks = "SELECT node, mark, by_whom, at, note, cordoned_by, cordoned_at, cordon_note FROM node_marks"
    for row in connection.execute(marks):
        saved.marks[row[0]] = NodeMarked(*row)
