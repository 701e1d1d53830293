"""The embedded store: one SQLite file, written by one thread, each batch one transaction.

Between batches the same thread tidies up, a little at a time. A file belongs to one head at a time; others
may read it meanwhile (`fleet store`, a backup).
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from fleet_service.runtime.records import Record, RequestAnswered, Saved
from fleet_service.runtime.store import StoreError, StoreTrouble
from fleet_service.stores.sqlite_files import FileDamagedError, FileGoneError, StoreFiles
from fleet_service.stores.sqlite_log import look_at_log
from fleet_service.stores.sqlite_read import (
    check_tables,
    read_answered,
    read_context,
    read_meta,
    read_saved,
)
from fleet_service.stores.sqlite_schema import NewerFileError, bring_up_to_date, version_of
from fleet_service.stores.sqlite_tidy import Housekeeper
from fleet_service.stores.sqlite_write import RowWriter

T = TypeVar("T")

log = structlog.get_logger(__name__)

BATCHES_KEPT_BYTES = 16 * 1024 * 1024
"""Tokens of generations that are still kept stay in `batches` up to this much, then move to `outputs`."""

# What SQLite says when it cannot do it now; anything else will not go away by itself.
_PASSING = {"BUSY", "LOCKED", "IOERR", "CANTOPEN", "READONLY", "NOMEM", "PROTOCOL", "PERM", "INTERRUPT"}
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_BUSY_TIMEOUT_S = 1.0
_CACHE_KIB = 8 * 1024
# The log is folded into the file from this size on; what that takes is seen by one batch in many.
_CHECKPOINT_PAGES = 1_000
# A log that grew beyond this while somebody read is cut back.
_LOG_KEPT_BYTES = 64 * 1024 * 1024
_USED = "there is nothing in it, though it was used before"
# So many batches are written without tidying after it failed.
_REST_BATCHES = 1_000


class SqliteStore:
    """A SessionStore. `file` is made where there is none, its folder too.

    `wall_clock` says which requests and cancels have had their time; None: they stay.
    """

    def __init__(
        self,
        file: Path,
        wall_clock: Callable[[], float] | None = None,
        *,
        batches_kept_bytes: int = BATCHES_KEPT_BYTES,
    ) -> None:
        self._files = StoreFiles(file)
        self._wall_clock = wall_clock
        self._batches_kept_bytes = batches_kept_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._db: _Database | None = None

    async def open(self) -> Saved:
        return await self._in_thread(self._open)

    async def take_term(self, term: int, branch: int, *, tells_ahead: bool = False) -> None:
        await self._in_thread(lambda: self._opened().take_term(term, branch, tells_ahead))

    async def write(self, batch: Sequence[Record]) -> None:
        await self._in_thread(lambda: self._write(batch))

    async def context(self, session_id: str) -> array[int]:
        return await self._in_thread(lambda: self._opened().context(session_id))

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return await self._in_thread(lambda: self._opened().answered(owner, request_id))

    async def tidy(self, steps: int = 1_000_000) -> int:
        """Do what housekeeping there is, at most so many steps of it; how many it were."""
        return await self._in_thread(lambda: self._opened().tidy(steps))

    async def close(self) -> None:
        try:
            await self._in_thread(self._close)
        finally:
            self._thread.shutdown(wait=True)

    # ------------------------------------------------------------------------------------- in the thread

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives, its failures as StoreError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError, NewerFileError, FileDamagedError, FileGoneError) as error:
            raise _explained(self._files, error) from error

    def _open(self) -> Saved:
        self._files.take()
        try:
            self._files.check_whole()
            self._files.make()
            self._db = _Database(self._files, self._wall_clock, self._batches_kept_bytes)
            return self._db.saved()
        except BaseException:
            self._let_go()
            raise

    def _write(self, batch: Sequence[Record]) -> None:
        db = self._opened()
        db.write(batch)
        if db.untidy:
            self._thread.submit(self._tidy_a_little)

    def _tidy_a_little(self) -> None:
        """One step; then batches that came meanwhile, then the next."""
        db = self._db
        if db is None:
            return
        try:
            db.tidy(1)
        except (sqlite3.Error, FileDamagedError) as error:
            log.warning("store_not_tidied", error=str(error))
            db.rest(_REST_BATCHES)

    def _opened(self) -> _Database:
        if self._db is None:
            raise StoreError(StoreTrouble.UNAVAILABLE, f"{self._files.file} is not open")
        return self._db

    def _close(self) -> None:
        try:
            if self._db is not None:
                self._db.note_end()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        db, self._db = self._db, None
        try:
            if db is not None:
                db.close()
        finally:
            self._files.let_go()


class _Database:
    """The file, opened. Every method in the store's thread; raises sqlite3.Error, OSError, File...Error."""

    def __init__(
        self, files: StoreFiles, wall_clock: Callable[[], float] | None, batches_kept_bytes: int
    ) -> None:
        self._files = files
        before = look_at_log(files.beside("-wal"))
        self._connection = _connect(files)
        try:
            frames = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            self._lost_end = before.lost_end(frames)
            self._meta = read_meta(self._connection)
            self._saved, self._numbers = read_saved(self._connection)
            if not self._saved.term and files.was_used:
                raise FileDamagedError(_USED)
        except BaseException:
            self._connection.close()
            raise
        self._housekeeper = Housekeeper(
            self._connection,
            self._numbers,
            wall_clock,
            batches_kept_bytes,
            # What it does changes nothing that can be read, so that losing it is no loss.
            lambda work: self._transact(work, sync=False),
        )
        self._synced: bool | None = None
        self._began = False
        self._failed = False
        self._resting = 0

    def saved(self) -> Saved:
        clean = bool(self._meta.get("clean", 0))
        unsure = bool(self._meta.get("lax", 0)) and not clean
        term = self._saved.term
        witnessed = self._files.witnessed(term, closed=clean)
        reasons = {
            "the last run told callers before it was on disk, and did not end in order": unsure,
            "the newest part of the log is damaged": self._lost_end,
            "the file is not the one that the newest run wrote": not witnessed,
        }
        self._saved.why_torn = "; ".join(why for why, so in reasons.items() if so) if term else ""
        self._saved.torn = bool(self._saved.why_torn)
        return self._saved

    def take_term(self, term: int, branch: int, tells_ahead: bool) -> None:  # noqa: FBT001 - as in the Protocol
        # The witness goes with the file at every moment in between.
        self._files.witness(term, before=self._saved.term)
        self._set_meta(term=term, branch=branch, clean=0, lax=int(tells_ahead))
        self._files.witness(term)
        self._began = True

    def write(self, batch: Sequence[Record]) -> None:
        self._failed = True
        writer = RowWriter(self._connection, self._numbers)
        try:
            self._transact(lambda: writer.write(batch), sync=True)
        except BaseException:
            writer.undo()
            raise
        self._files.check_there()
        self._failed = False

    def context(self, session_id: str) -> array[int]:
        return read_context(self._connection, session_id)

    def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return read_answered(self._connection, owner, request_id)

    @property
    def untidy(self) -> bool:
        """Whether there is housekeeping to do. Asked once for each batch."""
        if self._resting:
            self._resting -= 1
            return False
        return self._housekeeper.due()

    def tidy(self, steps: int) -> int:
        """Up to so many steps; how many it were."""
        done = 0
        while done < steps and self._housekeeper.step():
            done += 1
        return done

    def rest(self, batches: int) -> None:
        """Leave housekeeping for so many batches."""
        self._resting = batches

    def note_end(self) -> None:
        """Nothing is lost that was seen, if it was so."""
        if self._began and not self._failed:
            self._set_meta(clean=1)

    def close(self) -> None:
        self._connection.close()

    def _set_meta(self, **values: Any) -> None:
        rows = list(values.items())
        insert = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
        self._transact(lambda: self._connection.executemany(insert, rows), sync=True)

    def _transact(self, work: Callable[[], object], *, sync: bool) -> None:
        connection = self._connection
        if sync is not self._synced:
            connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            self._synced = sync
        connection.execute("BEGIN IMMEDIATE")
        try:
            work()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _connect(files: StoreFiles) -> sqlite3.Connection:
    """The file, its tables up to date. Raises NewerFileError, FileDamagedError, sqlite3.Error, OSError."""
    connection = sqlite3.connect(
        files.file,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        cached_statements=256,
    )
    try:
        if not version_of(connection) and files.was_used:
            raise FileDamagedError(_USED)
        for pragma in (
            # Only before there is anything in the file; then housekeeping can give room back to the disk.
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "temp_store = MEMORY",
            # What is over is not written over, but for what costs nothing.
            "secure_delete = FAST",
            f"cache_size = -{_CACHE_KIB}",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            f"journal_size_limit = {_LOG_KEPT_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        bring_up_to_date(connection)
        check_tables(connection)
        files.remember()
    except BaseException:
        connection.close()
        raise
    return connection


def _explained(files: StoreFiles, error: Exception) -> StoreError:
    file = files.file
    name = (getattr(error, "sqlite_errorname", None) or "").removeprefix("SQLITE_")
    kind = name.split("_")[0]
    if isinstance(error, NewerFileError):
        return StoreError(StoreTrouble.NEWER, f"{file}: {error}; start the newer release on it")
    if kind == "FULL" or getattr(error, "errno", None) in _NO_SPACE:
        return StoreError(StoreTrouble.FULL, f"no space is left for {file}")
    if isinstance(error, FileExistsError | NotADirectoryError):
        no_folder = next((each for each in file.parents if each.exists() and not each.is_dir()), file.parent)
        return StoreError(StoreTrouble.UNAVAILABLE, f"{file} cannot be used: {no_folder} is not a folder")
    if isinstance(error, FileGoneError):
        return StoreError(StoreTrouble.CORRUPT, f"{file} is lost: {error}")
    if name in ("IOERR_FSYNC", "IOERR_DIR_FSYNC"):
        # What the disk did not keep it may not tell of a second time, so trying again proves nothing.
        return StoreError(StoreTrouble.CORRUPT, f"the disk did not keep what was written to {file}: {error}")
    if isinstance(error, OSError) or kind in _PASSING:
        if kind in ("IOERR", "CANTOPEN") and files.no_room:
            return StoreError(StoreTrouble.FULL, f"no space is left for {file}")
        return StoreError(StoreTrouble.UNAVAILABLE, f"{file} cannot be used: {error}")
    return StoreError(
        StoreTrouble.CORRUPT,
        f"{file} is damaged ({error}); put a copy back, or move it away to start anew",
    )
