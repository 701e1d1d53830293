from __future__ import annotations

import pytest

from fleet_service.domain.node_types import NodeState, Report
from fleet_service.domain.placement import POLICY_NAMES, Demand, Verdict, explain, make_policy
from tests.domain.fakes import MODEL, NOW_S, FakeNode, place, serving, unlearned


def test_an_explanation_shows_the_best_first_and_why_the_others_were_left_out() -> None:
    nodes = [
        FakeNode("down", state=NodeState.DOWN),
        FakeNode("slow", reservations=2),
        FakeNode("hot", was_hot=True),
        FakeNode("best", models=serving(MODEL, window=4096), sessions=3, reservations=1).reporting(
            Report(
                decode_tokens_per_s=40,
                kv_blocks_used=7,
                kv_blocks_total=9,
                lanes_active=3,
                own_lanes_active=1,
            ),
            age_s=1.5,
        ),
        unlearned("new"),
    ]
    verdicts = explain(nodes, Demand(MODEL, prompt_tokens=100), make_policy("load-aware"), NOW_S)
    assert [(verdict.node, verdict.eligible, verdict.left_out) for verdict in verdicts] == [
        ("slow", True, ""),
        ("best", True, ""),
        ("down", False, "down"),
        ("hot", False, "hot"),
        ("new", False, "down"),
    ]
    assert verdicts[1] == Verdict(
        node="best",
        eligible=True,
        left_out="",
        eta_ms=3 * 6400 + 500 + 6400,
        ahead=3,
        decode_tokens_per_s=40,
        prefill_tokens_per_s=200,
        kv_used_pct=77,
        sessions=3,
        reservations=1,
        max_context_tokens=4096,
        report_age_ms=1500,
        decode_reported=True,
        prefill_reported=False,
    )


def test_the_rates_shown_for_a_node_that_reported_none_are_the_stand_ins_used() -> None:
    nodes = [FakeNode("known").reporting(Report(decode_tokens_per_s=70)), FakeNode("new")]
    new = explain(nodes, Demand(MODEL), make_policy("load-aware"), NOW_S)[1]
    assert (new.node, new.decode_tokens_per_s, new.prefill_tokens_per_s) == ("new", 70, 200)
    assert (new.decode_reported, new.prefill_reported) == (False, False)
    assert (new.kv_used_pct, new.report_age_ms) == (None, None)


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
def test_no_estimate_is_shown_where_the_policy_uses_none(policy: str) -> None:
    nodes = [FakeNode("a", was_hot=True), FakeNode("b")]
    verdicts = explain(nodes, Demand(MODEL), make_policy(policy), NOW_S)
    assert [verdict.eta_ms for verdict in verdicts] == [None, None]
    assert all(verdict.eligible for verdict in verdicts)


@pytest.mark.parametrize("policy_name", POLICY_NAMES)
def test_an_explanation_names_the_next_choice_and_does_not_change_it(policy_name: str) -> None:
    nodes, policy = [FakeNode(name) for name in "abc"], make_policy(policy_name)
    for _ in range(7):
        first = explain(nodes, Demand(MODEL), policy, NOW_S)
        assert explain(nodes, Demand(MODEL), policy, NOW_S) == first
        assert place(nodes, policy).name == first[0].node


def test_a_fleet_that_cannot_take_it_is_explained_node_by_node() -> None:
    nodes = [FakeNode("a", cordoned=True), FakeNode("b", models=serving("other"))]
    verdicts = explain(nodes, Demand(MODEL), make_policy("load-aware"), NOW_S)
    assert [verdict.left_out for verdict in verdicts] == ["cordoned", "model"]
    assert explain([], Demand(MODEL), make_policy("load-aware"), NOW_S) == []
