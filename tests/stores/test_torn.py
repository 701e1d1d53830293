"""Whether the end of what was written may be missing: a store says so when it is opened, and only then."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_service.runtime.records import Record, TokensDelivered
from fleet_service.runtime.store import StoreError
from fleet_service.stores.sqlite import SqliteStore, _Database
from fleet_service.stores.sqlite_files import StoreFiles
from tests.stores.histories import generation, session
from tests.stores.hurt import Writer, pass_for_the_original


async def begun(file: Path, term: int, *, tells_ahead: bool = False) -> SqliteStore:
    store = SqliteStore(file)
    saved = await store.open()
    await store.take_term(term, saved.branch, tells_ahead=tells_ahead)
    return store


async def torn(file: Path) -> bool:
    store = SqliteStore(file)
    saved = await store.open()
    await store.close()
    return saved.torn


def killed(file: Path) -> Path:
    """What a head leaves that is killed now."""
    copy = file.parent.with_name("killed")
    shutil.copytree(file.parent, copy)
    pass_for_the_original(copy / file.name)
    return copy / file.name


@pytest.mark.parametrize("tells_ahead", [False, True])
async def test_a_store_that_was_closed_is_whole(tmp_path: Path, *, tells_ahead: bool) -> None:
    file = tmp_path / "data" / "fleet.db"
    assert not await torn(file)
    store = await begun(file, 5, tells_ahead=tells_ahead)
    await store.write([session("s", 1)])
    await store.close()
    assert not await torn(file)


@pytest.mark.parametrize("at", ["witness", "commit", "witness again"])
async def test_a_head_killed_while_it_takes_its_term_has_lost_nothing(tmp_path: Path, at: str) -> None:
    file = tmp_path / "data" / "fleet.db"
    await (await begun(file, 5)).close()
    store = SqliteStore(file)
    await store.open()
    monkey = pytest.MonkeyPatch()
    calls: list[str] = []

    def killed_at(name: str, work: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            calls.append(name if name not in calls else f"{name} again")
            if calls[-1] == at:
                raise OSError("killed")
            return work(*args, **named)

        return call

    with monkey.context() as patch:
        patch.setattr(StoreFiles, "witness", killed_at("witness", StoreFiles.witness))
        patch.setattr(_Database, "_set_meta", killed_at("commit", _Database._set_meta))
        with pytest.raises(StoreError):
            await store.take_term(6, 0)
    left = killed(file)
    await store.close()
    assert calls[-1] == at
    assert not await torn(left)
    await (await begun(left, 7)).close()
    assert not await torn(left)


async def test_a_killed_head_lost_nothing_it_synced(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = await begun(file, 5)
    await store.write([session("s", 1)])
    assert not await torn(killed(file))
    await store.close()


async def test_a_head_killed_that_tells_ahead_may_have_lost_the_end(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = await begun(file, 5, tells_ahead=True)
    left = killed(file)
    await store.close()
    assert await torn(left)
    # Until a head has begun its term on it, that stays so: one that ended before has mended nothing.
    assert await torn(left)
    await (await begun(left, 6)).close()
    assert not await torn(left)


async def test_a_write_that_failed_of_what_was_told_is_not_closed_over(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = await begun(file, 5, tells_ahead=True)
    await store.write([session("s", 1)])
    bad: list[Record] = [session("t", 2), session("t", 3)]
    with pytest.raises(StoreError):
        await store.write(bad)
    await store.close()
    assert await torn(file)


async def test_a_copy_put_back_is_older_than_what_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    await (await begun(file, 5)).close()
    copy = tmp_path / "copy.db"
    shutil.copy(file, copy)
    assert not await torn(file)
    await (await begun(file, 6)).close()
    shutil.copy(copy, file)
    assert await torn(file)
    await (await begun(file, 7)).close()
    assert not await torn(file)


async def test_a_copy_made_while_the_head_ran_is_older_though_of_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = await begun(file, 5)
    await store.write([session("s", 1)])
    copy = tmp_path / "copy.db"
    with sqlite3.connect(file) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    source.close()
    target.close()
    await store.write([session("t", 2)])
    await store.close()
    for part in file.parent.glob("fleet.db*"):
        if part.suffix != ".term":
            part.unlink()
    copy.rename(file)
    assert await torn(file)


async def test_a_closed_store_that_is_carried_elsewhere_with_its_witness_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    await (await begun(file, 5)).close()
    shutil.copytree(file.parent, tmp_path / "elsewhere")
    assert not await torn(tmp_path / "elsewhere" / "fleet.db")


async def test_a_copy_put_elsewhere_may_be_older_than_what_was_seen(tmp_path: Path) -> None:
    file, other = tmp_path / "data" / "fleet.db", tmp_path / "other" / "fleet.db"
    await (await begun(file, 5)).close()
    other.parent.mkdir()
    shutil.copy(file, other)
    assert await torn(other)


async def _write(file: Path, batches: int) -> SqliteStore:
    store = await begun(file, 5)
    await store.write([session("s", 1), generation("g", "s")])
    for index in range(batches):
        await store.write([TokensDelivered("g", index, [index])])
    return store


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(
    "hurt, expected",
    [
        (lambda log: log, False),
        (lambda log: _flip(log, len(log) // 2), True),
        (lambda log: _flip(log, len(log) - 40_000), True),
        # The last batch alone: it looks like one that was under way.
        (lambda log: log[: len(log) - 100], False),
        # A batch that was under way when the power failed is no loss.
        (lambda log: log + bytes(3_000), False),
    ],
)
async def test_a_log_damaged_before_its_end_is_noticed(
    tmp_path: Path, hurt: Callable[[bytes], bytes], *, expected: bool
) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = await _write(file, 200)
    left = killed(file)
    await store.close()
    log = left.with_name("fleet.db-wal")
    log.write_bytes(hurt(log.read_bytes()))
    assert await torn(left) is expected


async def test_a_damaged_header_of_the_log_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    await (await _write(file, 5)).close()
    store = await begun(file, 6)
    await store.write([TokensDelivered("g", 5, [5])])
    left = killed(file)
    await store.close()
    log = left.with_name("fleet.db-wal")
    log.write_bytes(_flip(log.read_bytes(), 17))
    assert await torn(left)


async def test_a_first_log_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = await _write(file, 5)
    left = killed(file)
    await store.close()
    left.with_name("fleet.db-wal").unlink()
    with pytest.raises(StoreError, match="though it was used before"):
        await torn(left)


async def test_a_log_begun_anew_is_whole(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "data" / "fleet.db", tokens_a_batch=400)
    log = tmp_path / "data" / "fleet.db-wal"
    largest = 0
    # Begun anew, the file is as long as before, so this is long past it.
    while largest < 40_000_000:
        await writer.until("kept")
        largest = writer.kept * 100
    await writer.kill()
    assert log.stat().st_size < 40_000_000
    assert not await torn(tmp_path / "data" / "fleet.db")
