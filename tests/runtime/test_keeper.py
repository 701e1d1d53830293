"""Keeping nodes connected: in no haste where links die young, never misled by what one node says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleet_service.domain.commands import Revoke
from fleet_service.domain.epochs import CREDIBLE_TERMS_AHEAD, make_epoch
from fleet_service.domain.node_types import NodeState, Report
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import LinkLostError
from fleet_service.runtime.settings import HeadSettings
from tests.runtime.fakes import MODEL, UNIX_S, FakeNode, head_of, hello, simulate

REDIAL_MIN_S = HeadSettings().redial_min_s
REDIAL_MAX_S = HeadSettings().redial_max_s


def test_links_that_die_young_are_redialed_ever_more_slowly() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"), lives_s=0.0)
        head = await head_of({"a:1": node})
        await asyncio.sleep(60)
        waits = node.waits_s
        assert waits[0] == 0.0, "the first loss may be a hiccup: redialed at once"
        assert all(wait >= REDIAL_MIN_S for wait in waits[1:])
        assert all(
            wait <= min(REDIAL_MAX_S, REDIAL_MIN_S * 2**failures)
            for failures, wait in enumerate(waits[1:], 1)
        )
        assert max(waits) > REDIAL_MAX_S / 2
        assert len(node.dialed_s) < 60 / (REDIAL_MAX_S / 4)
        assert not any(link.open for link in node.links)
        await head.stop(0)

    simulate(story)


def test_a_node_whose_links_die_young_is_down_between_them() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"), lives_s=0.0)
        head = await head_of({"a:1": node})
        seen: list[NodeState] = []
        node.at_dial = lambda _: seen.append(head.fleet.nodes[0].state)
        await asyncio.sleep(30)
        assert set(seen[2:]) == {NodeState.DOWN}
        assert head.fleet.nodes[0].state_detail == "the connection was lost"
        await head.stop(0)

    simulate(story)


def test_a_link_that_lived_long_is_redialed_at_once() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"), lives_s=20.0)
        head = await head_of({"a:1": node})
        await asyncio.sleep(205)
        assert node.waits_s == [20.0] * 10
        await head.stop(0)

    simulate(story)


def test_links_that_died_young_are_forgotten_once_one_has_lived() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"), lives_s=0.0)
        head = await head_of({"a:1": node})
        await asyncio.sleep(30)
        node.lives_s = 20.0
        dials = len(node.dialed_s)
        await asyncio.sleep(50)
        assert node.waits_s[dials:] == pytest.approx([20.0, 20.0])
        await head.stop(0)

    simulate(story)


def test_a_node_that_is_another_run_at_each_handshake_is_redialed_without_haste() -> None:
    async def story() -> None:
        runs = iter(range(10_000))
        node = FakeNode(hello("a"), lives_s=0.05)
        node.at_dial = lambda each: each.change(incarnation=f"run-{next(runs)}")
        head = await head_of({"a:1": node})
        await asyncio.sleep(60)
        assert len(node.dialed_s) < 60 / (REDIAL_MAX_S / 4)
        await head.stop(0)

    simulate(story)


def _knows_a_later_epoch_each_time(head_term: int) -> FakeNode:
    node = FakeNode(hello("climber"), lives_s=0.5)
    terms = iter(range(head_term + 100, head_term + 100_000, 100))
    node.at_dial = lambda each: each.change(highest_epoch=make_epoch(next(terms), 1))
    return node


def test_a_node_that_raises_the_term_again_and_again_leaves_the_other_nodes_links_alone() -> None:
    async def story() -> None:
        climber, good = _knows_a_later_epoch_each_time(UNIX_S), FakeNode(hello("good"))
        head = await head_of({"climber:1": climber, "good:1": good})
        await asyncio.sleep(30)
        assert head.fleet.term > UNIX_S + 100 * (len(climber.links) - 1)
        assert head.fleet.term > UNIX_S + 1000
        assert (len(good.links), good.links[0].open) == (1, True)
        known = head.fleet.find("good")
        assert known is not None
        assert known.usable
        assert known.failures == {}
        assert len(climber.dialed_s) < 30 / (REDIAL_MAX_S / 4)
        await head.stop(0)

    simulate(story)


def test_a_node_that_has_seen_a_later_term_is_taken_in_at_once_and_bound_above_it() -> None:
    async def story() -> None:
        epoch = make_epoch(UNIX_S + 500, 7)
        node = FakeNode(hello("a", highest_epoch=epoch))
        head = await head_of({"a:1": node})
        assert head.fleet.nodes[0].usable
        assert head.fleet.next_epoch() > epoch
        assert len(node.dialed_s) == 1
        await head.stop(0)

    simulate(story)


def test_a_term_far_in_the_future_is_refused_with_advice_and_believed_by_nobody() -> None:
    async def story() -> None:
        far = make_epoch(UNIX_S + CREDIBLE_TERMS_AHEAD + 1000, 1)
        liars = {f"{n}:1": FakeNode(hello(f"n{n}", highest_epoch=far << n)) for n in range(2)}
        good = FakeNode(hello("good"))
        head = await head_of(
            {"max:1": FakeNode(hello("max", highest_epoch=2**64 - 1)), **liars, "good:1": good}
        )
        await asyncio.sleep(30)
        assert head.fleet.term == UNIX_S
        for known in head.fleet.nodes[:-1]:
            assert known.state is NodeState.DOWN
            assert "far in the future" in known.state_detail
            assert "restart the node" in known.state_detail
        assert head.fleet.nodes[-1].usable
        await head.stop(0)

    simulate(story)


def _names(head: Head) -> list[tuple[str, str, NodeState]]:
    return [(node.name, node.address, node.state) for node in head.fleet.nodes]


def test_an_identity_that_is_another_node_s_address_is_refused_and_the_other_stays() -> None:
    async def story() -> None:
        away = FakeNode(LinkLostError("connection refused"))
        impostor = FakeNode(hello("good:1"))
        head = await head_of({"good:1": away, "bad:1": impostor})
        await asyncio.sleep(5)
        assert _names(head) == [("good:1", "good:1", NodeState.DOWN), ("bad:1", "bad:1", NodeState.DOWN)]
        refused = head.fleet.find("bad:1")
        assert refused is not None
        assert "the address of another node" in refused.state_detail
        assert "another identity" in refused.state_detail
        away.says = hello("good")
        await asyncio.sleep(5)
        assert _names(head)[0] == ("good", "good:1", NodeState.UP)
        assert head.fleet.find("good:1") is head.fleet.nodes[0]
        await head.stop(0)

    simulate(story)


def test_a_node_named_by_its_address_keeps_its_name_though_it_is_down_when_another_claims_it() -> None:
    async def story() -> None:
        own = FakeNode(hello("good:1"))
        claims = FakeNode(LinkLostError("connection refused"))
        head = await head_of({"good:1": own, "bad:1": claims})
        assert _names(head)[0] == ("good:1", "good:1", NodeState.UP)
        own.says = LinkLostError("connection refused")
        own.links[0].break_()
        claims.says = hello("good:1", incarnation="run-2")
        await asyncio.sleep(5)
        assert _names(head) == [("good:1", "good:1", NodeState.DOWN), ("bad:1", "bad:1", NodeState.DOWN)]
        own.says = hello("good:1")
        await asyncio.sleep(5)
        assert _names(head)[0] == ("good:1", "good:1", NodeState.UP)
        await head.stop(0)

    simulate(story)


def test_an_address_stays_its_node_s_though_that_has_another_name_and_another_claims_it() -> None:
    async def story() -> None:
        good, impostor = FakeNode(hello("good")), FakeNode(LinkLostError("connection refused"))
        head = await head_of({"good:1": good, "bad:1": impostor})
        impostor.says = hello("good:1")
        await asyncio.sleep(5)
        found = head.fleet.find("good:1")
        assert found is not None
        assert (found.name, found.usable) == ("good", True)
        assert _names(head)[1] == ("bad:1", "bad:1", NodeState.DOWN)
        await head.stop(0)

    simulate(story)


def test_an_identity_lives_on_at_the_address_it_has_moved_to() -> None:
    async def story() -> None:
        old, new = FakeNode(hello("a")), FakeNode(LinkLostError("connection refused"))
        head = await head_of({"old:1": old, "new:1": new})
        head.operators.cordon_node("a", "for repair")
        old.says = LinkLostError("connection refused")
        old.links[0].break_()
        new.says = hello("a", incarnation="run-2")
        await asyncio.sleep(5)
        assert _names(head) == [("old:1", "old:1", NodeState.DOWN), ("a", "new:1", NodeState.UP)]
        assert [node.cordoned for node in head.fleet.nodes] == [True, True]
        await head.stop(0)

    simulate(story)


def _errors(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["log_level"] == "error"]


def test_a_surprise_in_dialing_neither_ends_the_keeper_nor_fills_the_log() -> None:
    async def story() -> None:
        node = FakeNode(RuntimeError("socket: too many open files"))
        with capture_logs() as logs:
            head = await head_of({"a:1": node})
            await asyncio.sleep(60)
            assert [entry["event"] for entry in _errors(logs)] == ["dial_failed"]
            assert head.fleet.nodes[0].state is NodeState.DOWN
            assert "too many open files" in head.fleet.nodes[0].state_detail
            assert 10 < len(node.dialed_s) < 60 / (REDIAL_MAX_S / 4)
            node.says = hello("a")
            await asyncio.sleep(5)
            assert head.fleet.nodes[0].usable
        await head.stop(0)

    simulate(story)


def test_a_surprise_in_redialing_does_not_end_the_keeper() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"))
        with capture_logs() as logs:
            head = await head_of({"a:1": node})
            node.says = RuntimeError("socket: too many open files")
            node.links[0].break_()
            await asyncio.sleep(60)
            assert [entry["event"] for entry in _errors(logs)] == ["redial_failed", "dial_failed"]
            node.says = hello("a")
            await asyncio.sleep(5)
            assert head.fleet.nodes[0].usable
        await head.stop(0)

    simulate(story)


def test_each_term_s_lease_is_renewed_until_it_turns_out_to_have_run_out() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"))
        head = await head_of({"a:1": node}, lease_s=60.0, lease_renew_s=40.0)
        (known,) = head.fleet.nodes
        known.assigned(make_epoch(UNIX_S, 1))
        known.assigned(make_epoch(UNIX_S + 9, 1))
        await asyncio.sleep(130)
        assert sorted(node.leases) == [(60.0, UNIX_S)] * 3 + [(60.0, UNIX_S + 9)] * 3
        node.renews = False
        await asyncio.sleep(200)
        assert len(node.leases) == 8
        assert known.leases == {}
        await head.stop(0)

    simulate(story)


def _holds_two_sessions(head: Head) -> None:
    (known,) = head.fleet.nodes
    known.assigned(make_epoch(UNIX_S, 1))
    known.owe_revoke("sure", make_epoch(UNIX_S, 1), surely_held=True)
    known.owe_revoke("unsure", make_epoch(UNIX_S, 2), surely_held=False)


async def _away(node: FakeNode, head: Head, away_s: float) -> None:
    """It goes, the head comes to owe it two revokes, and after so long it is back and has had them."""
    said, node.says = node.says, LinkLostError("connection refused")
    node.links[-1].break_()
    await asyncio.sleep(1)
    _holds_two_sessions(head)
    await asyncio.sleep(away_s)
    node.says = said
    await asyncio.sleep(5)
    assert head.fleet.nodes[0].usable
    assert head.fleet.nodes[0].outbox == {}


def test_a_node_that_was_away_for_a_lease_has_it_ended_before_it_is_used_again() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"))
        head = await head_of({"a:1": node}, lease_s=60.0)
        (known,) = head.fleet.nodes
        life = known.life
        await _away(node, head, 70.0)
        assert node.leases == [(0.0, UNIX_S)]
        assert (known.life, known.leases) == (life + 1, {})
        # What it surely held the end of the lease has freed; an Assign on its way is still to be barred.
        assert node.revoked == [Revoke("unsure", make_epoch(UNIX_S, 2))]
        await head.stop(0)

    simulate(story)


def test_a_node_that_was_away_for_less_keeps_its_lease_and_what_it_holds() -> None:
    async def story() -> None:
        node = FakeNode(hello("a"))
        head = await head_of({"a:1": node}, lease_s=60.0)
        (known,) = head.fleet.nodes
        life = known.life
        await _away(node, head, 30.0)
        assert node.leases == []
        assert known.life == life
        assert {revoke.session_id for revoke in node.revoked} == {"sure", "unsure"}
        await head.stop(0)

    simulate(story)


def _told_of(logs: list[Any], *events: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] in events]


def test_a_head_says_of_each_node_whether_it_was_reached_at_the_start_and_why_not() -> None:
    async def story() -> None:
        nodes = {
            "up:1": FakeNode(hello("a")),
            "gone:1": FakeNode(LinkLostError("connection refused")),
            "slow:1": FakeNode(hello("s"), answers_after_s=3.0),
        }
        with capture_logs() as logs:
            head = await head_of(nodes)
        told = _told_of(logs, "node_up", "node_down", "node_not_reached")
        assert {(each["event"], each["address"], each.get("why")) for each in told} == {
            ("node_up", "up:1", None),
            ("node_down", "gone:1", "connection refused"),
            ("node_not_reached", "slow:1", "no answer within 2 s; it is dialed on"),
        }
        assert len(told) == 3
        (up,) = _told_of(logs, "node_up")
        assert (up["models"], up["lanes"]) == ([MODEL], 4)
        await head.stop(0)

    simulate(story)


def test_lanes_beyond_the_cap_are_warned_of_once_per_node() -> None:
    async def story() -> None:
        nodes = {
            f"{name}:1": FakeNode(hello(name, report=Report(max_lanes=lanes)), lives_s=10.0)
            for name, lanes in (("a", 65), ("b", 64), ("c", 200))
        }
        with capture_logs() as logs:
            head = await head_of(nodes, max_lanes_per_node=64)
            await asyncio.sleep(60)
        assert all(len(node.links) > 2 for node in nodes.values())
        told = [(each["node"], each["has"], each["used"]) for each in _told_of(logs, "lanes_capped")]
        assert sorted(told) == [("a", 65, 64), ("c", 200, 64)]
        await head.stop(0)

    simulate(story)


def test_no_lanes_are_warned_of_where_the_setting_says_how_many_to_use() -> None:
    async def story() -> None:
        node = FakeNode(hello("a", report=Report(max_lanes=200)))
        with capture_logs() as logs:
            head = await head_of({"a:1": node}, max_lanes_per_node=64, lanes_per_node=8)
        assert head.fleet.nodes[0].lanes == 8
        assert _told_of(logs, "lanes_capped") == []
        await head.stop(0)

    simulate(story)
