from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import NodeState, Report
from fleet_service.domain.placement import POLICY_NAMES, Demand, LoadAware, choose, left_out, make_policy
from tests.domain.fakes import MODEL, NOW_S, FakeNode, place, serving, unlearned

LONG = Demand(MODEL, prompt_tokens=100)


def refused(nodes: Sequence[FakeNode], demand: Demand) -> FleetError:
    with pytest.raises(FleetError) as raised:
        choose(nodes, nodes, demand, LoadAware(), NOW_S)
    return raised.value


def windowed(name: str, window: int) -> FakeNode:
    return FakeNode(name, models=serving(MODEL, window=window))


LEFT_OUT = [
    ("model", FakeNode("n", models=serving("other"))),
    ("revision", FakeNode("n", models=serving(MODEL, revision="r2"), labels={"zone": "a"})),
    ("label", FakeNode("n", models=serving(MODEL, revision="r1"), labels={"zone": "b"})),
    ("label", FakeNode("n", models=serving(MODEL, revision="r1"))),
    ("down", FakeNode("n", state=NodeState.DOWN)),
    ("down", unlearned("n")),
    ("connecting", unlearned("n", NodeState.CONNECTING)),
    ("suspect", FakeNode("n", state=NodeState.SUSPECT)),
    ("cordoned", FakeNode("n", cordoned=True)),
    ("tried", FakeNode("tried")),
    ("busy", FakeNode("n", busy_until_s=NOW_S + 0.1)),
    ("queue_full", FakeNode("n", waiting=256)),
    # What would hold even if the node were up explains more than that it is down.
    ("context", FakeNode("n", state=NodeState.DOWN, models=serving(MODEL, window=99, revision="r1"))),
]


@pytest.mark.parametrize("reason, node", LEFT_OUT)
def test_a_node_is_left_out_with_the_reason_that_explains_it(reason: str, node: FakeNode) -> None:
    if reason not in ("model", "revision", "label") and node.models:
        window = node.models[MODEL].max_context_tokens
        node = replace(node, models=serving(MODEL, revision="r1", window=window), labels={"zone": "a"})
    demand = replace(LONG, model_revision="r1", selector={"zone": "a"}, avoid=frozenset({"tried"}))
    assert left_out(node, demand, NOW_S) == reason


def test_a_node_that_was_busy_and_one_with_room_in_its_queue_are_taken() -> None:
    assert left_out(FakeNode("n", busy_until_s=NOW_S, waiting=255), LONG, NOW_S) is None
    assert left_out(FakeNode("n", waiting=3), LONG, NOW_S, queue_limit=3) == "queue_full"


def test_a_wide_node_takes_what_a_narrow_one_cannot() -> None:
    nodes = [windowed("narrow", 64), windowed("wide", 4096)]
    assert place(nodes, LoadAware(), LONG).name == "wide"


def test_a_prompt_that_exactly_fills_a_window_fits() -> None:
    assert place([windowed("n", 100)], LoadAware(), LONG).name == "n"


def test_a_window_that_is_not_told_holds_anything() -> None:
    assert place([windowed("n", 0)], LoadAware(), Demand(MODEL, prompt_tokens=10**9)).name == "n"


def test_where_the_model_tells_no_window_that_of_the_report_counts() -> None:
    node = FakeNode("n").reporting(Report(max_context_tokens=99), age_s=3600)
    assert refused([node], LONG).metadata["maxContextTokens"] == "99"


def test_a_prompt_too_long_for_every_node_is_refused_with_the_widest_window_of_that_model() -> None:
    nodes = [
        windowed("narrow", 64),
        FakeNode("wide", state=NodeState.DOWN, models=serving(MODEL, window=80)),
        FakeNode("other", models=serving("other", window=4096)),
    ]
    error = refused(nodes, LONG)
    assert error.reason is Reason.CONTEXT_TOO_LONG
    assert error.metadata == {"model": MODEL, "promptTokens": "100", "maxContextTokens": "80"}
    assert error.retry_after_s is None
    assert not error.state_dependent
    assert "the prompt has 100 tokens" in error.message


def test_a_grown_session_too_long_for_every_node_is_told_to_truncate() -> None:
    error = refused([windowed("n", 64)], replace(LONG, state_dependent=True))
    assert error.state_dependent
    assert "truncate" in error.message


def test_a_node_of_two_models_is_judged_by_the_window_of_the_one_asked_for() -> None:
    models = {**serving(MODEL, window=64), **serving("wide", window=4096)}
    nodes = [FakeNode("both", models=models)]
    assert refused(nodes, LONG).metadata["maxContextTokens"] == "64"
    assert place(nodes, LoadAware(), replace(LONG, model="wide")).name == "both"


def test_a_wide_node_that_is_merely_down_makes_it_worth_a_retry() -> None:
    nodes = [windowed("narrow", 64), FakeNode("wide", state=NodeState.DOWN)]
    error = refused(nodes, LONG)
    assert error.reason is Reason.NO_ELIGIBLE_NODE
    assert error.metadata == {"model": MODEL, "context": "1", "down": "1"}
    assert error.retry_after_s == 1.0


def test_a_refused_length_goes_only_to_a_strictly_wider_node() -> None:
    nodes = [windowed("refused", 128), windowed("equal", 128), windowed("wider", 129)]
    demand = replace(LONG, min_window_tokens=128, avoid=frozenset({"refused"}))
    assert place(nodes, LoadAware(), demand).name == "wider"
    error = refused(nodes[:2], demand)
    assert error.reason is Reason.CONTEXT_TOO_LONG
    assert error.metadata["maxContextTokens"] == "128"


def test_a_node_that_told_no_window_and_refused_the_length_ends_the_search() -> None:
    demand = replace(LONG, min_window_tokens=90, avoid=frozenset({"n"}))
    error = refused([FakeNode("n")], demand)
    assert error.reason is Reason.CONTEXT_TOO_LONG
    assert error.metadata["maxContextTokens"] == "90"
    assert place([FakeNode("n"), FakeNode("untried")], LoadAware(), demand).name == "untried"


def test_a_model_that_no_node_serves_is_not_found() -> None:
    error = refused([FakeNode("n", state=NodeState.DOWN)], Demand("unheard-of"))
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert error.retry_after_s is None
    assert error.resource == ("fleet.v1.Model", "models/unheard-of")
    assert refused([], Demand("unheard-of")).reason is Reason.MODEL_NOT_FOUND


@pytest.mark.parametrize("state", [NodeState.DOWN, NodeState.CONNECTING])
def test_a_node_never_heard_from_might_serve_a_model_that_no_other_does(state: NodeState) -> None:
    error = refused([FakeNode("n"), unlearned("u", state)], Demand("unheard-of"))
    assert error.reason is Reason.NO_ELIGIBLE_NODE
    assert error.metadata == {"model": "unheard-of", state.value: "1"}
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize(
    "demand, reason",
    [(Demand(MODEL, selector={"zone": "z"}), Reason.MODEL_UNPLACEABLE), (LONG, Reason.CONTEXT_TOO_LONG)],
)
def test_nothing_is_refused_for_good_while_a_first_connection_is_under_way(
    demand: Demand, reason: Reason
) -> None:
    known = windowed("n", 64)
    assert refused([known, unlearned("u", NodeState.CONNECTING)], demand).reason is Reason.NO_ELIGIBLE_NODE
    assert refused([known, unlearned("u", NodeState.DOWN)], demand).reason is reason


def test_a_selector_takes_only_nodes_with_every_label_of_it() -> None:
    nodes = [
        FakeNode("half", labels={"zone": "a"}),
        FakeNode("full", labels={"zone": "a", "gpu": "big", "rack": "7"}),
        FakeNode("wrong", labels={"zone": "a", "gpu": "small"}),
    ]
    demand = Demand(MODEL, selector={"zone": "a", "gpu": "big"})
    assert place(nodes, LoadAware(), demand).name == "full"
    error = refused([nodes[0], nodes[2]], demand)
    assert error.reason is Reason.MODEL_UNPLACEABLE
    assert error.metadata == {"model": MODEL, "knownNodes": "2", "nodeSelector": "gpu=big, zone=a"}
    assert error.retry_after_s is None


def test_the_widest_window_is_that_of_the_nodes_the_selector_allows() -> None:
    nodes = [
        FakeNode("small", models=serving(MODEL, window=64), labels={"gpu": "small"}),
        FakeNode("big", models=serving(MODEL, window=4096)),
    ]
    error = refused(nodes, replace(LONG, selector={"gpu": "small"}))
    assert error.reason is Reason.CONTEXT_TOO_LONG
    assert error.metadata["maxContextTokens"] == "64"


def test_a_revision_that_no_node_has_now_may_come_back() -> None:
    error = refused([FakeNode("n", models=serving(MODEL, revision="r2"))], Demand(MODEL, model_revision="r1"))
    assert error.reason is Reason.NO_ELIGIBLE_NODE
    assert error.metadata == {"model": MODEL, "revision": "1"}


def test_a_refusal_counts_its_nodes_by_reason() -> None:
    nodes = [
        FakeNode("a", state=NodeState.DOWN),
        FakeNode("b", state=NodeState.DOWN),
        FakeNode("c", cordoned=True),
        FakeNode("d", state=NodeState.SUSPECT),
        FakeNode("e"),
    ]
    error = refused(nodes, Demand(MODEL, avoid=frozenset({"e"})))
    assert error.reason is Reason.NO_ELIGIBLE_NODE
    assert error.metadata == {"model": MODEL, "down": "2", "cordoned": "1", "suspect": "1", "tried": "1"}
    assert "1 cordoned, 2 down, 1 suspect, 1 tried" in error.message


def test_a_fleet_whose_queues_are_all_full_is_saturated() -> None:
    nodes = [FakeNode("a", waiting=256), FakeNode("b", waiting=300), FakeNode("c", state=NodeState.DOWN)]
    error = refused(nodes, Demand(MODEL))
    assert error.reason is Reason.FLEET_SATURATED
    assert error.metadata == {"model": MODEL, "fullNodes": "2"}
    assert error.retry_after_s == 1.0


def test_a_node_that_said_busy_is_worth_a_retry_when_it_is_asked_again() -> None:
    nodes = [FakeNode("a", busy_until_s=NOW_S + 4), FakeNode("b", busy_until_s=NOW_S + 0.25)]
    error = refused(nodes, Demand(MODEL))
    assert error.reason is Reason.FLEET_SATURATED
    assert error.retry_after_s == pytest.approx(0.25)


def test_the_nodes_looked_at_may_be_the_whole_fleet_or_those_of_the_model() -> None:
    fleet = [FakeNode("a", models=serving("other")), FakeNode("b"), unlearned("c")]
    assert choose(fleet, fleet, Demand(MODEL), LoadAware(), NOW_S).name == "b"
    assert choose(fleet[1:2], fleet, Demand(MODEL), LoadAware(), NOW_S).name == "b"
    with pytest.raises(FleetError, match="NO_ELIGIBLE_NODE"):
        choose([], fleet, Demand("unheard-of"), LoadAware(), NOW_S)


fake_nodes = st.builds(
    FakeNode,
    name=st.just(""),
    state=st.sampled_from([NodeState.UP, NodeState.UP, *NodeState]),
    cordoned=st.booleans(),
    labels=st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}]),
    models=st.sampled_from([{}, serving(MODEL), serving(MODEL, window=64), serving("other")]),
    report=st.sampled_from([None, Report(), Report(kv_blocks_used=95, kv_blocks_total=100)]),
    report_at_s=st.just(NOW_S),
    was_hot=st.booleans(),
    sessions=st.integers(0, 3),
    reservations=st.integers(0, 3),
    busy_until_s=st.sampled_from([0.0, NOW_S + 1]),
    waiting=st.sampled_from([0, 256]),
)
demands = st.builds(
    Demand,
    model=st.just(MODEL),
    selector=st.sampled_from([{}, {"zone": "a"}]),
    prompt_tokens=st.sampled_from([1, 64, 65]),
    avoid=st.sampled_from([frozenset(), frozenset({"n0"}), frozenset({"n0", "n1"})]),
    min_window_tokens=st.sampled_from([0, 64]),
)
retryable = {Reason.NO_ELIGIBLE_NODE, Reason.FLEET_SATURATED}
permanent = {Reason.MODEL_NOT_FOUND, Reason.MODEL_UNPLACEABLE, Reason.CONTEXT_TOO_LONG}


@given(nodes=st.lists(fake_nodes, max_size=6), demand=demands, policy=st.sampled_from(POLICY_NAMES))
def test_an_eligible_node_is_chosen_whenever_there_is_one_and_never_another(
    nodes: list[FakeNode], demand: Demand, policy: str
) -> None:
    for i, node in enumerate(nodes):
        node.name = f"n{i}"

    def able(node: FakeNode) -> bool:
        model = node.models.get(MODEL)
        return (
            model is not None
            and model.max_context_tokens
            in (0, *range(max(demand.prompt_tokens, demand.min_window_tokens + 1), 65))
            and demand.selector.items() <= node.labels.items()
            and node.state is NodeState.UP
            and not node.cordoned
            and node.name not in demand.avoid
            and node.busy_until_s == 0
            and node.waiting == 0
        )

    eligible = [node for node in nodes if able(node)]
    try:
        chosen = choose(nodes, nodes, demand, make_policy(policy), NOW_S)
    except FleetError as error:
        refusal = error
    else:
        assert chosen in eligible
        return
    assert eligible == []
    assert refusal.reason in retryable | permanent
    assert (refusal.retry_after_s is not None) == (refusal.reason in retryable)
