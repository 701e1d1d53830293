from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_service.domain.node_types import NodeState, Report
from fleet_service.domain.placement import (
    POLICY_NAMES,
    Demand,
    LoadAware,
    Policy,
    Pool,
    RoundRobin,
    choose,
    estimate_ms,
    estimates_ms,
    left_out,
    make_policy,
    takers,
    typical_rates,
)
from fleet_service.domain.placement.pool import LOOKS, Deck
from tests.domain.fakes import MODEL, NOW_S, FakeNode, serving
from tests.domain.test_choose import demands, fake_nodes

MANY = 1_000


class CountedNode(FakeNode):
    """A node that counts how often a placement looks at it."""

    looks = 0

    @property
    def waiting(self) -> int:
        CountedNode.looks += 1
        return 0

    @waiting.setter
    def waiting(self, _value: int) -> None: ...


def pool_of(nodes: Sequence[FakeNode], policy: Policy) -> Pool[FakeNode]:
    pool = Pool[FakeNode](shuns_hot=policy.shuns_hot)
    for node in nodes:
        pool.update(node)
    return pool


def place(pool: Pool[FakeNode], policy: Policy, demand: Demand | None = None) -> FakeNode:
    chosen = pool.choose(demand or Demand(MODEL), policy, NOW_S)
    assert chosen is not None
    chosen.sessions += 1
    chosen.reservations += 1
    return chosen


def mixed_fleet(count: int, rng: random.Random) -> list[FakeNode]:
    """Fast and slow ones, idle and busy ones, some that have not reported a rate."""
    return [
        FakeNode(f"n{number}", reservations=rng.randrange(9), sessions=rng.randrange(50)).reporting(
            Report(
                decode_tokens_per_s=rng.choice([0, 20, 100, 400, 1000]),
                prefill_tokens_per_s=rng.choice([0, 2_000, 20_000]),
                lanes_active=rng.randrange(5),
            ),
            age_s=rng.choice([0.5, 60]),
        )
        for number in range(count)
    ]


# What is asked of many at once is what is asked of each


@settings(deadline=None)
@given(nodes=st.lists(fake_nodes, max_size=6), demand=demands, limit=st.sampled_from([0, 256]))
def test_those_that_take_a_demand_are_those_with_no_reason_to_be_left_out(
    nodes: list[FakeNode], demand: Demand, limit: int
) -> None:
    for i, node in enumerate(nodes):
        node.name = f"n{i}"
    assert takers(nodes, demand, NOW_S, limit) == [
        node for node in nodes if left_out(node, demand, NOW_S, limit) is None
    ]


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), prompt=st.sampled_from([0, 7, 5_000]), out=st.sampled_from([1, 256]))
def test_estimates_of_many_are_those_of_each(seed: int, prompt: int, out: int) -> None:
    nodes = mixed_fleet(9, random.Random(seed))
    nodes[0].report = nodes[0].report_at_s = None
    demand = Demand(MODEL, prompt_tokens=prompt, expected_output_tokens=out)
    typical = typical_rates(nodes)
    assert estimates_ms(nodes, demand, NOW_S) == [estimate_ms(n, demand, typical, NOW_S) for n in nodes]


# The deck


@settings(deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 20)),
            st.tuples(st.just("out"), st.integers(0, 20)),
            st.tuples(st.just("deal"), st.integers(0, 30)),
        ),
        max_size=40,
    )
)
def test_a_deck_holds_what_was_put_in_and_deals_nobody_twice_at_once(steps: list[tuple[str, int]]) -> None:
    nodes = [FakeNode(f"n{number}") for number in range(21)]
    deck, inside = Deck[FakeNode](), set[int]()
    for step, number in steps:
        if step == "deal":
            dealt = [node.name for node in deck.deal(number)]
            assert len(dealt) == len(set(dealt)) == min(number, len(inside))
        elif step == "add" and number not in inside:
            deck.add(nodes[number])
            inside.add(number)
        elif step == "out" and number in inside:
            deck.take_out(nodes[number])
            inside.remove(number)
        assert {node.name for node in deck} == {f"n{each}" for each in inside}


def test_in_a_round_every_node_is_dealt_once() -> None:
    deck = Deck[FakeNode]()
    for number in range(100):
        deck.add(FakeNode(f"n{number}"))
    for _ in range(3):
        assert sorted(node.name for _ in range(10) for node in deck.deal(10)) == sorted(
            node.name for node in deck
        )


def test_neighbours_by_name_are_not_dealt_together() -> None:
    deck = Deck[FakeNode]()
    for number in range(MANY):
        deck.add(FakeNode(f"rack-{number // 100}-node-{number % 100}"))
    racks = Counter(node.name.partition("-node")[0] for node in deck.deal(100))
    assert len(racks) == 10
    assert max(racks.values()) < 30


# The choice


@settings(deadline=None)
@given(nodes=st.lists(fake_nodes, max_size=8), demand=demands, policy_name=st.sampled_from(POLICY_NAMES))
def test_a_node_is_found_whenever_one_can_take_it_and_hot_ones_only_when_all_are(
    nodes: list[FakeNode], demand: Demand, policy_name: str
) -> None:
    for i, node in enumerate(nodes):
        node.name = f"n{i}"
        report = node.report
        node.was_hot = node.was_hot if report is None else report.kv_blocks_used >= 90
    policy = make_policy(policy_name)
    found = pool_of(nodes, policy).choose(demand, policy, NOW_S)
    eligible = [node for node in nodes if left_out(node, demand, NOW_S) is None]
    assert (found is None) == (not eligible)
    if found is not None:
        assert any(found is node for node in eligible)
        if policy.shuns_hot and found.was_hot:
            assert all(node.was_hot for node in eligible)


@settings(deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["up", "down", "cordon", "hot", "model", "label"])),
        max_size=30,
    ),
    policy_name=st.sampled_from(POLICY_NAMES),
)
def test_a_pool_that_is_told_of_changes_finds_what_one_made_anew_finds(
    changes: list[tuple[int, str]], policy_name: str
) -> None:
    policy = make_policy(policy_name)
    nodes = [FakeNode(f"n{number}") for number in range(5)]
    pool = pool_of(nodes, policy)
    for number, change in changes:
        node = nodes[number]
        if change in ("up", "down"):
            node.state = NodeState.UP if change == "up" else NodeState.DOWN
        elif change == "cordon":
            node.cordoned = not node.cordoned
        elif change == "hot":
            node.was_hot = not node.was_hot
        elif change == "model":
            node.models = serving("other") if MODEL in node.models else serving(MODEL)
        else:
            node.labels = {} if node.labels else {"zone": "a"}
        pool.update(node)
        assert pool.is_current(node)
        for demand in (Demand(MODEL), Demand("other"), Demand(MODEL, selector={"zone": "a"})):
            found = pool.choose(demand, policy, NOW_S)
            anew = pool_of(nodes, policy).choose(demand, policy, NOW_S)
            assert (found is None) == (anew is None)
            assert found is None or left_out(found, demand, NOW_S) is None


def test_a_node_that_is_taken_out_is_chosen_no_more() -> None:
    nodes, policy = [FakeNode("a"), FakeNode("b")], LoadAware()
    pool = pool_of(nodes, policy)
    pool.take_out(nodes[0])
    assert {place(pool, policy).name for _ in range(4)} == {"b"}


def test_a_burst_of_a_thousand_over_a_thousand_equal_nodes_goes_one_to_each() -> None:
    for policy in map(make_policy, POLICY_NAMES):
        nodes = [FakeNode(f"n{number}") for number in range(MANY)]
        pool = pool_of(nodes, policy)
        for _ in range(MANY):
            place(pool, policy)
        assert Counter(node.reservations for node in nodes) == {1: MANY}, policy.name


def test_idle_equals_take_turns_though_each_is_idle_again_at_once() -> None:
    for policy in map(make_policy, POLICY_NAMES):
        pool = pool_of([FakeNode(f"n{number}") for number in range(MANY)], policy)
        shares = Counter[str]()
        for _ in range(MANY):
            node = place(pool, policy)
            node.sessions = node.reservations = 0
            shares[node.name] += 1
        assert max(shares.values()) <= 130, policy.name  # no less even than a deal at a time


@pytest.mark.parametrize("count", [300, MANY, 10_000])
def test_the_node_chosen_of_very_many_is_among_the_soonest_done(count: int) -> None:
    rng = random.Random(count)
    nodes, policy = mixed_fleet(count, rng), LoadAware()
    pool, demand = pool_of(nodes, policy), Demand(MODEL, prompt_tokens=200)
    ranks: list[float] = []
    worst = 0.0
    for _ in range(200):
        chosen = pool.choose(demand, policy, NOW_S)
        assert chosen is not None
        etas = estimates_ms(nodes, demand, NOW_S)
        eta = next(eta for node, eta in zip(nodes, etas, strict=True) if node is chosen)
        ranks.append(sum(other < eta for other in etas) / len(etas))
        worst = max(worst, eta / min(etas))
        chosen.reservations += 1
        gone = rng.choice(nodes)
        gone.reservations = max(0, gone.reservations - 1)
    ranks.sort()
    assert ranks[100] < 0.01  # half of them go to the best hundredth
    assert ranks[180] < 0.1
    assert worst < 3  # where the median node would take up to ten times as long


def test_a_few_nodes_much_faster_than_all_others_are_used_before_them() -> None:
    rng, policy = random.Random(1), LoadAware()
    slow = [FakeNode(f"n{number}").reporting(Report(decode_tokens_per_s=20)) for number in range(MANY)]
    fast = [FakeNode(f"f{number}").reporting(Report(decode_tokens_per_s=2_000)) for number in range(5)]
    nodes = [*slow, *fast]
    rng.shuffle(nodes)
    pool = pool_of(nodes, policy)
    chosen = [place(pool, policy).name for _ in range(100)]
    assert sum(name.startswith("f") for name in chosen[20:]) >= 75


def test_least_loaded_keeps_very_many_nodes_within_a_session_of_each_other_once_it_has_evened_them() -> None:
    rng, policy = random.Random(3), make_policy("least-loaded")
    nodes = [FakeNode(f"n{number}", sessions=rng.randrange(3)) for number in range(MANY)]
    pool = pool_of(nodes, policy)
    for _ in range(4 * MANY):
        place(pool, policy)
    sessions = [node.sessions for node in nodes]
    assert max(sessions) - min(sessions) <= 1


@pytest.mark.parametrize("lost", [0, 1, 400])
def test_round_robin_over_very_many_gives_even_shares_beside_those_that_cannot_take_part(lost: int) -> None:
    policy = RoundRobin()
    nodes = [FakeNode(f"n{number}") for number in range(MANY)]
    narrow = [FakeNode(f"w{number}", models=serving(MODEL, window=8)) for number in range(MANY)]
    pool = pool_of([*nodes, *narrow], policy)
    for node in nodes[:lost]:
        node.state = NodeState.DOWN
        pool.update(node)
    shares = Counter(
        place(pool, policy, Demand(MODEL, prompt_tokens=9)).name for _ in range(3 * (MANY - lost))
    )
    assert set(shares.values()) == {3}
    assert len(shares) == MANY - lost


def test_with_few_nodes_and_with_many_a_label_finds_the_only_node_that_has_it() -> None:
    policy = LoadAware()
    nodes = [FakeNode(f"n{number}", labels={"host": f"h{number}", "zone": "a"}) for number in range(MANY)]
    pool = pool_of(nodes, policy)
    for number in (0, 500, 999):
        demand = Demand(MODEL, selector={"zone": "a", "host": f"h{number}"})
        assert place(pool, policy, demand) is nodes[number]
    assert pool.choose(Demand(MODEL, selector={"zone": "b"}), policy, NOW_S) is None
    assert pool.choose(Demand("other", selector={"zone": "a"}), policy, NOW_S) is None


def test_the_one_node_wide_enough_is_found_among_very_many() -> None:
    policy = LoadAware()
    nodes = [FakeNode(f"n{number}", models=serving(MODEL, window=64)) for number in range(MANY)]
    nodes.append(FakeNode("wide"))
    assert place(pool_of(nodes, policy), policy, Demand(MODEL, prompt_tokens=65)).name == "wide"


def test_the_one_node_that_is_not_hot_is_taken_of_very_many() -> None:
    policy = LoadAware()
    nodes = [FakeNode(f"n{number}", was_hot=True) for number in range(MANY)]
    nodes[700].was_hot = False
    nodes[700].reservations = 9
    pool = pool_of(nodes, policy)
    assert place(pool, policy) is nodes[700]
    nodes[700].cordoned = True
    pool.update(nodes[700])
    assert place(pool, policy) is not nodes[700]


@pytest.mark.parametrize("policy_name", POLICY_NAMES)
@pytest.mark.parametrize("selector", [{}, {"zone": "a"}], ids=["any", "a label"])
def test_a_placement_looks_at_no_more_nodes_of_ten_thousand_than_of_a_thousand(
    policy_name: str, selector: dict[str, str]
) -> None:
    looked: dict[int, int] = {}
    for count in (MANY, 10 * MANY):
        policy = make_policy(policy_name)
        nodes = [CountedNode(f"n{number}", labels={"zone": "ab"[number % 2]}) for number in range(count)]
        pool = pool_of(nodes, policy)
        CountedNode.looks = 0
        for _ in range(50):
            place(pool, policy, Demand(MODEL, selector=selector))
        looked[count] = CountedNode.looks
    assert looked[10 * MANY] <= looked[MANY] + 50
    assert 0 < looked[MANY] <= 50 * LOOKS


def test_of_very_many_some_are_found_that_fit_and_the_others_come_next_time() -> None:
    policy = LoadAware()
    nodes = [FakeNode(f"n{number}") for number in range(2 * LOOKS)]
    pool = pool_of(nodes, policy)
    found = [node.name for _ in range(2) for node in pool.some(Demand(MODEL), lambda _: True, NOW_S)]
    assert sorted(found) == sorted(node.name for node in nodes)
    nodes[3].reservations = 4
    assert [n for _ in range(2) for n in pool.some(Demand(MODEL), lambda n: n.reservations == 4, NOW_S)] == [
        nodes[3]
    ]


def test_what_a_pool_finds_is_what_all_compared_give_where_there_are_few() -> None:
    rng = random.Random(7)
    nodes = mixed_fleet(60, rng)
    demand = Demand(MODEL, prompt_tokens=10)
    policy = LoadAware()
    dealt = pool_of(nodes, policy).choose(demand, policy, NOW_S)
    walked = choose(nodes, nodes, demand, LoadAware(), NOW_S)
    assert dealt is not None
    typical = typical_rates(nodes)
    assert estimate_ms(dealt, demand, typical, NOW_S) == estimate_ms(walked, demand, typical, NOW_S)


def test_what_was_compared_is_shown_best_first() -> None:
    policy, nodes = LoadAware(), [FakeNode(f"n{number}", reservations=number % 50) for number in range(MANY)]
    pool = pool_of(nodes, policy)
    assert pool.compared(Demand(MODEL)) == []
    chosen = pool.choose(Demand(MODEL), policy, NOW_S)
    shown = pool.compared(Demand(MODEL))
    assert shown[0] is chosen
    assert [node.reservations for node in shown] == sorted(node.reservations for node in shown)
