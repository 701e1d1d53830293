"""What every store does: keeps batches whole and in order, and gives back all of it when opened again."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from fleet_service.domain.context import Context
from fleet_service.domain.events import (
    Started,
)
from fleet_service.runtime.records import (
    AttemptStarted,
    CancelHeld,
    GenerationEnded,
    GenerationGone,
    NodeListed,
    NodeMarked,
    Record,
    RequestAnswered,
    RevokeOwed,
    Saved,
    SessionBound,
    SessionGone,
    TokensDelivered,
)
from fleet_service.runtime.store import SessionStore
from fleet_service.stores.memory import MemoryStore
from fleet_service.stores.sqlite import SqliteStore
from tests.stores.histories import FAILED, MOVED, extended, generation, histories, session


@pytest.fixture(params=["memory", "sqlite"])
async def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], Any]]:
    """Gives the store, opened; called again, after it was closed and opened once more."""
    memory = MemoryStore()
    opened: list[SessionStore] = []

    async def again() -> tuple[SessionStore, Saved]:
        if opened:
            await opened.pop().close()
        store = memory if request.param == "memory" else SqliteStore(tmp_path / "store" / "fleet.db")
        opened.append(store)
        return store, await store.open()

    yield again
    for store in opened:
        await store.close()


async def test_a_new_store_has_nothing(reopened: Callable[[], Any]) -> None:
    _, saved = await reopened()
    assert saved == Saved()


async def test_everything_written_is_there_again(reopened: Callable[[], Any]) -> None:
    store, _ = await reopened()
    await store.take_term(1_700_000_000, 2)
    await store.write(
        [
            session("s1", 1),
            session("s2", 2, owner="", ephemeral=True),
            extended("s1", 0, [1, 2, 2**32 - 1], [1, 2, 2**32 - 1]),
            SessionBound("s1", "node-a", "run-1", (1_700_000_000 << 32) + 1),
        ]
    )
    await store.write(
        [
            generation("g1", "s1"),
            generation("g2", "s2"),
            AttemptStarted("g1", 0, Started("a", 7), 1),
            TokensDelivered("g1", 0, [10, 11]),
            TokensDelivered("g2", 0, array("I", [20])),
            AttemptStarted("g1", 2, MOVED, 2),
        ]
    )
    await store.write([TokensDelivered("g1", 2, [12]), TokensDelivered("g2", 1, [21, 22, 23])])
    await store.write(
        [
            GenerationEnded("g2", FAILED, 99.5),
            extended("s1", 2, [5], [1, 2, 5]),
            session("s1", 1, parked=True, last_used_at=9.5),
            RequestAnswered("owner", "r1", b"\x01\x02", "s1", 5.5),
            CancelHeld("owner", "g9", 6.5),
            CancelHeld("", "g8", 6.5),
            RevokeOwed("node-a", "run-1", "s1", 2**62),
            RevokeOwed("node-a", "run-1", "s2", 5),
            NodeListed("10.0.0.1:8454"),
            NodeListed("10.0.0.2:8454", listed=False),
            NodeMarked("node-a", "drain", "oncall", 3.5, "disk", "night", 2.5, "fan"),
            NodeMarked("node-b", "cordon", "oncall", 3.5, ""),
        ]
    )
    await store.write(
        [
            CancelHeld("", "g8", 0),
            RevokeOwed("node-a", "run-1", "s2", 5, settled=True),
            NodeMarked("node-b", ""),
        ]
    )
    store, saved = await reopened()
    assert (saved.term, saved.branch, saved.torn) == (1_700_000_000, 2, False)
    assert list(saved.sessions) == ["s1", "s2"]
    first, second = saved.sessions.values()
    assert first.kept == session("s1", 1, parked=True, last_used_at=9.5)
    assert (first.context_length, first.context_crc32) == (3, Context([1, 2, 5]).crc32)
    assert first.bound == SessionBound("s1", "node-a", "run-1", (1_700_000_000 << 32) + 1)
    assert (second.kept, second.bound) == (session("s2", 2, owner="", ephemeral=True), None)
    assert list(await store.context("s1")) == [1, 2, 5]
    assert list(await store.context("s2")) == []
    running, ended = saved.generations["g1"], saved.generations["g2"]
    assert running.started == generation("g1", "s1")
    assert (list(running.token_ids), running.ended, running.attempts) == ([10, 11, 12], None, 2)
    assert running.marks == [(0, Started("a", 7)), (2, MOVED)]
    assert (list(ended.token_ids), ended.ended) == ([20, 21, 22, 23], GenerationEnded("g2", FAILED, 99.5))
    again = RequestAnswered("owner", "r1", b"\x01\x02", "s1", 5.5)
    assert await store.answered("owner", "r1") == again
    assert await store.answered("other", "r1") is None
    assert list(saved.cancels) == [("owner", "g9")]
    assert list(saved.revokes) == [("node-a", "run-1", "s1", 2**62)]
    assert saved.listed == {"10.0.0.1:8454": True, "10.0.0.2:8454": False}
    assert saved.marks == {
        "node-a": NodeMarked("node-a", "drain", "oncall", 3.5, "disk", "night", 2.5, "fan")
    }


async def test_what_is_over_is_gone_with_all_its_tokens(reopened: Callable[[], Any]) -> None:
    store, _ = await reopened()
    await store.take_term(5, 0)
    await store.write([session("s1", 1), extended("s1", 0, [1], [1]), generation("g1", "s1")])
    await store.write([TokensDelivered("g1", 0, [9])])
    await store.write([GenerationEnded("g1", FAILED, 1.0)])
    await store.write([GenerationGone("g1"), SessionGone("s1")])
    # The same ids again are other ones.
    await store.write([session("s1", 2), generation("g1", "s1")])
    store, saved = await reopened()
    assert saved.sessions["s1"].context_length == 0
    assert list(await store.context("s1")) == []
    assert list(saved.generations["g1"].token_ids) == []
    with pytest.raises(KeyError):
        await store.context("s9")


@pytest.mark.parametrize("cut", range(8))
async def test_a_context_is_cut_anywhere_and_goes_on_from_there(
    reopened: Callable[[], Any], cut: int
) -> None:
    store, _ = await reopened()
    ids = [1, 2, 3, 4, 5, 6, 7]
    await store.write([session("s1", 1), extended("s1", 0, ids[:3], ids[:3])])
    await store.write([extended("s1", 3, ids[3:], ids)])
    await store.write([extended("s1", cut, [], ids[:cut]), extended("s1", cut, [8], [*ids[:cut], 8])])
    store, saved = await reopened()
    assert list(await store.context("s1")) == [*ids[:cut], 8]
    assert saved.sessions["s1"].context_crc32 == Context([*ids[:cut], 8]).crc32


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
async def test_a_file_has_what_memory_has_whatever_was_written(
    tmp_path_factory: pytest.TempPathFactory, history: list[list[Record]]
) -> None:
    file = tmp_path_factory.mktemp("store") / "fleet.db"
    memory, store = MemoryStore(), SqliteStore(file)
    await store.open()
    for each in (memory, store):
        await each.take_term(7, 0)
    for batch in history:
        await memory.write(batch)
        await store.write(batch)
    await store.close()
    store = SqliteStore(file)
    saved, expected = await store.open(), await memory.open()
    assert saved == expected
    for session_id in expected.sessions:
        assert await store.context(session_id) == await memory.context(session_id)
    await store.close()
