"""What readers of a generation's log see: everything once, in order, each at its own pace."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.events import (
    Accepted,
    Event,
    Finished,
    FinishReason,
    MoveCause,
    Moved,
    Started,
    Timings,
    Tokens,
)
from fleet_service.runtime.tokenlog import Cursor, Follower, Reader, TokenLog

FINISHED = Finished(FinishReason.LENGTH, 4, 6, 1, Timings(0.0, 0.1, 0.2, 0.1))
STARTED = Started("node-1", 7)


def _moved(at: int) -> Moved:
    return Moved("node-1", "node-2", MoveCause.LINK_LOST, at, 0.1, 8)


def _log() -> TokenLog:
    return TokenLog(Accepted("g", "s"))


def _tokens(events: list[Event]) -> list[int]:
    seen: list[int] = []
    for event in events:
        if isinstance(event, Tokens):
            assert event.first_index == len(seen)
            seen.extend(event.token_ids)
    return seen


def test_a_reader_that_comes_late_sees_what_the_first_one_saw() -> None:
    log = _log()
    log.mark(STARTED)
    log.append([1, 2, 3])
    log.mark(_moved(3))
    log.append([4, 5])
    log.append([6])
    log.finish(FINISHED)
    events = Cursor(log, 0).take()
    assert [type(event) for event in events] == [Accepted, Started, Tokens, Moved, Tokens, Finished]
    assert _tokens(events) == [1, 2, 3, 4, 5, 6]


def test_a_reader_at_an_index_gets_the_rest_and_where_it_started() -> None:
    log = _log()
    log.mark(STARTED)
    log.append([1, 2, 3])
    log.mark(_moved(3))
    log.append([4])
    late = Cursor(log, 2).take()
    assert late[:2] == [log.accepted, STARTED]
    assert [(e.first_index, list(e.token_ids)) for e in late if isinstance(e, Tokens)] == [(2, [3]), (3, [4])]
    after_the_move = Cursor(log, 4).take()
    assert after_the_move == [log.accepted, STARTED]


def test_there_is_one_terminal_event() -> None:
    log = _log()
    log.finish(FINISHED)
    with pytest.raises(RuntimeError, match="one terminal event"):
        log.finish(FINISHED)


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 2**32 - 1), max_size=5), st.just("mark"), st.just("take"))),
    st.integers(0, 3),
)
def test_whatever_the_pace_a_reader_misses_and_repeats_nothing(steps: list[object], start: int) -> None:
    log = _log()
    log.append(list(range(start)))
    cursor = Cursor(log, start)
    seen: list[Event] = []
    marks = 0
    for step in steps:
        if step == "mark":
            log.mark(_moved(log.received))
            marks += 1
        elif step == "take":
            seen += cursor.take()
        else:
            assert isinstance(step, list)
            log.append(step)
    log.finish(FINISHED)
    seen += cursor.take()
    assert cursor.take() == []
    delivered = [t for event in seen if isinstance(event, Tokens) for t in event.token_ids]
    assert delivered == list(log.slice(start))
    assert sum(isinstance(event, Moved) for event in seen) == marks
    assert isinstance(seen[0], Accepted)
    assert isinstance(seen[-1], Finished)


async def test_a_waiting_reader_wakes_when_there_is_something() -> None:
    log = _log()
    closed: list[Follower] = []
    reader = Reader(log, 0, closed.append)
    assert await reader.read() == [log.accepted]
    waiting = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    log.append([1])
    log.append([2])
    assert [list(event.token_ids) for event in await waiting if isinstance(event, Tokens)] == [[1, 2]]
    log.finish(FINISHED)
    assert await reader.read() == [FINISHED]
    with pytest.raises(RuntimeError, match="ended"):
        await reader.read()
    reader.close()
    reader.close()
    assert closed == [reader]


async def test_closing_a_reader_wakes_whoever_waits_on_it() -> None:
    reader = Reader(_log(), 0, lambda _reader: None)
    await reader.read()
    waiting = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    reader.close()
    with pytest.raises(RuntimeError, match="ended"):
        await waiting
