from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.node_types import NodeState, Report
from fleet_service.domain.placement import (
    POLICY_NAMES,
    Demand,
    LeastLoaded,
    LoadAware,
    RoundRobin,
    make_policy,
)
from fleet_service.domain.placement.policies import SAMPLE_SIZE, Rotation
from tests.domain.fakes import MODEL, NOW_S, FakeNode, place, serving

HOT = Report(kv_blocks_used=95, kv_blocks_total=100, decode_tokens_per_s=1000)
COOL = Report(kv_blocks_used=10, kv_blocks_total=100, decode_tokens_per_s=10)


def fleet(count: int) -> list[FakeNode]:
    return [FakeNode(f"n{i}") for i in range(count)]


def test_load_aware_spreads_a_burst_of_eight_over_two_equal_nodes_four_and_four() -> None:
    nodes, policy = fleet(2), LoadAware()
    for _ in range(8):
        place(nodes, policy)
    assert [node.reservations for node in nodes] == [4, 4]


def test_load_aware_sends_more_of_a_burst_to_the_faster_node() -> None:
    slow = FakeNode("slow").reporting(Report(decode_tokens_per_s=20))
    fast = FakeNode("fast").reporting(Report(decode_tokens_per_s=60))
    for _ in range(8):
        place([slow, fast], LoadAware())
    assert (slow.reservations, fast.reservations) == (2, 6)


def test_load_aware_takes_turns_among_idle_equals() -> None:
    nodes, policy = fleet(3), LoadAware()
    chosen = []
    for _ in range(6):
        node = place(nodes, policy)
        node.sessions = node.reservations = 0
        chosen.append(node.name)
    assert chosen == ["n0", "n1", "n2", "n0", "n1", "n2"]


def test_load_aware_prefers_fewer_sessions_where_estimates_are_equal() -> None:
    nodes = [FakeNode("a", sessions=2), FakeNode("b", sessions=1), FakeNode("c", sessions=3)]
    assert place(nodes, LoadAware()).name == "b"


def test_load_aware_leaves_hot_nodes_out_even_when_they_are_faster() -> None:
    hot, cool = FakeNode("hot").reporting(HOT), FakeNode("cool").reporting(COOL)
    policy = LoadAware()
    assert [place([hot, cool], policy).name for _ in range(5)] == ["cool"] * 5


def test_load_aware_uses_hot_nodes_when_all_are_hot() -> None:
    nodes = [FakeNode("slow", was_hot=True).reporting(COOL, age_s=60), FakeNode("fast").reporting(HOT)]
    assert place(nodes, LoadAware()).name == "fast"


def test_load_aware_takes_a_hot_node_when_no_cool_one_is_eligible() -> None:
    nodes = [FakeNode("hot").reporting(HOT), FakeNode("cool", cordoned=True).reporting(COOL)]
    assert place(nodes, LoadAware()).name == "hot"


def test_load_aware_lets_hot_nodes_have_no_say_in_the_stand_in_rates() -> None:
    hot = FakeNode("hot").reporting(HOT)
    measured = FakeNode("measured", reservations=1).reporting(COOL)
    new = FakeNode("new", reservations=1)
    # At the hot node's rate `new` would seem a hundred times faster; at the cool one's it is an equal.
    policy = LoadAware()
    assert {node.name for node in policy.order([hot, measured, new], Demand(MODEL), NOW_S)[:2]} == {
        "measured",
        "new",
    }
    assert place([hot, measured, new], policy).name == "measured"


def test_load_aware_neither_shuns_nor_floods_a_node_that_has_served_nothing() -> None:
    nodes = [FakeNode("known").reporting(Report(decode_tokens_per_s=500)), FakeNode("new")]
    policy = LoadAware()
    for _ in range(8):
        place(nodes, policy)
    assert [node.reservations for node in nodes] == [4, 4]


@pytest.mark.parametrize("pool_high_pct", [0, 101])
def test_an_occupancy_that_is_no_percentage_is_refused(pool_high_pct: int) -> None:
    with pytest.raises(ValueError, match="pool_high_pct"):
        make_policy("load-aware", pool_high_pct)


def test_least_loaded_places_six_over_three_two_each() -> None:
    nodes, policy = fleet(3), LeastLoaded()
    for _ in range(6):
        place(nodes, policy).reservations -= 1
    assert [node.sessions for node in nodes] == [2, 2, 2]


def test_least_loaded_counts_a_session_that_generates_no_more_than_an_idle_one() -> None:
    nodes = [FakeNode("idle", sessions=3), FakeNode("generating", sessions=2, reservations=2)]
    assert place(nodes, LeastLoaded()).name == "generating"


def test_least_loaded_takes_turns_among_equals() -> None:
    nodes, policy = fleet(3), LeastLoaded()
    chosen = Counter[str]()
    for _ in range(6):
        node = place(nodes, policy)
        node.sessions = node.reservations = 0
        chosen[node.name] += 1
    assert chosen == {"n0": 2, "n1": 2, "n2": 2}


def test_round_robin_visits_every_node_once_before_any_twice() -> None:
    nodes, policy = fleet(3), RoundRobin()
    assert [place(nodes, policy).name for _ in range(6)] == ["n0", "n1", "n2"] * 2


@pytest.mark.parametrize(
    "odd_one",
    [FakeNode("odd", state=NodeState.DOWN), FakeNode("odd", models=serving("another"))],
    ids=["down", "another model"],
)
@pytest.mark.parametrize("place_in_list", [0, 1, 2, 3])
def test_round_robin_gives_even_shares_beside_a_node_that_cannot_take_part(
    odd_one: FakeNode, place_in_list: int
) -> None:
    nodes, policy = fleet(3), RoundRobin()
    nodes.insert(place_in_list, odd_one)
    shares = Counter(place(nodes, policy).name for _ in range(30))
    assert shares == {"n0": 10, "n1": 10, "n2": 10}


def test_round_robin_gives_even_shares_to_each_model_when_requests_alternate() -> None:
    nodes = [
        FakeNode("a", models=serving("x")),
        FakeNode("b", models=serving("x", "y")),
        FakeNode("c", models=serving("y")),
    ]
    policy = RoundRobin()
    shares = {"x": Counter[str](), "y": Counter[str]()}
    for _ in range(20):
        for model, share in shares.items():
            share[place(nodes, policy, Demand(model)).name] += 1
    assert shares == {"x": {"a": 10, "b": 10}, "y": {"b": 10, "c": 10}}


def test_round_robin_keeps_a_node_in_turn_that_was_too_narrow_for_one_request() -> None:
    nodes = [FakeNode("narrow", models=serving(MODEL, window=64)), FakeNode("wide")]
    policy = RoundRobin()
    assert place(nodes, policy, Demand(MODEL, prompt_tokens=96)).name == "wide"
    assert {place(nodes, policy).name for _ in range(2)} == {"narrow", "wide"}


def test_turns_are_remembered_for_a_bounded_number_of_sets() -> None:
    rotation = Rotation(max_sets=4)
    for i in range(50):
        nodes = [FakeNode(f"n{i}"), FakeNode(f"n{i + 1}")]
        rotation.chosen(nodes, rotation.rotated(nodes)[0])
    assert len(rotation) == 4


def test_sets_not_seen_before_do_not_all_begin_at_the_same_node() -> None:
    always, policy = FakeNode("always"), RoundRobin()
    shares = Counter(place([always, FakeNode(f"n{i}")], policy).name == "always" for i in range(50))
    assert shares[True] == 25


def test_a_burst_over_very_many_nodes_reaches_every_one() -> None:
    nodes, policy = fleet(SAMPLE_SIZE * 2), LoadAware()
    for _ in range(len(nodes)):
        place(nodes, policy)
    assert {node.reservations for node in nodes} == {1}
    assert len(policy.order(nodes, Demand(MODEL), NOW_S)) == len(nodes)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_is_made_by_its_name(name: str) -> None:
    assert make_policy(name).name == name


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="load-aware, least-loaded, round-robin"):
        make_policy("fastest")


@given(
    name=st.sampled_from(POLICY_NAMES),
    loads=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), min_size=1, max_size=8),
)
def test_asking_for_the_order_changes_nothing_and_never_leaves_all_out(
    name: str, loads: list[tuple[int, int, bool]]
) -> None:
    nodes = [
        FakeNode(f"n{i}", sessions=sessions, reservations=reservations, was_hot=was_hot)
        for i, (sessions, reservations, was_hot) in enumerate(loads)
    ]
    policy = make_policy(name)
    for _ in range(3):
        first = policy.order(nodes, Demand(MODEL), NOW_S)
        assert first
        assert policy.order(nodes, Demand(MODEL), NOW_S) == first
        assert place(nodes, policy) is first[0]
