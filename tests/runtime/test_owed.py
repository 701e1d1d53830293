"""Revokes that an earlier run of the head owed: a node that cannot say what it holds still gets them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from fleet_service.domain.commands import Revoke
from fleet_service.domain.node_types import Feature
from fleet_service.runtime.head import Head
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.node import OwedRevoke
from fleet_service.runtime.nodes import FAREWELL_S
from fleet_service.runtime.records import Record, RevokeOwed, Saved
from fleet_service.runtime.settings import HeadSettings
from tests.runtime.fakes import UNIX_S, FakeDialer, FakeNode, hello, simulate
from tests.runtime.test_recovery import KnownContext

EPOCH = 7 << 32 | 1
ADDRESS = "127.0.0.1:1"
OWED = RevokeOwed("a", "run-1", "s", EPOCH)
SETTLED = RevokeOwed("a", "run-1", "s", EPOCH, settled=True)


async def head_with(node: FakeNode, journal: KnownContext, *owed: RevokeOwed, **settings: Any) -> Head:
    saved = Saved(
        term=8, revokes={(each.node, each.incarnation, each.session_id, each.epoch): each for each in owed}
    )
    loop = asyncio.get_running_loop()
    head = Head(
        HeadSettings(**settings),
        dialer=FakeDialer({ADDRESS: node}),
        rng=random.Random(3),
        wall_clock=lambda: UNIX_S + loop.time(),
        kept=Kept(journal, saved),
    )
    await head.start([ADDRESS])
    return head


def owed_of(journal: KnownContext) -> list[Record]:
    return [each for each in journal.records if isinstance(each, RevokeOwed)]


def test_it_is_delivered_to_the_same_process_and_settled() -> None:
    async def story() -> None:
        node, journal = FakeNode(hello("a")), KnownContext()
        head = await head_with(node, journal, OWED)
        await asyncio.sleep(1.0)
        assert node.revoked == [Revoke("s", EPOCH)]
        assert owed_of(journal)[-1] == SETTLED
        await head.stop(0.0)

    simulate(story)


@pytest.mark.parametrize(
    "says",
    [
        hello("a", incarnation="run-2"),
        hello("a", features=frozenset({Feature.INLINE_BIND, Feature.RECONCILE})),
    ],
    ids=["another process", "says what it holds"],
)
def test_it_is_settled_where_nothing_can_be_held_or_the_node_says_what_it_holds(says: Any) -> None:
    async def story() -> None:
        node, journal = FakeNode(says), KnownContext()
        head = await head_with(node, journal, OWED)
        await asyncio.sleep(1.0)
        assert (node.revoked, owed_of(journal)) == ([], [SETTLED])
        await head.stop(0.0)

    simulate(story)


def test_it_is_settled_by_the_lease_where_the_node_does_not_come_back() -> None:
    async def story() -> None:
        node, journal = FakeNode(hello("b")), KnownContext()
        head = await head_with(node, journal, OWED, lease_s=20.0, lease_renew_s=10.0)
        await asyncio.sleep(19.0)
        assert owed_of(journal) == []
        await asyncio.sleep(2.0)
        assert owed_of(journal) == [SETTLED]
        await head.stop(0.0)

    simulate(story)


def test_what_is_owed_is_written_down_until_it_is_settled() -> None:
    async def story() -> None:
        node, journal = FakeNode(hello("a")), KnownContext()
        head = await head_with(node, journal)
        (known,) = head.fleet.nodes
        known.owe_revoke("s", EPOCH, surely_held=True)
        assert owed_of(journal) == [OWED]
        known.owe_revoke("s", EPOCH + 1, surely_held=True)
        assert owed_of(journal)[1:] == [SETTLED, RevokeOwed("a", "run-1", "s", EPOCH + 1)]
        known.new_life()
        assert owed_of(journal)[3:] == [RevokeOwed("a", "run-1", "s", EPOCH + 1, settled=True)]
        await head.stop(0.0)

    simulate(story)


def test_a_node_that_is_taken_out_is_owed_nothing_any_more() -> None:
    async def story() -> None:
        node, journal = FakeNode(hello("a")), KnownContext()
        head = await head_with(node, journal)
        (known,) = head.fleet.nodes
        known.outbox["s"] = OwedRevoke(EPOCH, surely_held=True)
        await head.operators.remove_node("a")
        assert SETTLED in owed_of(journal)
        await head.stop(0.0)

    simulate(story)


@pytest.mark.parametrize("revokes_in_s, ended_in_s", [(0.5, 0.5), (900.0, FAREWELL_S)])
def test_a_head_that_stops_waits_briefly_until_its_nodes_have_had_what_is_owed(
    revokes_in_s: float, ended_in_s: float
) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        node = FakeNode(hello("a"), revokes_in_s=revokes_in_s)
        head = await head_with(node, KnownContext())
        (known,) = head.fleet.nodes
        known.owe_revoke("s", EPOCH, surely_held=True)
        asked_at = loop.time()
        await head.stop(0.0)
        assert loop.time() - asked_at == pytest.approx(ended_in_s)
        assert node.revoked == ([Revoke("s", EPOCH)] if revokes_in_s < FAREWELL_S else [])

    simulate(story)
