"""The head is killed at any moment and started again: sessions and answers under way go on, to the token."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import grpc
import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import FleetClient, decode_error
from fleet_service.stores.sqlite_files import STORE_FILE
from tests.e2e.restarts import (
    PATIENCE_S,
    Durable,
    Stream,
    expected,
    generation_spec,
    open_session,
    session,
)

TOKENS = 40
LONG = 160
"""Tokens of an answer that outlasts several starts, though its node goes on with it meanwhile."""


@pytest.mark.parametrize(
    "kind",
    ["link", pytest.param("plain", marks=pytest.mark.slow), pytest.param("join", marks=pytest.mark.slow)],
)
async def test_an_answer_goes_on_exactly_after_the_head_was_killed_behind_any_token(
    durable: Durable, kind: str
) -> None:
    for name in ("a", "b"):
        await durable.node(name, joins=kind == "join", link=kind != "plain", rate=40)
    await durable.start()
    await durable.met_all()
    client = await durable.client()
    contexts = {k: [k, 7, 9, k + 1] for k in range(TOKENS + 1)}
    for k, context in contexts.items():
        await open_session(client, f"s-{k}", context)

    def begin(k: int) -> Stream:
        return Stream(client, f"s-{k}", f"g-{k}", generation_spec(TOKENS, extend_context=True))

    # One begins with each token of the first, so that each is at its own index when the head is killed.
    streams = {TOKENS: begin(TOKENS)}
    for n in range(1, TOKENS + 1):
        await streams[TOKENS].until_tokens(n)
        streams[TOKENS - n] = begin(TOKENS - n)
    await streams[0].accepted()
    await asyncio.gather(*(stream.until_tokens(k) for k, stream in streams.items()))
    await durable.crash()
    answers = await asyncio.gather(*(durable.rest(f"g-{k}", len(streams[k].tokens)) for k in contexts))
    client = await durable.client()
    for (k, context), (tokens, others) in zip(contexts.items(), answers, strict=True):
        assert streams[k].tokens + tokens == expected(context, TOKENS), k
        assert others[-1].finished.output_tokens == TOKENS
        assert (await session(client, f"s-{k}"))[1] == [*context, *expected(context, TOKENS)]
    assert (
        sum(0 < len(tokens) < TOKENS for tokens, _ in answers) > TOKENS // 2
    )  # it was in the middle of them
    await durable.ends_quiet()


class Follower:
    """Reads an answer for as long as its call lasts, and attaches again as a caller ought to."""

    def __init__(self, client: FleetClient, k: int) -> None:
        self.context = [k, 7, 9, k + 1]
        self.generation_id = f"g-{k}"
        self.tokens: list[int] = []
        self.branch = 0
        self.finished = False
        self.lost = 0
        """Tokens that it had to drop."""
        self._grown = asyncio.Condition()
        spec = generation_spec(LONG, extend_context=True)
        request = pb.GenerateRequest(session_id=f"s-{k}", generation_id=self.generation_id, spec=spec)
        self._task = asyncio.create_task(self._read(client.fleet.Generate(request)))

    async def _read(self, call: Any) -> bool:
        """Until the answer's end, or the call's; False: what it had was not all sure."""
        try:
            async for response in call:
                event = response.event
                async with self._grown:
                    assert event.branch >= self.branch
                    self.branch = event.branch
                    self.finished = event.HasField("finished")
                    if event.HasField("tokens"):
                        assert event.tokens.first_index == len(self.tokens)
                        self.tokens += event.tokens.token_ids
                    self._grown.notify_all()
        except grpc.aio.AioRpcError as error:
            broken = decode_error(error)
            assert broken.connection_lost or broken.reason == "DATA_LOSS", broken
            if broken.reason == "DATA_LOSS":
                sure = int(broken.metadata["nextIndex"])
                assert sure < len(self.tokens)
                self.lost += len(self.tokens) - sure
                del self.tokens[sure:]
                return False
        return True

    async def until_tokens(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self._grown:
            await self._grown.wait_for(lambda: len(self.tokens) >= count or self.finished)

    async def goes_on(self, client: FleetClient) -> None:
        """Attach to a head that has come back, where it is; again where not all that it has is sure."""
        await self._task
        if not self.finished:
            self._task = asyncio.create_task(self._read_again(client))

    async def _read_again(self, client: FleetClient) -> bool:
        while True:
            request = pb.AttachGenerationRequest(
                generation_id=self.generation_id, from_index=len(self.tokens), branch=self.branch
            )
            if await self._read(client.fleet.AttachGeneration(request, wait_for_ready=True)):
                return True

    async def ended(self) -> list[int]:
        async with asyncio.timeout(PATIENCE_S):
            await self._task
        assert self.finished, self.generation_id
        return self.tokens


async def test_relaxed_an_answer_goes_on_exactly_from_where_it_is_sure(durable: Durable) -> None:
    """A caller is given what it has already, exactly, or is told what of it is not sure."""
    durable.flags += ["--durability", "relaxed"]
    for name in ("a", "b"):
        await durable.node(name, rate=40)
    await durable.start()
    await durable.met_all()
    client = await durable.client()
    for k in range(TOKENS + 1):
        await open_session(client, f"s-{k}", [k, 7, 9, k + 1])
    followers = [Follower(client, TOKENS)]
    for n in range(1, TOKENS + 1):
        await followers[0].until_tokens(n // 2)
        followers.append(Follower(client, TOKENS - n))
    # Each crash comes right behind a token, so that this one was ahead of the disk.
    for crash in range(1, 4):
        await followers[-1].until_tokens(20 * crash)
        await durable.crash()
        client = await durable.client()
        await asyncio.gather(*(follower.goes_on(client) for follower in followers))
    for follower in followers:
        assert await follower.ended() == expected(follower.context, LONG), follower.generation_id
    assert sum(follower.lost for follower in followers)
    assert followers[-1].branch
    await durable.ends_quiet()


async def test_a_head_that_is_started_on_a_copy_tells_readers_what_is_sure(durable: Durable) -> None:
    await durable.node("a", rate=40)
    await durable.start()
    client = await durable.client()
    await open_session(client, "s-7", [7, 7, 9, 8])
    follower = Follower(client, 7)
    await follower.until_tokens(10)
    folder, copy = durable.folder / "data", durable.folder / "copy.db"
    with closing(sqlite3.connect(folder / STORE_FILE)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    had = len(follower.tokens)
    await follower.until_tokens(had + 10)
    await durable.kill()
    for part in folder.glob(f"{STORE_FILE}*"):
        part.unlink()
    copy.rename(folder / STORE_FILE)
    await durable.start()
    client = await durable.client()
    await follower.goes_on(client)
    assert await follower.ended() == expected(follower.context, LONG)
    assert follower.lost >= 9
    assert follower.branch
    await durable.ends_quiet()


async def test_a_node_that_kept_the_answer_goes_on_with_it_and_prefills_nothing(durable: Durable) -> None:
    for name in ("a", "b"):
        await durable.node(name, rate=50)
    await durable.start()
    client = await durable.client()
    await open_session(client, "s", [1, 2, 3])
    stream = Stream(client, "s", "g", generation_spec(100))
    got = await stream.until_tokens(10)
    before, _ = await session(client, "s")
    await durable.crash()
    tokens, others = await durable.rest("g", len(got))
    assert got + tokens == expected([1, 2, 3], 100)
    assert not [each for each in others if each.HasField("moved")]
    assert others[-1].finished.attempts == 2
    client = await durable.client()
    after, _ = await session(client, "s")
    assert (after.node, after.epoch) == (before.node, before.epoch)
    await durable.ends_quiet()
