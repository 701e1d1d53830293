"""How connections end and what they may ask for: ids, limits, callers that leave or do not read."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import grpc
import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.api import connection
from tests.api.conftest import MAX_OPEN_CALLS, Edge
from tests.api.connected import COMPLETE, GET, PATIENCE_S, Connected, tokens_of
from tests.api.fakes import FINISHED
from tests.e2e.refused import refusal_of


async def test_an_id_in_use_ends_the_connection_since_no_answer_could_tell_which_call_it_means(
    connected: Connected,
) -> None:
    generation = connected.generation()
    await connected.ask(1, complete=COMPLETE)
    await connected.read()
    await connected.ask(1, get_session=GET)
    assert await connected.refused() == ("INVALID_ARGUMENT", "INVALID_FIELD")
    await asyncio.wait_for(generation.gone.wait(), PATIENCE_S)


async def test_more_calls_than_may_be_open_are_refused_until_some_have_ended(connected: Connected) -> None:
    logs = []
    for call_id in range(MAX_OPEN_CALLS):
        logs.append(connected.generation().log)
        await connected.ask(call_id, complete=COMPLETE)
        await connected.read()
    await connected.ask(99, get_session=GET)
    error = (await connected.reply()).error
    assert (error.reason, error.HasField("retry_after_ms")) == ("LIMIT_EXCEEDED", True)
    logs[0].finish(FINISHED)
    assert (await connected.reply()).HasField("finished")
    await connected.ask(99, get_session=GET)
    assert (await connected.reply()).HasField("get_session")


async def test_a_stream_that_is_closed_leaves_its_generation_and_says_no_more(connected: Connected) -> None:
    generation = connected.generation()
    await connected.ask(1, complete=COMPLETE)
    await connected.read()
    await connected.send(closed_call_ids=[1, 77])
    await asyncio.wait_for(generation.gone.wait(), PATIENCE_S)
    generation.log.append([1])
    generation.log.finish(FINISHED)
    await connected.ask(2, get_session=GET)
    assert (await connected.reply()).call_id == 2


async def test_a_caller_that_leaves_leaves_all_it_reads(connected: Connected) -> None:
    generations = []
    for call_id in range(3):
        generations.append(connected.generation())
        await connected.ask(call_id, complete=COMPLETE)
        await connected.read()
    connected.call.cancel()
    waits = [asyncio.ensure_future(generation.gone.wait()) for generation in generations]
    await asyncio.wait(waits, timeout=PATIENCE_S)
    assert [generation.gone.is_set() for generation in generations] == [True] * 3


async def test_a_caller_that_asks_no_more_gets_the_rest_beyond_its_credit_and_the_end(
    connected: Connected,
) -> None:
    log = connected.generation().log
    log.append([5, 6])
    await connected.ask(1, complete=COMPLETE, credit_tokens=1)
    assert tokens_of(await connected.read()) == {1: (0, [5])}
    await connected.call.done_writing()
    assert tokens_of(await connected.read()) == {1: (1, [6])}
    log.append([7])
    assert tokens_of(await connected.read()) == {1: (2, [7])}
    log.finish(FINISHED)
    assert (await connected.reply()).HasField("finished")
    assert await connected.call.read() is grpc.aio.EOF
    assert await connected.call.code() is grpc.StatusCode.OK


async def test_a_head_that_stops_sends_what_is_ready_and_says_that_it_stops(connected: Connected) -> None:
    log = connected.generation().log
    await connected.ask(1, complete=COMPLETE)
    await connected.read()
    log.append([7])
    log.finish(FINISHED)
    stopping = asyncio.create_task(connected.edge.callers.stop(5.0))
    response = await connected.read()
    assert tokens_of(response) == {1: (0, [7])}
    assert [reply.call_id for reply in response.replies] == [1]
    assert await connected.refused() == ("UNAVAILABLE", "HEAD_DRAINING")
    await asyncio.wait_for(stopping, PATIENCE_S)


@pytest.mark.parametrize("credit,index", [(5, 2), (1, 1)])
async def test_a_generation_that_the_next_head_goes_on_with_says_where_to_come_back(
    connected: Connected, credit: int, index: int
) -> None:
    generation = connected.generation()
    generation.log.append([7, 8])
    await connected.ask(1, complete=COMPLETE, credit_tokens=credit)
    await connected.read()
    generation.readers[0].leave()
    error = (await connected.reply()).error
    assert (error.reason, f"index {index}" in error.message) == ("HEAD_DRAINING", True)


async def test_a_caller_that_does_not_read_costs_a_bounded_number_of_long_replies(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MAX_REPLY_BYTES", 3_000_000)
    head: Any = connected.edge.head
    context, served = array("I", [2**31] * 700_000), 0  # 3.5 MB on the wire

    async def context_of(*_: Any) -> Any:
        nonlocal served
        served += 1
        return context

    head.context_of = context_of
    get = pb.GetSessionRequest(session_id="s1", include_token_ids=True)
    small = pb.ConnectCall(call_id=99, get_session=GET)
    await connected.send(calls=[*(pb.ConnectCall(call_id=n, get_session=get) for n in range(7)), small])
    other: Any = connected.edge.fleet.Connect()
    await other.read()
    for n in range(20):  # others are served meanwhile
        await other.write(pb.ConnectRequest(calls=[pb.ConnectCall(call_id=n, get_session=GET)]))
        assert len((await other.read()).replies) == 1
    other.cancel()
    assert served < 7
    replies: list[int] = []
    while len(replies) < 8:
        replies += [reply.call_id for reply in (await connected.read()).replies]
    assert sorted(replies) == [*range(7), 99]


async def test_a_broken_connection_lets_go_of_its_streams_though_its_caller_does_not_read(
    connected: Connected,
) -> None:
    deaf = connected.generation()
    deaf.log.append(range(8_000_000))
    await connected.ask(1, complete=COMPLETE)
    await connected.ask(1, complete=COMPLETE)
    await asyncio.wait({asyncio.ensure_future(deaf.gone.wait())}, timeout=PATIENCE_S)
    assert deaf.gone.is_set()


async def test_a_message_with_more_calls_than_may_be_open_ends_the_connection(connected: Connected) -> None:
    await connected.send(calls=[pb.ConnectCall(call_id=n) for n in range(MAX_OPEN_CALLS + 1)])
    assert await connected.refused() == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_calls_of_a_message_that_is_too_large_are_refused_and_the_others_go_on(
    connected: Connected,
) -> None:
    log = connected.generation().log
    await connected.ask(1, complete=COMPLETE)
    await connected.read()
    large = pb.CompleteRequest(session=pb.SessionSpec(model="toy", engine_options=bytes(17 * 1024 * 1024)))
    await connected.send(calls=[pb.ConnectCall(call_id=n, complete=large) for n in (2,)])
    assert (await connected.reply()).error.reason == "REQUEST_TOO_LARGE"
    log.append([7])
    assert tokens_of(await connected.read()) == {1: (0, [7])}


async def test_bytes_that_are_no_request_end_the_connection(edge: Edge) -> None:
    call: Any = edge.channel.stream_stream("/fleet.v1.FleetService/Connect")()
    await call.write(b"\xff\xff\xff\xff")
    assert (await refusal_of(call)).what == ("INVALID_ARGUMENT", "INVALID_FIELD")
