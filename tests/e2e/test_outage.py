"""All nodes go at once and come back: what runs waits and goes on exactly, and no request is blamed."""

from __future__ import annotations

import asyncio

from tests.e2e.callers import Reading, complete, read_all
from tests.e2e.harness import World, expected, prompt, until

GENERATIONS = 24
N = 120


async def test_answers_outlive_an_outage_of_all_nodes(world: World) -> None:
    nodes = await world.start_nodes(3, "--lanes", "8", "--decode-rate", "100")
    server = await world.head(*nodes)
    readings = [Reading(complete(server, prompt(20, salt), N)) for salt in range(GENERATIONS)]
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
    await asyncio.gather(*(node.kill() for node in nodes))
    await until(lambda: not any(node.usable for node in server.head.fleet.nodes), "all are known to be gone")
    assert not any(reading.answer.finishes for reading in readings)
    await asyncio.gather(*(node.start() for node in nodes))
    answers = [await reading.end() for reading in readings]
    for salt, answer in enumerate(answers):
        assert answer.reason == "LENGTH", answer.finished
        assert answer.tokens == expected(prompt(20, salt), N)
        assert answer.moves


async def test_answers_outlive_nodes_that_go_one_after_the_other_within_a_moment(world: World) -> None:
    """Work of the first is given to the second when that is about to go, unknown to the head, and so on."""
    nodes = await world.start_nodes(4, "--lanes", "8", "--decode-rate", "100")
    server = await world.head(*nodes)
    readings = [Reading(complete(server, prompt(20, salt), N)) for salt in range(GENERATIONS)]
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
    for node in nodes[:-1]:
        node.freeze()  # what is given to it from now on gets no answer
    for node in nodes[:-1]:
        known = server.head.fleet.find(node.identity)
        assert known is not None
        await node.kill()
        node.frozen = False
        await until(lambda known=known: not known.usable, "it is known to be gone")  # type: ignore[misc]
    answers = [await reading.end() for reading in readings]
    for salt, answer in enumerate(answers):
        assert answer.reason == "LENGTH", answer.finished
        assert answer.tokens == expected(prompt(20, salt), N)
    # The nodes that are gone are no trouble to what comes later.
    assert (await read_all(complete(server, prompt(9), 5))).tokens == expected(prompt(9), 5)
