"""A node freezes (SIGSTOP): its answers go on elsewhere, no other feels it, and its late words go nowhere."""

from __future__ import annotations

import asyncio

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.admin_service_pb2 import GetNodeRequest, NodeState
from tests.e2e.callers import Answer, Reading, complete, context_of, generate, open_session_on, read_all
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt

SLOW = ("--decode-rate", "50")
SILENCE_S = 1.5
"""The head's patience in these tests."""


async def told_to_revoke(node: NodeProcess, session_id: str) -> None:
    """Until the node was told to give the session up."""
    async with asyncio.timeout(30):
        while not await node.journal(session_id, "revoke"):
            await asyncio.sleep(0.02)


async def state_is(server: HeadServer, node: NodeProcess, state: NodeState) -> None:
    """Until the head says so of the node."""
    async with asyncio.timeout(30):
        while True:
            answer = await server.admin.GetNode(GetNodeRequest(node=node.identity))
            if answer.node.state == state:
                return
            await asyncio.sleep(0.02)


def moved(answer: Answer) -> list[tuple[str, str, int]]:
    return [(move.from_node, move.to_node, move.cause) for move in answer.moves]


async def test_an_answer_of_a_frozen_node_goes_on_elsewhere_and_the_others_feel_nothing(
    world: World,
) -> None:
    node, calm, other = await world.start_nodes(3, *SLOW)
    server = await world.head(node, calm, other, silence_s=SILENCE_S)
    at = {"struck": node, "calm-1": calm, "calm-2": calm, "calm-3": other}
    for salt, (name, where) in enumerate(at.items()):
        await open_session_on(server, where, prompt(20, salt), name)
    readings = {name: Reading(generate(server, name, 120, extend_context=True)) for name in at}
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings.values()))
    node.freeze()
    struck = readings["struck"]
    await struck.until(lambda answer: answer.moves)
    later = await asyncio.gather(*(read_all(complete(server, prompt(9, salt), 4)) for salt in range(3)))
    # It wakes while the answer goes on elsewhere: its late tokens go nowhere, and it is told to stop.
    await struck.until_tokens(struck.answer.moves[0].next_index + 5)
    node.thaw()
    await told_to_revoke(node, "struck")
    answers = {name: await reading.end() for name, reading in readings.items()}

    for salt, (name, answer) in enumerate(answers.items()):
        assert answer.tokens == expected(prompt(20, salt), 120), name
        assert answer.reason == "LENGTH"
        assert await context_of(server, name) == [*prompt(20, salt), *answer.tokens]
    (move,) = answers["struck"].moves
    assert (move.from_node, move.cause) == ("node-1", pb.MOVE_CAUSE_NODE_SILENT)
    assert move.gap_ms >= SILENCE_S * 1000
    assert answers["struck"].finished.attempts == 2
    for name in ("calm-1", "calm-2", "calm-3"):
        assert (answers[name].moves, answers[name].finished.attempts) == ([], 1)
        assert answers[name].finished.timings.longest_gap_ms < SILENCE_S * 1000
    # Known to be silent, it was given no new work.
    for salt, answer in enumerate(later):
        assert answer.tokens == expected(prompt(9, salt), 4)
        assert answer.started[0].node != "node-1"
        assert answer.finished.attempts == 1
    (run,) = await node.journal("struck", "generate")
    assert run.outcome != "running"
    assert run.HasField("ended_ms")


async def test_late_tokens_go_nowhere_though_the_answer_has_come_back_to_the_woken_node(
    world: World,
) -> None:
    node, refuge = await world.start_nodes(2, *SLOW)
    server = await world.head(node, refuge, silence_s=SILENCE_S)
    names = [f"session-{i}" for i in range(4)]
    for salt, name in enumerate(names):
        await open_session_on(server, node, prompt(20, salt), name)
    readings = [Reading(generate(server, name, 60)) for name in names]
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
    node.freeze()
    await asyncio.gather(*(reading.until(lambda answer: answer.moves) for reading in readings))
    await asyncio.gather(
        *(reading.until_tokens(reading.answer.moves[0].next_index + 3) for reading in readings)
    )
    node.thaw()
    await refuge.kill()
    answers = [await reading.end() for reading in readings]
    there_and_back = [
        ("node-1", "node-2", pb.MOVE_CAUSE_NODE_SILENT),
        ("node-2", "node-1", pb.MOVE_CAUSE_LINK_LOST),
    ]
    for salt, (name, answer) in enumerate(zip(names, answers, strict=True)):
        assert answer.tokens == expected(prompt(20, salt), 60), name
        assert moved(answer) == there_and_back
        epochs = [answer.started[0].epoch, *(move.epoch for move in answer.moves)]
        assert epochs == sorted(set(epochs))
        first, again = await node.journal(name, "generate")
        assert (first.epoch, again.epoch) == (epochs[0], epochs[2])
        assert first.outcome not in ("running", "LENGTH")
        assert again.outcome == "LENGTH"
        await told_to_revoke(node, name)


async def test_a_node_that_freezes_before_the_first_token_is_left_by_its_requests(world: World) -> None:
    by_assign, by_generate, spare = await asyncio.gather(
        world.node("by-assign", "--no-inline", "--fault", "after-assign:freeze,times=1"),
        world.node("by-generate", "--fault", "after-generate:freeze,times=1"),
        world.node("spare"),
    )
    server = await world.head(by_assign, by_generate, spare, silence_s=SILENCE_S)
    for node in (by_assign, by_generate):
        await open_session_on(server, node, prompt(20), node.identity)
        node.frozen = True
    answers = await asyncio.gather(
        *(read_all(generate(server, node.identity, 10)) for node in (by_assign, by_generate))
    )
    for answer in answers:
        assert answer.tokens == expected(prompt(20), 10)
        assert [(move.next_index, move.cause) for move in answer.moves] == [(0, pb.MOVE_CAUSE_NODE_SILENT)]
    for node in (by_assign, by_generate):
        node.thaw()
        await told_to_revoke(node, node.identity)


async def test_a_session_at_rest_on_a_frozen_node_takes_its_next_turn_elsewhere(world: World) -> None:
    node, other = await world.start_nodes(2)
    server = await world.head(node, other, silence_s=SILENCE_S)
    session_id = await open_session_on(server, node, prompt(20))
    first = await read_all(generate(server, session_id, 8, extend_context=True))
    assert first.started[0].node == "node-1"
    node.freeze()
    await state_is(server, node, NodeState.NODE_STATE_SUSPECT)
    second = await read_all(generate(server, session_id, 8, extend_context=True))
    assert second.tokens == expected([*prompt(20), *first.tokens], 8)
    assert second.started[0].node == "node-2"
    assert second.finished.attempts == 1
    node.thaw()
    await told_to_revoke(node, session_id)
    await state_is(server, node, NodeState.NODE_STATE_UP)
