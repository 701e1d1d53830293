"""The tables, the targets and the picture."""

from __future__ import annotations

from itertools import groupby
from xml.etree import ElementTree as ET

from benchmarks.about import About
from benchmarks.failover import lost_of
from benchmarks.goals import CONNECT, SGLANG, goals
from benchmarks.measure import Result, result_of
from benchmarks.picture import drawn
from benchmarks.plan import Outcome
from benchmarks.report import line_of, text
from benchmarks.suite import Everything
from benchmarks.works import BY_KEY


def result(target: str, run: int, used_s: float, work: str = "full-128") -> Result:
    outcome = Outcome(tokens=100_000, requests=50, way_us={100: 100_000}, cpu_s=[0.4], lag_us={1: 10})
    return result_of(BY_KEY[work], target, run, outcome, 2.0, used_s, 50_000_000)


def everything(*results: Result) -> Everything:
    return Everything(About(3, 2, "a processor", "a system", {"python": "3.11"}, 0.5), list(results))


def test_cost_is_cpu_time_by_what_came_in_that_time() -> None:
    assert result(CONNECT, 0, 0.4).us_per_token == 4.0
    assert result(CONNECT, 0, 0.4).us_per_request is None
    one_token = result(CONNECT, 0, 0.4, "one-64")
    assert (one_token.us_per_token, one_token.us_per_request) == (None, 8_000.0)


def test_a_row_tells_the_median_the_least_and_the_most() -> None:
    told = text(everything(*(result(CONNECT, run, used) for run, used in enumerate((0.4, 0.5, 0.9)))))
    assert "5.00 (4.00–9.00)" in told
    assert "128 streams, full speed" in told


def test_the_columns_of_a_table_line_up() -> None:
    told = text(everything(result(CONNECT, 0, 0.4), result(SGLANG, 0, 12.3)))
    tables = [list(lines) for bar, lines in groupby(told.splitlines(), lambda line: line[:1]) if bar == "|"]
    assert len(tables) == 3
    assert all(len({len(line) for line in lines}) == 1 for lines in tables)


def test_a_target_is_told_as_met_or_missed_or_not_measured() -> None:
    found = {
        (goal.what, goal.target): goal.verdict
        for goal in goals(everything(result(CONNECT, 0, 0.42), result(SGLANG, 0, 0.8)))
    }
    assert found["Connect, 128 at full speed, a token", "≤ 4.5 µs"] == "met"
    assert found["Connect, 128 at full speed, a token", "≤ 0.5 × sglang-router"] == "missed"
    assert found["Connect, 512 x 25/s, a token", "≤ 14 µs"] == "not measured"


def test_a_peer_that_is_skipped_is_shown_with_the_reason() -> None:
    all_of_it = everything(result(CONNECT, 0, 0.4))
    all_of_it.skipped["nginx"] = "nginx is not installed"
    assert "nginx is not installed" in text(all_of_it)


def test_a_driver_that_was_too_busy_is_told() -> None:
    outcome = Outcome(tokens=1, cpu_s=[1.9, 0.1])
    busy = result_of(BY_KEY["full-128"], CONNECT, 0, outcome, 2.0, 0.1, None)
    assert busy.driver_limits
    assert "the driver may limit it" in text(everything(busy))


def test_calls_that_failed_are_told_in_lines_and_tables() -> None:
    outcome = Outcome(tokens=1, lost=3, failure="no way", cpu_s=[0.1])
    failed = result_of(BY_KEY["full-128"], CONNECT, 0, outcome, 2.0, 0.1, None)
    assert "LOST 3: no way" in line_of(failed)
    assert "3 calls failed: no way" in text(everything(failed))


def test_streams_that_were_cut_have_no_gap_but_are_counted() -> None:
    lost = lost_of("haproxy", "killed", Outcome(lost=2, gaps_ms=[5.0, 6.0]), 0.1)
    assert (lost.touched, lost.cut, lost.gap_p99_ms) == (2, 2, None)
    moved = lost_of("head", "killed", Outcome(gaps_ms=[5.0, 6.0]), 0.1)
    assert (moved.touched, moved.cut, moved.gap_p99_ms) == (2, 0, 6.0)


def test_the_picture_is_svg_with_a_bar_for_each() -> None:
    picture = ET.fromstring(drawn([result(CONNECT, 0, 0.4), result(SGLANG, 0, 0.8)]))
    bars = [each for each in picture if each.tag.endswith("rect")]
    assert len(bars) == 1 + 2
    assert picture.get("width")


def test_streams_that_are_slower_than_their_nodes_are_told() -> None:
    fast, slow = Outcome(tokens=25_600, cpu_s=[0.1]), Outcome(tokens=20_000, cpu_s=[0.1])
    rows = [
        result_of(BY_KEY["paced-512x25-4"], CONNECT, 0, outcome, 2.0, 0.1, None) for outcome in (fast, slow)
    ]
    assert "not at the pace" not in text(everything(rows[0]))
    assert "not at the pace of its nodes" in text(everything(rows[1]))
