"""The store's file and what stands beside it: the lock, and the witness of the newest term.

Things happen to files that no database can know of: a copy is put back, a folder is taken away. What can be
told of it is told here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

from fleet_service.runtime.store import StoreError, StoreTrouble

STORE_FILE = "head.db"
"""In the folder that a head is given."""

# A commit takes a few pages, and what SQLite needs beside the file grows by 32 KiB.
_LEAST_ROOM_BYTES = 64 * 1024


class FileDamagedError(Exception):
    """What is in the file cannot be right; the text says how."""


class FileGoneError(Exception):
    """The file is not where it was when it was opened."""


class StoreFiles:
    """`file` and its neighbours. Raises OSError, and what it says."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock: int | None = None
        self._identity: tuple[int, int] | None = None

    def take(self) -> None:
        """Make the folder, and have the file for this process alone; the lock ends with the process.

        Raises StoreError IN_USE.
        """
        self._make_folder()
        self._lock = os.open(self.beside(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.let_go()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StoreError(
                StoreTrouble.IN_USE,
                f"{self.file} is in use by another head; stop it, or give this one a name of its own",
            ) from None

    def let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_whole(self) -> None:
        """Whether what is there can be a store, or is none yet. Raises FileDamagedError."""
        if not self.file.exists() and not _size(self.beside("-wal")):
            # Moved away, to start anew.
            self.beside(".term").unlink(missing_ok=True)
        elif not _size(self.file) and (_size(self.beside("-wal")) or self.was_used):
            raise FileDamagedError("it is empty or missing, and what stands beside it says that it was used")

    @property
    def was_used(self) -> bool:
        """Whether a head has ever begun its term on it."""
        return self.beside(".term").exists()

    def make(self) -> None:
        """An empty file where there is none; what is in it, or in a copy put back, is its owner's alone."""
        number = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(number).st_uid == os.geteuid():
                os.fchmod(number, 0o600)
        finally:
            os.close(number)

    def remember(self) -> None:
        """The file is open."""
        stat = self.file.stat()
        self._identity = (stat.st_dev, stat.st_ino)

    def check_there(self) -> None:
        """Whether what was written is still to be found by its name. Raises FileGoneError."""
        try:
            stat = self.file.stat()
            self.beside("-wal").stat()
        except (FileNotFoundError, NotADirectoryError):
            raise FileGoneError("it was taken away while the head was running") from None
        except OSError:
            return  # cannot be told
        if (stat.st_dev, stat.st_ino) != self._identity:
            raise FileGoneError("another file was put in its place while the head was running")
        if self._lock is not None and not os.fstat(self._lock).st_nlink:
            raise FileGoneError("its lock was taken away while the head was running")

    @property
    def no_room(self) -> bool:
        """Whether the disk has no room for anything worth having."""
        try:
            room = os.statvfs(self.file.parent)
        except OSError:
            return False
        return room.f_bavail * room.f_frsize < _LEAST_ROOM_BYTES

    def beside(self, suffix: str) -> Path:
        return self.file.with_name(self.file.name + suffix)

    # The witness

    def witness(self, term: int, *, before: int | None = None) -> None:
        """Note the newest term beside the file, whole or not at all; the file may have `before` yet."""
        draft = self.beside(".term.new")
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"term": term, "before": before, "file": self._identity}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.beside(".term"))
        _sync_folder(self.file.parent)

    def witnessed(self, term: int, *, closed: bool) -> bool:
        """Whether the file, open, is the one that the newest run wrote, as far as can be told.

        One that was not closed is only as new as that run's last batch if it is the very file.
        """
        try:
            noted = json.loads(self.beside(".term").read_text("utf-8"))
            same = self._identity is not None and noted["file"] == [*self._identity]
            return term in (noted["term"], noted["before"]) and (closed or same)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _make_folder(self) -> None:
        missing = []
        folder = self.file.parent
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in missing:
            _sync_folder(each.parent)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _sync_folder(folder: Path) -> None:
    """Names in it outlive a loss of power from here on."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
