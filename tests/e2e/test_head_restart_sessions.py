"""After the head was killed, sessions are as they were: contexts, states, order, and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.access_file import Entry, add_entry, hash_of, new_token
from fleet_service.client import CallError, FleetClient
from fleet_service.domain.access import Caller, Permission
from tests.e2e.restarts import (
    SPEC,
    Durable,
    Stream,
    expected,
    first_tokens,
    generation_spec,
    open_session,
    session,
    sessions_of,
    until_so,
)


async def answer(client: FleetClient, session_id: str, n: int, *, extend: bool = False) -> list[int]:
    request = pb.GenerateRequest(session_id=session_id, spec=generation_spec(n, extend_context=extend))
    return [token async for event in client.generate(request) for token in event.tokens.token_ids]


async def append(client: FleetClient, session_id: str, token_ids: list[int], cut: int | None = None) -> None:
    request = pb.AppendTokensRequest(session_id=session_id, token_ids=token_ids, truncate_to=cut)
    await client.ask(client.fleet.AppendTokens(request))


async def test_contexts_are_as_they_were_and_are_generated_from(durable: Durable) -> None:
    nodes = [await durable.node("a"), await durable.node("b", joins=True)]
    await durable.start()
    await durable.met_all()
    client = await durable.client()
    for session_id in ("grown", "cut", "extended", "empty"):
        await open_session(client, session_id, [] if session_id == "empty" else [1, 2, 3, 4])
    await append(client, "grown", [5, 6])
    assert await answer(client, "cut", 2) == expected([1, 2, 3, 4], 2)  # so that its node has the old context
    await append(client, "cut", [9, 9, 9], cut=2)
    told = await answer(client, "extended", 5, extend=True)
    contexts = {
        "grown": [1, 2, 3, 4, 5, 6],
        "cut": [1, 2, 9, 9, 9],
        "extended": [1, 2, 3, 4, *told],
        "empty": [],
    }
    before = {each.session_id: each for each in await sessions_of(client)}
    await durable.crash()
    await durable.met_all()
    client = await durable.client()
    for each in await sessions_of(client):
        was = before[each.session_id]
        assert (each.context_length, each.context_crc32) == (was.context_length, was.context_crc32)
        assert (each.create_time, each.spec) == (was.create_time, was.spec)
        assert each.last_use_time == was.last_use_time
    for session_id, context in contexts.items():
        assert (await session(client, session_id))[1] == context
    await append(client, "grown", [7], cut=5)
    contexts["grown"] = [1, 2, 3, 4, 5, 7]
    for session_id, context in contexts.items():
        assert await answer(client, session_id, 10) == expected(context, 10)
    outcomes = [entry.outcome for node in nodes for entry in await node.journal()]
    assert "CONTEXT_MISMATCH" not in outcomes
    await durable.crash()
    client = await durable.client()
    assert (await session(client, "grown"))[1] == contexts["grown"]
    await durable.ends_quiet()


async def test_parked_sessions_stay_parked_and_are_resumed(durable: Durable) -> None:
    node = await durable.node("a")
    await durable.start()
    client = await durable.client()
    await open_session(client, "parked", [1, 2, 3])
    await answer(client, "parked", 3)
    await client.ask(client.fleet.ParkSession(pb.ParkSessionRequest(session_id="parked")))
    await durable.crash()
    client = await durable.client()
    assert (await session(client, "parked"))[0].state == pb.SESSION_STATE_PARKED

    async def forgotten() -> bool:
        return all(each.fenced for each in (await node.holdings()).holdings)

    await until_so(forgotten, "the node holds nothing of a parked session")
    with pytest.raises(CallError) as refused:
        await answer(client, "parked", 1)
    assert refused.value.reason == "SESSION_PARKED"
    await client.ask(client.fleet.ResumeSession(pb.ResumeSessionRequest(session_id="parked")))
    assert await answer(client, "parked", 10) == expected([1, 2, 3], 10)
    await durable.ends_quiet()


@pytest.mark.slow
async def test_lists_keep_their_order_and_a_page_token_its_place(durable: Durable) -> None:
    await durable.node("a")
    await durable.start()
    client = await durable.client()
    ids = [f"s-{i}" for i in (5, 3, 9, 1, 7, 2)]
    for session_id in ids:
        await open_session(client, session_id, [1])
    await append(client, "s-5", [2])
    page = await client.ask(client.fleet.ListSessions(pb.ListSessionsRequest(page_size=2)))
    await client.ask(client.fleet.FinishSession(pb.FinishSessionRequest(session_id="s-9")))
    await durable.crash()
    client = await durable.client()
    assert [each.session_id for each in await sessions_of(client)] == ["s-5", "s-3", "s-1", "s-7", "s-2"]
    rest = pb.ListSessionsRequest(page_token=page.next_page_token)
    reply = await client.ask(client.fleet.ListSessions(rest))
    assert [each.session_id for each in reply.sessions] == ["s-1", "s-7", "s-2"]
    await open_session(client, "s-0", [1])
    assert [each.session_id for each in await sessions_of(client)][-1] == "s-0"
    await durable.ends_quiet()


@pytest.mark.slow
async def test_sessions_and_answers_stay_their_callers(durable: Durable, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    tokens = {}
    for name in ("ann", "bob"):
        secret = new_token()
        may = frozenset({Permission.CALL, Permission.OPERATE})
        add_entry(file, Entry(Caller(name, may, frozenset()), hash_of(secret)))
        tokens[name] = tmp_path / f"{name}.token"
        tokens[name].write_text(f"{secret}\n")
    durable.flags += ["--set", f"access_file={file}"]
    await durable.node("a", rate=40)
    await durable.start()
    ann, bob = await durable.client(tokens["ann"]), await durable.client(tokens["bob"])
    await open_session(ann, "anns", [1, 2])
    await open_session(bob, "bobs", [3])
    await Stream(ann, "anns", "anns-answer", generation_spec(60)).until_tokens(5)
    await durable.crash()
    ann, bob = await durable.client(tokens["ann"]), await durable.client(tokens["bob"])
    assert [each.session_id for each in await sessions_of(ann)] == ["anns"]
    assert [each.session_id for each in await sessions_of(bob)] == ["bobs"]
    for reason, call in (
        ("GENERATION_NOT_FOUND", durable.rest("anns-answer", 0, bob)),
        ("SESSION_NOT_FOUND", session(bob, "anns")),
    ):
        with pytest.raises(CallError) as refused:
            await call
        assert refused.value.reason == reason
    assert (await durable.rest("anns-answer", 0, ann))[0] == expected([1, 2], 60)


async def test_the_session_of_an_answer_is_gone_with_it(durable: Durable) -> None:
    """Whether the answer ended before the head died, or is ended by a deadline that passed meanwhile."""
    await durable.node("a", rate=40)
    await durable.start()
    client = await durable.client()
    for n, wall_ms in ((3, 60_000), (2000, 700)):
        spec = generation_spec(n, max_wall_ms=wall_ms, on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        await first_tokens(client.fleet.Complete(pb.CompleteRequest(session=SPEC, token_ids=[1], spec=spec)))
    await durable.crash()
    client = await durable.client()

    async def none_left() -> bool:
        return not await sessions_of(client)

    await until_so(none_left, "no session is left")
    await durable.crash()
    assert await sessions_of(await durable.client()) == []
    await durable.ends_quiet()
