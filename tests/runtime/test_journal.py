"""What is written down, and when it is seen: together, in order, and never before it is kept."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from fleet_service.domain.events import Accepted, Event, Finished, FinishReason, Started, Timings, Tokens
from fleet_service.runtime.journal import Durability, StoreJournal
from fleet_service.runtime.records import (
    GenerationEnded,
    GenerationGone,
    Record,
    RequestAnswered,
    Saved,
    SessionGone,
    TokensDelivered,
)
from fleet_service.runtime.store import StoreError, StoreTrouble
from fleet_service.runtime.tokenlog import Cursor, TokenLog

FINISHED = Finished(FinishReason.LENGTH, 4, 6, 1, Timings(0.0, 0.1, 0.2, 0.1))
FULL = StoreError(StoreTrouble.FULL, "full")
AWAY = StoreError(StoreTrouble.UNAVAILABLE, "away")
DAMAGED = StoreError(StoreTrouble.CORRUPT, "damaged")
ENDED = GenerationEnded("g", FINISHED, 1.0)
_PATIENCE_S = 10.0


class SteeredStore:
    """Keeps a batch when the test lets it, or fails as the test says."""

    def __init__(self) -> None:
        self.kept: list[list[Record]] = []
        self.asked = 0
        self.held = False
        self.let_through = 0
        self.failures: list[Exception] = []
        self.always: Exception | None = None
        self._changed = asyncio.Condition()

    async def open(self) -> Saved:
        return Saved()

    async def take_term(self, term: int, branch: int, *, tells_ahead: bool = False) -> None:
        return

    async def write(self, batch: Sequence[Record]) -> None:
        async with self._changed:
            self.asked += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: not self.held or self.let_through)
            self.let_through = max(self.let_through - 1, 0)
        if self.always is not None:
            raise self.always
        if self.failures:
            raise self.failures.pop(0)
        self.kept.append(list(batch))

    async def context(self, session_id: str) -> array[int]:
        return array("I", [1, 2, 3])

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return None

    async def close(self) -> None:
        return

    async def until_asked(self, times: int) -> None:
        async with asyncio.timeout(_PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.asked >= times)

    async def let(self, *, one: bool = False) -> None:
        """Let what is held through: all, or one batch and no more."""
        async with self._changed:
            self.held, self.let_through = one, int(one)
            self._changed.notify_all()

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.kept for record in batch]


class Desk:
    """A journal on a steered store."""

    def __init__(self, durability: Durability = Durability.STRICT) -> None:
        self.store = SteeredStore()
        self.broken: list[StoreError] = []
        self.journal = StoreJournal(self.store, durability, broken=self.broken.append)
        self.journal.start()

    def log(self, name: str = "g") -> TokenLog:
        return TokenLog(Accepted(name, "s"), self.journal)

    def trouble(self) -> StoreError | None:
        return self.journal.trouble

    async def settled(self) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            await self.journal.settled()

    async def stop(self) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            await self.journal.stop()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    yield made
    made.store.always = None
    await made.store.let()
    await made.stop()


def seen(cursor: Cursor) -> tuple[list[int], Event | None]:
    """All tokens of what is new to a reader, and the end."""
    events = cursor.take()
    ids = [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]
    return ids, events[-1] if events and isinstance(events[-1], Finished) else None


async def shown(log: TokenLog, until: Callable[[], bool]) -> None:
    """Wait until readers were called back and it is so."""
    changed = asyncio.Event()
    log.subscribe(changed.set)
    async with asyncio.timeout(_PATIENCE_S):
        while not until():
            await changed.wait()
            changed.clear()
    log.unsubscribe(changed.set)


async def test_all_that_comes_while_a_batch_is_written_is_the_next_batch(desk: Desk) -> None:
    desk.store.held = True
    logs = [desk.log(f"g{n}") for n in range(100)]
    desk.journal.put(SessionGone("first"))
    await desk.store.until_asked(1)
    for index in range(5):
        for log in logs:
            log.append([index])
        desk.journal.put(SessionGone(f"s{index}"))
    await desk.store.let()
    await desk.settled()
    assert [len(batch) for batch in desk.store.kept] == [1, 105]
    tokens = [record for record in desk.store.kept[1] if isinstance(record, TokensDelivered)]
    assert [list(record.token_ids) for record in tokens] == [[0, 1, 2, 3, 4]] * 100


async def test_a_token_is_seen_when_it_is_kept_and_not_before(desk: Desk) -> None:
    log = desk.log()
    cursor = Cursor(log, 0)
    desk.store.held = True
    log.append([1, 2])
    await desk.store.until_asked(1)
    log.append([3])
    assert seen(cursor) == ([], None)
    await desk.store.let()
    await shown(log, lambda: log.visible == 3)
    assert desk.store.records == [
        TokensDelivered("g", 0, array("I", [1, 2])),
        TokensDelivered("g", 2, array("I", [3])),
    ]
    assert seen(cursor) == ([1, 2, 3], None)


async def test_the_first_batch_shows_its_own_tokens_alone(desk: Desk) -> None:
    log = desk.log()
    desk.store.held = True
    log.append([1])
    await desk.store.until_asked(1)
    log.append([2])
    await desk.store.let(one=True)
    await desk.store.until_asked(2)
    assert (log.visible, log.received) == (1, 2)


async def test_the_end_is_seen_when_it_is_kept_with_the_last_tokens(desk: Desk) -> None:
    log = desk.log()
    cursor = Cursor(log, 0)
    desk.store.held = True
    log.append([1])
    log.finish(FINISHED)
    desk.journal.put(ENDED)
    await desk.store.until_asked(1)
    assert seen(cursor) == ([], None)
    assert log.ended is None
    await desk.store.let()
    await shown(log, lambda: log.ended is not None)
    assert desk.store.kept == [[TokensDelivered("g", 0, array("I", [1])), ENDED]]
    assert seen(cursor) == ([1], FINISHED)


async def test_changes_are_kept_in_the_order_in_which_they_were_put(desk: Desk) -> None:
    put: list[Record] = []
    for n in range(50):
        records: list[Record] = [SessionGone(f"s{n}"), GenerationGone(f"g{n}")]
        desk.journal.put(*records)
        put += records
        if n % 7 == 0:
            await desk.settled()
    await desk.settled()
    assert desk.store.records == put


async def test_an_answer_waits_until_what_it_tells_of_is_kept(desk: Desk) -> None:
    desk.store.held = True
    desk.journal.put(SessionGone("s"))
    answer = asyncio.create_task(desk.settled())
    await desk.store.until_asked(1)
    assert not answer.done()
    await desk.store.let()
    await answer
    assert desk.store.records == [SessionGone("s")]


async def test_a_caller_that_leaves_while_it_waits_disturbs_nobody(desk: Desk) -> None:
    desk.store.held = True
    desk.journal.put(SessionGone("s"))
    leaver, stayer = asyncio.create_task(desk.settled()), asyncio.create_task(desk.settled())
    await desk.store.until_asked(1)
    leaver.cancel()
    await asyncio.wait({leaver})
    assert not stayer.done()
    await desk.store.let()
    await stayer
    assert (leaver.cancelled(), desk.store.records) == (True, [SessionGone("s")])


async def test_who_is_impatient_waits_no_longer_once_nothing_can_be_kept(desk: Desk) -> None:
    desk.store.held, desk.store.always = True, FULL
    desk.journal.put(SessionGone("s"))
    read, done = (asyncio.create_task(desk.journal.settled(patient=patient)) for patient in (False, True))
    await desk.store.until_asked(1)
    late = asyncio.create_task(desk.journal.settled(patient=False))
    await desk.store.let()
    for each in (read, late):
        with pytest.raises(StoreError, match="full"):
            await each
    with pytest.raises(StoreError, match="full"):
        await desk.journal.settled(patient=False)
    assert not done.done()
    desk.store.always = None
    await done
    await desk.journal.settled(patient=False)


async def test_what_stands_between_tokens_is_seen_once_it_is_kept(desk: Desk) -> None:
    desk.store.held = True
    log = desk.log()
    cursor = Cursor(log, 0)
    log.mark(Started("a", 7))
    desk.journal.put(SessionGone("with it"))
    log.append([1])
    await desk.store.until_asked(1)
    assert cursor.take() == [log.accepted]
    await desk.store.let()
    await shown(log, lambda: log.visible == 1)
    assert cursor.take() == [Started("a", 7), Tokens(0, array("I", [1]))]


@pytest.mark.parametrize("trouble", [FULL, AWAY])
async def test_a_store_that_fails_for_a_while_is_tried_until_it_works(
    desk: Desk, trouble: StoreError
) -> None:
    log = desk.log()
    desk.store.always = trouble
    log.append([1])
    await desk.store.until_asked(3)
    assert desk.trouble() is trouble
    assert log.visible == 0
    log.append([2])
    desk.store.always = None
    await shown(log, lambda: log.visible == 2)
    assert desk.trouble() is None
    assert [list(r.token_ids) for r in desk.store.records if isinstance(r, TokensDelivered)] == [[1], [2]]
    assert desk.broken == []


@pytest.mark.parametrize("failures", [[DAMAGED], [FULL, AWAY, DAMAGED], [ZeroDivisionError("a fault")]])
async def test_a_store_that_fails_for_good_is_told_of_once_and_shows_nothing(
    desk: Desk, failures: list[Exception]
) -> None:
    log = desk.log()
    desk.store.failures = failures
    log.append([1])
    with pytest.raises(StoreError) as caught:
        await desk.settled()
    log.append([2])
    log.finish(FINISHED)
    with pytest.raises(StoreError):
        await desk.settled()
    await desk.stop()
    assert desk.broken == [caught.value]
    assert caught.value.trouble is StoreTrouble.CORRUPT
    assert desk.journal.trouble is caught.value
    assert (log.visible, log.ended, desk.store.kept) == (0, None, [])


async def test_at_the_end_everything_is_written(desk: Desk) -> None:
    log = desk.log()
    desk.store.held = True
    desk.journal.put(SessionGone("s1"))
    await desk.store.until_asked(1)
    # This comes while a batch is written, then the head is stopped.
    log.append([1])
    desk.journal.put(SessionGone("s2"))
    stopping = asyncio.create_task(desk.stop())
    await asyncio.sleep(0)
    desk.journal.put(SessionGone("s3"))
    await desk.store.let()
    await stopping
    assert [r for r in desk.store.records if isinstance(r, SessionGone)] == [
        SessionGone("s1"),
        SessionGone("s2"),
        SessionGone("s3"),
    ]
    assert log.visible == 1


async def test_the_end_does_not_wait_for_a_store_that_stays_full(desk: Desk) -> None:
    log = desk.log()
    desk.store.always = FULL
    log.append([1])
    await desk.store.until_asked(2)
    waiting = asyncio.create_task(desk.settled())
    await asyncio.sleep(0)
    await desk.stop()
    with pytest.raises(StoreError):
        await waiting
    assert log.visible == 0
    # The head ends already: nobody needs to be told to end it.
    assert desk.broken == []


async def test_a_context_is_read_from_the_store_once_what_came_before_is_kept(desk: Desk) -> None:
    desk.store.held = True
    desk.journal.put(SessionGone("s"))
    reading = asyncio.create_task(desk.journal.context("s"))
    await desk.store.until_asked(1)
    await asyncio.sleep(0)
    assert not reading.done()
    await desk.store.let()
    assert list(await reading) == [1, 2, 3]


async def test_relaxed_shows_at_once_and_writes_soon() -> None:
    desk = Desk(Durability.RELAXED)
    log = desk.log()
    cursor = Cursor(log, 0)
    desk.store.held = True
    log.append([1, 2])
    await desk.settled()
    assert seen(cursor) == ([1, 2], None)
    log.finish(FINISHED)
    assert seen(cursor) == ([], FINISHED)
    await desk.store.let()
    await desk.stop()
    assert [list(r.token_ids) for r in desk.store.records if isinstance(r, TokensDelivered)] == [[1, 2]]


async def test_relaxed_tells_no_more_while_nothing_can_be_kept() -> None:
    desk = Desk(Durability.RELAXED)
    log = desk.log()
    cursor = Cursor(log, 0)
    desk.store.always = FULL
    log.append([1])
    await desk.store.until_asked(2)
    assert seen(cursor) == ([1], None)
    log.append([2])
    log.finish(FINISHED)
    told = asyncio.ensure_future(desk.settled())
    await desk.store.until_asked(desk.store.asked + 1)
    assert (seen(cursor), told.done()) == (([], None), False)
    desk.store.always = None
    await shown(log, lambda: log.ended is not None)
    assert seen(cursor) == ([2], FINISHED)
    await told
    await desk.stop()
