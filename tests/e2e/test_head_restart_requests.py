"""A request that is tried again, under its request_id, after the head was killed: done once."""

from __future__ import annotations

from collections.abc import Awaitable

import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import CallError, FleetClient
from tests.e2e.restarts import (
    SPEC,
    Durable,
    expected,
    first_tokens,
    generation_spec,
    open_session,
    session,
    sessions_of,
)


def create(context: list[int]) -> pb.CreateSessionRequest:
    return pb.CreateSessionRequest(spec=SPEC, token_ids=context, request_id="create")


def append(token_ids: list[int]) -> pb.AppendTokensRequest:
    return pb.AppendTokensRequest(session_id="s", token_ids=token_ids, request_id="append")


def generate(n: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(session_id="g", spec=generation_spec(n), request_id="generate")


def complete(n: int) -> pb.CompleteRequest:
    return pb.CompleteRequest(session=SPEC, token_ids=[5, 6], spec=generation_spec(n), request_id="complete")


async def refused(client: FleetClient, request: object) -> str:
    """The reason why a request is not taken."""
    call: Awaitable[object]
    match request:
        case pb.CreateSessionRequest():
            call = client.ask(client.fleet.CreateSession(request))
        case pb.AppendTokensRequest():
            call = client.ask(client.fleet.AppendTokens(request))
        case pb.GenerateRequest():
            call = anext(client.generate(request))
        case pb.CompleteRequest():
            call = anext(client.complete(request))
    with pytest.raises(CallError) as info:
        await call
    return info.value.reason


async def test_a_session_and_an_append_asked_for_again_get_the_first_answer(
    durable: Durable,
) -> None:
    await durable.node("a")
    await durable.start()
    client = await durable.client()
    first = (await client.ask(client.fleet.CreateSession(create([1, 2, 3])))).session
    await open_session(client, "s", [1, 2])
    appended = (await client.ask(client.fleet.AppendTokens(append([3, 4])))).session
    await durable.crash()
    client = await durable.client()
    again = (await client.ask(client.fleet.CreateSession(create([1, 2, 3])))).session
    assert again == first
    assert (await client.ask(client.fleet.AppendTokens(append([3, 4])))).session == appended
    assert (await session(client, "s"))[1] == [1, 2, 3, 4]
    assert {each.session_id for each in await sessions_of(client)} == {"s", first.session_id}
    assert await refused(client, create([9])) == "REQUEST_ID_REUSED"
    assert await refused(client, append([9])) == "REQUEST_ID_REUSED"
    await durable.ends_quiet()


async def test_an_answer_that_is_asked_for_again_is_the_one_that_runs_or_has_ended(durable: Durable) -> None:
    node = await durable.node("a", rate=40)
    await durable.start()
    client = await durable.client()
    await open_session(client, "g", [1, 2, 3])
    streams = [client.fleet.Generate(generate(60)), client.fleet.Complete(complete(60))]
    ids = [await first_tokens(stream) for stream in streams]
    short = pb.CompleteRequest(session=SPEC, token_ids=[8], spec=generation_spec(3), request_id="short")
    ended = [event async for event in client.complete(short)]
    await durable.crash()
    client = await durable.client()
    assert await refused(client, generate(61)) == "REQUEST_ID_REUSED"
    assert await refused(client, complete(61)) == "REQUEST_ID_REUSED"
    last = client.complete(short)
    for again, expects, generation_id in (
        (client.generate(generate(60)), expected([1, 2, 3], 60), ids[0]),
        (client.complete(complete(60)), expected([5, 6], 60), ids[1]),
        (last, expected([8], 3), ended[0].accepted.generation_id),
    ):
        events = [event async for event in again]
        assert events[0].accepted.generation_id == generation_id
        assert [token for event in events for token in event.tokens.token_ids] == expects
        if again is last:
            assert events[-1].finished == ended[-1].finished
    runs = {entry.generation_id for entry in await node.journal(kind="generate")}
    assert runs == {*ids, ended[0].accepted.generation_id}
    await durable.ends_quiet()
