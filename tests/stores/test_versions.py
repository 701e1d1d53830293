"""A file of every version of the tables there has been is read by this release, and written to."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from fleet_service.domain.context import Context
from fleet_service.runtime.records import BranchCut, ContextExtended, TokensDelivered
from fleet_service.stores.sqlite import SqliteStore
from fleet_service.stores.sqlite_schema import APPLICATION_ID, STEPS, VERSION
from tests.stores.histories import generation, session

ROWS_OF = {1: Path(__file__).with_name("version_1.sql")}
"""What a release of that version wrote, as SQL. One for each version; it is never made anew."""


def file_of(version: int, file: Path) -> None:
    """A file as a release of that version left it, made from its own tables."""
    connection = sqlite3.connect(file, isolation_level=None)
    for step in range(version):
        connection.executescript(STEPS[step])
    for pragma in (f"user_version = {version}", f"application_id = {APPLICATION_ID}", "journal_mode = WAL"):
        connection.execute(f"PRAGMA {pragma}")
    connection.executescript(ROWS_OF[version].read_text("utf-8"))
    connection.close()


def tables_of(file: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(file)
    found = connection.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()
    connection.close()
    return found


def test_every_version_has_its_file() -> None:
    assert sorted(ROWS_OF) == list(range(1, VERSION + 1))
    assert sorted(STEPS) == list(range(VERSION))


@pytest.mark.parametrize("version", sorted(ROWS_OF))
async def test_a_file_of_each_version_is_read_whole_and_goes_on(tmp_path: Path, version: int) -> None:
    file = tmp_path / "old" / "fleet.db"
    file.parent.mkdir()
    file_of(version, file)
    store = SqliteStore(file)
    saved = await store.open()
    assert (saved.term, saved.raised_term, saved.branch) == (5, 6, 2)
    assert {name: each.kept for name, each in saved.sessions.items()} == {"s": session("s", 1)}
    assert list(await store.context("s")) == [1, 2, 3, 4]
    running = saved.generations["g"]
    assert running.started == generation("g", "s")
    assert list(running.token_ids) == [7, 8, 9, 10]
    assert running.cuts == [BranchCut("g", 2, 2)]
    await store.take_term(6, 1)
    whole = [1, 2, 3, 4, 5]
    extended = ContextExtended("s", 4, [5], Context(whole).crc32)
    await store.write([extended, TokensDelivered("g", 4, [11]), session("t", 2)])
    await store.close()
    store = SqliteStore(file)
    saved = await store.open()
    assert list(await store.context("s")) == whole
    assert list(saved.generations["g"].token_ids) == [7, 8, 9, 10, 11]
    await store.close()
    # And its tables are those of a new file.
    new = tmp_path / "new" / "fleet.db"
    fresh = SqliteStore(new)
    await fresh.open()
    await fresh.close()
    assert tables_of(file) == tables_of(new)


async def test_a_step_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.db"
    file_of(VERSION, file)
    before = tables_of(file)
    monkeypatch.setitem(STEPS, VERSION, "CREATE TABLE more (x); SELECT x FROM nowhere;")
    monkeypatch.setattr("fleet_service.stores.sqlite_schema.VERSION", VERSION + 1)
    with pytest.raises(Exception, match="nowhere"):
        await SqliteStore(file).open()
    assert tables_of(file) == before
    monkeypatch.undo()
    store = SqliteStore(file)
    assert "s" in (await store.open()).sessions
    await store.close()
