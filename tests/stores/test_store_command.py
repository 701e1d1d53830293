"""`fleet store`, as a real command, on stores that are whole, damaged, in use, or none."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

from examples.processes import command_of
from fleet_service.stores.sqlite import SqliteStore
from fleet_service.stores.sqlite_schema import VERSION
from tests.stores.histories import generation, session
from tests.stores.hurt import Writer
from tests.stores.test_faults import SESSIONS, ids_of, make

TOKENS = sum(len(ids_of(n)) for n in range(SESSIONS))


async def fleet_store(command: str, folder: Path, *flags: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(command_of("fleet"), "store", command, str(folder), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def as_json(command: str, folder: Path) -> tuple[int, Any]:
    code, out, _ = await fleet_store(command, folder, "--json")
    return code, json.loads(out)


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


async def test_what_is_no_store_is_told_of(tmp_path: Path) -> None:
    for command in ("check", "stats"):
        code, _, err = await fleet_store(command, tmp_path)
        assert (code, err) == (1, f"fleet: there is no {tmp_path / 'head.db'}\n")
    (tmp_path / "head.db").write_bytes(b"no database at all" * 100)
    code, _, err = await fleet_store("check", tmp_path)
    assert (code, "cannot be read: file is not a database" in err) == (1, True)


async def test_a_store_of_a_newer_release_is_told_of(tmp_path: Path) -> None:
    await make(tmp_path / "head.db")
    change(tmp_path / "head.db", f"PRAGMA user_version = {VERSION + 1}")
    code, _, err = await fleet_store("stats", tmp_path)
    assert (code, f"version {VERSION + 1}" in err) == (1, True)
