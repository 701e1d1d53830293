"""A node dies at any moment: what was delivered stands, another node says the rest, exact to the token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from node_stub.reference import StubModel
from tests.e2e.callers import (
    Answer,
    Reading,
    complete,
    context_of,
    cordon,
    generate,
    open_session_on,
    read_all,
    uncordon,
)
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt, until

N = 40
"""Tokens of an answer here."""

EOS_MODEL = StubModel("eos-model", eos_per_mille=40)

FAULT_POINTS = (
    "before-assign",
    "after-assign",
    "after-append",
    "after-generate",
    "after-tokens=1",
    "after-tokens=17",
    "before-finish",
)


def stall_after(tokens: int, session_prefix: str) -> stub_pb.Fault:
    """The session stands still right after so many tokens, until its node is killed."""
    return stub_pb.Fault(
        point=stub_pb.FAULT_POINT_AFTER_TOKENS,
        action=stub_pb.FAULT_ACTION_STALL,
        after_tokens=tokens,
        session_prefix=session_prefix,
    )


def check_moved_once(answer: Answer, from_node: str, to_node: str, index: int) -> None:
    (moved,) = answer.moves
    assert (moved.from_node, moved.to_node, moved.next_index) == (from_node, to_node, index)
    assert moved.cause == pb.MOVE_CAUSE_LINK_LOST
    assert moved.epoch > answer.started[0].epoch
    assert answer.finished.attempts == 2


async def runs_on(node: NodeProcess, session_id: str = "") -> int:
    """How many generations the node took."""
    return len(await node.journal(session_id, "generate"))


async def all_taken(node: NodeProcess, count: int) -> None:
    """Until the node has taken so many generations."""
    async with asyncio.timeout(30):
        while await runs_on(node) < count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("inline", ["--inline", "--no-inline"])
async def test_a_node_killed_right_after_any_token_changes_nothing_but_time(
    world: World, inline: str
) -> None:
    doomed, survivor = await asyncio.gather(
        world.node("doomed", "--lanes", "64", inline), world.node("survivor", "--lanes", "64", inline)
    )
    server = await world.head(doomed, survivor)
    cuts = range(N + 1)
    names = [f"cut-{k:02d}" for k in cuts]
    contexts = [prompt(20 + k, k) for k in cuts]
    await doomed.faults(*(stall_after(k, name) for k, name in enumerate(names)))
    await cordon(server, survivor)
    for name, context in zip(names, contexts, strict=True):
        await open_session_on(server, doomed, context, name)
    await uncordon(server, survivor)

    readings = [Reading(generate(server, name, N, extend_context=k % 2 == 0)) for k, name in enumerate(names)]
    await asyncio.gather(*(reading.until_tokens(k) for k, reading in enumerate(readings)))
    await all_taken(doomed, len(names))
    assert [len(reading.answer.tokens) for reading in readings] == list(cuts)
    await doomed.kill()
    answers = await asyncio.gather(*(reading.end() for reading in readings))

    for k, answer in enumerate(answers):
        assert answer.tokens == expected(contexts[k], N), f"cut after token {k}"
        assert (answer.reason, answer.first_index) == ("LENGTH", 0)
        assert (answer.finished.context_tokens, answer.finished.output_tokens) == (20 + k, N)
        if k < N:
            check_moved_once(answer, "doomed", "survivor", k)
        else:
            assert (answer.moves, answer.finished.attempts) == ([], 1)
        kept = [*contexts[k], *answer.tokens] if k % 2 == 0 else contexts[k]
        assert await context_of(server, names[k]) == kept
    # The next turn goes on from the right context.
    turns = await asyncio.gather(*(read_all(generate(server, name, 5)) for name in names))
    for k, turn in enumerate(turns):
        before = [*contexts[k], *answers[k].tokens] if k % 2 == 0 else contexts[k]
        assert turn.tokens == expected(before, 5)
        assert turn.finished.attempts == 1


async def doomed_fleet(
    world: World, points: Sequence[str], inline: str, *, faults_at_start: bool
) -> tuple[HeadServer, list[NodeProcess], NodeProcess]:
    """A node for each fault point and a survivor for all; label group-I leads to node I or the survivor."""
    labels = [f"group-{i}=yes" for i in range(len(points))]
    faults = [("--fault", f"{point}:die") if faults_at_start else () for point in points]
    doomed = await asyncio.gather(
        *(
            world.node(f"doomed-{i}", inline, "--label", labels[i], *faults[i], model=EOS_MODEL.name)
            for i in range(len(points))
        )
    )
    every_label = [flag for label in labels for flag in ("--label", label)]
    survivor = await world.node("survivor", inline, *every_label, "--lanes", "16", model=EOS_MODEL.name)
    return await world.head(*doomed, survivor), list(doomed), survivor


async def open_groups(server: HeadServer, survivor: NodeProcess, contexts: Sequence[Sequence[int]]) -> None:
    """Sessions group-0, group-1, ..., each on its doomed node."""
    await cordon(server, survivor)
    for i, context in enumerate(contexts):
        spec = pb.SessionSpec(model=EOS_MODEL.name, node_selector={f"group-{i}": "yes"})
        request = pb.CreateSessionRequest(session_id=f"group-{i}", spec=spec, token_ids=context)
        answer = await server.fleet.CreateSession(request)
        assert answer.session.node == f"doomed-{i}"
    await uncordon(server, survivor)


def check_outlived(answer: Answer, context: Sequence[int], point: str) -> None:
    assert answer.tokens == expected(context, N, EOS_MODEL), point
    assert answer.reason == "LENGTH"
    moves = [move.cause for move in answer.moves]
    # Of the tokens a node sends before it dies the last ones may be lost with it, an answer's end too.
    assert moves == [pb.MOVE_CAUSE_LINK_LOST] or (moves == [] and point == "before-finish"), point
    sent = {"after-tokens=1": 1, "after-tokens=17": 17, "before-finish": N}.get(point, 0)
    assert all(move.next_index <= sent for move in answer.moves), point
    assert answer.finished.attempts == 1 + len(moves)
    assert answer.finished.context_tokens == len(context)


def long_prompt(salt: int) -> list[int]:
    """A prompt that EOS_MODEL answers with N tokens and no EOS."""
    while True:
        context = prompt(30, salt)
        answer = expected(context, N, EOS_MODEL)
        if len(answer) == N and answer[-1] != EOS_MODEL.eos_token_id:
            return context
        salt += 1000


@pytest.mark.parametrize("inline", ["--inline", "--no-inline"])
async def test_a_node_that_dies_between_any_two_steps_of_a_first_answer_is_outlived(
    world: World, inline: str
) -> None:
    server, doomed, survivor = await doomed_fleet(world, FAULT_POINTS, inline, faults_at_start=True)
    contexts = [long_prompt(i) for i in range(len(FAULT_POINTS))]
    await open_groups(server, survivor, contexts)
    answers = await asyncio.gather(
        *(read_all(generate(server, f"group-{i}", N, extend_context=True)) for i in range(len(doomed)))
    )
    for i, point in enumerate(FAULT_POINTS):
        check_outlived(answers[i], contexts[i], point)
        if answers[i].moves:  # a node whose every token arrived may be told to stop before it comes to die
            await doomed[i].wait_dead()
        assert await context_of(server, f"group-{i}") == [*contexts[i], *answers[i].tokens]


@pytest.mark.parametrize("inline", ["--inline", "--no-inline"])
async def test_a_node_that_dies_between_any_two_steps_of_a_later_turn_is_outlived(
    world: World, inline: str
) -> None:
    points = FAULT_POINTS[2:]
    server, doomed, survivor = await doomed_fleet(world, points, inline, faults_at_start=False)
    contexts = [prompt(12, i) for i in range(len(points))]
    await open_groups(server, survivor, contexts)
    firsts = await asyncio.gather(
        *(read_all(generate(server, f"group-{i}", 6, extend_context=True)) for i in range(len(points)))
    )
    for i, point in enumerate(points):
        await doomed[i].faults(fault_of(point))
        said = firsts[i].tokens
        # Enough of a second question that the answer to all of it comes without EOS.
        question = next(
            more
            for more in (prompt(9, salt) for salt in range(500, 2000))
            if len(expected([*contexts[i], *said, *more], N + 1, EOS_MODEL)) == N + 1
        )
        await server.fleet.AppendTokens(pb.AppendTokensRequest(session_id=f"group-{i}", token_ids=question))
        contexts[i] = [*contexts[i], *said, *question]
    answers = await asyncio.gather(*(read_all(generate(server, f"group-{i}", N)) for i in range(len(points))))
    for i, point in enumerate(points):
        check_outlived(answers[i], contexts[i], point)
        if answers[i].moves:  # a node whose every token arrived may be told to stop before it comes to die
            await doomed[i].wait_dead()
        assert await context_of(server, f"group-{i}") == contexts[i]


def fault_of(point: str) -> stub_pb.Fault:
    """The fault that FAULT_POINTS names, with DIE."""
    name, _, tokens = point.partition("=")
    point_name = f"FAULT_POINT_{name.upper().replace('-', '_')}"
    return stub_pb.Fault(point=point_name, action=stub_pb.FAULT_ACTION_DIE, after_tokens=int(tokens or 0))


async def test_an_answer_outlives_three_nodes_in_turn_and_a_moment_without_any(world: World) -> None:
    doomed = await asyncio.gather(
        *(world.node(f"doomed-{i}", "--fault", "after-tokens=7:die") for i in range(3))
    )
    last = await world.node("last")
    server = await world.head(*doomed, last)
    await cordon(server, last)
    reading = Reading(complete(server, prompt(25), N))
    await asyncio.gather(*(node.wait_dead() for node in doomed))
    others = [node for node in server.head.fleet.nodes if node.name != "last"]
    await until(lambda: not any(node.usable for node in others), "the head knows of all three deaths")
    assert not reading.answer.finishes
    await uncordon(server, last)
    answer = await reading.end()
    assert answer.tokens == expected(prompt(25), N)
    assert len(answer.moves) >= 3
    assert answer.moves[-1].to_node == "last"
    indexes = [move.next_index for move in answer.moves]
    assert indexes == sorted(indexes)


async def test_the_only_node_is_started_again_and_the_answer_goes_on_there(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node)
    reading = Reading(complete(server, prompt(25), N))
    await reading.until_tokens(10)
    await node.kill()
    await node.start()
    answer = await reading.end()
    assert answer.tokens == expected(prompt(25), N)
    assert [(move.from_node, move.to_node) for move in answer.moves] == [("node-1", "node-1")]
    assert answer.moves[0].next_index >= 10
