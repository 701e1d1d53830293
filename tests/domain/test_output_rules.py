from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.events import FinishReason
from fleet_service.domain.output_rules import OutputEnd, OutputRules

EOS, STOP, LENGTH = FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH
NO_EOS: frozenset[int] = frozenset()


def test_output_goes_on_while_no_rule_ends_it() -> None:
    rules = OutputRules(frozenset({2}), ((7, 8),), 10)
    assert rules.accept([1, 3, 7]) == (3, None)
    assert rules.accept([]) == (0, None)
    assert (rules.count, rules.remaining, rules.end_now()) == (3, 7, None)


def test_an_eos_is_delivered_and_later_tokens_are_dropped() -> None:
    rules = OutputRules(frozenset({2, 99}), (), 10)
    assert rules.accept([1, 99, 5, 2]) == (2, OutputEnd(EOS))
    assert rules.accept([4]) == (0, OutputEnd(EOS))
    assert (rules.count, rules.remaining, rules.end_now()) == (2, 0, OutputEnd(EOS))


def test_a_stop_sequence_is_delivered_and_named() -> None:
    rules = OutputRules(NO_EOS, ((4, 4), (5, 6)), 10)
    assert rules.accept([5, 5, 6, 9]) == (3, OutputEnd(STOP, 1))


def test_a_stop_sequence_split_over_a_failover_is_found() -> None:
    rules = OutputRules(NO_EOS, ((5, 6, 7),), 10)
    assert rules.accept([1, 5]) == (2, None)
    assert rules.accept([6]) == (1, None)
    assert rules.accept([7, 8]) == (1, OutputEnd(STOP, 0))


def test_a_stop_sequence_that_overlaps_its_own_beginning_is_found() -> None:
    rules = OutputRules(NO_EOS, ((1, 1, 2),), 10)
    assert rules.accept([1, 1, 1, 2]) == (4, OutputEnd(STOP, 0))


def test_of_two_stop_sequences_the_one_completed_first_counts() -> None:
    rules = OutputRules(NO_EOS, ((1, 2, 3, 4), (2, 3)), 10)
    assert rules.accept([1, 2, 3, 4]) == (3, OutputEnd(STOP, 1))


def test_of_two_completed_by_one_token_the_first_listed_counts() -> None:
    rules = OutputRules(NO_EOS, ((9,), (2, 3), (3,)), 10)
    assert rules.accept([2, 3]) == (2, OutputEnd(STOP, 1))


def test_a_token_that_is_eos_stop_and_last_at_once_ends_as_eos() -> None:
    assert OutputRules(frozenset({3}), ((3,),), 1).accept([3]) == (1, OutputEnd(EOS))


def test_a_token_that_completes_a_stop_at_the_limit_ends_as_stop() -> None:
    assert OutputRules(NO_EOS, ((1, 3),), 2).accept([1, 3]) == (2, OutputEnd(STOP, 0))


def test_the_limit_cuts_a_batch_and_what_stands_behind_it() -> None:
    rules = OutputRules(frozenset({9}), (), 3)
    assert rules.accept([1, 2, 3, 9]) == (3, OutputEnd(LENGTH))
    assert rules.remaining == 0


def test_a_limit_of_zero_ends_before_any_token() -> None:
    rules = OutputRules(NO_EOS, (), 0)
    assert rules.end_now() == OutputEnd(LENGTH)
    assert rules.accept([1]) == (0, OutputEnd(LENGTH))


def test_an_empty_stop_sequence_or_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="stop sequence 1 is empty"):
        OutputRules(NO_EOS, ((1,), ()), 5)
    with pytest.raises(ValueError, match="negative"):
        OutputRules(NO_EOS, (), -1)


def naive(
    output: list[int], eos: frozenset[int], stop: tuple[tuple[int, ...], ...], limit: int
) -> tuple[int, OutputEnd | None]:
    """Search the whole list again after every token."""
    if limit == 0:
        return 0, OutputEnd(LENGTH)
    for count in range(1, len(output) + 1):
        so_far = output[:count]
        if so_far[-1] in eos:
            return count, OutputEnd(EOS)
        for index, sequence in enumerate(stop):
            if tuple(so_far[-len(sequence) :]) == sequence:
                return count, OutputEnd(STOP, index)
        if count == limit:
            return count, OutputEnd(LENGTH)
    return len(output), None


few_tokens = st.integers(0, 3)


@given(
    batches=st.lists(st.lists(few_tokens, max_size=5), max_size=12),
    eos=st.frozensets(st.integers(3, 5), max_size=1),
    stop=st.lists(st.lists(few_tokens, min_size=1, max_size=5).map(tuple), max_size=4).map(tuple),
    limit=st.integers(0, 40),
)
def test_whatever_the_batching_output_ends_where_a_search_of_all_of_it_says(
    batches: list[list[int]], eos: frozenset[int], stop: tuple[tuple[int, ...], ...], limit: int
) -> None:
    output = [token_id for batch in batches for token_id in batch]
    rules = OutputRules(eos, stop, limit)
    end = rules.end_now()
    delivered: list[int] = []
    for batch in batches:
        taken, end = rules.accept(batch)
        delivered += batch[:taken]
    expected_count, expected_end = naive(output, eos, stop, limit)
    assert (len(delivered), end) == (expected_count, expected_end)
    assert delivered == output[:expected_count]
    assert rules.count == expected_count
    assert rules.end_now() == expected_end
    assert rules.remaining == (0 if end else limit - expected_count)
