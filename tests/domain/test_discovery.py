"""Names as a source of nodes: what is added, kept and forgotten, and that it settles whatever comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.discovery import KnownNode, Plan, plan, within_limit
from fleet_service.domain.node_types import NodeState

A, B, C, D = "10.0.0.1:8454", "10.0.0.2:8454", "10.0.0.3:8454", "[2001:db8::1]:8454"
PODS, OTHERS = "dns:///pods.example:8454", "dns:///others.example:8454"
ROOM = 100


def found(address: str, state: NodeState = NodeState.UP, name: str = "", by: str = PODS) -> KnownNode:
    return KnownNode(address, name or address, state, found_by=by)


def given_by_hand(address: str, state: NodeState = NodeState.UP, name: str = "") -> KnownNode:
    return KnownNode(address, name or address, state)


def planned(
    listed: Mapping[str, Sequence[str]],
    nodes: Sequence[KnownNode] = (),
    *,
    other_ways: Mapping[str, str] | None = None,
    removed: Sequence[str] = (),
    room: int = ROOM,
) -> Plan:
    return plan(listed, nodes, other_ways or {}, set(removed), room)


def test_every_address_of_a_name_that_is_no_node_yet_becomes_one() -> None:
    assert planned({PODS: (A, B, C)}, [given_by_hand(A), found(B)]).add == {C: PODS}


def test_an_address_that_two_names_list_becomes_one_node() -> None:
    decided = planned({PODS: (A, B), OTHERS: (B, C)})
    assert decided.add == {A: PODS, B: PODS, C: OTHERS}


@pytest.mark.parametrize("state", [NodeState.DOWN, NodeState.CONNECTING])
def test_a_node_no_more_listed_that_has_no_link_is_forgotten(state: NodeState) -> None:
    decided = planned({PODS: (B,)}, [found(A, state), found(B)])
    assert decided.forget == {A}
    assert decided.add == {}


@pytest.mark.parametrize("state", [NodeState.UP, NodeState.SUSPECT])
def test_a_node_no_more_listed_that_has_its_link_is_kept_and_gets_no_new_work(state: NodeState) -> None:
    decided = planned({PODS: (B,)}, [found(A, state), found(B)])
    assert (decided.forget, decided.unlisted) == (set(), {A})


@pytest.mark.parametrize(
    "listed_one",
    [None, found(B, NodeState.DOWN), found(B, NodeState.SUSPECT), replace(found(B), cordoned=True)],
)
def test_a_node_no_more_listed_gets_work_while_none_that_is_listed_takes_any(
    listed_one: KnownNode | None,
) -> None:
    nodes = [found(A), *([listed_one] if listed_one else [])]
    assert planned({PODS: (B,)}, nodes).unlisted == set()


def test_a_node_that_is_down_and_listed_is_kept() -> None:
    assert planned({PODS: (A,)}, [found(A, NodeState.DOWN)]).forget == set()


@pytest.mark.parametrize("state", NodeState)
def test_a_node_given_by_its_address_is_nobody_s_to_forget(state: NodeState) -> None:
    decided = planned({PODS: (B,)}, [given_by_hand(A, state), found(B)])
    assert (decided.forget, decided.unlisted) == (set(), set())


def test_what_another_name_lists_is_that_name_s_from_then_on() -> None:
    decided = planned({PODS: (B,), OTHERS: (A,)}, [found(A, NodeState.DOWN), found(B)])
    assert (decided.forget, decided.unlisted) == (set(), set())
    assert decided.found_by == {A: OTHERS, B: PODS}


def test_a_second_address_of_a_connected_node_is_no_node_but_remembered() -> None:
    second = replace(found(D, NodeState.DOWN), other_way_to="a")
    decided = planned({PODS: (A, D)}, [found(A, name="a"), second])
    assert (decided.forget, decided.other_ways, decided.add) == ({D}, {D: "a"}, {})
    again = planned({PODS: (A, D)}, [found(A, name="a")], other_ways=decided.other_ways)
    assert (again.add, again.other_ways) == ({}, {D: "a"})


def test_a_second_address_is_tried_once_the_node_is_down_at_the_first() -> None:
    decided = planned({PODS: (A, D)}, [found(A, NodeState.DOWN, name="a")], other_ways={D: "a"})
    assert (decided.add, decided.other_ways) == ({D: PODS}, {})


def test_a_node_whose_second_address_is_listed_counts_as_listed() -> None:
    nodes = [found(A, name="a"), found(B)]
    assert planned({PODS: (B, D)}, nodes, other_ways={D: "a"}).unlisted == set()
    assert planned({PODS: (B,)}, nodes, other_ways={D: "a"}).unlisted == {A}


def test_a_second_address_given_by_hand_is_left_to_who_gave_it() -> None:
    second = replace(given_by_hand(D, NodeState.DOWN), other_way_to="a")
    decided = planned({PODS: (A,)}, [found(A, name="a"), second])
    assert (decided.forget, decided.other_ways) == (set(), {})


def test_what_an_operator_removed_does_not_come_back() -> None:
    assert planned({PODS: (A, B)}, removed=[A]).add == {B: PODS}


def test_there_are_no_more_nodes_than_there_is_room_for() -> None:
    decided = planned({PODS: (A, B, C), OTHERS: (D,)}, room=1)
    assert (decided.add, decided.no_room) == ({A: PODS}, {PODS: 2, OTHERS: 1})


def test_what_is_forgotten_makes_room() -> None:
    assert planned({PODS: (B,)}, [found(A, NodeState.DOWN)], room=0).add == {B: PODS}


def test_an_address_that_a_node_has_as_its_name_is_not_taken_for_another() -> None:
    assert planned({PODS: (A, B)}, [found(B, name=A)]).add == {}


def test_of_too_many_addresses_those_that_were_there_before_stay() -> None:
    assert within_limit([D, C, B, A, A], set(), 4) == (A, B, C, D)
    assert within_limit([A, B, C], {C}, 2) == (A, C)
    assert within_limit([A, B, C], set(), 2) == (A, B)


# ------------------------------------------------------------------------------------------ whatever comes

ADDRESSES = [f"10.0.0.{n}:8454" for n in range(6)]
ENTRIES = [PODS, OTHERS]
IDENTITIES = ["x", "y", "z"]

World = tuple[dict[str, tuple[str, ...]], list[KnownNode], dict[str, str], set[str], int]


@st.composite
def worlds(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[str, ...]], list[KnownNode], dict[str, str], set[str], int]:
    some = st.lists(st.sampled_from(ADDRESSES), unique=True)
    listed = {entry: tuple(sorted(draw(some))) for entry in draw(st.sampled_from([[PODS], ENTRIES]))}
    identities = list(IDENTITIES)
    nodes = []
    for address in draw(some):
        name = address
        if identities and draw(st.sampled_from([True, False])):
            name = identities.pop()
        nodes.append(
            KnownNode(
                address,
                name,
                draw(st.sampled_from(NodeState)),
                cordoned=draw(st.booleans()),
                found_by=draw(st.sampled_from(["", *ENTRIES])),
                other_way_to=draw(st.sampled_from(["", *IDENTITIES])),
            )
        )
    ways = draw(st.dictionaries(st.sampled_from(ADDRESSES), st.sampled_from(IDENTITIES)))
    return listed, nodes, ways, set(draw(some)), draw(st.integers(0, 8))


def after(decided: Plan, nodes: Sequence[KnownNode]) -> list[KnownNode]:
    """The nodes once the plan is carried out."""
    kept = [
        replace(node, found_by=decided.found_by.get(node.address, ""))
        for node in nodes
        if node.address not in decided.forget
    ]
    return [*kept, *(found(a, NodeState.CONNECTING, by=entry) for a, entry in decided.add.items())]


@given(worlds())
def test_no_node_that_lives_or_was_given_by_hand_is_ever_forgotten(world: World) -> None:
    _, nodes, _, _, _ = world
    decided = plan(*world)
    for node in nodes:
        if node.address in decided.forget:
            assert node.found_by
            assert node.state in (NodeState.DOWN, NodeState.CONNECTING)


@given(worlds())
def test_what_is_added_is_listed_wanted_and_new(world: World) -> None:
    listed, nodes, _, removed, room = world
    decided = plan(*world)
    for address, entry in decided.add.items():
        assert address in listed[entry]
        assert address not in removed
        assert address not in {node.address for node in nodes}
    assert len(nodes) - len(decided.forget) + len(decided.add) <= len(nodes) + room


@given(worlds())
def test_some_node_of_a_name_takes_work_whenever_one_could(world: World) -> None:
    _, nodes, _, _, _ = world
    decided = plan(*world)
    able = [node for node in nodes if node.state is NodeState.UP and not node.cordoned]
    assert not able or any(node.address not in decided.unlisted for node in able)


@given(worlds())
def test_a_plan_carried_out_leaves_nothing_to_do(world: World) -> None:
    listed, nodes, _, removed, room = world
    first = plan(*world)
    then = after(first, nodes)
    second = plan(listed, then, first.other_ways, removed, room + len(nodes) - len(then))
    assert second.add == {}
    assert second.forget == set()
    assert second.unlisted == first.unlisted
    assert second.no_room == first.no_room
