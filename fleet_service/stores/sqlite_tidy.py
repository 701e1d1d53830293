"""Housekeeping of the SQLite store: what nobody needs any more is deleted, what is kept long is packed.

A row of `batches` has tokens of many generations, so the longest of them would hold up all. Rows at the front
that nobody needs go; when those that are needed grow too many, their tokens move to `outputs`, and the
generation then begins behind them. What can be read stays the same at every moment. A step is small, since
batches wait for it.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

from fleet_service.stores import codec
from fleet_service.stores.sqlite_files import FileDamagedError
from fleet_service.stores.sqlite_write import Numbers

# Of one step. Measured: one takes about a millisecond (benchmarks/store.py).
_ROWS = 64
_ROWS_BYTES = 128 * 1024
_PARTS = 2_000
_GENERATIONS = 32
_EXPIRED = 100
# What is moved at once, in several steps: the more, the fewer rows of `outputs` there are in the end.
_MOVED_BYTES = 1024 * 1024
# In between so many batches it is looked for what has had its time, and for room to give back.
_EXPIRY_BATCHES = 1_000
# Pages of the file that are given back to the disk in one step, and those that stay free for what comes.
_PAGES = 64
_FREE_PAGES = 4_096
_FREE_PART = 4

Transact = Callable[[Callable[[], object]], None]


class Housekeeper:
    """Works in the store's thread, between batches. Raises sqlite3.Error, FileDamagedError."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        numbers: Numbers,
        wall_clock: Callable[[], float] | None,
        batches_kept_bytes: int,
        transact: Transact,
    ) -> None:
        self._connection = connection
        self._numbers = numbers
        self._wall_clock = wall_clock
        self._batches_kept_bytes = batches_kept_bytes
        self._transact = transact
        self._work: Iterator[None] | None = None
        # At first there may be anything.
        self._gone_seen = -1
        self._batches_to_expiry = 0

    def due(self) -> bool:
        """Whether there may be something to do. Asked once for each batch."""
        self._batches_to_expiry -= 1
        return (
            self._work is not None
            or self._too_much
            or self._gone_seen != self._numbers.gone
            or self._batches_to_expiry < 0
        )

    def step(self) -> bool:
        """Do a little; False: there was nothing to do."""
        if self._work is None:
            self._work = self._next_work()
        try:
            next(self._work)
        except StopIteration:
            self._work = None
            return self._too_much
        except BaseException:
            self._work = None
            raise
        return True

    @property
    def _too_much(self) -> bool:
        return self._numbers.batches_bytes > self._batches_kept_bytes

    def _next_work(self) -> Iterator[None]:
        if self._batches_to_expiry <= 0:
            self._batches_to_expiry = _EXPIRY_BATCHES
            yield from self._expire()
            yield from self._shrink()
        self._gone_seen = self._numbers.gone
        yield from self._drop()
        if self._too_much:
            yield from self._move()

    def _drop(self) -> Iterator[None]:
        """Delete rows at the front of `batches` that have no token of a generation that is kept."""
        more = True
        while more:
            last, dropped_bytes = 0, 0
            for seq, body in self._rows_after(0):
                if any(self._needs(number, seq) for number in _numbers(seq, body)):
                    more = False
                    break
                last, dropped_bytes = seq, dropped_bytes + len(body)
            if not last:
                return
            self._delete_to(last, dropped_bytes)
            yield

    def _move(self) -> Iterator[None]:
        """Tokens in rows at the front of `batches` go to `outputs`, so that nobody needs the rows."""
        runs: dict[int, tuple[int, array[int]]] = {}
        rows: list[tuple[int, int]] = []
        parts = moved_bytes = 0
        while moved_bytes < _MOVED_BYTES and (front := self._rows_after(rows[-1][0] if rows else 0)):
            for seq, body in front:
                for number, first_index, ids in _parts(seq, body):
                    parts += 1
                    if self._needs(number, seq):
                        runs.setdefault(number, (first_index, array("I")))[1].extend(ids)
                rows.append((seq, len(body)))
                moved_bytes += len(body)
                if parts >= _PARTS:
                    parts = 0
                    break
            yield
        last = rows[-1][0]
        numbers = iter(list(runs))
        while some := list(islice(numbers, _GENERATIONS)):
            # Those that are gone by now have no outputs any more, nor may they get any.
            kept = [number for number in some if number in self._numbers.first_batches]
            outputs: list[tuple[Any, ...]] = [
                (n, runs[n][0], codec.ids_to(runs[n][1])) for n in kept if runs[n][1]
            ]
            begins: list[tuple[Any, ...]] = [(last + 1, number) for number in kept]
            self._change(
                ("INSERT INTO outputs VALUES (?, ?, ?)", outputs),
                ("UPDATE generations SET first_batch = ? WHERE no = ?", begins),
            )
            self._numbers.first_batches.update((number, begin) for begin, number in begins)
            yield
        for first in range(0, len(rows), _ROWS):
            some_rows = rows[first : first + _ROWS]
            self._delete_to(some_rows[-1][0], sum(size for _, size in some_rows))
            yield

    def _expire(self) -> Iterator[None]:
        """Delete answers and cancels that have had their time."""
        if self._wall_clock is None:
            return
        now = self._wall_clock()
        for table, key in (("requests", "owner, request_id"), ("cancels", "owner, generation_id")):
            delete = (
                f"DELETE FROM {table} WHERE ({key}) IN"  # noqa: S608 - fixed names
                f" (SELECT {key} FROM {table} WHERE until < ? ORDER BY until LIMIT {_EXPIRED})"
            )
            while self._change((delete, [(now,)])) == _EXPIRED:
                yield
            yield

    def _shrink(self) -> Iterator[None]:
        """Give room in the file back, but for a quarter of it and 16 MiB, which will be used again."""
        while self._free_pages() > _FREE_PAGES + self._one("PRAGMA page_count") // _FREE_PART:
            self._transact(
                lambda: self._connection.execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
            )
            yield

    def _free_pages(self) -> int:
        return self._one("PRAGMA freelist_count")

    def _one(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    def _needs(self, number: int, seq: int) -> bool:
        """Whether a generation has tokens in that batch which are nowhere else."""
        first_batch = self._numbers.first_batches.get(number)
        return first_batch is not None and first_batch <= seq

    def _rows_after(self, seq: int) -> list[tuple[int, bytes]]:
        """The next rows of `batches`: at least one if there is one, else up to so many and so large."""
        found: list[tuple[int, bytes]] = []
        room = _ROWS_BYTES
        with closing(self._connection.cursor()) as cursor:
            rows = "SELECT seq, body FROM batches WHERE seq > ? ORDER BY seq LIMIT ?"
            for each in cursor.execute(rows, (seq, _ROWS)):
                found.append(each)
                room -= len(each[1])
                if room <= 0:
                    break
        return found

    def _delete_to(self, last: int, deleted_bytes: int) -> None:
        self._change(("DELETE FROM batches WHERE seq <= ?", [(last,)]))
        self._numbers.batches_bytes -= deleted_bytes

    def _change(self, *statements: tuple[str, list[tuple[Any, ...]]]) -> int:
        """Each with its rows, all in one transaction; how many rows changed."""
        before = self._connection.total_changes

        def work() -> None:
            for statement, rows in statements:
                self._connection.executemany(statement, rows)

        self._transact(work)
        return self._connection.total_changes - before


def _parts(seq: int, body: bytes) -> Iterator[tuple[int, int, array[int]]]:
    with _explaining(seq):
        yield from codec.batch_from(body)


def _numbers(seq: int, body: bytes) -> list[int]:
    with _explaining(seq):
        return codec.batch_numbers(body)


@contextmanager
def _explaining(seq: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError) as error:
        raise FileDamagedError(f"batch {seq}: {error}") from error
