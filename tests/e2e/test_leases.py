"""Leases: renewed while all is well; one that ran out costs a session its cache and never its answer."""

from __future__ import annotations

import asyncio

from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import generate, open_session, read_all
from tests.e2e.harness import PATIENCE_S, HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.local_nodes import local_node

NEVER_S = 1000.0


async def journal_until(node: NodeProcess, kind: str, count: int) -> None:
    """Wait until the node has noted so many entries of a kind."""
    async with asyncio.timeout(PATIENCE_S):
        while len(await node.journal(kind=kind)) < count:
            await asyncio.sleep(0.02)


async def all_fenced(node: NodeProcess) -> None:
    """Wait until the node's leases have run out."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(held.fenced for held in (await node.holdings()).holdings):
            await asyncio.sleep(0.02)


async def state_of(server: HeadServer, session_id: str) -> pb.Session:
    return (await server.fleet.GetSession(pb.GetSessionRequest(session_id=session_id))).session


async def test_a_session_idle_past_its_lease_is_bound_anew_and_answers_exactly(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node, lease_s=0.8, lease_renew_s=NEVER_S)
    session_id = await open_session(server, prompt(20))
    await read_all(generate(server, session_id, 4))
    await all_fenced(node)
    assert (await node.holdings()).kv_blocks_used == 0
    answer = await read_all(generate(server, session_id, 8))
    assert answer.tokens == expected(prompt(20), 8)
    (moved,) = answer.moves
    assert (moved.from_node, moved.to_node, moved.cause) == (
        "node-1",
        "node-1",
        pb.MOVE_CAUSE_SESSION_LOST,
    )
    assert moved.epoch > answer.started[0].epoch
    outcomes = [entry.outcome for entry in await node.journal(session_id, "generate")]
    assert outcomes[-2:] == ["FENCED", "LENGTH"]
    assert server.head.fleet.nodes[0].failures == {}


async def test_a_lease_that_runs_out_in_mid_stream_loses_repeats_and_changes_no_token(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node, lease_s=0.3, lease_renew_s=NEVER_S)
    session_id = await open_session(server, prompt(20))
    answer = await read_all(generate(server, session_id, 250))
    assert answer.tokens == expected(prompt(20), 250)
    assert len(answer.moves) >= 2
    assert {move.cause for move in answer.moves} == {pb.MOVE_CAUSE_SESSION_LOST}
    epochs = [answer.started[0].epoch, *(move.epoch for move in answer.moves)]
    assert epochs == sorted(set(epochs))


async def test_leases_are_renewed_while_sessions_idle(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node, lease_s=1.5, lease_renew_s=0.4, tick_s=0.1)
    session_id = await open_session(server, prompt(20))
    await read_all(generate(server, session_id, 4))
    before = await state_of(server, session_id)
    await journal_until(node, "lease", 5)  # renewed for longer than the lease
    assert {entry.outcome for entry in await node.journal(kind="lease")} == {"done"}
    assert await node.journal(kind="fence") == []
    after = await state_of(server, session_id)
    assert (after.node, after.epoch) == (before.node, before.epoch)
    answer = await read_all(generate(server, session_id, 8))
    assert (answer.tokens, answer.moves) == (expected(prompt(20), 8), [])


async def test_all_sessions_of_a_lease_that_could_not_be_renewed_answer_exactly(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node, lease_s=0.8, lease_renew_s=1.2, tick_s=0.1)
    ids = [await open_session(server, prompt(20, salt)) for salt in range(3)]
    for session_id in ids:
        await read_all(generate(server, session_id, 4))
    await all_fenced(node)
    await journal_until(node, "lease", 1)
    assert "expired" in {entry.outcome for entry in await node.journal(kind="lease")}
    for salt, session_id in enumerate(ids):
        answer = await read_all(generate(server, session_id, 4))
        assert answer.tokens == expected(prompt(20, salt), 4)
        assert [move.cause for move in answer.moves] == [pb.MOVE_CAUSE_SESSION_LOST]
    assert server.head.fleet.nodes[0].failures == {}


async def test_a_node_frozen_past_its_lease_has_fenced_its_sessions_when_it_wakes(world: World) -> None:
    node = await world.node("node-1")
    server = await world.head(node, lease_s=1.5, lease_renew_s=0.5, silence_s=0.6)
    session_id = await open_session(server, prompt(20))
    await read_all(generate(server, session_id, 4))
    known = server.head.fleet.nodes[0]
    node.freeze()
    loop = asyncio.get_running_loop()
    await until(lambda: loop.time() - known.last_sign_s > 2.0, "it was silent for longer than its lease")
    assert (await state_of(server, session_id)).state == pb.SESSION_STATE_UNBOUND
    node.thaw()
    await until(lambda: known.usable, "it is back")
    answer = await read_all(generate(server, session_id, 8))
    assert answer.tokens == expected(prompt(20), 8)
    assert [entry.outcome for entry in await node.journal(kind="fence")] == ["done"]
