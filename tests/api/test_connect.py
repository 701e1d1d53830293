"""Connect: the calls of many sessions over one stream, against real gRPC and real token logs."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import Started
from tests.api.connected import COMPLETE, GET, MOVED, PATIENCE_S, Connected, tokens_of
from tests.api.fakes import FINISHED, SESSION, not_found


@pytest.mark.parametrize(
    "kind,request_message,method",
    [
        ("create_session", pb.CreateSessionRequest(spec=pb.SessionSpec(model="toy")), "create_session"),
        ("get_session", GET, "get_session"),
        ("append_tokens", pb.AppendTokensRequest(session_id="s1", token_ids=[1]), "append_tokens"),
        ("park_session", pb.ParkSessionRequest(session_id="s1"), "park_session"),
        ("resume_session", pb.ResumeSessionRequest(session_id="s1"), "resume_session"),
        ("finish_session", pb.FinishSessionRequest(session_id="s1"), "finish_session"),
        ("cancel_generation", pb.CancelGenerationRequest(generation_id="g"), "cancel_generation"),
    ],
)
async def test_a_call_is_answered_as_a_call_of_its_own(
    connected: Connected, kind: str, request_message: Any, method: str
) -> None:
    await connected.ask(3, **{kind: request_message})
    reply = await connected.reply()
    assert (reply.call_id, reply.WhichOneof("reply")) == (3, kind)
    plain = getattr(connected.edge.fleet, "".join(part.title() for part in kind.split("_")))
    assert getattr(reply, kind) == await plain(request_message)
    assert method in connected.edge.head.calls


@pytest.mark.parametrize(
    "kind,request_message",
    [
        ("generate", pb.GenerateRequest(session_id="s1")),
        ("complete", COMPLETE),
        ("attach_generation", pb.AttachGenerationRequest(generation_id="gen-1")),
    ],
)
async def test_a_stream_s_events_come_before_its_tokens_and_its_end_after_them(
    connected: Connected, kind: str, request_message: Any
) -> None:
    log = connected.generation().log
    await connected.ask(9, **{kind: request_message})
    (accepted,) = (await connected.read()).events
    assert (accepted.call_id, accepted.event.accepted.generation_id, accepted.event.branch) == (9, "gen-1", 7)
    log.mark(Started("node-a", 7))
    log.append([10, 11])
    log.finish(FINISHED)
    response = await connected.read()
    assert [event.event.started.node for event in response.events] == ["node-a"]
    assert tokens_of(response) == {9: (0, [10, 11])}
    assert [(reply.call_id, reply.finished.output_tokens) for reply in response.replies] == [(9, 4)]


async def test_what_lies_behind_a_move_waits_for_the_next_message(connected: Connected) -> None:
    log = connected.generation().log
    log.append([10, 11])
    log.mark(MOVED)
    log.append([12])
    log.finish(FINISHED)
    await connected.ask(1, complete=COMPLETE)
    first, second = await connected.read(), await connected.read()
    assert tokens_of(first) == {1: (0, [10, 11])}
    assert not first.replies
    assert [event.event.moved.to_node for event in second.events] == ["node-b"]
    assert tokens_of(second) == {1: (2, [12])}
    assert [reply.WhichOneof("reply") for reply in second.replies] == ["finished"]


async def test_what_is_ready_for_many_streams_goes_out_in_one_message(connected: Connected) -> None:
    logs = []
    for call_id in range(1, 6):
        logs.append(connected.generation().log)
        await connected.ask(call_id, complete=COMPLETE)
        await connected.read()
    for number, log in enumerate(logs):
        log.append([number])
    assert tokens_of(await connected.read()) == {i + 1: (0, [i]) for i in range(5)}


async def test_a_stream_sends_no_more_than_its_credit_and_holds_up_no_other(connected: Connected) -> None:
    slow = connected.generation().log
    await connected.ask(1, complete=COMPLETE, credit_tokens=3)
    await connected.read()
    other = connected.generation().log
    await connected.ask(2, complete=COMPLETE)
    await connected.read()
    slow.append(range(10))
    slow.finish(FINISHED)
    assert tokens_of(await connected.read()) == {1: (0, [0, 1, 2])}
    other.append([7])
    assert tokens_of(await connected.read()) == {2: (0, [7])}
    await connected.send(credits=[pb.ConnectCredit(call_id=1, tokens=6)])
    assert tokens_of(await connected.read()) == {1: (3, [3, 4, 5, 6, 7, 8])}
    await connected.send(credits=[pb.ConnectCredit(call_id=1, tokens=6)])
    last = await connected.read()
    assert tokens_of(last) == {1: (9, [9])}
    assert [reply.call_id for reply in last.replies] == [1]


async def test_without_credit_a_stream_still_says_what_is_no_token(connected: Connected) -> None:
    log = connected.generation().log
    await connected.ask(1, complete=COMPLETE, credit_tokens=0)
    await connected.read()
    log.mark(Started("node-a", 7))
    assert [event.event.WhichOneof("event") for event in (await connected.read()).events] == ["started"]
    log.finish(FINISHED)
    assert (await connected.reply()).HasField("finished")


async def test_one_refused_call_is_told_as_its_own_would_be_and_costs_no_other(connected: Connected) -> None:
    log = connected.generation().log
    await connected.ask(1, complete=COMPLETE)
    await connected.read()
    connected.edge.head.errors["get_session"] = not_found()
    await connected.ask(2, get_session=GET)
    error = (await connected.reply()).error
    with pytest.raises(grpc.aio.AioRpcError) as plain:
        await connected.edge.fleet.GetSession(GET)
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND.value[0], "SESSION_NOT_FOUND")
    assert error.message == plain.value.details()
    assert error.status == dict(plain.value.trailing_metadata() or ())["grpc-status-details-bin"]
    assert not error.HasField("retry_after_ms")
    log.append([7])
    assert tokens_of(await connected.read()) == {1: (0, [7])}


async def test_a_refusal_that_time_mends_says_when_to_come_back(connected: Connected) -> None:
    refusal = FleetError(Reason.FLEET_SATURATED, "full", retry_after_s=2.0)
    connected.edge.head.errors["complete"] = refusal
    await connected.ask(1, complete=COMPLETE)
    error = (await connected.reply()).error
    assert error.reason == "FLEET_SATURATED"
    assert 2000 <= error.retry_after_ms <= 2500


async def test_a_fault_of_the_head_costs_one_call_and_leaks_nothing(connected: Connected) -> None:
    connected.edge.head.errors["get_session"] = ValueError("secret")
    await connected.ask(1, get_session=GET)
    error = (await connected.reply()).error
    assert (error.reason, "secret" in error.message) == ("INTERNAL", False)
    del connected.edge.head.errors["get_session"]
    await connected.ask(1, get_session=GET)
    assert (await connected.reply()).get_session.session.session_id == SESSION.session_id
    (logged,) = [call for call in connected.edge.log.calls if call.kwargs["event"] == "call failed"]
    assert "ValueError" in repr(logged.kwargs["exc_info"])


async def test_a_call_with_a_wrong_field_is_refused_by_the_field_s_name(connected: Connected) -> None:
    await connected.ask(1, complete=pb.CompleteRequest(session=pb.SessionSpec(model="no model")))
    error = (await connected.reply()).error
    assert (error.reason, "session.model" in error.message) == ("INVALID_FIELD", True)


async def test_a_call_of_no_known_kind_is_refused_alone(connected: Connected) -> None:
    await connected.ask(1)
    assert (await connected.reply()).error.reason == "INVALID_FIELD"
    await connected.ask(1, get_session=GET)
    assert (await connected.reply()).HasField("get_session")


async def test_a_close_and_credit_may_come_with_the_call_that_they_mean(connected: Connected) -> None:
    closed = connected.generation()
    await connected.send(calls=[pb.ConnectCall(call_id=1, complete=COMPLETE)], closed_call_ids=[1])
    await asyncio.wait_for(closed.gone.wait(), PATIENCE_S)
    log = connected.generation().log
    log.append(range(10))
    await connected.send(
        calls=[pb.ConnectCall(call_id=2, complete=COMPLETE, credit_tokens=1)],
        credits=[pb.ConnectCredit(call_id=2, tokens=5)],
    )
    got: list[int] = []
    while len(got) < 6:
        got += tokens_of(await connected.read()).get(2, (0, []))[1]
    assert got == list(range(6))


async def test_calls_of_one_session_are_done_in_their_order(connected: Connected) -> None:
    head: Any = connected.edge.head
    order: list[str] = []
    go_on = asyncio.Event()

    async def append(*_: Any) -> Any:
        await go_on.wait()
        order.append("append")
        return SESSION

    def get(*_: Any) -> Any:
        order.append("get")
        return SESSION

    head.append_tokens, head.get_session = append, get
    calls = [
        pb.ConnectCall(call_id=1, append_tokens=pb.AppendTokensRequest(session_id="s1", token_ids=[1])),
        pb.ConnectCall(call_id=2, get_session=GET),
        pb.ConnectCall(call_id=3, park_session=pb.ParkSessionRequest(session_id="another")),
    ]
    await connected.send(calls=calls)
    assert (await connected.reply()).call_id == 3
    assert order == []
    go_on.set()
    replies = [reply.call_id for reply in (await connected.read()).replies]
    replies += [] if len(replies) == 2 else [(await connected.reply()).call_id]
    assert (order, replies) == (["append", "get"], [1, 2])


async def test_a_call_that_is_cancelled_from_below_is_answered_all_the_same(connected: Connected) -> None:
    connected.edge.head.errors["get_session"] = asyncio.CancelledError()  # type: ignore[assignment]
    await connected.ask(1, get_session=GET)
    assert (await connected.reply()).error.reason == "INTERNAL"
