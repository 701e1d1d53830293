"""Bad requests get typed errors and hurt nobody: no node, no other session, and not the next good request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import types_pb2
from tests.e2e.callers import (
    Reading,
    complete,
    context_of,
    cordon,
    generate,
    open_session,
    open_session_on,
    read_all,
    uncordon,
)
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt
from tests.e2e.local_nodes import local_node, local_nodes
from tests.e2e.refused import refusal_of

SESSION = "the-session"
INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
LONG_ID = "x" * 129

Ask = Callable[[HeadServer], Any]


def completing(
    spec: pb.GenerationSpec | None = None, *, token_ids: list[int] | None = None, **session: Any
) -> Ask:
    """A Complete that would be well but for what is given."""
    request = pb.CompleteRequest(
        session=pb.SessionSpec(**({"model": MODEL.name} | session)),
        token_ids=prompt(10) if token_ids is None else token_ids,
        spec=spec or pb.GenerationSpec(max_new_tokens=4),
    )
    return lambda server: server.fleet.Complete(request)


def generating(session_id: str = SESSION, generation_id: str = "", **spec: Any) -> Ask:
    return lambda server: generate(server, session_id, 4, generation_id, **spec)


def sampling(**params: Any) -> dict[str, Any]:
    return {"sampling": types_pb2.SamplingParams(**params)}


def stop(*lengths: int) -> list[types_pb2.TokenSequence]:
    return [types_pb2.TokenSequence(token_ids=[7] * length) for length in lengths]


def appending(token_ids: list[int], **fields: Any) -> Ask:
    request = pb.AppendTokensRequest(session_id=SESSION, token_ids=token_ids, **fields)
    return lambda server: server.fleet.AppendTokens(request)


def getting(session_id: str) -> Ask:
    return lambda server: server.fleet.GetSession(pb.GetSessionRequest(session_id=session_id))


BAD: dict[str, tuple[Ask, tuple[str, str], str]] = {
    "no model": (completing(model=""), INVALID, "session.model"),
    "unknown model": (completing(model="no-such-model"), ("NOT_FOUND", "MODEL_NOT_FOUND"), ""),
    "prompt too long": (completing(token_ids=prompt(40_000)), ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG"), ""),
    "token outside the vocabulary": (completing(token_ids=[5, 32_000]), INVALID, "token_ids"),
    "highest token id there is": (completing(token_ids=[2**32 - 1]), INVALID, "token_ids"),
    "temperature NaN": (
        completing(**sampling(temperature=math.nan)),
        INVALID,
        "session.sampling.temperature",
    ),
    "temperature infinite": (
        generating(**sampling(temperature=math.inf)),
        INVALID,
        "spec.sampling.temperature",
    ),
    "temperature negative": (generating(**sampling(temperature=-1)), INVALID, "spec.sampling.temperature"),
    "top_p above 1": (generating(**sampling(top_p=1.5)), INVALID, "spec.sampling.top_p"),
    "min_p NaN": (generating(**sampling(min_p=math.nan)), INVALID, "spec.sampling.min_p"),
    "unknown QoS class": (completing(qos_class=77), INVALID, "session.qos_class"),
    "unknown replay mode": (completing(replay=9), INVALID, "session.replay"),
    "unknown on_disconnect": (generating(on_disconnect=9), INVALID, "spec.on_disconnect"),
    "no time at all": (generating(max_wall_ms=0), INVALID, "spec.max_wall_ms"),
    "more time than there is": (generating(max_wall_ms=2**32 - 1), INVALID, "spec.max_wall_ms"),
    "more tokens than allowed": (
        completing(pb.GenerationSpec(max_new_tokens=2**31)),
        INVALID,
        "spec.max_new_tokens",
    ),
    "empty stop sequence": (generating(stop=stop(0)), INVALID, "spec.stop[0].token_ids"),
    "too many stop sequences": (generating(stop=stop(*[1] * 17)), INVALID, "spec.stop"),
    "stop sequence too long": (generating(stop=stop(65)), INVALID, "spec.stop[0].token_ids"),
    "too many labels": (
        completing(node_selector={f"k{i}": "v" for i in range(17)}),
        INVALID,
        "session.node_selector",
    ),
    "too many engine options": (completing(engine_options=b"x" * 65_537), INVALID, "session.engine_options"),
    "no session id": (generating(session_id=""), INVALID, "session_id"),
    "unknown session": (generating(session_id="nobody"), ("NOT_FOUND", "SESSION_NOT_FOUND"), ""),
    "odd session id": (getting("no blanks/or slashes"), INVALID, "session_id"),
    "session id of another alphabet": (getting("сессия"), INVALID, "session_id"),
    "session id with a newline": (getting("abc\n"), INVALID, "session_id"),
    "session id too long": (getting(LONG_ID), INVALID, "session_id"),
    "generation id of the head's own kind": (generating(generation_id="gen-1"), INVALID, "generation_id"),
    "odd generation id": (generating(generation_id="a b"), INVALID, "generation_id"),
    "nothing to append": (appending([]), INVALID, "token_ids"),
    "cut beyond the end": (appending([5], truncate_to=10**12), INVALID, "truncate_to"),
    "append outside the vocabulary": (appending([40_000]), INVALID, "token_ids"),
    "append of 20 MiB": (
        appending([2**31] * (4 * 1024 * 1024)),
        ("RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE"),
        "",
    ),
    "append of more tokens than a request may hold": (appending([5] * 1_048_577), INVALID, "token_ids"),
}


async def health(server: HeadServer) -> list[tuple[str, str, dict[str, int], float]]:
    """All that a caller's fault must leave as it is."""
    return [
        (node.name, node.state.value, dict(node.failures), node.busy_until_s)
        for node in server.head.fleet.nodes
    ]


async def test_every_bad_request_gets_its_typed_error_and_the_next_good_one_works(world: World) -> None:
    nodes = await local_nodes(world, 2)
    server = await world.head(*nodes)
    spec = pb.SessionSpec(model=MODEL.name)
    await server.fleet.CreateSession(
        pb.CreateSessionRequest(session_id=SESSION, spec=spec, token_ids=prompt(20))
    )
    before = await health(server)
    for name, (ask, what, field) in BAD.items():
        error = await refusal_of(ask(server))
        assert error.what == what, name
        assert not field or error.fields == (field,), name
        assert error.retry_after_s is None, name
    assert await context_of(server, SESSION) == prompt(20)
    assert await health(server) == before
    answer = await read_all(generate(server, SESSION, 8))
    assert answer.tokens == expected(prompt(20), 8)
    assert [await node.journal(kind="generate") for node in nodes].count([]) == 1


async def test_bad_requests_in_a_crowd_do_not_disturb_the_good_ones_among_them(world: World) -> None:
    nodes = await local_nodes(world, 2)
    server = await world.head(*nodes)
    good = [asyncio.create_task(read_all(complete(server, prompt(10, salt), 40))) for salt in range(8)]
    spec = pb.SessionSpec(model=MODEL.name)
    await server.fleet.CreateSession(pb.CreateSessionRequest(session_id=SESSION, spec=spec))
    cheap = [case for name, case in BAD.items() if "append" not in name]
    errors = await asyncio.gather(*(refusal_of(ask(server)) for ask, _, _ in cheap))
    assert [error.what for error in errors] == [what for _, what, _ in cheap]
    answers = await asyncio.gather(*good)
    assert [answer.tokens for answer in answers] == [expected(prompt(10, salt), 40) for salt in range(8)]
    assert [answer.moves for answer in answers] == [[]] * 8


async def test_an_error_says_all_that_is_wrong_at_once(world: World) -> None:
    server = await world.head(await local_node(world))
    request = pb.CompleteRequest(
        session=pb.SessionSpec(model="", qos_class=77),  # type: ignore[arg-type]
        spec=pb.GenerationSpec(max_wall_ms=0, stop=stop(0)),
    )
    error = await refusal_of(server.fleet.Complete(request))
    wrong = ("session.model", "session.qos_class", "spec.max_wall_ms", "spec.stop[0].token_ids")
    assert error.fields == wrong


def engine_error(session_prefix: str = "", after_tokens: int = 3) -> stub_pb.Fault:
    return stub_pb.Fault(
        point=stub_pb.FAULT_POINT_AFTER_TOKENS,
        action=stub_pb.FAULT_ACTION_ENGINE_ERROR,
        after_tokens=after_tokens,
        session_prefix=session_prefix,
    )


async def test_an_engine_error_is_tried_once_elsewhere(world: World) -> None:
    failing, well = await local_nodes(world, 2)
    server = await world.head(failing, well)
    session_id = await open_session_on(server, failing, prompt(20))
    await failing.faults(engine_error())
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20), 16)
    (moved,) = answer.moves
    assert (moved.cause, moved.next_index) == (pb.MOVE_CAUSE_ENGINE_ERROR, 3)
    assert (moved.from_node, moved.to_node) == (failing.identity, well.identity)


@pytest.mark.parametrize("index", [0, 3], ids=["when it is asked", "while it decodes"])
async def test_an_engine_error_on_two_nodes_ends_with_the_cause(world: World, index: int) -> None:
    first, *others = await local_nodes(world, 3)
    server = await world.head(first, *others)
    session_id = await open_session_on(server, first, prompt(20))
    await first.faults(engine_error(session_id, after_tokens=index))
    for node in others:
        await node.faults(engine_error(session_id, after_tokens=0))
    answer = await read_all(generate(server, session_id, 16))
    assert answer.tokens == expected(prompt(20), index)
    assert (answer.reason, answer.finished.attempts) == ("ERROR", 2)
    assert answer.finished.error.reason == "ENGINE_ERROR"
    assert answer.finished.error.metadata["nextIndex"] == str(index)
    assert {node.state.value for node in server.head.fleet.nodes} == {"up"}
    good = await read_all(complete(server, prompt(20, salt=1), 16))
    assert good.tokens == expected(prompt(20, salt=1), 16)


async def test_an_engine_error_with_no_other_node_ends_with_the_cause(world: World) -> None:
    node = await local_node(world)
    server = await world.head(node)
    session_id = await open_session(server, prompt(20))
    await node.faults(engine_error(session_id))
    answer = await read_all(generate(server, session_id, 16))
    assert (answer.reason, answer.finished.error.reason) == ("ERROR", "ENGINE_ERROR")
    assert answer.tokens == expected(prompt(20), 3)


async def test_a_constraint_that_cannot_be_met_ends_at_once_and_is_nobodys_failure(world: World) -> None:
    nodes = await local_nodes(world, 2)
    server = await world.head(*nodes)
    session_id = await open_session(server, prompt(20))
    before = await health(server)
    for node in nodes:
        await node.faults(
            stub_pb.Fault(
                point=stub_pb.FAULT_POINT_BEFORE_ASSIGN,
                action=stub_pb.FAULT_ACTION_REFUSE,
                refusal_code=7,
                session_prefix=session_id,
            )
        )
    answer = await read_all(generate(server, session_id, 16))
    assert (answer.reason, answer.finished.error.reason) == ("ERROR", "CONSTRAINT_UNSATISFIABLE")
    assert answer.finished.attempts == 1
    assert await health(server) == before


async def test_a_request_that_kills_two_nodes_is_given_to_no_third_and_the_others_go_on(world: World) -> None:
    """Sessions that shared the dying nodes are carried over; the poison ends with what was delivered."""
    doomed = [await world.node("node-1", "--lanes", "8"), await world.node("node-2", "--lanes", "8")]
    rest = await local_nodes(world, 1)
    server = await world.head(*doomed, *rest)
    poison = "poison-session"
    bystanders = [await open_session_on(server, doomed[salt % 2], prompt(20, salt)) for salt in range(1, 5)]
    await open_session_on(server, doomed[0], prompt(20), poison)
    for node in (*doomed, *rest):
        kind = stub_pb.FAULT_ACTION_DIE
        await node.faults(
            stub_pb.Fault(point=stub_pb.FAULT_POINT_AFTER_GENERATE, action=kind, session_prefix=poison)
        )
    others = [Reading(generate(server, session_id, 300)) for session_id in bystanders]
    for reading in others:
        await reading.until_tokens(3)
    await cordon(server, *rest)
    answer = await read_all(generate(server, poison, 16))
    assert (answer.reason, answer.finished.error.reason) == ("ERROR", "POISON_REQUEST")
    assert answer.tokens == []
    assert answer.finished.error.metadata["nextIndex"] == "0"
    await uncordon(server, *rest)
    for salt, reading in enumerate(others, start=1):
        carried = await reading.end()
        assert carried.tokens == expected(prompt(20, salt), 300)
        assert carried.moves
    assert rest[0].alive
