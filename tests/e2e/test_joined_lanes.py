"""A node that dials in, with three lanes: its death, its return, and another run that claims its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
import structlog

from fleet_service.runtime.node import Node
from tests.e2e.callers import Reading, generate, open_session_on
from tests.e2e.harness import PATIENCE_S, HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.refused import taken_apart
from tests.e2e.relay import Relay
from tests.links.scripted_link import hello_frame, join_call
from tests.ports import quiet_port

log = structlog.get_logger(__name__)

LANES = 3
N = 150
THREE_LANES = ("--lanes", str(LANES), "--decode-rate", "50")

pytestmark = pytest.mark.parametrize("world", ["join"], indirect=True)


def known(server: HeadServer, node: NodeProcess) -> Node:
    found = server.head.fleet.named(node.identity)
    assert found is not None
    return found


async def usable(server: HeadServer, *nodes: NodeProcess) -> None:
    def all_are() -> bool:
        found = [server.head.fleet.named(node.identity) for node in nodes]
        return all(node is not None and node.usable for node in found)

    await until(all_are, "the nodes are up")


async def another_run(server: HeadServer, node: NodeProcess, than: str) -> None:
    """Until another incarnation than that is up under the node's name."""
    at_head = known(server, node)
    await until(lambda: at_head.usable and at_head.incarnation != than, "another run of the node is up")


async def three_answers(server: HeadServer, node: NodeProcess) -> list[Reading]:
    """Answers that run on the node's lanes, all at once."""
    ids = [await open_session_on(server, node, prompt(20, salt)) for salt in range(LANES)]
    readings = [Reading(generate(server, session_id, N)) for session_id in ids]
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
    assert (await node.holdings()).lanes_active == LANES
    return readings


def process(world: World, identity: str, said: Path, join: str = "") -> NodeProcess:
    """A node of three lanes, not started yet, that says in a file what it has to say."""
    flags = ("--model", "stub-model", "--join", join or f"127.0.0.1:{world.join_port}", *THREE_LANES)
    node = NodeProcess(identity, flags, said)
    world.nodes.append(node)
    return node


async def line_with(said: Path, *words: str) -> str:
    """A line that the process wrote with all these words, once it is there."""

    def found() -> list[str]:
        lines = [line for line in said.read_text().splitlines() if line.startswith("fleet-node: ")]
        return [line for line in lines if all(word in line for word in words)]

    await until(lambda: bool(found()), f"a line with {words}")
    return found()[0]


async def refusal_of_run(world: World, identity: str, incarnation: str) -> tuple[str, str, str]:
    """Code, reason and text for a run of that name and incarnation that dials in now."""
    async with join_call(f"127.0.0.1:{world.join_port}") as (end, call):
        await end.send(hello_frame(identity=identity, incarnation=incarnation))
        async with asyncio.timeout(PATIENCE_S):
            await end.wait_for_end()
        trailers = await call.trailing_metadata()
        error = grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), trailers, await call.details())
    refused = taken_apart(error)
    return refused.code, refused.reason, refused.message


async def test_three_answers_of_a_killed_node_go_on_elsewhere_and_it_is_used_again(world: World) -> None:
    server = await world.head()
    node, other = await world.node("three", *THREE_LANES), await world.node("other", *THREE_LANES)
    await usable(server, node, other)
    readings = await three_answers(server, node)
    first_run = known(server, node).incarnation
    await node.kill()
    await asyncio.gather(*(reading.until(lambda answer: answer.moves) for reading in readings))
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await node.start(quiet_port())
    await another_run(server, node, than=first_run)
    log.info("used again", after_s=round(loop.time() - started_s, 3))
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(20, salt), N)
        assert [(move.from_node, move.to_node) for move in answer.moves] == [("three", "other")]
    for salt, reading in enumerate(await three_answers(server, node)):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(20, salt), N)
        assert ([start.node for start in answer.started], answer.moves) == (["three"], [])


async def test_a_late_goodbye_of_the_last_run_does_nothing_to_the_next(world: World) -> None:
    server = await world.head()
    async with Relay(world.join_port) as relay:
        node = await world.node("mover", "--join", relay.address, *THREE_LANES)
        await usable(server, node)
        first_run = known(server, node).incarnation
        await node.kill()
        await until(lambda: relay.held == 1, "the relay keeps the end to itself")
        await node.start(quiet_port())
        await another_run(server, node, than=first_run)
        readings = await three_answers(server, node)
        at_head = known(server, node)
        link = at_head.link
        await relay.let_go()
        for salt, reading in enumerate(readings):
            answer = await reading.end()
            assert (answer.tokens, answer.moves) == (expected(prompt(20, salt), N), [])
        assert at_head.link is link
        assert list(server.head.fleet.nodes) == [at_head]
        await node.kill()
        await relay.let_go()


async def test_a_clone_of_a_living_node_is_refused_and_that_one_feels_nothing(
    world: World, tmp_path: Path
) -> None:
    server = await world.head()
    node = await world.node("twin", *THREE_LANES)
    await usable(server, node)
    readings = await three_answers(server, node)
    at_head = known(server, node)
    link, run = at_head.link, at_head.incarnation
    clone = await process(world, "twin", tmp_path / "clone").start()
    line = await line_with(tmp_path / "clone", "refused by", "identity twin is in use")
    assert "--identity" in line
    code, reason, text = await refusal_of_run(world, "twin", "one-more-run")
    assert (code, reason) == ("ALREADY_EXISTS", "IDENTITY_IN_USE")
    assert "twin is in use by a living node" in text
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert (answer.tokens, answer.moves) == (expected(prompt(20, salt), N), [])
    assert (at_head.link, at_head.incarnation, at_head.failures) == (link, run, {})
    assert clone.alive, "it dials on, for when the name is free"
    assert await clone.journal() == []


async def test_a_clone_replaces_a_frozen_node_whose_run_stays_out_for_good(
    world: World, tmp_path: Path
) -> None:
    server = await world.head()
    frozen = await process(world, "twin", tmp_path / "frozen").start()
    await usable(server, frozen)
    readings = await three_answers(server, frozen)
    barred_run = known(server, frozen).incarnation
    frozen.freeze()
    clone = await process(world, "twin", tmp_path / "clone").start()
    await another_run(server, clone, than=barred_run)
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(20, salt), N)
        assert [(move.from_node, move.to_node) for move in answer.moves] == [("twin", "twin")]
    clones_run = known(server, clone).incarnation
    frozen.thaw()
    line = await line_with(tmp_path / "frozen", "refused by", "has been replaced")
    assert "restart it" in line
    assert known(server, clone).incarnation == clones_run
    # The name is free again, and still that run is not to have it.
    await clone.kill()
    await until(lambda: not known(server, clone).usable, "the clone is gone")
    code, reason, text = await refusal_of_run(world, "twin", barred_run)
    assert (code, reason) == ("ALREADY_EXISTS", "IDENTITY_IN_USE")
    assert "has been replaced" in text
    assert not known(server, clone).usable
    await frozen.kill()  # it would hold what it had until its lease runs out
