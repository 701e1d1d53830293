"""A request sent again under its request_id is done once and answered alike; another one is refused."""

from __future__ import annotations

import asyncio

from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import Reading, context_of, open_session, read_all
from tests.e2e.harness import MODEL, World, expected, prompt
from tests.e2e.refused import refusal_of

REUSED = ("ALREADY_EXISTS", "REQUEST_ID_REUSED")
SPEC = pb.SessionSpec(model=MODEL.name)


def create(request_id: str, length: int = 10) -> pb.CreateSessionRequest:
    return pb.CreateSessionRequest(spec=SPEC, token_ids=prompt(length), request_id=request_id)


def append(session_id: str, request_id: str, length: int = 5) -> pb.AppendTokensRequest:
    return pb.AppendTokensRequest(session_id=session_id, token_ids=prompt(length, 1), request_id=request_id)


def ask(session_id: str, request_id: str, n: int = 20) -> pb.GenerateRequest:
    spec = pb.GenerationSpec(max_new_tokens=n, extend_context=True)
    return pb.GenerateRequest(session_id=session_id, spec=spec, request_id=request_id)


def answer_at_once(request_id: str, n: int = 20) -> pb.CompleteRequest:
    spec = pb.GenerationSpec(max_new_tokens=n)
    return pb.CompleteRequest(session=SPEC, token_ids=prompt(10), spec=spec, request_id=request_id)


async def test_create_session_again_is_the_same_session(world: World) -> None:
    server = await world.head(await world.node("node-1"))
    first = await server.fleet.CreateSession(create("once"))
    again = await asyncio.gather(*(server.fleet.CreateSession(create("once")) for _ in range(4)))
    assert {reply.session.session_id for reply in again} == {first.session.session_id}
    at_once = await asyncio.gather(*(server.fleet.CreateSession(create("together")) for _ in range(8)))
    assert len({reply.session.session_id for reply in at_once}) == 1
    sessions = (await server.fleet.ListSessions(pb.ListSessionsRequest())).sessions
    assert len(sessions) == 2
    refusal = await refusal_of(server.fleet.CreateSession(create("once", length=11)))
    assert refusal.what == REUSED
    assert refusal.metadata["requestId"] == "once"
    # Without an id each request is one of its own.
    assert (await server.fleet.CreateSession(create(""))).session.session_id != first.session.session_id


async def test_append_tokens_again_appends_once(world: World) -> None:
    server = await world.head(await world.node("node-1"))
    session_id = await open_session(server, prompt(10))
    replies = await asyncio.gather(*(server.fleet.AppendTokens(append(session_id, "once")) for _ in range(8)))
    replies.append(await server.fleet.AppendTokens(append(session_id, "once")))
    assert [reply.session.context_length for reply in replies] == [15] * 9
    assert await context_of(server, session_id) == [*prompt(10), *prompt(5, 1)]
    refusal = await refusal_of(server.fleet.AppendTokens(append(session_id, "once", length=6)))
    assert refusal.what == REUSED
    assert (await server.fleet.AppendTokens(append(session_id, "twice"))).session.context_length == 20


async def test_generate_again_reads_the_same_answer_running_or_ended(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    first = Reading(server.fleet.Generate(ask(session_id, "once")))
    await first.until_tokens(5)
    again = Reading(server.fleet.Generate(ask(session_id, "once")))
    refusal = await refusal_of(server.fleet.Generate(ask(session_id, "once", n=21)))
    assert refusal.what == REUSED
    answers = [await first.end(), await again.end()]
    answers.append(await read_all(server.fleet.Generate(ask(session_id, "once"))))
    for answer in answers:
        assert answer.tokens == expected(prompt(10), 20)
        assert answer.generation_id == answers[0].generation_id
        assert answer.finished == answers[0].finished
    assert len(await node.journal(kind="generate")) == 1
    assert await context_of(server, session_id) == [*prompt(10), *answers[0].tokens]
    # The same id names one request, of whatever method.
    whole = pb.GenerateAllRequest(session_id=session_id, request_id="once")
    assert (await refusal_of(server.fleet.GenerateAll(whole))).what == REUSED


async def test_generate_sent_eight_times_at_once_runs_once(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    answers = await asyncio.gather(
        *(read_all(server.fleet.Generate(ask(session_id, "together"))) for _ in range(8))
    )
    assert [answer.tokens for answer in answers] == [expected(prompt(10), 20)] * 8
    assert len({answer.generation_id for answer in answers}) == 1
    assert len(await node.journal(kind="generate")) == 1


async def test_complete_again_reads_the_same_answer_running_or_ended(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    together = await asyncio.gather(
        *(read_all(server.fleet.Complete(answer_at_once("together"))) for _ in range(6))
    )
    together.append(await read_all(server.fleet.Complete(answer_at_once("together"))))
    assert [answer.tokens for answer in together] == [expected(prompt(10), 20)] * 7
    assert len({answer.generation_id for answer in together}) == 1
    assert len(await node.journal(kind="generate")) == 1
    refusal = await refusal_of(server.fleet.Complete(answer_at_once("together", n=19)))
    assert refusal.what == REUSED


async def test_complete_again_after_the_connection_broke_takes_up_what_runs(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "100")
    server = await world.head(node)
    request = answer_at_once("retried", n=60)
    request.spec.on_disconnect = pb.ON_DISCONNECT_CONTINUE
    broken = Reading(server.fleet.Complete(request))
    await broken.until_tokens(5)
    had = await broken.leave()
    answer = await read_all(server.fleet.Complete(request))
    assert answer.generation_id == had.generation_id
    assert answer.tokens == expected(prompt(10), 60)
    assert len(await node.journal(kind="generate")) == 1


async def test_a_request_that_was_refused_may_be_tried_again_under_its_id(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node)
    session_id = await open_session(server, prompt(10))
    await server.fleet.ParkSession(pb.ParkSessionRequest(session_id=session_id))
    refusal = await refusal_of(server.fleet.Generate(ask(session_id, "again")))
    assert refusal.what == ("FAILED_PRECONDITION", "SESSION_PARKED")
    await server.fleet.ResumeSession(pb.ResumeSessionRequest(session_id=session_id))
    answer = await read_all(server.fleet.Generate(ask(session_id, "again")))
    assert answer.tokens == expected(prompt(10), 20)
