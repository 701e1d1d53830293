"""Nodes that dial in: an identity that comes and goes both ways, and a head that is shutting down."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from fleet_service.domain.epochs import make_epoch
from fleet_service.domain.node_types import NodeState
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import JoinRefusedError, LinkLostError
from tests.runtime.fakes import FakeNode, FakeOffer, head_of, hello, simulate
from tests.sim.loop import SimLoop


async def _offer(head: Head, identity: str, incarnation: str = "run-1") -> FakeOffer:
    """A node dials in."""
    offer = FakeOffer(FakeNode(hello(identity, incarnation=incarnation)), head)
    await head.nodes.desk.offer(offer.hello, offer)
    return offer


async def _dial_in(head: Head, incarnation: str) -> FakeOffer:
    """A run of node `a` dials in, and is up."""
    offer = await _offer(head, "a", incarnation)
    await _until_up(head, incarnation)
    return offer


def _is_up(head: Head, incarnation: str) -> bool:
    node = head.fleet.named("a")
    return node is not None and node.usable and node.incarnation == incarnation


async def _until_up(head: Head, incarnation: str) -> None:
    while not _is_up(head, incarnation):
        await asyncio.sleep(0.1)


def test_an_identity_may_dial_in_and_be_dialed_in_turns() -> None:
    async def story() -> None:
        dialed = FakeNode(hello("a", incarnation="run-0"))
        head = await head_of({"a:1": dialed})
        for turn in range(3):
            dialed.says = LinkLostError("connection refused")
            back = hello("a", incarnation=f"run-{turn}-dialed")
            dialed.links[-1].break_()
            await asyncio.sleep(1.0)
            joined = await _dial_in(head, f"run-{turn}-joined")
            dialed.says = back
            joined.break_()
            await _until_up(head, back.incarnation)
        addresses = [node.address for node in head.fleet.nodes]
        assert sorted(addresses) == ["a:1", "joined:a"]
        known = head.fleet.named("a")
        assert known is not None
        assert (known.address, known.state) == ("a:1", NodeState.UP)
        keepers = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("keep ")]
        assert sorted(keepers) == ["keep a:1", "keep joined:a"]
        await head.stop(0)

    simulate(story)


def test_nodes_that_dial_in_while_the_head_shuts_down_are_refused_and_leave_no_task() -> None:
    async def story() -> None:
        head = await head_of({})
        await _dial_in(head, "run-1")
        stopping, number = asyncio.create_task(head.stop(0)), 0
        while not stopping.done():
            number += 1
            # Before it lets go of its nodes it may take in some more.
            for identity in ("a", f"b{number}"):
                with suppress(JoinRefusedError):
                    await _offer(head, identity)
            await asyncio.sleep(0)
        await stopping
        for identity in ("a", "c"):
            with pytest.raises(JoinRefusedError, match="shutting down"):
                await _offer(head, identity)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulate(story)


def test_a_living_node_keeps_its_identity_though_the_head_stood_still_when_it_was_challenged() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        head = await head_of({})
        node = FakeNode(hello("a"), answers_after_s=0.3)
        offer = FakeOffer(node, head)
        await head.nodes.desk.offer(offer.hello, offer)
        await _until_up(head, "run-1")
        for round_ in range(40):
            # It goes on at any time, also just before the challenge's time is over, or after.
            clone = asyncio.create_task(_offer(head, "a", "run-2"))
            await asyncio.sleep(0.1)
            loop.stand_still(20.0 if round_ % 2 else 0.9 + 0.02 * round_)
            with pytest.raises(JoinRefusedError, match="in use by a living node"):
                await clone
            assert _is_up(head, "run-1")
        await head.stop(0)

    simulate(story)


def test_a_node_that_was_away_when_the_term_was_raised_may_dial_in_again() -> None:
    async def story() -> None:
        other = FakeNode(hello("b"))
        head = await head_of({"b:1": other})
        (await _dial_in(head, "run-1")).break_()
        await asyncio.sleep(1.0)
        term = head.fleet.term
        other.change(highest_epoch=make_epoch(term + 100, 1))
        other.links[-1].break_()
        await asyncio.sleep(1.0)
        assert head.fleet.term > term
        async with asyncio.timeout(5.0):
            again = await _dial_in(head, "run-1")
        assert again.open
        await head.stop(0)

    simulate(story)


def test_a_run_that_is_back_after_another_of_its_node_has_its_lease_ended() -> None:
    async def story() -> None:
        head = await head_of({})
        (await _dial_in(head, "run-1")).break_()
        await asyncio.sleep(1.0)
        (await _dial_in(head, "run-2")).break_()
        await asyncio.sleep(1.0)
        term = head.fleet.term
        first = FakeNode(hello("a", highest_epoch=head.fleet.next_epoch()))
        offer = FakeOffer(first, head)
        await head.nodes.desk.offer(offer.hello, offer)
        await _until_up(head, "run-1")
        assert first.leases == [(0.0, term)], "what it holds of before is not known here any more"
        offer.break_()
        await asyncio.sleep(1.0)
        again = FakeOffer(first, head)
        await head.nodes.desk.offer(again.hello, again)
        await _until_up(head, "run-1")
        assert first.leases == [(0.0, term)], "what it was given since is"
        await head.stop(0)

    simulate(story)
