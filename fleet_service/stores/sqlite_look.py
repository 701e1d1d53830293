"""Looks into a store without changing it, also while a head writes to it: one moment of it is seen, whole."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_service.stores import codec
from fleet_service.stores.sqlite_files import FileDamagedError, StoreFiles
from fleet_service.stores.sqlite_log import damage_of_log
from fleet_service.stores.sqlite_read import read_answered, read_context, read_meta, read_saved
from fleet_service.stores.sqlite_schema import NewerFileError, version_of

# Told of one by one; the rest is a number.
_MOST_PROBLEMS = 20
_SAMPLE = 100
# Between two of these a copy tells how far it is.
_PAGES_A_STEP = 256
# What a copy must not find beside it: it would be taken for a part of it.
_NEIGHBOURS = ("", "-wal", "-shm", "-journal", ".term")
# Behind the name of a copy that is not whole yet.
_DRAFT = ".part"
_ORPHANS = (
    ("context", "session_no", "sessions"),
    ("marks", "generation_no", "generations"),
    ("cuts", "generation_no", "generations"),
    ("outputs", "generation_no", "generations"),
)
_KINDS = {
    "sessions": "sum(length(spec) + length(engine_options) + length(sampling) + length(id) + length(owner))",
    "context": "sum(length(ids))",
    "generations": "sum(length(body) + coalesce(length(finished), 0) + length(id) + length(owner))",
    "marks": "sum(length(event))",
    "cuts": "0",
    "batches": "sum(length(body))",
    "outputs": "sum(length(ids))",
    "requests": "sum(length(answer) + length(engine_options) + length(fingerprint) + length(request_id))",
    "cancels": "sum(length(generation_id))",
    "revokes": "sum(length(session_id))",
    "listed": "sum(length(address))",
    "node_marks": "sum(length(node) + length(note))",
}


class LookError(Exception):
    """There is nothing to look at, or it cannot be opened; the text says why."""


class NothingThereError(LookError):
    """There is no such file."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The rows of one table, and the bytes of what stands in them."""

    rows: int
    content_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What is in a store. Times are unix seconds; None: there is none."""

    in_use: bool
    version: int
    term: int
    branch: int
    sessions: int
    context_tokens: int
    running: int
    ended: int
    output_tokens: int
    kinds: dict[str, Kind]
    file_bytes: int
    free_bytes: int
    log_bytes: int
    oldest_session_at: float | None
    newest_session_at: float | None


@dataclass(slots=True)
class StoreCheck:
    """What a check found. No problems: everything in it can be read, and is what was written."""

    sessions: int = 0
    context_tokens: int = 0
    generations: int = 0
    output_tokens: int = 0
    in_use: bool = False
    witnessed: bool = True
    """Whether it is the file that its newest head wrote, by what stands beside it."""
    log_damaged_at: int | None = None
    """The byte of the log behind which whole commits are lost; one of the problems."""
    problems: list[str] = field(default_factory=list)
    problems_in_all: int = 0

    def add(self, problem: str) -> None:
        self.problems_in_all += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)


def stats_of(file: Path) -> StoreStats:
    """Raises LookError."""
    with _reading(file) as connection, _explaining(file):
        meta = read_meta(connection)
        one = _one(connection)
        sessions, context_tokens, oldest, newest = one(
            "SELECT count(*), coalesce(sum(context_length), 0), min(created_at), max(created_at)"
            " FROM sessions"
        )
        generations, ended = one("SELECT count(*), count(finished) FROM generations")
        kinds = {
            kind: Kind(*one(f"SELECT count(*), coalesce({content}, 0) FROM {kind}"))  # noqa: S608 - fixed
            for kind, content in _KINDS.items()
        }
        page_bytes = one("PRAGMA page_size")[0]
        return StoreStats(
            in_use=in_use(file),
            version=version_of(connection),
            term=meta.get("term", 0),
            branch=meta.get("branch", 0),
            sessions=sessions,
            context_tokens=context_tokens,
            running=generations - ended,
            ended=ended,
            output_tokens=_output_tokens(connection),
            kinds=kinds,
            file_bytes=file.stat().st_size,
            free_bytes=one("PRAGMA freelist_count")[0] * page_bytes,
            log_bytes=_size(StoreFiles(file).beside("-wal")),
            oldest_session_at=oldest,
            newest_session_at=newest,
        )


def check(file: Path) -> StoreCheck:
    """Read all of it. Raises LookError when it cannot even be opened."""
    found = _check(file)
    if found.problems_in_all and not found.in_use and in_use(file):
        # A head began on it, and wrote where nobody was expected to.
        found = _check(file)
    return found


def copy(file: Path, to: Path, progress: Callable[[float], None]) -> StoreCheck:
    """Make a copy of one moment, synced, for its owner alone; what a check of it found.

    `progress` is told the part that is done. A head may write to `file` meanwhile; its log grows until the
    copy is made. Raises LookError; then there is no copy.
    """
    if to.is_dir():
        raise LookError(f"{to} is a folder; name the file to make")
    for each in (StoreFiles(to).beside(suffix) for suffix in _NEIGHBOURS):
        if os.path.lexists(each):
            raise LookError(f"{each} is there already; name another file")
    damaged_at = None
    with _reading(file) as source:
        if not in_use(file):
            with _explaining(file):
                damaged_at = _log_damage(file, source)
        try:
            _copy(source, to, progress)
        except (sqlite3.Error, OSError) as error:
            raise LookError(f"{file} cannot be copied to {to}: {error}") from error
    found = check(to)
    if damaged_at is not None:
        _note_log_damage(found, damaged_at)
    return found


def _check(file: Path) -> StoreCheck:
    found = StoreCheck(in_use=in_use(file))
    with _reading(file) as connection:
        if not found.in_use:
            with _explaining(file):
                damaged_at = _log_damage(file, connection)
            if damaged_at is not None:
                _note_log_damage(found, damaged_at)
        try:
            _check_structure(connection, found)
            saved, _ = read_saved(connection)
        except (sqlite3.Error, FileDamagedError) as error:
            found.add(str(error))
            return found
        found.sessions, found.generations = len(saved.sessions), len(saved.generations)
        found.output_tokens = sum(len(each.token_ids) for each in saved.generations.values())
        files, closed = StoreFiles(file), bool(read_meta(connection).get("clean", 0))
        files.remember()
        found.witnessed = not saved.term or files.witnessed(saved.term, closed=closed)
        for session_id in saved.sessions:
            try:
                found.context_tokens += len(read_context(connection, session_id))
            except KeyError:
                found.add(f"session {session_id} is not found by its id")
            except (sqlite3.Error, FileDamagedError) as error:
                found.add(str(error))
        _check_answers(connection, found)
    return found


def _check_answers(connection: sqlite3.Connection, found: StoreCheck) -> None:
    try:
        for key in connection.execute("SELECT owner, request_id FROM requests"):
            try:
                read_answered(connection, *key)
            except FileDamagedError as error:
                found.add(str(error))
    except sqlite3.Error as error:
        found.add(str(error))


def in_use(file: Path) -> bool:
    """Whether a head has the file now."""
    try:
        lock = os.open(StoreFiles(file).beside(".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _log_damage(file: Path, connection: sqlite3.Connection) -> int | None:
    """Only while no head has the file: a log that is written to begins anew under its reader."""
    return damage_of_log(StoreFiles(file).beside("-wal"), _one(connection)("PRAGMA page_size")[0])


def _note_log_damage(found: StoreCheck, at: int) -> None:
    found.log_damaged_at = at
    found.add(f"the log is damaged from byte {at} on; what was written behind it is lost")


def _copy(source: sqlite3.Connection, to: Path, progress: Callable[[float], None]) -> None:
    """Whole and synced, or not at all: what is broken off has another name. Raises sqlite3.Error, OSError."""
    draft = StoreFiles(to).beside(_DRAFT)
    draft.unlink(missing_ok=True)
    try:
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(draft, isolation_level=None)) as target:
            # It is thrown away unless it is whole, and synced once at its end.
            target.execute("PRAGMA journal_mode = OFF")
            target.execute("PRAGMA synchronous = OFF")
            source.backup(
                target,
                pages=_PAGES_A_STEP,
                progress=lambda _, remaining, total: progress(1 - remaining / max(1, total)),
            )
        _sync(draft)
        if os.path.lexists(to):
            raise FileExistsError(f"{to} was made meanwhile")
        draft.rename(to)
        _sync(to.parent)
    finally:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _check_structure(connection: sqlite3.Connection, found: StoreCheck) -> None:
    for (line,) in connection.execute(f"PRAGMA integrity_check({_SAMPLE})"):
        if line != "ok":
            found.add(" ".join(line.split()))
    for table, column, parents in _ORPHANS:
        orphans = f"SELECT count(*) FROM {table} WHERE {column} NOT IN (SELECT no FROM {parents})"  # noqa: S608
        count = connection.execute(orphans).fetchone()[0]
        if count:
            found.add(f"{count} rows of {table} belong to none of the {parents}")


def _output_tokens(connection: sqlite3.Connection) -> int:
    first_batches = dict(connection.execute("SELECT no, first_batch FROM generations"))
    tokens = 0
    for (data,) in connection.execute("SELECT ids FROM outputs"):
        tokens += len(codec.ids_from(data))
    for seq, body in connection.execute("SELECT seq, body FROM batches"):
        for number, _, ids in codec.batch_from(body):
            if first_batches.get(number, seq + 1) <= seq:
                tokens += len(ids)
    return tokens


def _one(connection: sqlite3.Connection) -> Any:
    return lambda query: connection.execute(query).fetchone()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _reading(file: Path) -> Iterator[sqlite3.Connection]:
    """The store as it is at one moment. Raises LookError."""
    files = StoreFiles(file)
    with _explaining(file):
        if not file.exists():
            raise NothingThereError(f"there is no {file}")
        # Otherwise SQLite makes a log, and leaves it there.
        immutable = not in_use(file) and not _size(files.beside("-wal"))
        had_index = files.beside("-shm").exists()
        uri = f"{file.absolute().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        with _explaining(file):
            connection.execute("BEGIN")
            if not version_of(connection):
                raise FileDamagedError("there is nothing in it")
        yield connection
    finally:
        connection.close()
        if not immutable and not had_index and not in_use(file):
            # SQLite made it to find its way in the log, and will again.
            files.beside("-shm").unlink(missing_ok=True)


@contextmanager
def _explaining(file: Path) -> Iterator[None]:
    try:
        yield
    except NewerFileError as error:
        raise LookError(f"{file}: {error}") from error
    except (FileDamagedError, ValueError, LookupError) as error:
        raise LookError(f"{file} is damaged: {error}") from error
    except (sqlite3.Error, OSError) as error:
        raise LookError(f"{file} cannot be read: {error}") from error
