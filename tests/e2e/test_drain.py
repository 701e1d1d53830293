"""Draining a node: its sessions leave, nobody notices more than a prefill, and operators see the progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.types_pb2 import REPLAY_MODE_NEVER
from tests.e2e.callers import Reading, complete, generate, open_session, open_session_on, read_all, uncordon
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.local_nodes import LocalNode, local_node, local_nodes
from tests.e2e.refused import refusal_of

DRAINED = admin_pb.DRAIN_STATE_DRAINED


class Draining:
    """A DrainNode stream that is read in the background."""

    def __init__(self, server: HeadServer, node: NodeProcess, note: str = "", by: str = "") -> None:
        request = admin_pb.DrainNodeRequest(node=node.identity, note=note, by=by)
        self.told: list[admin_pb.Drain] = []
        self.acknowledged = asyncio.Event()
        self._call = server.admin.DrainNode(request)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            self.told.append(response.drain)
            self.acknowledged.set()

    async def begun(self) -> Draining:
        """Until the head has said that nothing new goes there."""
        async with asyncio.timeout(30):
            await self.acknowledged.wait()
        return self

    async def end(self) -> admin_pb.Drain:
        async with asyncio.timeout(60):
            await self._task
        return self.told[-1]

    async def leave(self) -> None:
        self._call.cancel()
        await asyncio.wait({self._task})


async def begin(server: HeadServer, node: NodeProcess, note: str = "", by: str = "") -> Draining:
    return await Draining(server, node, note, by).begun()


async def shown(server: HeadServer, node: NodeProcess) -> admin_pb.Node:
    return (await server.admin.GetNode(admin_pb.GetNodeRequest(node=node.identity))).node


async def streams_on(
    server: HeadServer, node: NodeProcess, count: int, length: int, first_salt: int = 0
) -> list[Reading]:
    """So many answers that stream from `node`, each under way; salts from `first_salt` on."""
    salts = range(first_salt, first_salt + count)
    ids = [await open_session_on(server, node, prompt(10, salt)) for salt in salts]
    readings = [Reading(generate(server, session_id, length)) for session_id in ids]
    for reading in readings:
        await reading.until_tokens(1)
    return readings


async def generated_on(node: NodeProcess) -> int:
    """How many generations the node was ever asked for."""
    return len(await node.journal(kind="generate"))


def moves_by_drain(answers: Sequence[tuple[list[pb.Moved], str]], node: str) -> int:
    """How many moved, each once, away from `node` and for its drain."""
    for moves, _started in answers:
        assert len(moves) <= 1
        for move in moves:
            assert (move.cause, move.from_node) == (pb.MOVE_CAUSE_DRAIN, node)
            assert move.to_node != node
    return sum(len(moves) for moves, _started in answers)


async def test_fifty_live_streams_leave_a_drained_node_and_each_is_exact(world: World) -> None:
    leaving = await world.node("leaving", "--lanes", "64", "--decode-rate", "40")
    others = [await world.node(f"stays-{i}", "--lanes", "32", "--decode-rate", "40") for i in (1, 2)]
    server = await world.head(leaving, *others)
    readings = await streams_on(server, leaving, 50, 240)
    idle = await open_session_on(server, leaving, prompt(10, 900))
    await read_all(generate(server, idle, 2))
    most = [0, 0]
    held = [server.head.fleet.find(node.identity) for node in others]

    def watch_pace() -> None:
        for at, node in enumerate(held):
            assert node is not None
            most[at] = max(most[at], sum(each.replays for each in node.running))

    for node in held:
        assert node is not None
        grants = node.dispatch

        def dispatched(grants: object = grants) -> None:
            grants()  # type: ignore[operator]
            watch_pace()

        node.dispatch = dispatched  # type: ignore[method-assign]
    draining = await begin(server, leaving, note="new driver", by="olga")
    asked_before = await generated_on(leaving)
    seen = await shown(server, leaving)
    assert (seen.cordoned, seen.cordon_note, seen.cordoned_by) == (True, "new driver", "olga")
    assert (seen.drain.by, seen.drain.note) == ("olga", "new driver")
    assert seen.drain.start_time.seconds > 1_600_000_000
    new = [await open_session(server, prompt(10, salt)) for salt in range(800, 806)]
    answers = [await reading.end() for reading in readings]
    for salt, answer in enumerate(answers):
        assert answer.tokens == expected(prompt(10, salt), 240), f"stream {salt}"
        assert answer.reason == "LENGTH"
    moved = moves_by_drain([(answer.moves, answer.started[0].node) for answer in answers], "leaving")
    last = await draining.end()
    assert (last.state, last.sessions, last.generations, last.owed) == (DRAINED, 0, 0, 0)
    assert last.moved == moved == 50
    assert last.unbound == 1
    assert last.end_time.seconds >= last.start_time.seconds
    assert 1 <= max(most) <= 4, "more than four prefilled at once on one node"
    assert await generated_on(leaving) == asked_before == 51
    views = [await server.fleet.GetSession(pb.GetSessionRequest(session_id=each)) for each in new]
    assert "leaving" not in {view.session.node for view in views}
    assert (await server.admin.ListNodes(admin_pb.ListNodesRequest())).books_balance
    # An idle session that was unbound goes on elsewhere.
    again = await read_all(generate(server, idle, 4))
    assert again.tokens == expected(prompt(10, 900), 4)
    assert again.started[0].node != "leaving"
    left = [entry.session_id for entry in (await leaving.holdings()).holdings if not entry.fenced]
    assert left == []


async def test_without_another_node_streams_end_where_they_are_and_nothing_new_comes(world: World) -> None:
    node = await local_node(world, "only")
    server = await world.head(node)
    readings = await streams_on(server, node, 3, 80)
    draining = await begin(server, node)
    refused = await refusal_of(complete(server, prompt(10, 50), 4))
    assert refused.what == ("UNAVAILABLE", "NO_ELIGIBLE_NODE")
    await until(lambda: draining.told[-1].staying == 3, "the progress says that three stay")
    assert draining.told[-1].state == admin_pb.DRAIN_STATE_DRAINING
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert (answer.tokens, answer.moves) == (expected(prompt(10, salt), 80), [])
    last = await draining.end()
    assert (last.state, last.moved, last.sessions, last.unbound) == (DRAINED, 0, 0, 3)
    assert await generated_on(node) == 3


async def test_streams_wait_on_the_drained_node_for_lanes_that_nobody_else_waits_for(world: World) -> None:
    leaving = await local_node(world, "leaving", lanes=4, decode_rate=60)
    narrow = await local_node(world, "narrow", lanes=1, decode_rate=400)
    server = await world.head(leaving, narrow)
    readings = await streams_on(server, leaving, 3, 200)
    busy = Reading(complete(server, prompt(10, 40), 100_000))
    await busy.until_tokens(1)
    if busy.answer.started[0].node != "narrow":
        pytest.fail("placement sent it to the fuller node")
    draining = await begin(server, leaving)
    await until(lambda: draining.told[-1].waiting == 3, "three wait for the lane of the other node")
    before = [len(reading.answer.tokens) for reading in readings]
    for reading, count in zip(readings, before, strict=True):
        await reading.until_tokens(count + 5)  # they stream on meanwhile
        assert not reading.answer.moves
    await busy.leave()
    await until(lambda: any(reading.answer.moves for reading in readings), "one took the free lane")
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(10, salt), 200)
        assert len(answer.moves) <= 1
    assert (await draining.end()).state == DRAINED


async def test_what_waits_for_a_lane_of_a_drained_node_waits_elsewhere_at_once(world: World) -> None:
    leaving = await local_node(world, "leaving", lanes=1)
    other = await local_node(world, "other", lanes=4)
    server = await world.head(leaving, other)
    (running,) = await streams_on(server, leaving, 1, 60)
    session_id = await open_session_on(server, leaving, prompt(10, 7))
    waiting = Reading(generate(server, session_id, 20))
    known = server.head.fleet.find("leaving")
    assert known is not None
    await until(lambda: len(known.queue) == 1, "the second waits for the only lane")
    draining = await begin(server, leaving)
    answer = await waiting.end()
    assert (answer.tokens, answer.moves) == (expected(prompt(10, 7), 20), [])
    assert answer.started[0].node == "other"
    assert (await running.end()).tokens == expected(prompt(10, 0), 60)
    assert (await draining.end()).state == DRAINED
    assert await leaving.journal(session_id, "generate") == []


async def test_a_node_that_dies_while_it_is_drained_costs_no_token(world: World) -> None:
    leaving, *others = await local_nodes(world, 3, lanes=8, decode_rate=50)
    server = await world.head(leaving, *others)
    readings = await streams_on(server, leaving, 8, 100)
    draining = await begin(server, leaving)
    await until(lambda: any(reading.answer.moves for reading in readings), "the first has moved")
    await leaving.kill()
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(10, salt), 100)
        assert len(answer.moves) <= 1
    last = await draining.end()
    assert (last.state, last.sessions, last.generations) == (DRAINED, 0, 0)
    assert 1 <= last.moved <= 8


async def test_an_uncordon_ends_a_drain_and_leaves_the_rest_where_it_is(world: World) -> None:
    leaving = await local_node(world, "leaving", lanes=4)
    narrow = await local_node(world, "narrow", lanes=1)
    server = await world.head(leaving, narrow)
    readings = await streams_on(server, leaving, 4, 150)
    draining = await begin(server, leaving)
    await until(lambda: sum(len(each.answer.moves) for each in readings) == 1, "one has moved")
    await uncordon(server, leaving)
    last = await draining.end()
    assert last.state == admin_pb.DRAIN_STATE_ENDED
    seen = await shown(server, leaving)
    assert (seen.cordoned, seen.cordoned_by, seen.HasField("drain")) == (False, "", False)
    answers = [await reading.end() for reading in readings]
    for salt, answer in enumerate(answers):
        assert answer.tokens == expected(prompt(10, salt), 150)
    assert moves_by_drain([(each.moves, "") for each in answers], "leaving") <= 2
    back = await open_session_on(server, leaving, prompt(10, 60))
    assert (await read_all(generate(server, back, 3))).started[0].node == "leaving"


async def test_a_drain_goes_on_without_its_watcher_and_can_be_joined(world: World) -> None:
    leaving, other = await local_nodes(world, 2)
    server = await world.head(leaving, other)
    (reading,) = await streams_on(server, leaving, 1, 100)
    first = await begin(server, leaving, note="first", by="olga")
    await first.leave()
    second = await begin(server, leaving, note="second", by="ivan")
    last = await second.end()
    assert (last.state, last.by, last.note) == (DRAINED, "olga", "first")
    assert (await reading.end()).tokens == expected(prompt(10, 0), 100)
    third = await (await begin(server, leaving)).end()
    assert (third.state, third.end_time) == (DRAINED, last.end_time)


async def test_a_session_that_must_not_be_replayed_ends_on_the_drained_node(world: World) -> None:
    leaving, other = await local_nodes(world, 2)
    server = await world.head(leaving, other)
    await server.admin.CordonNode(admin_pb.CordonNodeRequest(node=other.identity))
    session_id = await open_session(server, prompt(10), replay=REPLAY_MODE_NEVER)
    await uncordon(server, other)
    reading = Reading(generate(server, session_id, 60))
    await reading.until_tokens(1)
    draining = await begin(server, leaving)
    answer = await reading.end()
    assert (answer.tokens, answer.moves, answer.reason) == (expected(prompt(10), 60), [], "LENGTH")
    assert (await draining.end()).state == DRAINED


async def test_a_stream_is_not_moved_to_a_window_that_would_cut_it_short(world: World) -> None:
    leaving = await local_node(world, "leaving", window_tokens=4096)
    await local_node(world, "narrow", window_tokens=60)
    server = await world.head(*world.nodes)
    (reading,) = await streams_on(server, leaving, 1, 100)
    draining = await begin(server, leaving)
    answer = await reading.end()
    assert (answer.tokens, answer.moves) == (expected(prompt(10, 0), 100), [])
    assert (await draining.end()).moved == 0


async def test_a_stream_is_not_moved_back_to_a_node_whose_engine_failed_on_it(world: World) -> None:
    failing, leaving = await local_nodes(world, 2)
    server = await world.head(failing, leaving)
    session_id = await open_session_on(server, failing, prompt(10))
    await failing.faults(
        stub_pb.Fault(
            point=stub_pb.FAULT_POINT_AFTER_TOKENS,
            action=stub_pb.FAULT_ACTION_ENGINE_ERROR,
            after_tokens=3,
        )
    )
    reading = Reading(generate(server, session_id, 120))
    await reading.until(lambda answer: answer.moves and len(answer.tokens) > 10)
    draining = await begin(server, leaving)
    await until(lambda: draining.told[-1].staying == 1, "the progress says that it stays")
    answer = await reading.end()
    assert [move.cause for move in answer.moves] == [pb.MOVE_CAUSE_ENGINE_ERROR]
    assert answer.tokens == expected(prompt(10), 120)
    assert (await draining.end()).moved == 0


async def test_a_drain_survives_the_nodes_return_and_a_removed_node_ends_it(world: World) -> None:
    leaving, other = await local_nodes(world, 2)
    server = await world.head(leaving, other)
    await (await begin(server, leaving, note="new disk", by="olga")).end()
    await leaving.kill()
    known = server.head.fleet.find(leaving.identity)
    assert known is not None
    await until(lambda: not known.usable, "it is down")
    await leaving.start()
    if leaving.address != known.address:
        await server.admin.AddNode(admin_pb.AddNodeRequest(address=leaving.address))
    await until(lambda: any(n.usable and n.name == leaving.identity for n in server.head.fleet.nodes), "back")
    seen = await shown(server, leaving)
    assert (seen.drain.state, seen.drain.by, seen.cordoned) == (DRAINED, "olga", True)
    started = [(await read_all(complete(server, prompt(10, salt), 2))).started[0].node for salt in range(4)]
    assert set(started) == {other.identity}


async def test_a_node_removed_while_it_is_drained_ends_the_drain(world: World) -> None:
    node = await local_node(world, "only")
    server = await world.head(node, placement_wait_s=0.2)
    (reading,) = await streams_on(server, node, 1, 5000)
    draining = await begin(server, node)
    await server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node="only"))
    assert (await draining.end()).state == admin_pb.DRAIN_STATE_NODE_REMOVED
    assert (await reading.end()).reason == "ERROR"


@pytest.mark.parametrize("world", ["link", "join"], indirect=True)
async def test_a_node_of_every_kind_can_be_drained(world: World) -> None:
    nodes: list[LocalNode] = await local_nodes(world, 2, lanes=8)
    leaving, other = nodes
    server = await world.head(*nodes)
    readings = await streams_on(server, leaving, 6, 100)
    last = await (await begin(server, leaving, by="olga")).end()
    answers = [await reading.end() for reading in readings]
    for salt, answer in enumerate(answers):
        assert answer.tokens == expected(prompt(10, salt), 100)
    assert moves_by_drain([(each.moves, "") for each in answers], leaving.identity) == last.moved == 6
    assert (last.state, last.by) == (DRAINED, "olga")
    assert {move.to_node for answer in answers for move in answer.moves} == {other.identity}


async def test_what_is_wrong_with_a_drain_is_said(world: World) -> None:
    node = await local_node(world, "only")
    server = await world.head(node, max_watchers=1)

    async def drained(**fields: str) -> object:
        return [each async for each in server.admin.DrainNode(admin_pb.DrainNodeRequest(**fields))]

    unknown = await refusal_of(server.admin.DrainNode(admin_pb.DrainNodeRequest(node="nobody")))
    assert unknown.what == ("NOT_FOUND", "NODE_NOT_FOUND")
    long = admin_pb.DrainNodeRequest(node="only", by="o" * 129)
    assert (await refusal_of(server.admin.DrainNode(long))).what == ("INVALID_ARGUMENT", "INVALID_FIELD")
    (reading,) = await streams_on(server, node, 1, 5000)
    server.head.operators.drain_places = 0
    first = await begin(server, node)
    more = await refusal_of(server.admin.DrainNode(admin_pb.DrainNodeRequest(node="only")))
    assert more.what == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    await first.leave()
    await reading.leave()
    assert await drained(node="only")
