"""Which ends of a log are damage, frame by frame, and which are what a head leaves that is killed."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest

from fleet_service.runtime.records import Record, TokensDelivered
from fleet_service.stores.sqlite import SqliteStore
from fleet_service.stores.sqlite_log import _summed, damage_of_log
from tests.stores.histories import generation, session

PAGE = 4096
FRAME = 24 + PAGE
HEADER = 32


async def log_of(folder: Path, commits: int = 12) -> bytes:
    """A log with commits of several frames and of one."""
    store = SqliteStore(folder / "head.db")
    await store.open()
    await store.take_term(1, 0)
    await store.write([session("s", 1), generation("g", "s")])
    told = 0
    for number in range(commits):
        tokens = 3_000 if number % 3 == 0 else 1
        batch: list[Record] = [TokensDelivered("g", told, range(told, told + tokens))]
        await store.write(batch)
        told += tokens
    log = (folder / "head.db-wal").read_bytes()
    await store.close()
    return log


def last_frames(log: bytes) -> list[int]:
    """The frames that end a commit, from 0."""
    count = (len(log) - HEADER) // FRAME
    return [n for n in range(count) if struct.unpack_from(">2I", log, HEADER + n * FRAME)[1]]


def flipped(log: bytes, at: int, count: int = 1) -> bytes:
    return log[:at] + bytes(each ^ 0xFF for each in log[at : at + count]) + log[at + count :]


def damage(folder: Path, log: bytes) -> int | None:
    file = folder / "log"
    file.write_bytes(log)
    return damage_of_log(file, PAGE)


async def test_a_whole_log_and_one_that_ends_early_are_not_damaged(tmp_path: Path) -> None:
    log = await log_of(tmp_path)
    for end in (len(log), len(log) - 100, len(log) - FRAME, HEADER + 5 * FRAME + 10, HEADER, 20, 0):
        assert damage(tmp_path, log[:end]) is None
    assert damage(tmp_path, log + bytes(3 * FRAME)) is None
    assert damage_of_log(tmp_path / "none", PAGE) is None


@pytest.mark.parametrize("within", [0, 4, 8, 16, 24, 2_000, FRAME - 1])
async def test_a_frame_that_is_wrong_is_named_wherever_a_whole_commit_stands_behind_it(
    tmp_path: Path, within: int
) -> None:
    log = await log_of(tmp_path)
    *_, before, last_but_one, last = last_frames(log)
    for frame in range(before + 1):
        at = HEADER + frame * FRAME
        assert damage(tmp_path, flipped(log, at + within)) == at
    for frame in range(last_but_one + 1, last + 1):
        assert damage(tmp_path, flipped(log, HEADER + frame * FRAME + within)) is None


async def test_a_commit_that_was_under_way_is_no_damage_whatever_of_it_is_there(tmp_path: Path) -> None:
    log = await log_of(tmp_path, 10)  # the last commit is of several frames
    *_, last_but_one, last = last_frames(log)
    assert last - last_but_one > 2
    old = os.urandom(FRAME)
    for missing in range(1, 2 ** (last - last_but_one)):
        frames = [log[HEADER + n * FRAME : HEADER + (n + 1) * FRAME] for n in range(last + 1)]
        for number in range(last - last_but_one):
            if missing >> number & 1:
                frames[last_but_one + 1 + number] = old
        assert damage(tmp_path, log[:HEADER] + b"".join(frames)) is None


async def test_frames_of_before_are_no_damage(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    before, log = await log_of(tmp_path, 12), await log_of(tmp_path / "other", 3)
    assert before[16:24] != log[16:24]
    assert damage(tmp_path, log + before[len(log) :]) is None


@pytest.mark.parametrize("at", [0, 3, 8, 12, 16, 24, 31])
async def test_a_damaged_header_is_damage_from_the_first_byte_on(tmp_path: Path, at: int) -> None:
    log = await log_of(tmp_path)
    assert damage(tmp_path, flipped(log, at)) == 0


async def test_a_log_summed_with_the_high_byte_first_is_read_too(tmp_path: Path) -> None:
    log = bytearray(await log_of(tmp_path))
    log[3] |= 1
    sums = _summed([0, 0], bytes(log[:24]), swap=True)
    struct.pack_into(">2I", log, 24, *sums)
    for at in range(HEADER, len(log) - FRAME + 1, FRAME):
        sums = _summed(sums, bytes(log[at : at + 8] + log[at + 24 : at + FRAME]), swap=True)
        struct.pack_into(">2I", log, at + 16, *sums)
    assert damage(tmp_path, bytes(log)) is None
    at = HEADER + 5 * FRAME
    assert damage(tmp_path, flipped(bytes(log), at + 100)) == at


async def test_a_log_of_64_mb_takes_seconds(tmp_path: Path) -> None:
    frame, salts = bytes(PAGE), b"saltsalt"
    header = struct.pack(">4I", 0x377F0682, 3_007_000, PAGE, 0) + salts
    sums = _summed([0, 0], header, swap=False)
    parts = [header, struct.pack(">2I", *sums)]
    start = struct.pack(">2I", 1, 1)
    for _ in range(64 * 1024 * 1024 // FRAME // 8):
        sums = _summed(sums, start + frame, swap=False)
        parts += [start, salts, struct.pack(">2I", *sums), frame]
    began = time.process_time()
    assert damage(tmp_path, b"".join(parts)) is None
    assert (time.process_time() - began) * 8 < 10
