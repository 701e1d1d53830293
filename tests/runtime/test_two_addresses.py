"""One node that is reached at two addresses is one node, whoever gave them and whenever they are dialed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from fleet_service.domain.commands import HeldSession
from fleet_service.domain.node_types import Feature, NodeState
from fleet_service.runtime.head import Head
from fleet_service.runtime.settings import HeadSettings
from tests.runtime.fakes import UNIX_S, FakeDialer, FakeLink, FakeNode, hello, simulate
from tests.runtime.pods import LONGEST_S, ONE_NODE, REFRESH_S, SETTLED_S, FakeResolver, Pods, pods


class SlowLink(FakeLink):
    """It takes a while to say what its node holds, so that two links to one node come up at once."""

    async def reconcile(self) -> list[HeldSession]:
        await asyncio.sleep(0.05)
        return []


class SlowDialer(FakeDialer):
    async def connect(self, address: str, introduction: Any, listener: Any) -> FakeLink:
        node = self._nodes[address]
        node.dialed_s.append(asyncio.get_running_loop().time())
        node.links.append(SlowLink(node, await self.probe(address, introduction), listener))
        return node.links[-1]


def is_one_node(world: Pods, *hosts: str) -> None:
    """The same process answers at all these addresses."""
    for host in hosts:
        world.at(host).says = ONE_NODE


async def two_ways(**more: Any) -> Pods:
    """A node with addresses a and b, and another one, c."""
    return await pods("a", "b", "c", one_node=("a", "b"), dialer=SlowDialer, **more)


def up(world: Pods) -> list[str]:
    return [each.name for each in world.head.fleet.nodes if each.state is NodeState.UP]


def test_a_node_dialed_at_two_addresses_at_once_is_one_node() -> None:
    """Both were given by hand: the second way is refused and says so."""

    async def story() -> None:
        nodes = {f"{host}:8454": FakeNode(hello(host)) for host in "ab"}
        loop = asyncio.get_running_loop()
        world = Pods(
            nodes,
            FakeResolver({}),
            Head(
                HeadSettings(),
                dialer=SlowDialer(nodes),
                rng=random.Random(3),
                wall_clock=lambda: UNIX_S + loop.time(),
            ),
        )
        is_one_node(world, "a", "b")
        await world.head.start(list(nodes))
        await asyncio.sleep(30)
        assert up(world) == ["one"]
        (other,) = [each for each in world.head.fleet.nodes if each.name != "one"]
        assert (other.state, other.models) == (NodeState.DOWN, {})
        assert "connected already" in other.state_detail
        assert sum(link.open for node in nodes.values() for link in node.links) == 1
        assert await world.placed() == {"one"}
        await world.head.stop(0)

    simulate(story)


def test_a_node_that_a_name_lists_twice_is_one_node_and_the_other_address_is_not_dialed_on() -> None:
    async def story() -> None:
        world = await two_ways()
        assert world.states() == {"c": "up", "one": "up"}
        (name,) = world.head.operators.list_names()
        assert len(name.other_ways) == 1
        dials = len(world.at("a").dialed_s) + len(world.at("b").dialed_s)
        await asyncio.sleep(5 * REFRESH_S)
        assert len(world.at("a").dialed_s) + len(world.at("b").dialed_s) == dials
        assert world.head.operators.list_names()[0].other_ways == name.other_ways
        await world.head.stop(0)

    simulate(story)


def test_a_node_is_reached_by_its_other_address_when_the_first_is_gone() -> None:
    async def story() -> None:
        world = await two_ways()
        (second,) = world.head.operators.list_names()[0].other_ways
        first = "b" if second == "a:8454" else "a"
        world.stops(first)
        await asyncio.sleep(SETTLED_S)
        assert world.states() == {"c": "up", "one": "up", f"{first}:8454": "down"}
        known = world.head.fleet.find("one")
        assert known is not None
        assert known.address == second
        # Back by both, it is still one.
        is_one_node(world, first)
        await asyncio.sleep(SETTLED_S)
        assert world.states() == {"c": "up", "one": "up"}
        assert world.head.operators.list_names()[0].other_ways == (f"{first}:8454",)
        await world.head.stop(0)

    simulate(story)


def test_a_node_stays_listed_by_its_other_address() -> None:
    async def story() -> None:
        world = await two_ways()
        (second,) = world.head.operators.list_names()[0].other_ways
        world.lists(second.partition(":")[0], "c")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"c": "up", "one": "up"}
        world.lists("c")
        await asyncio.sleep(LONGEST_S + SETTLED_S)
        assert world.states() == {"c": "up", "one": "up*"}
        await world.head.stop(0)

    simulate(story)


def test_a_node_given_by_its_address_is_not_taken_for_another_when_a_name_lists_it_by_a_second() -> None:
    async def story() -> None:
        world = await two_ways(static=("a",))
        assert world.states() == {"c": "up", "one": "up"}
        known = world.head.fleet.find("one")
        assert known is not None
        assert (known.address, known.found_by) == ("a:8454", "")
        assert world.head.operators.list_names()[0].other_ways == ("b:8454",)
        await world.head.stop(0)

    simulate(story)


def test_a_node_removed_by_an_operator_does_not_come_back_by_its_other_address() -> None:
    async def story() -> None:
        world = await two_ways()
        await world.head.operators.remove_node("one")
        await asyncio.sleep(3 * REFRESH_S)
        assert world.states() == {"c": "up"}
        await world.head.stop(0)

    simulate(story)


def test_a_run_that_replaces_a_frozen_one_is_one_node_by_whichever_addresses_it_comes() -> None:
    """Two addresses of the new run wait for the old one's answer at the same time."""

    async def story() -> None:
        world = await pods("c", dialer=SlowDialer)
        world.at("c").says = hello("other", incarnation="run-3")

        async def no_answer() -> None:
            await asyncio.sleep(1000)

        (frozen,) = world.at("c").links
        frozen.ping = no_answer  # type: ignore[method-assign]
        for host in "ab":
            world.at(host).says = hello("c", incarnation="run-2", features=frozenset({Feature.RECONCILE}))
        world.lists("a", "b", "c")
        await asyncio.sleep(LONGEST_S + 2 * SETTLED_S)
        assert world.states() == {"c": "up", "other": "up"}
        known = world.head.fleet.find("c")
        assert known is not None
        assert known.incarnation == "run-2"
        await world.head.stop(0)

    simulate(story)
