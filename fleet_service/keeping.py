"""What outlives the head, opened for one run and closed after it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from fleet_service.config import StoreConfig
from fleet_service.runtime.journal import Durability, StoreJournal
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.store import SessionStore, StoreError, StoreTrouble
from fleet_service.stores.sqlite import SqliteStore
from fleet_service.stores.sqlite_files import STORE_FILE

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """The head's `kept`, and the store behind it; None where nothing outlives the head."""

    kept: Kept
    store: SessionStore | None = None
    journal: StoreJournal | None = None

    async def begin(self, term: int, branch: int) -> None:
        """Write from here on, as the run of that term. Raises StoreError."""
        if self.store is not None and self.journal is not None:
            await self.store.take_term(term, branch, tells_ahead=self.journal.tells_ahead)
            self.journal.start()


def folder_of(store: StoreConfig, head_id: str, environ: Mapping[str, str]) -> Path:
    """Where a head keeps what is its own: as set, as a service manager says, or among the user's files."""
    if store.folder:
        return Path(store.folder).expanduser().absolute()
    if given := environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    home = Path(environ.get("HOME") or "~").expanduser()
    return Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "fleet" / head_id


def advice_on(error: StoreError, store: StoreConfig) -> str:
    """What to do where a head cannot start for it: the rest of its sentence."""
    if error.trouble is StoreTrouble.IN_USE:
        # Heads of one name at the same nodes take each other's sessions away.
        folder = " and a folder of its own with --data-dir FOLDER" if store.folder else ""
        return f" with --set head.head_id=NAME{folder}"
    if error.may_pass:
        return "; name another folder with --data-dir FOLDER, or keep nothing with --durability memory"
    return ""


@asynccontextmanager
async def keeping(
    config: StoreConfig,
    head_id: str,
    *,
    broken: Callable[[StoreError], None],
    committed: Callable[[float], None],
) -> AsyncIterator[Keeping]:
    """The store, open within the block; `broken` and `committed` as of StoreJournal. Raises StoreError."""
    durability = Durability(config.durability)
    if durability is Durability.MEMORY:
        _log.info("keeping nothing", durability=durability.value)
        yield Keeping(Kept())
        return
    folder = folder_of(config, head_id, os.environ)
    store = SqliteStore(folder / STORE_FILE, time.time)
    saved = await store.open()
    _log.info("keeping", folder=str(folder), durability=durability.value, sessions=len(saved.sessions))
    journal = StoreJournal(store, durability, broken=broken, committed=committed)
    try:
        yield Keeping(Kept(journal, saved), store, journal)
    finally:
        await journal.stop()
        with suppress(StoreError):  # what could not be kept was told of
            await store.close()


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """What a head takes up stays: to look through it for garbage delays its start, and all streams later."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
