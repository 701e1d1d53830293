"""How results are summed up, and how loads are shared out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan import (
    STEP_US,
    Histogram,
    Outcome,
    Plan,
    Spread,
    count,
    due_s,
    outcome_of,
    percentile_ms,
    plan_of,
    shared_out,
    spread,
    to_line,
    together,
)
from benchmarks.pool import parts_of

PLAN = Plan("complete", "127.0.0.1:1", slots=5, tokens=3, connections=4, from_s=0.0, until_s=1.0)


@given(st.lists(st.integers(0, 10_000_000), min_size=1), st.sampled_from([1, 50, 99, 100]))
def test_a_percentile_is_a_time_that_so_many_are_not_above(times_us: list[int], percent: int) -> None:
    histogram: Histogram = {}
    for time_us in times_us:
        count(histogram, time_us)
    found_ms = percentile_ms(histogram, percent)
    assert found_ms is not None
    rounded = [time_us // STEP_US * STEP_US / 1e3 for time_us in times_us]
    assert found_ms in rounded
    assert sum(each <= found_ms for each in rounded) * 100 >= percent * len(rounded)
    assert sum(each < found_ms for each in rounded) * 100 < percent * len(rounded)


def test_no_times_have_no_percentile() -> None:
    assert percentile_ms({}, 50) is None


def test_of_several_runs_the_least_the_median_and_the_most_are_told() -> None:
    assert spread([3.0, None, 1.0, 7.0]) == Spread(1.0, 3.0, 7.0)
    assert spread([1.0, 2.0]) == Spread(1.0, 1.5, 2.0)
    assert spread([None]) is None


@given(st.integers(0, 1000), st.integers(1, 20))
def test_what_is_shared_out_is_whole_and_even(whole: int, parts: int) -> None:
    shares = shared_out(whole, parts)
    assert sum(shares) == whole
    assert len(shares) == parts
    assert max(shares) - min(shares) <= 1


def test_an_open_loop_begins_each_call_at_its_time_whatever_came_before() -> None:
    assert [due_s(number, 4.0) for number in range(4)] == [0.0, 0.25, 0.5, 0.75]


def test_a_plan_for_two_processes_asks_for_as_much_as_one() -> None:
    parts = parts_of(PLAN, 2)
    assert [(part.slots, part.connections) for part in parts] == [(3, 2), (2, 2)]
    assert len({part.salt for part in parts}) == 2


def test_one_stream_is_one_process_work() -> None:
    one = Plan("sse", "127.0.0.1:1", slots=1, tokens=3, connections=4, from_s=0.0, until_s=1.0)
    assert [part.slots for part in parts_of(one, 2)] == [1]


def test_plans_and_outcomes_cross_between_processes_as_they_are() -> None:
    outcome = Outcome(tokens=3, way_us={2: 1, 30: 4}, cpu_s=[0.5], failure="x")
    assert plan_of(to_line(PLAN)) == PLAN
    assert outcome_of(to_line(outcome)) == outcome


def test_what_two_processes_saw_is_added_up() -> None:
    total = together(
        [
            Outcome(tokens=2, lost=1, way_us={1: 2}, cpu_s=[0.1]),
            Outcome(tokens=3, way_us={1: 1, 5: 1}, cpu_s=[0.2]),
        ]
    )
    assert (total.tokens, total.lost, total.way_us, total.cpu_s) == (5, 1, {1: 3, 5: 1}, [0.1, 0.2])
