"""Rows to what is saved: read once, when a head starts."""

from __future__ import annotations

import sqlite3
from array import array

from fleet_service.runtime.records import (
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
from fleet_service.stores.sqlite_write import Numbers


class FileDamagedError(Exception):
    """The rows contradict each other; the text says how."""


def read_saved(connection: sqlite3.Connection) -> tuple[Saved, Numbers]:
    """All there is, but for the contexts. Raises FileDamagedError, sqlite3.Error."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    saved = Saved(term=meta.get("term", 0), branch=meta.get("branch", 0))
    _read_sessions(connection, saved)
    numbers = _read_generations(connection, saved)
    _read_others(connection, saved)
    return saved, numbers


def read_context(connection: sqlite3.Connection, session_id: str) -> array[int]:
    """A session's context. Raises KeyError, FileDamagedError, sqlite3.Error."""
    found = connection.execute(
        "SELECT no, context_length FROM sessions WHERE id = ?", (session_id,)
    ).fetchone()
    if found is None:
        raise KeyError(session_id)
    number, length = found
    ids = array("I")
    pieces = "SELECT start, ids FROM context WHERE session_no = ? ORDER BY start"
    for start, data in connection.execute(pieces, (number,)):
        if start != len(ids):
            raise FileDamagedError(f"the context of session {session_id} lacks tokens at {len(ids)}")
        ids.extend(codec.ids_from(data))
    if len(ids) != length:
        raise FileDamagedError(f"the context of session {session_id} has {len(ids)} of {length} tokens")
    return ids


def _read_sessions(connection: sqlite3.Connection, saved: Saved) -> None:
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
            codec.session_spec_from(spec, options),
            codec.sampling_from(sampling),
            created_at,
            last_used_at,
            bool(parked),
            bool(ephemeral),
        )
        bound = SessionBound(session_id, node, incarnation, epoch) if node else None
        saved.sessions[session_id] = SavedSession(kept, length, crc32, bound)


def _read_generations(connection: sqlite3.Connection, saved: Saved) -> Numbers:
    numbers = Numbers({})
    by_number: dict[int, SavedGeneration] = {}
    rows = connection.execute(
        "SELECT no, id, session_id, owner, body, accepted_at, deadline_at, attempts, finished, ended_at"
        " FROM generations ORDER BY no"
    )
    for number, *about, attempts, finished, ended_at in rows:
        started = codec.generation_from(*about)
        generation = SavedGeneration(started, attempts=attempts)
        if finished is not None:
            generation.ended = GenerationEnded(started.generation_id, codec.finished_from(finished), ended_at)
        saved.generations[started.generation_id] = by_number[number] = generation
        numbers.generations[started.generation_id] = number
    marks = "SELECT generation_no, token_index, event FROM marks ORDER BY generation_no, nth"
    for number, index, event in connection.execute(marks):
        if number in by_number:
            by_number[number].marks.append((index, codec.mark_from(event)))
    _read_tokens(connection, by_number)
    for table, column, field in (("generations", "no", "last_generation"), ("batches", "seq", "last_batch")):
        last = connection.execute(f"SELECT max({column}) FROM {table}").fetchone()[0]  # noqa: S608 - fixed
        setattr(numbers, field, last or 0)
    return numbers


def _read_tokens(connection: sqlite3.Connection, by_number: dict[int, SavedGeneration]) -> None:
    outputs = "SELECT generation_no, first_index, ids FROM outputs ORDER BY generation_no, first_index"
    for number, first_index, data in connection.execute(outputs):
        _extend(by_number, number, first_index, codec.ids_from(data))
    for (body,) in connection.execute("SELECT body FROM batches ORDER BY seq"):
        for number, first_index, ids in codec.batch_from(body):
            _extend(by_number, number, first_index, ids)


def _extend(by_number: dict[int, SavedGeneration], number: int, first_index: int, ids: array[int]) -> None:
    generation = by_number.get(number)
    if generation is None:
        return  # kept no longer, but another one of the same batch is
    have = len(generation.token_ids)
    if first_index > have:
        name = generation.started.generation_id
        raise FileDamagedError(f"generation {name} lacks tokens from {have} to {first_index}")
    generation.token_ids.extend(ids[have - first_index :])


def _read_others(connection: sqlite3.Connection, saved: Saved) -> None:
    requests = "SELECT owner, request_id, fingerprint, answer, engine_options, until FROM requests"
    for owner, request_id, fingerprint, answer, options, until in connection.execute(requests):
        saved.requests[owner, request_id] = RequestAnswered(
            owner, request_id, fingerprint, codec.answer_from(answer, options), until
        )
    for row in connection.execute("SELECT owner, generation_id, until FROM cancels"):
        saved.cancels[row[0], row[1]] = CancelHeld(*row)
    for row in connection.execute("SELECT node, incarnation, session_id, epoch FROM revokes"):
        saved.revokes[row] = RevokeOwed(*row)
    for address, listed in connection.execute("SELECT address, listed FROM listed"):
        saved.listed[address] = bool(listed)
    for row in connection.execute("SELECT node, mark, by_whom, at, note FROM node_marks"):
        saved.marks[row[0]] = NodeMarked(*row)
