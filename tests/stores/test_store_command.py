"""`fleet store`, as a real command, on stores that are whole, damaged, in use, or none."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from examples.processes import command_of
from fleet_service.stores.sqlite import SqliteStore
from fleet_service.stores.sqlite_look import copy as copy_file
from fleet_service.stores.sqlite_schema import VERSION
from tests.stores.histories import generation, session
from tests.stores.hurt import Writer
from tests.stores.test_faults import SESSIONS, ids_of, make

TOKENS = sum(len(ids_of(n)) for n in range(SESSIONS))


async def fleet_store(command: str, *arguments: str | Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(command_of("fleet"), "store", command, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def as_json(command: str, *places: Path) -> tuple[int, Any]:
    code, out, _ = await fleet_store(command, *places, "--json")
    return code, json.loads(out)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def change(file: Path, statement: str) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(statement)
    connection.close()


async def test_a_whole_store_is_said_to_be_so_and_left_as_it_is(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    before = (tmp_path / "head.db").read_bytes()
    code, out, err = await fleet_store("check", tmp_path)
    assert (code, err) == (0, "")
    about = f"{SESSIONS} sessions with {TOKENS} tokens, {SESSIONS} generations with {TOKENS} tokens\n"
    assert out == f"{tmp_path / 'head.db'} is whole: {about}"
    assert (tmp_path / "head.db").read_bytes() == before


async def test_it_counts_what_is_in_a_store(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    store = SqliteStore(tmp_path / "head.db")
    await store.open()
    await store.write([session("more", 100, created_at=1_700_000_000.0), generation("done", "more")])
    await store.close()
    change(tmp_path / "head.db", "UPDATE generations SET finished = body WHERE id = 'done'")
    code, found = await as_json("stats", tmp_path)
    assert code == 0
    assert (found["sessions"], found["context_tokens"], found["output_tokens"]) == (61, TOKENS, TOKENS)
    assert (found["running"], found["ended"], found["term"], found["version"]) == (60, 1, 5, VERSION)
    assert found["kinds"]["sessions"]["rows"] == 61
    assert found["kinds"]["context"]["content_bytes"] == 4 * TOKENS + 4 * (SESSIONS - 1)
    assert found["file_bytes"] == (tmp_path / "head.db").stat().st_size
    code, out, _ = await fleet_store("stats", tmp_path)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["newest", "session", "2023-11-14T22:13:20Z"] in lines
    assert ["sessions", "61"] in lines


async def test_a_store_that_a_head_writes_to_is_read_at_one_moment(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "head.db")
    await writer.until("kept")
    for _ in range(3):
        code, found = await as_json("check", tmp_path)
        assert (code, found["problems"], found["in_use"]) == (0, [], True)
        assert found["context_tokens"] == found["output_tokens"] > 0
        code, counted = await as_json("stats", tmp_path)
        assert (code, counted["in_use"]) == (0, True)
        assert counted["output_tokens"] == counted["context_tokens"] >= found["output_tokens"]
        await writer.until("kept")
    await writer.kill()
    code, found = await as_json("check", tmp_path)
    assert (code, found["in_use"]) == (0, False)
    assert found["output_tokens"] >= writer.kept


async def test_what_is_damaged_is_named_and_ends_with_1(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    change(tmp_path / "head.db", "UPDATE context SET ids = zeroblob(40) WHERE session_no = 4")
    change(tmp_path / "head.db", "DELETE FROM context WHERE session_no = 5")
    change(tmp_path / "head.db", "INSERT INTO marks VALUES (999, 1, 0, '')")
    code, out, err = await fleet_store("check", tmp_path)
    assert code == 1
    assert "context of session s3: token ids are not what was written" in out
    assert "the context of session s4 is not what was written" in out
    assert "1 rows of marks belong to none of the generations" in out
    assert "is damaged; put a copy back, or move it away" in err
    code, found = await as_json("check", tmp_path)
    assert (code, found["whole"], found["problems_in_all"]) == (1, False, 3)


async def test_a_store_put_back_is_whole_and_said_to_be_another(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    (tmp_path / "head.db.term").write_text('{"term": 6}')
    code, _, err = await fleet_store("check", tmp_path)
    assert code == 0
    assert "begins a new branch" in err


async def test_a_store_that_no_head_has_open_is_looked_at_without_leaving_a_file(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    before = names(tmp_path)
    for command in ("check", "stats"):
        assert (await fleet_store(command, tmp_path))[0] == 0
        assert names(tmp_path) == before


async def test_a_log_without_what_finds_a_place_in_it_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "head.db")
    await writer.until("kept")
    await writer.kill()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("head.db", "head.db-wal"):
        shutil.copy(tmp_path / name, copy / name)
    code, found = await as_json("check", copy)
    assert (code, found["output_tokens"] >= writer.kept) == (0, True)
    assert names(copy) == ["head.db", "head.db-wal"]


async def test_a_file_may_be_named_as_well_as_its_folder(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    copy = tmp_path / "copy.db"
    shutil.copy(tmp_path / "head.db", copy)
    for file in (tmp_path / "head.db", copy):
        code, out, _ = await fleet_store("check", file)
        assert (code, out.startswith(f"{file} is whole: {SESSIONS} sessions")) == (0, True)
    change(copy, "DELETE FROM context WHERE session_no = 5")
    code, _, err = await fleet_store("check", copy)
    assert (code, err.splitlines()[-1]) == (1, f"fleet: {copy} is damaged")
    missing = tmp_path / "missing.db"
    assert await fleet_store("stats", missing) == (1, "", f"fleet: there is no {missing}\n")


# ---------------------------------------------------------------------------------------- a damaged log


async def test_a_log_damaged_in_its_middle_is_told_of(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "head.db")
    while writer.kept < 350:  # long before a log is begun anew
        await writer.until("kept")
    await writer.kill()
    assert (await fleet_store("check", tmp_path))[0] == 0
    log = tmp_path / "head.db-wal"
    data = bytearray(log.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(each ^ 0xFF for each in data[middle : middle + 64])
    log.write_bytes(data)
    code, found = await as_json("check", tmp_path)
    assert (code, found["whole"], found["problems_in_all"]) == (1, False, 1)
    at = found["log_damaged_at"]
    assert middle - 5_000 < at <= middle + 64
    assert found["output_tokens"] < writer.kept
    code, out, err = await fleet_store("check", tmp_path)
    assert (code, out) == (1, f"the log is damaged from byte {at} on; what was written behind it is lost\n")
    assert "put a copy back" not in err
    assert f"the rest of {tmp_path / 'head.db'} is whole; a head that starts on it begins" in err
    code, out, err = await fleet_store("copy", tmp_path, tmp_path / "copy.db")
    assert (code, f"from byte {at} on" in out, "copy.db is damaged" in err) == (1, True, True)


# ---------------------------------------------------------------------------------------- copies


async def test_a_copy_made_while_a_head_writes_is_whole_and_of_one_moment(tmp_path: Path) -> None:
    writer = await Writer.start(tmp_path / "head.db", tokens_a_batch=400)
    while writer.kept < 200_000:
        await writer.until("kept")
    for number in range(3):
        await writer.until("kept")
        kept, copy = writer.kept, tmp_path / f"copy-{number}.db"
        code, out, err = await fleet_store("copy", tmp_path, copy)
        assert (code, err) == (0, "")
        assert out.startswith(f"{copy} is a copy of {tmp_path / 'head.db'}, and whole: 1 session with ")
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        assert [name for name in names(tmp_path) if name.startswith(copy.name)] == [copy.name]
        code, found = await as_json("check", copy)
        assert (code, found["problems"]) == (0, [])
        assert found["output_tokens"] == found["context_tokens"] >= kept
    await writer.kill()


async def test_a_store_that_was_put_back_from_a_copy_opens(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "head.db"
    code, said = await as_json("copy", tmp_path, copy)
    assert (code, said["file"], said["copy"], said["whole"], said["sessions"]) == (
        *(0, str(tmp_path / "head.db"), str(copy), True, SESSIONS),
    )
    assert names(tmp_path / "other") == ["head.db"]
    store = SqliteStore(copy)
    saved = await store.open()
    assert (len(saved.sessions), saved.torn) == (SESSIONS, True)
    await store.close()


async def test_a_copy_overwrites_nothing_and_takes_nothing_beside_it_for_its_own(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    copy = tmp_path / "copy.db"
    for suffix in ("", "-wal", ".term"):
        there = tmp_path / f"copy.db{suffix}"
        there.write_text("mine")
        refused = f"fleet: {there} is there already; name another file\n"
        assert await fleet_store("copy", tmp_path, copy) == (1, "", refused)
        assert there.read_text() == "mine"
        there.unlink()
    refused = f"fleet: {tmp_path} is a folder; name the file to make\n"
    assert await fleet_store("copy", tmp_path, tmp_path) == (1, "", refused)
    code, _, err = await fleet_store("copy", tmp_path, tmp_path / "none" / "copy.db")
    assert (code, "cannot be copied to" in err, "No such file or directory" in err) == (1, True, True)


async def test_a_copy_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    before = names(tmp_path)

    def interrupt(part: float) -> None:
        assert 0 <= part <= 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_file(tmp_path / "head.db", tmp_path / "copy.db", interrupt)
    assert names(tmp_path) == before


# ---------------------------------------------------------------------------------------- no store


async def test_what_is_no_store_is_told_of(tmp_path: Path) -> None:
    for command in ("check", "stats"):
        code, _, err = await fleet_store(command, tmp_path)
        assert (code, err) == (1, f"fleet: there is no {tmp_path / 'head.db'}\n")
    (tmp_path / "head.db").write_bytes(b"no database at all" * 100)
    code, _, err = await fleet_store("check", tmp_path)
    assert (code, "cannot be read: file is not a database" in err) == (1, True)
    for said in (err, (await fleet_store("stats", "--help"))[1]):
        assert "--data-dir" not in said


async def test_a_store_of_a_newer_release_is_told_of(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    change(tmp_path / "head.db", f"PRAGMA user_version = {VERSION + 1}")
    code, _, err = await fleet_store("stats", tmp_path)
    assert (code, f"version {VERSION + 1}" in err) == (1, True)
