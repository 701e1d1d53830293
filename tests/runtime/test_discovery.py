"""Nodes found by a name: they come and go with its addresses, and never because DNS is down."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.discovery import JITTER, SOONEST_S
from fleet_service.runtime.protocols import ResolveError
from tests.runtime.fakes import MODEL, UNIX_S, hello, simulate
from tests.runtime.pods import GONE, LONGEST_S, PODS, REFRESH_S, SETTLED_S, pods


def test_every_address_of_a_name_is_a_node_when_the_head_has_started() -> None:
    async def story() -> None:
        world = await pods("a", "b")
        assert world.states() == {"a": "up", "b": "up"}
        assert {info.found_by for info in world.head.operators.list_nodes()} == {PODS}
        (name,) = world.head.operators.list_names()
        assert (name.entry, name.addresses, name.failure) == (PODS, ("a:8454", "b:8454"), "")
        assert name.resolved_at == UNIX_S + world.dns.asked_s[0]
        await world.head.stop(0)

    simulate(story)


def test_a_new_address_is_dialed_by_the_next_look_up() -> None:
    async def story() -> None:
        world = await pods("a")
        world.lists("a", "c")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "c": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_name_is_looked_up_at_its_period_with_jitter() -> None:
    async def story() -> None:
        world = await pods("a")
        await asyncio.sleep(50 * REFRESH_S)
        asked_s = world.dns.asked_s
        waits = [later - sooner for sooner, later in pairwise(asked_s)]
        assert 40 <= len(waits) <= 63
        assert REFRESH_S * (1 - JITTER) <= min(waits) < REFRESH_S < max(waits) <= LONGEST_S
        await world.head.stop(0)

    simulate(story)


def test_a_node_no_more_listed_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def story() -> None:
        world = await pods("a", "b", settings={"policy": "round-robin"})
        assert await world.placed() == {"a", "b"}
        links = len(world.at("b").links)
        world.lists("a")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up*"}
        assert await world.placed() == {"a"}
        assert (len(world.at("b").links), world.at("b").links[-1].open) == (links, True)
        left_out = {
            each.node: each.left_out
            for each in world.head.operators.explain_placement("", SessionSpec(model=MODEL), 4).verdicts
        }
        assert left_out == {"a": "", "b": "unlisted"}
        world.stops("b")
        await asyncio.sleep(SETTLED_S)
        assert world.states() == {"a": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_node_that_is_listed_again_gets_work_again() -> None:
    async def story() -> None:
        world = await pods("a", "b", settings={"policy": "round-robin"})
        world.lists("a")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up*"}
        world.lists("a", "b")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up"}
        assert await world.placed() == {"a", "b"}
        assert len(world.at("b").links) == 1
        await world.head.stop(0)

    simulate(story)


def test_an_answer_of_addresses_where_nobody_is_takes_no_node_from_its_work() -> None:
    async def story() -> None:
        world = await pods("a", "b")
        world.at("c").says = GONE
        world.lists("c")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up", "c:8454": "down"}
        assert await world.placed() <= {"a", "b"}
        world.at("c").says = hello("c")
        await asyncio.sleep(SETTLED_S)
        assert world.states() == {"a": "up*", "b": "up*", "c": "up"}
        assert await world.placed() == {"c"}
        world.stops("c")
        await asyncio.sleep(SETTLED_S)
        assert world.states() == {"a": "up", "b": "up", "c": "down"}
        await world.head.stop(0)

    simulate(story)


def test_a_node_that_goes_down_has_its_name_looked_up_at_once() -> None:
    async def story() -> None:
        world = await pods("a", "b", dns_refresh_s=3600.0)
        await asyncio.sleep(100)
        assert len(world.dns.asked_s) == 1
        world.lists("a")
        world.stops("b")
        await asyncio.sleep(SETTLED_S)
        assert len(world.dns.asked_s) == 2
        assert world.states() == {"a": "up"}
        await world.head.stop(0)

    simulate(story)


def test_nodes_that_flap_do_not_have_their_name_looked_up_all_the_time() -> None:
    async def story() -> None:
        world = await pods("a", "b", "c")
        for host in "abc":
            world.at(host).lives_s = 0.3
            world.at(host).links[-1].break_()
        before = len(world.dns.asked_s)
        await asyncio.sleep(60)
        assert 30 / SOONEST_S < len(world.dns.asked_s) - before <= 60 / SOONEST_S
        await world.head.stop(0)

    simulate(story)


@pytest.mark.parametrize("answer", [ResolveError("the DNS server gives no answer"), [], RuntimeError("odd")])
def test_a_look_up_that_fails_or_is_empty_changes_nothing_and_is_told_once(
    answer: list[str] | Exception,
) -> None:
    async def story() -> None:
        world = await pods("a", "b")
        with capture_logs() as logs:
            world.dns.says["pods.example"] = answer
            world.stops("b")
            await asyncio.sleep(20 * REFRESH_S)
        assert world.states() == {"a": "up", "b": "down"}
        assert world.head.ready
        told = [each for each in logs if each["event"] == "name_not_resolved"]
        assert [(each["name"], each["addresses_kept"]) for each in told] == [(PODS, 2)]
        (name,) = world.head.operators.list_names()
        assert name.failure
        assert name.addresses == ("a:8454", "b:8454")
        world.lists("a")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up"}
        (name,) = world.head.operators.list_names()
        assert name.failure == ""
        await world.head.stop(0)

    simulate(story)


def test_a_look_up_without_an_answer_is_given_up_and_made_again() -> None:
    async def story() -> None:
        world = await pods("a", dns_timeout_s=5.0)
        world.dns.answers_after_s = 1000.0
        await asyncio.sleep(REFRESH_S * 3)
        assert world.head.operators.list_names()[0].failure == "no answer within 5 s"
        assert world.states() == {"a": "up"}
        world.dns.answers_after_s = 0.0
        world.lists("a", "b")
        await asyncio.sleep(LONGEST_S + 5.0 + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_name_that_never_had_an_answer_is_looked_up_oftener() -> None:
    async def story() -> None:
        world = await pods(says=ResolveError("name not found"))
        assert world.states() == {}
        await asyncio.sleep(30)
        assert 30 / (1 + JITTER) - 1 <= len(world.dns.asked_s) <= 30 / (1 - JITTER) + 2
        world.lists("a")
        await asyncio.sleep(SETTLED_S)
        assert world.states() == {"a": "up"}
        await world.head.stop(0)

    simulate(story)


def test_of_too_many_addresses_the_rest_is_left_out_and_told_once() -> None:
    async def story() -> None:
        with capture_logs() as logs:
            world = await pods("a", "b", "c", max_addresses_per_name=2)
            await asyncio.sleep(5 * REFRESH_S)
        assert world.states() == {"a": "up", "b": "up"}
        assert world.head.operators.list_names()[0].left_out == 1
        told = [each for each in logs if each["event"] == "addresses_left_out"]
        assert [(each["has"], each["used"]) for each in told] == [(3, 2)]
        assert "links.max_addresses_per_name" in told[0]["advice"]
        await world.head.stop(0)

    simulate(story)


def test_there_are_never_more_nodes_than_the_head_takes() -> None:
    async def story() -> None:
        with capture_logs() as logs:
            world = await pods("a", "b", static=("c",), settings={"max_nodes": 2})
            await asyncio.sleep(5 * REFRESH_S)
        assert world.states() == {"a": "up", "c": "up"}
        assert world.head.operators.list_names()[0].left_out == 1
        told = [each for each in logs if each["event"] == "addresses_left_out"]
        assert ["head.max_nodes" in each["advice"] for each in told] == [True]
        world.lists("b")
        world.stops("a")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"b": "up", "c": "up"}
        await world.head.stop(0)

    simulate(story)


# --------------------------------------------------------------------------------------------- operators


def test_a_found_node_that_an_operator_removes_stays_away_as_long_as_it_is_listed() -> None:
    async def story() -> None:
        world = await pods("a", "b")
        await world.head.operators.remove_node("b")
        await asyncio.sleep(3 * REFRESH_S)
        assert world.states() == {"a": "up"}
        assert world.head.operators.list_names()[0].removed == ("b:8454",)
        world.lists("a")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.head.operators.list_names()[0].removed == ()
        world.lists("a", "b")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_node_given_by_its_address_stays_though_a_name_listed_it_and_does_no_more() -> None:
    async def story() -> None:
        world = await pods("a", "b", static=("a",))
        world.lists("b")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"a": "up", "b": "up"}
        world.stops("a")
        await asyncio.sleep(3 * REFRESH_S)
        assert world.states() == {"a": "down", "b": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_name_can_be_added_and_removed_while_the_head_runs() -> None:
    async def story() -> None:
        world = await pods("a", "b")
        operators = world.head.operators
        world.dns.says["more.example"] = ["b", "c"]
        more = "dns:///more.example:8454"
        added = await operators.add_name(more)
        assert (added.entry, added.addresses) == (more, ("b:8454", "c:8454"))
        assert world.states() == {"a": "up", "b": "up", "c": "up"}
        removed = await operators.remove_name(PODS)
        assert removed.entry == PODS
        assert world.states() == {"b": "up", "c": "up"}
        assert [name.entry for name in operators.list_names()] == [more]
        await operators.remove_name(more)
        assert world.states() == {}
        asked = len(world.dns.asked_s)
        await asyncio.sleep(5 * REFRESH_S)
        assert (world.states(), len(world.dns.asked_s)) == ({}, asked)
        await world.head.stop(0)

    simulate(story)


def test_a_name_that_is_there_one_too_many_and_one_unknown_are_refused() -> None:
    async def story() -> None:
        world = await pods("a", max_dns_names=1)
        operators = world.head.operators
        with pytest.raises(FleetError) as there:
            await operators.add_name(PODS)
        assert there.value.reason is Reason.NODE_ALREADY_EXISTS
        with pytest.raises(FleetError) as too_many:
            await operators.add_name("dns:///more.example:8454")
        assert too_many.value.reason is Reason.LIMIT_EXCEEDED
        assert too_many.value.metadata == {"limit": "max_dns_names", "value": "1"}
        with pytest.raises(FleetError) as unknown:
            await operators.remove_name("dns:///more.example:8454")
        assert unknown.value.reason is Reason.NODE_NOT_FOUND
        assert world.states() == {"a": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_head_that_stops_looks_nothing_up_any_more() -> None:
    async def story() -> None:
        world = await pods("a")
        world.dns.answers_after_s = 4.0
        await asyncio.sleep(LONGEST_S)
        await world.head.stop(0)
        asked = len(world.dns.asked_s)
        await asyncio.sleep(5 * REFRESH_S)
        assert len(world.dns.asked_s) == asked

    simulate(story)
