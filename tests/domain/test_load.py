from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_service.domain.node_types import Report
from fleet_service.domain.placement import (
    Demand,
    Rates,
    estimate_ms,
    is_hot,
    kv_used_pct,
    typical_rates,
)
from tests.domain.fakes import MODEL, NOW_S, FakeNode

NOMINAL = Rates(20, 200)
MEASURED = Report(decode_tokens_per_s=40, prefill_tokens_per_s=1000)


def demand(prompt_tokens: int = 0, out: int = 256) -> Demand:
    return Demand(MODEL, prompt_tokens=prompt_tokens, expected_output_tokens=out)


# Worked out by hand from eta_ms = ahead*out*1000//decode + prompt*1000//prefill + out*1000//decode.
GOLDEN = [
    # report, reservations, prompt, out, eta_ms
    pytest.param(None, 0, 0, 256, 12_800, id="nothing known: 256 tokens at 20/s"),
    pytest.param(None, 0, 100, 256, 500 + 12_800, id="nothing known: 100 prompt tokens at 200/s"),
    pytest.param(None, 2, 100, 256, 2 * 12_800 + 500 + 12_800, id="own reservations wait in front"),
    pytest.param(MEASURED, 0, 1000, 100, 1000 + 2500, id="measured rates"),
    pytest.param(
        replace(MEASURED, lanes_active=2, queue_depth=1), 0, 1000, 100, 3 * 2500 + 1000 + 2500, id="others"
    ),
    pytest.param(
        replace(MEASURED, lanes_active=3, queue_depth=2, own_lanes_active=2, own_queue_depth=2),
        4,
        1000,
        100,
        (1 + 4) * 2500 + 1000 + 2500,
        id="own part of the report is not counted twice",
    ),
    pytest.param(
        replace(MEASURED, lanes_active=1, own_lanes_active=2),
        0,
        0,
        40,
        1000,
        id="a report that contradicts itself",
    ),
    pytest.param(
        Report(decode_tokens_per_s=3, prefill_tokens_per_s=7, lanes_active=1),
        0,
        10,
        10,
        3333 + 1428 + 3333,
        id="each term rounds down by itself",
    ),
    pytest.param(
        Report(decode_tokens_per_s=3, prefill_tokens_per_s=7, lanes_active=2),
        0,
        0,
        1,
        666 + 333,
        id="what is ahead rounds down as a whole",
    ),
    pytest.param(MEASURED, 0, 0, 0, 0, id="nothing to do"),
]


@pytest.mark.parametrize("report, reservations, prompt, out, eta_ms", GOLDEN)
def test_the_estimate_is_exactly_the_documented_one(
    report: Report | None, reservations: int, prompt: int, out: int, eta_ms: int
) -> None:
    node = FakeNode("a", reservations=reservations)
    if report is not None:
        node.reporting(report)
    assert estimate_ms(node, demand(prompt, out), NOMINAL, NOW_S) == eta_ms


def test_a_report_ten_seconds_old_loses_its_load_and_keeps_its_rates() -> None:
    report = replace(MEASURED, lanes_active=4)
    fresh = FakeNode("a", reservations=1).reporting(report, age_s=9.999)
    stale = FakeNode("b", reservations=1).reporting(report, age_s=10)
    assert estimate_ms(fresh, demand(out=40), NOMINAL, NOW_S) == 5 * 1000 + 1000
    assert estimate_ms(stale, demand(out=40), NOMINAL, NOW_S) == 1 * 1000 + 1000


def test_a_rate_not_reported_counts_as_the_mean_of_those_that_are() -> None:
    nodes = [
        FakeNode("slow").reporting(Report(decode_tokens_per_s=10), age_s=500),
        FakeNode("fast").reporting(Report(decode_tokens_per_s=31, prefill_tokens_per_s=900)),
        FakeNode("new").reporting(Report()),
        FakeNode("silent"),
    ]
    typical = typical_rates(nodes)
    assert typical == Rates(20, 900)
    for unmeasured in nodes[2:]:
        assert estimate_ms(unmeasured, demand(90, 40), typical, NOW_S) == 100 + 2000
    assert estimate_ms(nodes[0], demand(90, 40), typical, NOW_S) == 100 + 4000


def test_where_no_node_has_reported_a_rate_twenty_and_two_hundred_stand_in() -> None:
    assert typical_rates([]) == NOMINAL
    assert typical_rates([FakeNode("a"), FakeNode("b").reporting(Report())]) == NOMINAL


def test_occupancy_is_whole_percent_and_unknown_without_a_fresh_report() -> None:
    full = Report(kv_blocks_used=899, kv_blocks_total=1000)
    assert kv_used_pct(FakeNode("a").reporting(full), NOW_S) == 89
    assert kv_used_pct(FakeNode("a").reporting(full, age_s=10), NOW_S) is None
    assert kv_used_pct(FakeNode("a").reporting(Report()), NOW_S) is None
    assert kv_used_pct(FakeNode("a"), NOW_S) is None


@pytest.mark.parametrize("used, hot", [(899, False), (900, True), (1000, True)])
def test_a_node_is_hot_from_the_configured_occupancy_on(used: int, hot: bool) -> None:
    node = FakeNode("a").reporting(Report(kv_blocks_used=used, kv_blocks_total=1000))
    assert is_hot(node, 90, NOW_S) is hot


def test_a_node_last_seen_hot_stays_hot_until_a_fresh_report_says_otherwise() -> None:
    cool = Report(kv_blocks_used=1, kv_blocks_total=1000)
    assert is_hot(FakeNode("a", was_hot=True), 90, NOW_S)
    assert is_hot(FakeNode("a", was_hot=True).reporting(cool, age_s=10), 90, NOW_S)
    assert not is_hot(FakeNode("a", was_hot=True).reporting(cool), 90, NOW_S)
    assert not is_hot(FakeNode("a").reporting(cool, age_s=10), 90, NOW_S)
