from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.epochs import EpochCounter, choose_term, make_epoch, term_of

terms = st.integers(0, 2**32 - 1)


def test_an_epoch_is_its_term_over_its_number() -> None:
    assert make_epoch(5, 7) == 5 * 2**32 + 7
    assert term_of(5 * 2**32 + 7) == 5


@pytest.mark.parametrize("term, n", [(-1, 1), (2**32, 1), (1, -1), (1, 2**32)])
def test_an_epoch_that_would_not_fit_is_refused(term: int, n: int) -> None:
    with pytest.raises(ValueError, match="is not in"):
        make_epoch(term, n)


def test_a_counter_starts_at_one_and_knows_its_term() -> None:
    counter = EpochCounter(9)
    assert counter.term == 9
    assert [counter.next(), counter.next()] == [make_epoch(9, 1), make_epoch(9, 2)]


@pytest.mark.parametrize("term", [-1, 2**32])
def test_a_counter_of_an_impossible_term_is_refused(term: int) -> None:
    with pytest.raises(ValueError, match="term"):
        EpochCounter(term)


def test_a_run_takes_its_term_from_the_clock() -> None:
    assert choose_term(1_800_000_000, []) == 1_800_000_000
    assert choose_term(1_800_000_000, [make_epoch(1_700_000_000, 12), 0]) == 1_800_000_000


def test_a_clock_that_went_back_does_not_make_a_run_older_than_its_predecessor() -> None:
    assert choose_term(100, [make_epoch(250, 3), make_epoch(300, 99)]) == 301


def test_a_node_that_reports_an_impossible_epoch_leaves_no_term() -> None:
    with pytest.raises(ValueError, match="term"):
        choose_term(100, [make_epoch(2**32 - 1, 5)])


@given(term=terms, steps=st.integers(1, 50))
def test_epochs_of_a_run_strictly_rise_and_carry_its_term(term: int, steps: int) -> None:
    counter = EpochCounter(term)
    epochs = [counter.next() for _ in range(steps)]
    assert epochs == sorted(set(epochs))
    assert {term_of(epoch) for epoch in epochs} == {term}


@given(
    unix_s=st.integers(0, 2**32 - 2),
    seen=st.lists(st.integers(0, (2**32 - 1) * 2**32 - 1), max_size=5),
)
def test_every_epoch_of_a_new_run_is_above_every_epoch_seen(unix_s: int, seen: list[int]) -> None:
    counter = EpochCounter(choose_term(unix_s, seen))
    assert counter.next() > max(seen, default=0)
    assert counter.term >= unix_s
