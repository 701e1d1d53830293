"""Commands over a multiplexed link, dialed or joined: frames, answers, and what ends a link."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.v1 import link_pb2, link_service_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.commands import CancelRun, HeldSession, Refusal, RefusalCode, Revoke
from fleet_service.domain.node_types import Feature, ModelInfo, Report
from fleet_service.links import mux
from fleet_service.links.mux import MAX_UNANSWERED, MuxLink
from fleet_service.runtime.protocols import LinkLostError, LinkTimeoutError, NodeFaultError
from tests.links.scripted_link import PATIENT, WAYS, Linked, accepted, columns, linked, news
from tests.links.scripted_node import (
    EPOCH,
    INTRODUCTION,
    RecordingListener,
    RecordingSink,
    a_run,
    an_append,
    an_assign,
)

COMMANDS: dict[str, Callable[[MuxLink], Awaitable[Any]]] = {
    "assign": lambda link: link.assign(an_assign()),
    "append": lambda link: link.append(an_append([1, 2, 3])),
    "cancel": lambda link: link.cancel(CancelRun("s-1", EPOCH, "g-1")),
    "revoke": lambda link: link.revoke(Revoke("s-1", EPOCH)),
}
ANSWERS: dict[str, Callable[..., Any]] = {
    "assign": pb.AssignResponse,
    "append": pb.AppendResponse,
    "cancel": pb.CancelResponse,
    "revoke": pb.RevokeResponse,
}


async def _ask(link: MuxLink, kind: str) -> object:
    return await COMMANDS[kind](link)


every_command = pytest.mark.parametrize("kind", COMMANDS)
both_ways = pytest.mark.parametrize("way", WAYS)


def answer(command: link_pb2.HeadCommand, **fields: Any) -> link_pb2.NodeReply:
    kind = str(command.WhichOneof("command"))
    body: dict[str, Any] = {kind: ANSWERS[kind](**fields)}
    return link_pb2.NodeReply(call_id=command.call_id, **body)


@both_ways
async def test_the_head_speaks_first_and_says_who_it_is_and_how_often_it_wants_reports(way: str) -> None:
    async with linked(way, settings=replace(PATIENT, report_period_s=0.5), identity="n-7") as both:
        hello = both.greeting.hello
        assert both.greeting.type == link_pb2.FRAME_TYPE_HELLO
        assert (hello.fleet_id, hello.head_id, hello.term) == ("fleet", "head-1", 7)
        assert hello.report_period_ms == 500
        assert both.link.hello.identity == "n-7"
        assert both.link.introduction == INTRODUCTION


@both_ways
@pytest.mark.parametrize("features, resumes", [([3, 4], True), ([3], False)])
async def test_runs_outlive_a_link_only_where_the_node_says_so(
    way: str, features: list[Any], resumes: bool
) -> None:
    async with linked(way, features=features) as both:
        assert both.link.resumes is resumes
        assert Feature.LINK in both.link.hello.features


@both_ways
@every_command
async def test_a_command_that_is_done_is_no_refusal_and_a_sign_of_life(way: str, kind: str) -> None:
    async with linked(way) as both:
        asked = asyncio.ensure_future(COMMANDS[kind](both.link))
        command = await both.node.command()
        assert command.WhichOneof("command") == kind
        assert getattr(command, kind).session_id == "s-1"
        assert both.listener.signs == 0
        await both.node.send(news(replies=[answer(command)]))
        assert await asked is None
        assert both.listener.signs == 1


@both_ways
@every_command
async def test_a_refused_command_says_why(way: str, kind: str) -> None:
    refusal = pb.Refusal(code=pb.REFUSAL_CODE_STALE_EPOCH, current_epoch=9, detail="newer owner")
    async with linked(way) as both:
        asked = asyncio.ensure_future(COMMANDS[kind](both.link))
        command = await both.node.command()
        await both.node.send(news(replies=[answer(command, refusal=refusal)]))
        assert await asked == Refusal(RefusalCode.STALE_EPOCH, current_epoch=9, detail="newer owner")


@both_ways
@pytest.mark.parametrize("renewed", [True, False])
async def test_a_lease_is_renewed_or_had_run_out(way: str, renewed: bool) -> None:
    async with linked(way) as both:
        asked = asyncio.ensure_future(both.link.renew_lease(60.0, INTRODUCTION.term))
        command = await both.node.command()
        assert (command.renew_lease.lease_ms, command.renew_lease.term) == (60_000, INTRODUCTION.term)
        reply = pb.RenewLeaseResponse(renewed=renewed)
        await both.node.send(news(replies=[link_pb2.NodeReply(call_id=command.call_id, renew_lease=reply)]))
        assert await asked is renewed


@both_ways
async def test_reconcile_lists_what_the_node_holds(way: str) -> None:
    held = pb.HeldSession(
        session_id="s-1", epoch=5, head_id="h", context_length=9, fenced=True, generation_ids=["g"]
    )
    async with linked(way) as both:
        asked = asyncio.ensure_future(both.link.reconcile())
        command = await both.node.command()
        assert (command.reconcile.fleet_id, command.reconcile.head_id) == ("fleet", "head-1")
        reply = pb.ReconcileResponse(sessions=[held])
        await both.node.send(news(replies=[link_pb2.NodeReply(call_id=command.call_id, reconcile=reply)]))
        assert await asked == [HeldSession("s-1", 5, "h", 9, fenced=True, generation_ids=("g",))]


@both_ways
async def test_any_answer_to_a_ping_proves_life(way: str) -> None:
    refusal = pb.Refusal(code=pb.REFUSAL_CODE_UNKNOWN_SESSION)
    async with linked(way) as both:
        asked = asyncio.ensure_future(both.link.ping())
        command = await both.node.command()
        assert command.cancel.epoch == 0, "a run of that epoch cannot be"
        await both.node.send(news(replies=[answer(command, refusal=refusal)]))
        await asked


@both_ways
async def test_commands_of_one_turn_leave_in_one_frame_in_their_order(way: str) -> None:
    async with linked(way) as both:
        await both.node.send(news(report=types_pb2.CapacityReport()))
        await both.listener.reported.wait()
        frames_before, signs_before = both.node.frames, both.listener.signs
        asked = [asyncio.create_task(_ask(both.link, kind)) for kind in [*COMMANDS] * 25]
        sinks = [RecordingSink() for _ in range(28)]
        for sink in sinks:
            both.link.run(a_run(), sink)
        commands = [await both.node.command() for _ in range(128)]
        # The runs were asked for in this turn, the tasks of the other commands begin in the next.
        assert [each.WhichOneof("command") for each in commands] == ["generate"] * 28 + [*COMMANDS] * 25
        assert both.node.frames - frames_before == 1
        call_ids = [each.call_id for each in commands]
        assert call_ids == sorted(set(call_ids))
        await both.node.send(news(replies=[answer(each) for each in commands[28:]]))
        assert await asyncio.gather(*asked) == [None] * 100
        assert both.listener.signs == signs_before + 1


@both_ways
async def test_a_revoke_leaves_with_the_next_command(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mux, "COMPANY_S", 60.0)
    async with linked(way) as both:
        frames_before = both.node.frames
        revoked = both.link.revoke(Revoke("s-1", EPOCH))
        for _ in range(10):
            await asyncio.sleep(0)
        assert both.node.frames == frames_before, "it waits for company"
        appended = asyncio.create_task(both.link.append(an_append([1])))
        commands = [await both.node.command() for _ in range(2)]
        assert [each.WhichOneof("command") for each in commands] == ["revoke", "append"]
        assert both.node.frames == frames_before + 1
        await both.node.send(news(replies=[answer(each) for each in commands]))
        assert [await revoked, await appended] == [None, None]


@both_ways
async def test_commands_that_fill_more_than_a_frame_leave_in_several(way: str) -> None:
    settings = replace(PATIENT, max_message_bytes=10_000)
    async with linked(way, settings=settings) as both:
        asked = [asyncio.ensure_future(both.link.append(an_append([2**31] * 700))) for _ in range(5)]
        commands = [await both.node.command() for _ in range(5)]
        assert both.node.frames == 1 + 3
        await both.node.send(news(replies=[answer(each) for each in commands]))
        assert await asyncio.gather(*asked) == [None] * 5


@both_ways
async def test_a_command_beyond_the_message_limit_fails_and_the_link_stays(way: str) -> None:
    async with linked(way, max_message_bytes=10_000) as both:
        with pytest.raises(NodeFaultError, match=r"append: the command has 25\d+ bytes"):
            await both.link.append(an_append([2**31] * 5_000))
        sink = RecordingSink()
        run = both.link.run(a_run(prefix_token_ids=[2**31] * 5_000), sink)
        await sink.ended.wait()
        run.close()
        assert [type(error) for error in sink.broken] == [NodeFaultError]
        asked = asyncio.ensure_future(both.link.append(an_append([2**31] * 500)))
        command = await both.node.command()
        assert command.WhichOneof("command") == "append"
        await both.node.send(news(replies=[answer(command)]))
        assert await asked is None


@both_ways
async def test_a_million_tokens_go_in_one_append(way: str) -> None:
    token_ids = list(range(0, 3_000_000, 3))
    async with linked(way) as both:
        asked = asyncio.ensure_future(both.link.append(an_append(token_ids)))
        command = await both.node.command()
        assert list(command.append.token_ids) == token_ids
        await both.node.send(news(replies=[answer(command)]))
        assert await asked is None


@both_ways
async def test_a_command_without_an_answer_times_out_and_its_late_answer_is_nothing(way: str) -> None:
    async with linked(way, settings=replace(PATIENT, command_timeout_s=0.05)) as both:
        with pytest.raises(LinkTimeoutError, match="assign: no answer within"):
            await both.link.assign(an_assign())
        late = await both.node.command()
        await both.node.send(news(replies=[answer(late)], report=types_pb2.CapacityReport()))
        await both.listener.reported.wait()
        assert both.listener.losses == []


@both_ways
async def test_what_is_given_up_before_it_left_is_never_sent(way: str) -> None:
    silenced = RecordingSink()
    async with linked(way) as both:
        # The node does not read, so that these fill the connection.
        filling = [asyncio.ensure_future(both.link.append(an_append([2**31] * 500_000))) for _ in range(8)]
        for _ in range(10):
            await asyncio.sleep(0)
        given_up = asyncio.ensure_future(both.link.assign(an_assign()))
        run = both.link.run(a_run(), silenced)
        kept = asyncio.ensure_future(both.link.revoke(Revoke("s-1", EPOCH)))
        await asyncio.sleep(0)
        given_up.cancel()
        run.close()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        commands = [await both.node.command() for _ in range(9)]
        assert [each.WhichOneof("command") for each in commands] == ["append"] * 8 + ["revoke"]
        await both.node.send(news(replies=[answer(each) for each in commands]))
        assert await asyncio.gather(*filling, kept) == [None] * 9
    assert (silenced.steps, silenced.broken) == ([], [])


@both_ways
@every_command
async def test_closing_the_link_ends_a_command_under_way_as_lost(way: str, kind: str) -> None:
    async with linked(way) as both:
        asked = asyncio.ensure_future(COMMANDS[kind](both.link))
        await both.node.command()
        await both.link.close()
        with pytest.raises(LinkLostError):
            await asked
        with pytest.raises(LinkLostError, match="gone"):
            await COMMANDS[kind](both.link)
        await both.node.wait_for_end()
    assert both.listener.losses == [], "a link that was closed is not lost"


@both_ways
async def test_a_lost_link_is_told_once_with_its_commands_and_runs(way: str) -> None:
    sinks = [RecordingSink() for _ in range(10)]
    async with linked(way) as both:
        runs = [both.link.run(a_run(), sink) for sink in sinks]
        for handle in range(1, 6):
            await both.node.accept(handle)
        asked = asyncio.ensure_future(both.link.assign(an_assign()))
        await asyncio.sleep(0)
        await both.drop()
        await both.listener.lost.wait()
        with pytest.raises(LinkLostError):
            await asked
        for run, sink in zip(runs, sinks, strict=True):
            assert [type(error) for error in sink.broken] == [LinkLostError]
            run.close()
    assert [type(error) for error in both.listener.losses] == [LinkLostError]
    assert all(len(sink.broken) == 1 for sink in sinks)


@both_ways
async def test_reports_reach_the_listener_with_new_models(way: str) -> None:
    report = types_pb2.CapacityReport(queue_depth=1)
    async with linked(way) as both:
        await both.node.send(news(report=report))
        await both.node.send(news(models=[types_pb2.Model(name="new")]))
        await both.node.send(news())
        while both.listener.signs < 3:
            await asyncio.sleep(0.001)
    assert both.listener.reports == [
        (Report(queue_depth=1), ()),
        (Report(queue_depth=1), (ModelInfo("new"),)),
    ]


async def test_what_came_before_somebody_listens_is_told_then() -> None:
    async with linked("joined", attach=False) as both:
        await both.node.send(news(report=types_pb2.CapacityReport(queue_depth=1)))
        await both.node.send(news(models=[types_pb2.Model(name="new")]))
        await both.node.send(news(report=types_pb2.CapacityReport(queue_depth=2)))
        sink = RecordingSink()
        both.link.run(a_run(), sink)
        command = await both.node.command()
        refused = link_pb2.RunAccepted(refusal=pb.Refusal(code=pb.REFUSAL_CODE_BUSY))
        reply = link_pb2.NodeReply(call_id=command.call_id, generate=refused)
        await both.node.send(news(replies=[reply]))
        await sink.ended.wait()
        assert both.link.attach(both.listener)
        assert both.listener.reports == [(Report(queue_depth=2), (ModelInfo("new"),))]
        await both.node.send(news(report=types_pb2.CapacityReport(queue_depth=3)))
        while len(both.listener.reports) < 2:
            await asyncio.sleep(0.001)
        await both.drop()
        await both.listener.lost.wait()
        assert not both.link.attach(RecordingListener()), "there is nothing to listen to"


# ------------------------------------------------------------------------------- what the contract forbids


async def _accepted_run(both: Linked, sink: RecordingSink) -> None:
    both.link.run(a_run(), sink)
    await both.node.accept(1)
    await both.node.send(news(steps=columns((1, 0, [5]))))
    await sink.stepped.wait()


def _frame(kind: int, **fields: Any) -> link_pb2.NodeFrame:
    return link_pb2.NodeFrame(type=kind, **fields)  # type: ignore[arg-type]


FORBIDDEN: dict[str, tuple[link_pb2.NodeFrame | bytes | int, str]] = {
    "garbage": (b"\xff\xff\xff", "could not be decoded"),
    "half a frame": (b"\x0a\x7f" + news(steps=columns((1, 1, [6]))).SerializeToString(), "not be decoded"),
    "a second hello": (_frame(1, hello=pb.HandshakeResponse()), "sent FRAME_TYPE_HELLO where only NEWS"),
    "a late refusal": (_frame(2), "sent FRAME_TYPE_REFUSED where only NEWS"),
    "a head's frame": (_frame(4), "sent FRAME_TYPE_COMMANDS where only NEWS"),
    "a new type that matters": (_frame(99, must_understand=True), "type 99 that must be understood.*upgrade"),
    "an answer to nothing": (news(replies=[accepted(77, 2)]), "answered call 77, which was not open"),
    "an answer given twice": (news(replies=[accepted(1, 2)]), "answered call 1, which was not open"),
    "a step of no run": (news(steps=columns((1, 1, [6]), (9, 0, [5]))), "run 9, which is not under way"),
    "an event of no run": (news(events=[link_pb2.RunEvent(handle=9)]), "run 9, which is not under"),
    "too few counts": (news(steps=link_pb2.StepColumns(handles=[1], token_ids=[1])), "columns of a step"),
    "too many ids": (
        news(steps=link_pb2.StepColumns(handles=[1], counts=[1], first_indexes=[1], token_ids=[1, 2])),
        "columns of a step",
    ),
    "ten thousand handles": (
        news(steps=columns(*((handle, 1, [6]) for handle in range(1, 10_001)))),
        "run 2, which is not under way",
    ),
    "a giant frame": (20_000_000, "larger than max|20000000 bytes; the head takes 16777216"),
}


@both_ways
@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_node_that_breaks_the_contract_loses_its_link_with_a_clear_text(way: str, name: str) -> None:
    sent, text = FORBIDDEN[name]
    sink = RecordingSink()
    async with linked(way) as both:
        await _accepted_run(both, sink)
        data = bytes(sent) if isinstance(sent, int) else as_sent(sent)
        sending = asyncio.ensure_future(both.node.send_bytes(data))
        await both.listener.lost.wait()
        await asyncio.wait([sending])
        sending.exception()
        assert len(both.listener.losses) == 1
        assert isinstance(both.listener.losses[0], NodeFaultError), both.listener.losses
        assert re.search(text, str(both.listener.losses[0]))
        assert [type(error) for error in sink.broken] == [LinkLostError]
        await both.node.wait_for_end()
        with pytest.raises(LinkLostError):
            await both.link.assign(an_assign())


@both_ways
async def test_a_frame_of_forty_megabytes_costs_the_link(way: str) -> None:
    async with linked(way) as both:
        sending = asyncio.ensure_future(both.node.send_bytes(bytes(40_000_000)))
        await both.listener.lost.wait()
        await asyncio.wait([sending])
        sending.exception()
    assert len(both.listener.losses) == 1


@both_ways
@pytest.mark.parametrize("handle", [0, 1])
async def test_a_handle_that_is_no_new_one_costs_the_link(way: str, handle: int) -> None:
    sink = RecordingSink()
    async with linked(way) as both:
        await _accepted_run(both, sink)
        both.link.run(a_run(), RecordingSink())
        await both.node.accept(handle)
        await both.listener.lost.wait()
        assert "no new one" in str(both.listener.losses[0])


@both_ways
async def test_an_answer_of_another_kind_costs_the_link(way: str) -> None:
    async with linked(way) as both:
        asked = asyncio.ensure_future(both.link.assign(an_assign()))
        command = await both.node.command()
        await both.node.send(
            news(replies=[link_pb2.NodeReply(call_id=command.call_id, append=pb.AppendResponse())])
        )
        with pytest.raises(LinkLostError):
            await asked
        assert "a call of assign with append" in str(both.listener.losses[0])


@both_ways
async def test_frames_of_later_versions_are_skipped_and_are_signs_of_life(way: str) -> None:
    async with linked(way) as both:
        for kind in (0, 77):
            await both.node.send(_frame(kind))
        await both.node.send(news(report=types_pb2.CapacityReport()))
        await both.listener.reported.wait()
        assert both.listener.signs == 3
        assert both.listener.losses == []


@both_ways
async def test_a_node_that_answers_nothing_is_given_up(way: str) -> None:
    async with linked(way) as both:
        for _ in range(MAX_UNANSWERED):
            both.link.run(a_run(), RecordingSink())
        while both.node.frames == 1:
            await both.node.take_frame()
        with pytest.raises(LinkLostError):
            await both.link.assign(an_assign())
        assert "unanswered" in str(both.listener.losses[0])


def as_sent(frame: link_pb2.NodeFrame | bytes) -> bytes:
    """A frame as it goes over the wire: the first field of its message, both ways."""
    if isinstance(frame, bytes):
        return frame
    return link_service_pb2.LinkResponse(frame=frame).SerializeToString()
