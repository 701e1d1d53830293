"""What becomes of a store when the disk, the file or the process fails: no other token than was written."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_service.domain.context import Context
from fleet_service.runtime.records import ContextExtended, Record, Saved, TokensDelivered
from fleet_service.runtime.store import StoreError, StoreTrouble
from fleet_service.stores.sqlite import SqliteStore
from fleet_service.stores.sqlite_schema import VERSION
from tests.stores.histories import generation, session
from tests.stores.hurt import ROOT, Disk, Writer, pass_for_the_original, power

SESSIONS = 60


def ids_of(n: int) -> list[int]:
    return [n * 1_000 + index for index in range(10 * n)]


async def make(file: Path) -> None:
    """A store with sessions and generations in all tables, closed."""
    store = SqliteStore(file, batches_kept_bytes=4_000)
    await store.open()
    await store.take_term(5, 0)
    for n in range(SESSIONS):
        ids = ids_of(n)
        name = f"s{n}"
        batch: list[Record] = [session(name, n + 1), generation(f"g{n}", name)]
        await store.write(
            [*batch, ContextExtended(name, 0, ids, Context(ids).crc32), TokensDelivered(f"g{n}", 0, ids)]
        )
    await store.tidy()
    await store.close()


async def found(file: Path) -> Saved:
    """Everything in it, contexts too. Raises StoreError."""
    store = SqliteStore(file)
    try:
        saved = await store.open()
        for session_id in saved.sessions:
            assert list(await store.context(session_id)) == ids_of(int(session_id[1:]))
    finally:
        await store.close()
    for name, each in saved.generations.items():
        assert list(each.token_ids) == ids_of(int(name[1:]))
    return saved


async def refusal(file: Path) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await SqliteStore(file).open()
    return caught.value


async def check(file: Path, kept: int) -> int:
    """Whether a writer's file is right, and has all it said is kept; how much there is."""
    store = SqliteStore(file)
    saved = await store.open()
    tokens = list(saved.generations["g"].token_ids)
    assert tokens == list(range(len(tokens)))
    assert list(await store.context("s")) == tokens
    assert len(tokens) >= kept
    assert not saved.torn or kept == 0
    await store.close()
    return len(tokens)


# The process dies, the power fails


@pytest.mark.parametrize("times", [4, pytest.param(60, marks=pytest.mark.slow)])
async def test_a_killed_process_loses_nothing_it_was_told_is_kept(tmp_path: Path, times: int) -> None:
    rng = random.Random(times)
    there = 0
    for _ in range(times):
        writer = await Writer.start(tmp_path / "fleet.db", tokens_a_batch=rng.choice([1, 7, 400]))
        assert await writer.line() == f"open {there}"
        for _ in range(rng.randrange(300)):
            await writer.line()
        await writer.kill()
        there = await check(tmp_path / "fleet.db", writer.kept)
    assert there > 0


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_power_fails_and_nothing_is_lost_that_was_told_is_kept(tmp_path: Path, times: int) -> None:
    rng = random.Random(times)
    folder, disk = tmp_path / "folder", tmp_path / "disk"
    env = power(tmp_path, FROM=folder, TO=disk)
    folder.mkdir()
    disk.mkdir()
    for _ in range(times):
        writer = await Writer.start(folder / "fleet.db", tokens_a_batch=rng.choice([7, 400]), env=env)
        for _ in range(rng.randrange(50, 300)):
            await writer.line()
        await writer.kill()
        kept = writer.kept
        # Files as they were when they were last synced: all that a disk has to have.
        shutil.rmtree(folder)
        shutil.copytree(disk, folder)
        assert kept > 0
        pass_for_the_original(folder / "fleet.db")
        await check(folder / "fleet.db", kept)
        # The look at it changed it.
        shutil.rmtree(disk)
        shutil.copytree(folder, disk)


# No room


async def test_a_full_disk_says_so_and_all_goes_on_when_there_is_room(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "fleet.db", disk="8m")
    await writer.until("kept")
    disk = Disk(writer.disk_pid, tmp_path)
    for _ in range(3):
        disk.fill()
        before = await writer.until("full")
        assert before == f"full: no space is left for {tmp_path / 'fleet.db'}"
        disk.free()
        await writer.until("kept")
    disk.fill()
    await writer.until("full")
    # Killed while it was full: what is in the file is right.
    copy = tmp_path.with_name("copy")
    shutil.copytree(Path(f"/proc/{writer.disk_pid}/root") / tmp_path.relative_to("/"), copy)
    pass_for_the_original(copy / "fleet.db")
    await writer.kill()
    await check(copy / "fleet.db", writer.kept)


async def test_a_disk_too_small_to_begin_on_is_told_of(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "fleet.db", disk="16k")
    line = await writer.line()
    assert line.startswith("refused full: no space is left for "), line
    await writer.ended()


# May not


def test_a_disk_that_is_read_only_is_told_of(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o ro tmpfs "$0" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, str(tmp_path)]
    if subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    ended = subprocess.run(
        [*command, sys.executable, "-m", "tests.stores.writer", str(tmp_path / "data" / "fleet.db"), "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith("refused unavailable: ")
    assert "Read-only file system" in ended.stdout


def test_a_folder_that_may_not_be_written_is_told_of() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        # Who is root may all the same, but for this.
        command = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
        ended = subprocess.run(
            [*command, sys.executable, "-m", "tests.stores.writer", str(folder / "data" / "fleet.db"), "1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    assert ended.stdout.startswith("refused unavailable: ")
    assert "Permission denied" in ended.stdout


async def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    error = await refusal(tmp_path / "file" / "data" / "fleet.db")
    assert error.trouble is StoreTrouble.UNAVAILABLE
    assert str(tmp_path / "file" / "data" / "fleet.db") in str(error)


# Not what was written


async def test_an_intact_file_is_read_whole(tmp_path: Path) -> None:
    await make(tmp_path / "fleet.db")
    saved = await found(tmp_path / "fleet.db")
    assert (len(saved.sessions), len(saved.generations), saved.torn) == (SESSIONS, SESSIONS, False)


def cuts(size: int) -> Iterator[int]:
    yield from (0, 1, 100, 4_095, 4_096, 4_097, size - 4_097, size - 4_096)
    yield from (size * part // 8 for part in range(1, 8))


async def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    whole, file = tmp_path / "whole" / "fleet.db", tmp_path / "cut" / "fleet.db"
    await make(whole)
    for size in cuts(whole.stat().st_size):
        shutil.copytree(whole.parent, file.parent)
        os.truncate(file, size)
        with pytest.raises(StoreError) as caught:
            await found(file)
        assert caught.value.trouble is StoreTrouble.CORRUPT, size
        assert str(file) in str(caught.value)
        shutil.rmtree(file.parent)


async def test_no_flipped_byte_makes_another_token(tmp_path: Path) -> None:
    whole, file = tmp_path / "whole" / "fleet.db", tmp_path / "hurt" / "fleet.db"
    await make(whole)
    expected = await found(whole)
    content = whole.read_bytes()
    rng = random.Random(3)
    troubles = []
    for _ in range(200):
        shutil.copytree(whole.parent, file.parent)
        hurt = bytearray(content)
        at = rng.randrange(len(hurt))
        for offset in range(rng.choice([1, 1, 16])):
            hurt[min(at + offset, len(hurt) - 1)] ^= rng.randrange(1, 256)
        file.write_bytes(hurt)
        try:
            saved = await found(file)
        except StoreError as error:
            troubles.append(error.trouble)
        else:
            specs = {name: each.started for name, each in saved.generations.items()}
            assert specs == {name: each.started for name, each in expected.generations.items()}, at
            assert {n: (s.kept.spec, s.kept.owner) for n, s in saved.sessions.items()} == {
                n: (s.kept.spec, s.kept.owner) for n, s in expected.sessions.items()
            }, at
        shutil.rmtree(file.parent)
    # The rest lay in room that nothing stands in.
    assert len(troubles) > 50
    assert set(troubles) == {StoreTrouble.CORRUPT}


async def test_a_log_that_was_cut_or_hurt_gives_what_came_before(tmp_path: Path) -> None:
    rng = random.Random(4)
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    writer = await Writer.start(whole / "fleet.db")
    for _ in range(300):
        await writer.line()
    await writer.kill()
    content = (whole / "fleet.db-wal").read_bytes()
    lengths = []
    for part in range(12):
        shutil.copytree(whole, hurt)
        # From where the tables are made on.
        at = rng.randrange(len(content) // 8, len(content))
        if part % 2:
            (hurt / "fleet.db-wal").write_bytes(content[:at])
        else:
            (hurt / "fleet.db-wal").write_bytes(content[:at] + b"\xaa" + content[at + 1 :])
        lengths.append(await check(hurt / "fleet.db", 0))
        shutil.rmtree(hurt)
    assert len(set(lengths)) > 3
    await check(whole / "fleet.db", writer.kept)


async def test_garbage_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    garbage = random.Random(5).randbytes(50_000)
    file.write_bytes(garbage)
    error = await refusal(file)
    assert error.trouble is StoreTrouble.CORRUPT
    assert file.read_bytes() == garbage


async def test_the_file_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE songs (title)")
    connection.close()
    before = file.read_bytes()
    error = await refusal(file)
    assert (error.trouble, "something else" in str(error)) == (StoreTrouble.CORRUPT, True)
    assert file.read_bytes() == before


async def test_the_file_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    await make(file)
    connection = sqlite3.connect(file)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = file.read_bytes()
    error = await refusal(file)
    assert error.trouble is StoreTrouble.NEWER
    assert "newer release" in str(error)
    assert file.read_bytes() == before


async def test_a_log_without_its_file_is_refused(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "fleet.db")
    await writer.until("kept")
    await writer.kill()
    log = (tmp_path / "fleet.db-wal").read_bytes()
    (tmp_path / "fleet.db").unlink()
    assert (await refusal(tmp_path / "fleet.db")).trouble is StoreTrouble.CORRUPT
    assert (tmp_path / "fleet.db-wal").read_bytes() == log


# Others


async def test_a_second_head_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    writer = await Writer.start(file)
    await writer.until("kept")
    for _ in range(3):
        error = await refusal(file)
        assert error.trouble is StoreTrouble.IN_USE
        assert "in use by another head" in str(error)
        await writer.until("kept")
    await writer.kill()
    await check(file, writer.kept)


@pytest.mark.parametrize("what", ["folder", "file", "lock", "replaced"])
async def test_a_file_taken_away_while_it_is_used_is_told_of_at_once(tmp_path: Path, what: str) -> None:
    file = tmp_path / "data" / "fleet.db"
    store = SqliteStore(file)
    await store.open()
    await store.write([session("s1", 1)])
    if what == "folder":
        shutil.rmtree(file.parent)
    elif what == "lock":
        file.with_name(f"{file.name}.lock").unlink()
    elif what == "file":
        file.unlink()
    else:
        shutil.copy(file, tmp_path / "other")
        (tmp_path / "other").replace(file)
    with pytest.raises(StoreError, match="while the head was running") as caught:
        await store.write([session("s2", 2)])
    assert not caught.value.may_pass
    await store.close()


async def test_a_store_moved_away_makes_room_for_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    await make(file)
    file.rename(tmp_path / "old.db")
    store = SqliteStore(file)
    assert await store.open() == Saved()
    await store.close()
