"""The embedded store: one SQLite file, written by one thread, each batch one transaction.

A file belongs to one head at a time; a lock beside it says so, which ends with the head's process. Another
file beside it, the witness, names the newest term: a copy of the store put back from elsewhere is older than
it, and then the end of the log may be lost.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import sqlite3
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fleet_service.runtime.records import Record, Saved
from fleet_service.runtime.store import StoreError, StoreTrouble
from fleet_service.stores.sqlite_read import FileDamagedError, read_context, read_saved
from fleet_service.stores.sqlite_schema import APPLICATION_ID, NewerFileError, bring_up_to_date
from fleet_service.stores.sqlite_write import Numbers, RowWriter

T = TypeVar("T")

_FULL = {"SQLITE_FULL"}
_CORRUPT = {"SQLITE_CORRUPT", "SQLITE_NOTADB"}
_CACHE_KIB = 8 * 1024
# The log is folded into the file from this size on; what that takes is seen by one batch in many.
_CHECKPOINT_PAGES = 4_000


class SqliteStore:
    """A SessionStore. `file` is made where there is none, its folder too."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._connection: sqlite3.Connection | None = None
        self._numbers = Numbers({})
        self._lock: int | None = None
        self._synced: bool | None = None
        self._lax = False

    async def open(self) -> Saved:
        return await self._in_thread(self._open)

    async def take_term(self, term: int, branch: int) -> None:
        meta = {"term": term, "branch": branch, "clean": 0, "lax": 0}

        def work() -> None:
            self._transact(lambda connection: _set_meta(connection, **meta), True)
            self._lax = False
            self._witness(term)

        await self._in_thread(work)

    async def write(self, batch: Sequence[Record], *, sync: bool = True) -> None:
        await self._in_thread(lambda: self._write(batch, sync))

    async def context(self, session_id: str) -> array[int]:
        return await self._in_thread(lambda: read_context(self._open_connection(), session_id))

    async def close(self) -> None:
        await self._in_thread(self._close)
        self._thread.shutdown(wait=True)

    # ------------------------------------------------------------------------------------- in the thread

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives, its failures as StoreError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError, NewerFileError, FileDamagedError) as error:
            raise self._explained(error) from error

    def _open(self) -> Saved:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._connection = connection = self._connect()
            bring_up_to_date(connection)
            saved, self._numbers = read_saved(connection)
            meta = dict(connection.execute("SELECT key, value FROM meta"))
        except BaseException:
            self._let_go()
            raise
        unsure = bool(meta.get("lax", 0)) and not meta.get("clean", 0)
        saved.torn = saved.term > 0 and (unsure or not self._witnessed(saved.term))
        return saved

    def _connect(self) -> sqlite3.Connection:
        # One thread at a time uses it: the one that opens, then the pool's only one, which is the same.
        connection = sqlite3.connect(
            self._file, timeout=0.0, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        kind = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if tables and kind != APPLICATION_ID:
            connection.close()
            raise FileDamagedError("it is an SQLite file of something else")
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "temp_store = MEMORY",
            f"cache_size = -{_CACHE_KIB}",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _write(self, batch: Sequence[Record], sync: bool) -> None:  # noqa: FBT001 - as in the Protocol
        if not sync and not self._lax:
            # Noted before it counts: the end of what is written so may be lost.
            self._transact(lambda connection: _set_meta(connection, lax=1), True)
            self._lax = True
        writer = RowWriter(self._open_connection(), self._numbers)
        try:
            self._transact(lambda _: writer.write(batch), sync)
        except BaseException:
            writer.undo()
            raise

    def _transact(self, work: Callable[[sqlite3.Connection], None], sync: bool) -> None:  # noqa: FBT001
        connection = self._open_connection()
        if sync is not self._synced:
            connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            self._synced = sync
        connection.execute("BEGIN IMMEDIATE")
        try:
            work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(StoreTrouble.UNAVAILABLE, f"{self._file} is not open")
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._transact(lambda connection: _set_meta(connection, clean=1), True)
        self._let_go()

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------------------------ the files beside it

    def _take_lock(self) -> None:
        self._lock = os.open(self._beside(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            self._lock = None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StoreError(
                StoreTrouble.IN_USE,
                f"{self._file} is in use by another head; stop it, or give this one another",
            ) from None

    def _beside(self, suffix: str) -> Path:
        return self._file.with_name(self._file.name + suffix)

    def _witness(self, term: int) -> None:
        """Note the newest term beside the file, whole or not at all."""
        draft = self._beside(".term.new")
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"term": term}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._beside(".term"))

    def _witnessed(self, term: int) -> bool:
        """Whether the file is the one that the newest run wrote, as far as can be told."""
        try:
            noted = json.loads(self._beside(".term").read_text("utf-8"))
            return bool(noted["term"] == term)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _explained(self, error: Exception) -> StoreError:
        name = getattr(error, "sqlite_errorname", "") or ""
        base = "_".join(name.split("_")[:2])
        if isinstance(error, NewerFileError):
            return StoreError(StoreTrouble.NEWER, f"{self._file}: {error}; start the newer release on it")
        if isinstance(error, FileDamagedError) or base in _CORRUPT:
            return StoreError(
                StoreTrouble.CORRUPT,
                f"{self._file} is damaged ({error}); put a copy back, or move it away to start anew",
            )
        if base in _FULL or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return StoreError(StoreTrouble.FULL, f"no space is left for {self._file}")
        return StoreError(StoreTrouble.UNAVAILABLE, f"{self._file} cannot be used: {error}")


def _set_meta(connection: sqlite3.Connection, **values: Any) -> None:
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
