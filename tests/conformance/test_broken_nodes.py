"""A node with one mistake in it is told by the rule that it breaks: no rule of the check is for show."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet_service.conformance.runner import all_rules
from fleet_service.token import FleetToken as HeadToken
from node_stub.faults import ReportLies, parse_fault, parse_lie
from node_stub.link import LinkProtocolError
from node_stub.rules import NodeRules
from node_stub.server import NodeServicer
from node_stub.token import FleetToken, Way
from tests.conformance import broken_rules as rules
from tests.conformance import broken_servicers as servicers
from tests.conformance.support import broken, check, stub

# A mistake that shows as silence is waited for so long.
TIMEOUT_S = 4.0
KEY = b"k" * 32

BY_RULES: list[tuple[str, type[NodeRules]]] = [
    ("N4", rules.ForgetsTheHighestEpoch),
    ("N7", rules.WorksForAnyFleet),
    ("N8", rules.KeepsTheOldContext),
    ("N9", rules.TakesAnEqualEpoch),
    ("N10", rules.TakesAnOldEpoch),
    ("N11", rules.StopsNothing),
    ("N12", rules.AppendsUnderAnyEpoch),
    ("N12", rules.TellsNoCurrentEpoch),
    ("N13", rules.AppendsToUnknownSessions),
    ("N14", rules.ServesAnyModel),
    ("N17", rules.RefusesARepeat),
    ("N18", rules.TakesALowerId),
    ("N19", rules.TakesAnotherCommandUnderTheSameId),
    ("N20", rules.AppendsAtTheEnd),
    ("N21", rules.KeepsWhatThereIs),
    ("N22", rules.KnowsNoVocabulary),
    ("N23", rules.KnowsNoWindow),
    ("N24", rules.IgnoresTheChecksum),
    ("N24", rules.IgnoresTheLength),
    ("N28", rules.GeneratesOneTooMany),
    ("N29", rules.GeneratesBeyondTheWindow),
    ("N30", rules.LetsThePrefixJoin),
    ("N31", rules.TakesAnyFirstIndex),
    ("N32", rules.RunsAGenerationAgain),
    ("N37", rules.StartsWhatWasCancelled),
    ("N38", rules.CancelsUnderAnyEpoch),
    ("N40", rules.RenewsWhatNeverWas),
    ("N40", rules.ForgetsToRenew),
    ("N41", rules.NeverFences),
    ("N42", rules.StopsNothing),
    ("N43", rules.RenewsWhatRanOut),
    ("N44", rules.NeverEndsALease),
    ("N45", rules.HasOneLeaseForAHead),
    ("N46", rules.FreesWithAnOldEpoch),
    ("N47", rules.KeepsWhatIsRevoked),
    ("N47", rules.StopsNothing),
    ("N48", rules.RevokesUnderAnyEpoch),
    ("N49", rules.ForgetsTombstones),
    ("N50", rules.BarsNothingUnknown),
    ("N51", rules.KeepsTombstonesForOneLease),
]
BY_SERVICER: list[tuple[str, type[NodeServicer]]] = [
    ("N1", servicers.SpeaksAnyVersion),
    ("N1", servicers.AnswersWithTheNewestVersion),
    ("N2", servicers.IsAnotherRunEachTime),
    ("N3", servicers.NamesAModelTwice),
    ("N15", servicers.AbortsOddIds),
    ("N16", servicers.KeepsSessionsByConnection),
    ("N27", servicers.FinishesLate),
    ("N33", servicers.SaysNoPhase),
    ("N34", servicers.WaitsInSilence),
    ("N35", servicers.KnowsNoTime),
    ("N36", servicers.CancelsNothing),
    ("N36", servicers.TellsNothingRan),
    ("N39", servicers.RunsOnAlone),
    ("N52", servicers.ReportsOnce),
    ("N52", servicers.ReportsLate),
    ("N53", servicers.HasNoClock),
    ("N54", servicers.KnowsNoOwner),
    ("N55", servicers.IgnoresWhatRidesAlong),
    ("N56", servicers.GoesOnAfterARefusedPart),
    ("N57", servicers.TellsAllFleets),
    ("N57", servicers.TellsFencedSessionsAsLive),
    ("N57", servicers.TellsNoGenerations),
    ("N63", servicers.IsAnotherRunEachTime),
]
BY_FAULT = [
    ("N8", "before-assign:refuse=FENCED"),
    ("N8", "after-assign:drop-link"),
    ("N8", "after-assign:die"),
    ("N8", "before-assign:engine-error"),
    ("N20", "after-append:refuse=REPLAYED"),
    ("N20", "after-append:lose-append"),
    ("N20", "after-append:repeat-append"),
    ("N20", "after-append:cut-link=60000"),
    ("N25", "after-tokens=3:repeat-index"),
    ("N25", "after-tokens=3:skip-index"),
    ("N26", "after-generate:wrong-epoch"),
    ("N26", "before-finish:wrong-epoch"),
    ("N27", "after-generate:stall"),
    ("N27", "after-tokens=3:stall"),
    ("N27", "after-generate:refuse=BUSY"),
    ("N27", "after-tokens=3:engine-error"),
    ("N27", "after-tokens=3:drop-link"),
    ("N27", "before-finish:drop-link"),
    ("N27", "before-finish:delay=20"),
    ("N27", "after-tokens=3:die"),
    ("N59", "after-tokens=3:skip-index"),
    ("N59", "after-tokens=3:repeat-index"),
    ("N59", "after-generate:wrong-epoch"),
    ("N59", "after-tokens=3:engine-error"),
]
BY_LIE = [
    ("N52", "silent"),
    ("N53", "lanes-active=99"),
    ("N53", "kv-blocks-used=999999"),
    ("N53", "kv-blocks-total=1"),
    ("N54", "lanes-active=0"),
    ("N54", "queue-depth=0"),
    ("N61", "silent"),
]
APART = {"N5", "N6", "N58", "N60", "N62"}  # each has a test of its own below


def test_every_rule_is_broken_by_some_node() -> None:
    shown = {number for number, _ in (*BY_RULES, *BY_SERVICER, *BY_FAULT, *BY_LIE)} | APART
    assert shown == {rule.number for rule in all_rules()}


@pytest.mark.slow
@pytest.mark.parametrize("number,mistake", BY_RULES, ids=lambda each: getattr(each, "__name__", each))
async def test_rules_with_a_mistake(number: str, mistake: type[NodeRules]) -> None:
    async with stub(mistake) as node:
        verdict = await check(node.address, [number], timeout_s=TIMEOUT_S)
    assert list(broken(verdict)) == [number], verdict.results
    assert not verdict.holds


@pytest.mark.slow
@pytest.mark.parametrize("number,mistake", BY_SERVICER, ids=lambda each: getattr(each, "__name__", each))
async def test_a_servicer_with_a_mistake(
    number: str, mistake: type[NodeServicer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_stub.server.NodeServicer", mistake)
    async with stub() as node:
        verdict = await check(node.address, [number], timeout_s=TIMEOUT_S)
    assert list(broken(verdict)) == [number], verdict.results


@pytest.mark.slow
@pytest.mark.parametrize("number,text", BY_FAULT)
async def test_a_fault(number: str, text: str) -> None:
    async with stub(faults=[parse_fault(text)]) as node:
        verdict = await check(node.address, [number], timeout_s=TIMEOUT_S)
    assert list(broken(verdict)) == [number], verdict.results


@pytest.mark.slow
@pytest.mark.parametrize("number,text", BY_LIE)
async def test_a_report_that_lies(number: str, text: str) -> None:
    async with stub() as node:
        node.set_faults(lies=parse_lie(text, ReportLies()))
        verdict = await check(node.address, [number], timeout_s=TIMEOUT_S)
    assert list(broken(verdict)) == [number], verdict.results


@pytest.mark.parametrize(
    "text", ["decode-tokens-per-s=1", "prefill-tokens-per-s=1000000", "kv-blocks-used=0"]
)
async def test_a_lie_that_might_be_true_is_not_told(text: str) -> None:
    async with stub() as node:
        node.set_faults(lies=parse_lie(text, ReportLies()))
        verdict = await check(node.address, ["N52", "N53", "N54"])
    assert broken(verdict) == {}


async def test_sessions_that_a_node_keeps_for_itself() -> None:
    async with stub(rules.FreesNothing) as node:
        verdict = await check(node.address, ["N20", "N63"], timeout_s=TIMEOUT_S)
    assert "still held" in broken(verdict)["N63"]


async def test_generations_that_a_node_keeps_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_stub.server.NodeServicer", servicers.RunsOnAlone)
    async with stub(rules.FreesNothing) as node:
        verdict = await check(node.address, ["N39", "N63"], timeout_s=1.0)
    assert "waiting until the reports count none" in broken(verdict)["N63"]


class _ProvesAsAHead(FleetToken):
    def proof(self, way: Way, head_nonce: bytes, node_nonce: bytes) -> bytes:
        return self._mac(f"fleet.v1 head {way}", head_nonce, node_nonce)


class _ProvesOnce(FleetToken):
    """The nonce of the first handshake answers all."""

    def proof(self, way: Way, head_nonce: bytes, node_nonce: bytes) -> bytes:
        first = self.__dict__.setdefault("first", head_nonce)
        return super().proof(way, first, node_nonce)


class _BelievesAnybody(FleetToken):
    def accepts_metadata(self, value: bytes) -> bool:
        return True


@pytest.mark.parametrize(
    "number,token",
    [("N5", _ProvesAsAHead), ("N5", _ProvesOnce), ("N6", _BelievesAnybody)],
    ids=lambda each: getattr(each, "__name__", each),
)
async def test_a_token_that_proves_nothing(number: str, token: type[FleetToken]) -> None:
    async with stub(token=token(KEY)) as node:
        verdict = await check(node.address, [number], token=HeadToken(KEY))
    assert list(broken(verdict)) == [number], verdict.results


async def test_a_node_that_opens_its_gate_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def admit(self: Any, continuation: Any, details: Any) -> Any:
        return await continuation(details)

    monkeypatch.setattr("node_stub.gate.TokenGate.intercept_service", admit)
    async with stub(token=FleetToken(KEY)) as node:
        verdict = await check(node.address, ["N6"], token=HeadToken(KEY))
    assert "Assign without a proof ended with an answer" in broken(verdict)["N6"]


async def test_a_link_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from node_stub.commands import hello_of

    def renamed(*arguments: Any) -> Any:
        hello = hello_of(*arguments)
        hello.identity = "another"  # type: ignore[union-attr]
        return hello

    monkeypatch.setattr("node_stub.link.hello_of", renamed)
    async with stub() as node:
        verdict = await check(node.address, ["N58"])
    assert list(broken(verdict)) == ["N58"]


async def test_a_link_that_knows_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_stub.link._skip", lambda frame: None)
    async with stub() as node:
        verdict = await check(node.address, ["N60"], timeout_s=TIMEOUT_S)
    assert list(broken(verdict)) == ["N60"]


async def test_a_link_that_breaks_on_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(frame: Any) -> None:
        raise LinkProtocolError("what is that?")

    monkeypatch.setattr("node_stub.link._skip", refuse)
    async with stub() as node:
        verdict = await check(node.address, ["N60"])
    assert list(broken(verdict)) == ["N60"]


async def test_a_node_that_announces_to_resume_and_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from node_stub.convert import features_of

    def boastful(settings: Any) -> Any:
        return [*features_of(settings), admin_pb.NODE_FEATURE_RESUME]

    monkeypatch.setattr("node_stub.convert.features_of", boastful)
    async with stub(resume=False) as node:
        verdict = await check(node.address, ["N62"])
        # Its run had been cancelled with the link.
        assert not node.node.report().lanes_active
    assert "REPLAYED" in broken(verdict)["N62"]
