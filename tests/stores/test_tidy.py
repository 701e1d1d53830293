"""Housekeeping: the file stays small, and nothing that can be read changes by it, whenever it happens."""

from __future__ import annotations

import shutil
import sqlite3
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_service.domain.context import crc32_of
from fleet_service.runtime.records import (
    CancelHeld,
    ContextExtended,
    GenerationEnded,
    GenerationGone,
    Record,
    RequestAnswered,
    Saved,
    SessionGone,
    TokensDelivered,
)
from fleet_service.stores.memory import MemoryStore
from fleet_service.stores.sqlite import SqliteStore
from tests.stores.histories import FAILED, generation, histories, session
from tests.stores.hurt import pass_for_the_original

SOON = st.sampled_from([0, 0, 1, 2, 3, 100])


def rows(file: Path, table: str) -> int:
    with sqlite3.connect(file) as connection:
        count = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    connection.close()
    assert isinstance(count, int)
    return count


async def read_again(file: Path) -> Saved:
    """What a head finds that starts on a copy of the files as they are."""
    copy = file.with_name("copy")
    copy.mkdir()
    for each in file.parent.glob("fleet.db*"):
        shutil.copy(each, copy)
    pass_for_the_original(copy / file.name)
    store = SqliteStore(copy / file.name)
    try:
        saved = await store.open()
        for session_id in saved.sessions:
            await store.context(session_id)
    finally:
        await store.close()
        shutil.rmtree(copy)
    return saved


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    history=histories(),
    kept_bytes=st.sampled_from([0, 100, 16_000_000]),
    data=st.data(),
)
async def test_what_is_read_is_the_same_whenever_it_was_tidied(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[list[Record]],
    kept_bytes: int,
    data: st.DataObject,
) -> None:
    file = tmp_path_factory.mktemp("store") / "fleet.db"
    memory, store = MemoryStore(), SqliteStore(file, batches_kept_bytes=kept_bytes)
    await store.open()
    for each in (memory, store):
        await each.take_term(7, 0)
    for batch in history:
        await memory.write(batch)
        await store.write(batch)
        await store.tidy(data.draw(SOON, label="steps"))
        if data.draw(st.booleans(), label="killed"):
            assert await read_again(file) == await memory.open()
        if data.draw(st.booleans(), label="restarted"):
            await store.close()
            store = SqliteStore(file, batches_kept_bytes=kept_bytes)
            assert await store.open() == await memory.open()
            await store.take_term(7, 0)
    await store.tidy()
    await store.close()
    store = SqliteStore(file)
    saved, expected = await store.open(), await memory.open()
    assert saved == expected
    for session_id in expected.sessions:
        assert await store.context(session_id) == await memory.context(session_id)
    await store.close()
    assert kept_bytes or rows(file, "batches") == 0


async def test_tokens_of_generations_that_are_gone_leave_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "fleet.db")
    await store.open()
    await store.write([session("s", 1), generation("a", "s"), generation("b", "s")])
    for index in range(100):
        await store.write([TokensDelivered("a", index, [1]), TokensDelivered("b", index, [2])])
    await store.write([GenerationEnded("a", FAILED, 1.0), GenerationGone("a")])
    await store.tidy()
    assert rows(tmp_path / "fleet.db", "batches") == 100
    await store.write([GenerationEnded("b", FAILED, 1.0), GenerationGone("b")])
    await store.tidy()
    assert rows(tmp_path / "fleet.db", "batches") == 0
    await store.close()


async def test_a_long_generation_holds_up_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    store = SqliteStore(file, batches_kept_bytes=10_000)
    await store.open()
    await store.write([session("s", 1), generation("long", "s")])
    for round_ in range(1_000):
        name = f"g{round_}"
        await store.write([generation(name, "s"), TokensDelivered("long", round_, [round_])])
        await store.write([TokensDelivered(name, 0, range(50)), GenerationEnded(name, FAILED, 1.0)])
        await store.write([GenerationGone(name)])
    # Nobody called for it: it happens on the way.
    assert rows(file, "batches") < 500
    assert 1 <= rows(file, "outputs") <= 100
    assert list((await read_again(file)).generations["long"].token_ids) == list(range(1_000))
    await store.close()


async def test_the_file_is_as_large_after_many_times_the_work(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    store = SqliteStore(file, batches_kept_bytes=50_000)
    await store.open()
    await store.write([session("s", 1)])

    async def work(rounds: range) -> int:
        for round_ in rounds:
            name = f"g{round_}"
            await store.write([generation(name, "s"), TokensDelivered(name, 0, range(1_000))])
            await store.write([GenerationEnded(name, FAILED, 1.0)])
            if round_ >= 20:
                await store.write([GenerationGone(f"g{round_ - 20}")])
        return file.stat().st_size + file.with_name("fleet.db-wal").stat().st_size

    await work(range(300))
    once = await work(range(300, 600))
    assert await work(range(600, 2_100)) < 1.2 * once
    await store.close()


async def test_answers_and_cancels_go_when_their_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    now = [100.0]
    store = SqliteStore(file, lambda: now[0])
    await store.open()
    answered = RequestAnswered("owner", "", b"", "s1", 0.0)
    batch: list[Record] = [
        replace(answered, request_id=f"r{n}", until=50.0 if n % 10 else 150.0) for n in range(1_000)
    ]
    await store.write([*batch, CancelHeld("", "old", 99.0), CancelHeld("", "new", 101.0)])
    await store.tidy()
    saved = await read_again(file)
    kept = [await store.answered("owner", f"r{n}") for n in range(1_000)]
    assert [answer and answer.until for answer in kept[::10]] == [150.0] * 100
    assert sum(answer is not None for answer in kept) == rows(file, "requests") == 100
    assert list(saved.cancels) == [("", "new")]
    await store.close()


async def test_a_generation_gets_no_tokens_of_an_earlier_one_that_had_its_number(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    store = SqliteStore(file)
    await store.open()
    await store.write([session("s", 1), generation("long", "s"), generation("old", "s")])
    await store.write([TokensDelivered("long", 0, [1]), TokensDelivered("old", 0, [66, 66])])
    await store.write([GenerationEnded("old", FAILED, 1.0), GenerationGone("old")])
    await store.close()
    store = SqliteStore(file)
    await store.open()
    await store.write([generation("new", "s"), TokensDelivered("new", 0, [5])])
    await store.close()
    store = SqliteStore(file)
    saved = await store.open()
    assert list(saved.generations["new"].token_ids) == [5]
    assert list(saved.generations["long"].token_ids) == [1]
    await store.close()


async def test_a_batch_that_failed_leaves_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    store = SqliteStore(file)
    await store.open()
    await store.write([session("s", 1), generation("kept", "s"), TokensDelivered("kept", 0, [1])])
    ended = GenerationEnded("kept", FAILED, 1.0)
    brief: list[Record] = [
        generation("brief", "s"),
        GenerationEnded("brief", FAILED, 1.0),
        GenerationGone("brief"),
    ]
    # The same number under another id is refused by the table, at the end of all that.
    bad = [ended, GenerationGone("kept"), *brief, session("other", 2), session("other", 3)]
    with pytest.raises(Exception, match="UNIQUE"):
        await store.write(bad)
    await store.write([TokensDelivered("kept", 1, [2]), generation("brief", "s")])
    await store.tidy()
    await store.close()
    store = SqliteStore(file)
    saved = await store.open()
    assert list(saved.generations["kept"].token_ids) == [1, 2]
    assert set(saved.generations) == {"kept", "brief"}
    assert set(saved.sessions) == {"s"}
    await store.close()


async def test_room_of_what_is_gone_is_given_back_while_the_head_runs(tmp_path: Path) -> None:
    file = tmp_path / "fleet.db"
    store = SqliteStore(file)
    await store.open()
    await store.take_term(5, 0)
    ids = list(range(20_000))
    crc32 = crc32_of(array("I", ids))
    names = [f"s{number}" for number in range(1, 801)]
    for number, name in enumerate(names, start=1):
        await store.write([session(name, number), ContextExtended(name, 0, ids, crc32)])
    await store.tidy()
    full_bytes = file.stat().st_size
    assert full_bytes > 60_000_000
    await store.write([SessionGone(name) for name in names[1:]])
    for number in range(1_001):  # now and then it is looked for
        await store.write([CancelHeld("o", f"g{number}", 1.0)])
    await store.tidy()
    await store.close()
    assert file.stat().st_size < full_bytes / 2
    store = SqliteStore(file)
    assert list((await store.open()).sessions) == ["s1"]
    assert list(await store.context("s1")) == ids
    await store.close()
