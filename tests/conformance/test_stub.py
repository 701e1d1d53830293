"""The stub keeps every rule, whatever of its features is on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fleet_service.conformance.engine import Answer
from fleet_service.conformance.runner import all_rules
from fleet_service.tls import ClientTls
from fleet_service.token import FleetToken as HeadToken
from node_stub.faults import parse_fault
from node_stub.reference import StubModel
from node_stub.rules import Assign, Code, Limits, Model, NodeRules, Refusal
from node_stub.stub_node import FAST
from node_stub.tls import TlsFiles
from node_stub.token import FleetToken
from tests.certificates import Authority
from tests.conformance.support import broken, check, skipped, stub, untried
from tests.node_stub.support import head_of

KEY = b"k" * 32
TOKEN_RULES = {"N5", "N6"}
INLINE_RULES = {"N55", "N56"}
RECONCILE_RULES = {"N57"}
LINK_RULES = {"N58", "N59", "N60", "N61", "N62"}


SLOW = pytest.mark.slow
BARE = {"link": False, "inline_bind": False, "resume": False, "reconcile": False}


@pytest.mark.parametrize(
    "settings,skips",
    [
        pytest.param({}, set(), id="all"),
        pytest.param({"link": False}, LINK_RULES, id="no-link", marks=SLOW),
        pytest.param({"inline_bind": False}, INLINE_RULES, id="no-inline", marks=SLOW),
        pytest.param({"resume": False}, {"N62"}, id="no-resume", marks=SLOW),
        pytest.param({"reconcile": False}, RECONCILE_RULES, id="no-reconcile", marks=SLOW),
        pytest.param(BARE, LINK_RULES | INLINE_RULES | RECONCILE_RULES, id="minimal", marks=SLOW),
    ],
)
async def test_every_rule_holds(settings: dict[str, Any], skips: set[str]) -> None:
    async with stub(**settings) as node:
        verdict = await check(node.address)
        held = node.node.rules.holdings()
    assert broken(verdict) == {}
    assert set(skipped(verdict)) == skips | TOKEN_RULES
    assert not untried(verdict)
    assert verdict.holds
    assert [each.number for each in verdict.results] == [rule.number for rule in all_rules()]
    assert verdict.engine == {"deterministic": Answer.YES, "continues": Answer.YES}
    assert not [each for each in held if not each.fenced]


@SLOW
async def test_every_rule_holds_with_a_token_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, own = authority.issue("node"), authority.issue("head")
    tls = TlsFiles(cert=pair.cert, key=pair.key, ca=authority.ca)
    async with stub(token=FleetToken(KEY), tls=tls) as node:
        head_tls = ClientTls(authority.ca, own.cert, own.key)
        verdict = await check(node.address, token=HeadToken(KEY), tls=head_tls)
    assert broken(verdict) == {}
    assert not skipped(verdict)
    assert verdict.holds


@SLOW
async def test_a_node_that_is_only_slow_keeps_every_rule() -> None:
    points = "before-assign", "after-append", "after-generate", "after-tokens=3"
    async with stub(faults=[parse_fault(f"{point}:delay=20") for point in points]) as node:
        verdict = await check(node.address)
    assert broken(verdict) == {}
    assert verdict.holds


async def test_an_engine_too_fast_to_be_caught_breaks_nothing() -> None:
    async with stub(engine=FAST, models=((StubModel("stub"), 64),)) as node:
        verdict = await check(node.address)
    assert broken(verdict) == {}
    assert not untried(verdict)


@SLOW
async def test_answers_that_end_at_once_break_nothing() -> None:
    async with stub(models=((StubModel("stub", eos_per_mille=1000), 2_048),)) as node:
        verdict = await check(node.address)
    assert broken(verdict) == {}
    assert not untried(verdict)


@SLOW
async def test_a_window_without_a_limit_breaks_nothing() -> None:
    async with stub(models=((StubModel("stub"), 0),)) as node:
        verdict = await check(node.address)
    assert broken(verdict) == {}
    assert set(skipped(verdict)) == TOKEN_RULES | {"N23", "N29"}


async def test_a_node_may_be_tried_again_and_again() -> None:
    """Each time as another fleet: a node keeps something of every fleet, and must not fill up with it."""
    async with stub(limits=Limits(max_fleets=2)) as node:
        for _ in range(4):
            verdict = await check(node.address, ["N8", "N15", "N63"])
            assert broken(verdict) == {}


@SLOW
async def test_a_node_at_work_is_not_held_up() -> None:
    """Its own sessions live on, and its lanes are not all taken."""
    async with stub() as node, head_of(node.address) as head:
        await head.bind()
        call = head.generate([11, 22, 33, 44], 1_000)
        await call.read()
        verdict = await check(node.address, fleet_id="fleet")
        assert broken(verdict) == {}
        assert "other work" in skipped(verdict)["N34"]
        assert (await head.append([5], base=4)).context_length == 5
        call.cancel()


@SLOW
async def test_an_engine_of_chance_is_a_property_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(5)
    monkeypatch.setattr("node_stub.stub_engine.next_token", lambda model, state: next(numbers) % 1_000 + 4)
    async with stub() as node:
        verdict = await check(node.address)
    assert broken(verdict) == {}
    assert verdict.holds
    assert verdict.engine == {"deterministic": Answer.NO, "continues": Answer.NO}


def test_a_fleet_without_sessions_makes_room_and_its_epochs_stay_known() -> None:
    rules = NodeRules([Model("stub")], Limits(max_fleets=1))
    ours, theirs = 9 << 32 | 5, 2 << 32 | 1

    def assign(fleet_id: str, epoch: int, now_ms: int) -> Refusal | None:
        return rules.assign(Assign(f"s-{fleet_id}", epoch, 1, fleet_id, "head", "stub"), now_ms)

    assert assign("ours", ours, 0) is None
    refusal = assign("theirs", theirs, 1)
    assert refusal is not None
    assert refusal.code is Code.BUSY
    assert rules.revoke("s-ours", ours, 2) is None
    assert assign("theirs", theirs, 3) is None
    assert rules.highest_epoch("ours") == ours
