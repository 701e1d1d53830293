"""The head is killed at any moment and started again: sessions and answers under way go on, to the token."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.restarts import (
    Durable,
    Stream,
    expected,
    generation_spec,
    open_session,
    session,
)

TOKENS = 40


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
