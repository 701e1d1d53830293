"""How a head looks for reference cycles: often through what is new, seldom through all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fleet_service.garbage import ALL_AGAIN_S, SET_ASIDE_ABOVE, Garbage, looked_for_in_pieces


class Thing:
    """May be one end of a cycle."""

    def __init__(self) -> None:
        self.other: object = None


def cycle() -> tuple[Thing, weakref.ref[Thing]]:
    thing = Thing()
    thing.other = thing
    return thing, weakref.ref(thing)


class Head:
    """What a head's garbage is looked for by, at moments of the test's choice."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.idle = True
        self.blocks = 1_000
        self.garbage = Garbage(lambda: self.idle, lambda: self.now_s, lambda: self.blocks)


@pytest.fixture
def head() -> Iterator[Head]:
    with looked_for_in_pieces(lambda: True):
        yield Head()
    gc.unfreeze()


def make_much() -> list[Thing]:
    """Enough that the newest are looked through of themselves, and some more."""
    return [Thing() for _ in range(10 * SET_ASIDE_ABOVE)]


def test_what_is_new_and_in_a_cycle_is_found(head: Head) -> None:
    thing, found = cycle()
    del thing
    stays = make_much()
    head.garbage.look()
    assert found() is None
    assert stays


def test_what_was_looked_through_and_stays_is_set_aside_and_still_freed_when_it_goes(head: Head) -> None:
    before = gc.get_freeze_count()
    stays = make_much()
    head.garbage.look()
    assert gc.get_freeze_count() - before > SET_ASIDE_ABOVE
    last = weakref.ref(stays[-1])
    stays.clear()
    assert last() is None


def test_nothing_is_looked_through_where_little_is_new(head: Head) -> None:
    head.garbage.look()
    before = gc.get_stats()[2]["collections"]
    for _ in range(10):
        head.garbage.look()
    assert gc.get_stats()[2]["collections"] == before


@pytest.mark.parametrize("lacking", ["nothing", "time", "growth", "idleness"])
def test_what_was_set_aside_is_looked_through_when_there_is_much_more_and_nothing_to_do(
    head: Head, lacking: str
) -> None:
    thing, found = cycle()
    stays = make_much()
    head.garbage.look()
    del thing
    head.garbage.look()
    assert found() is not None, "it was set aside while it was used"
    head.now_s = 0.0 if lacking == "time" else ALL_AGAIN_S
    head.blocks = 2_000 if lacking == "growth" else 2_001
    head.idle = lacking != "idleness"
    head.garbage.look()
    assert (found() is None) == (lacking == "nothing")
    assert stays


def test_the_interpreters_own_ways_are_back_afterwards() -> None:
    before = gc.get_threshold()
    with looked_for_in_pieces(lambda: True):
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
