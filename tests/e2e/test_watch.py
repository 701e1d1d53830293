"""Watching the fleet: all of it once, then what changes; bounded for a slow reader, and free without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.types_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH
from fleet_service.runtime.journal import Durability, Journal, NoJournal, StoreJournal
from fleet_service.stores.memory import MemoryStore
from tests.e2e.callers import Reading, complete, cordon, generate, open_session_on, read_all
from tests.e2e.harness import PATIENCE_S, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import local_node, local_nodes
from tests.e2e.refused import refusal_of
from tests.failing_journal import FULL, FailingJournal


class Watching:
    """A WatchFleet stream, read in the background into the fleet as it shows it."""

    def __init__(self, server: HeadServer, *, without_events: bool = False) -> None:
        self.nodes: dict[str, admin_pb.Node] = {}
        self.summary = admin_pb.FleetSummary()
        self.events: list[admin_pb.FleetEvent] = []
        self.messages: list[admin_pb.WatchFleetResponse] = []
        self._news = asyncio.Event()
        self._call = server.admin.WatchFleet(admin_pb.WatchFleetRequest(without_events=without_events))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._call:
                assert message.snapshot == (not self.messages), "the first message is the snapshot, once"
                self.messages.append(message)
                self.nodes.update((node.name, node) for node in message.nodes)
                for name in message.removed_nodes:
                    del self.nodes[name]
                if message.HasField("summary"):
                    self.summary = message.summary
                self.events += message.events
                self._news.set()
        finally:
            self._news.set()

    async def until(self, condition: Callable[[Watching], object]) -> Watching:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                if self._task.done():
                    self._task.result()
                    raise AssertionError("the stream ended first")
                self._news.clear()
                await self._news.wait()
        return self

    async def end(self) -> None:
        """Until the head ends it."""
        async with asyncio.timeout(PATIENCE_S):
            await self._task

    async def leave(self) -> None:
        self._call.cancel()
        await asyncio.wait({self._task})


async def test_a_watcher_sees_the_fleet_at_once_and_each_turn_of_a_generation(world: World) -> None:
    node, other = await local_nodes(world, 2)
    server = await world.head(node, other)
    watching = await Watching(server).until(lambda seen: seen.messages)
    assert set(watching.nodes) == {"node-1", "node-2"}
    assert all(each.state == admin_pb.NODE_STATE_UP for each in watching.nodes.values())
    assert watching.summary.books_balance
    session_id = await open_session_on(server, node, prompt(10))
    answer = await read_all(generate(server, session_id, 20, generation_id="g-1"))
    await watching.until(lambda seen: any(event.HasField("ended") for event in seen.events))
    placed, ended = watching.events
    for event in (placed, ended):
        assert (event.generation_id, event.session_id, event.model) == ("g-1", session_id, "stub-model")
        assert event.time.seconds > 1_600_000_000
    assert placed.placed.node == ended.ended.node == "node-1"
    assert ended.ended.finished == answer.finished
    await watching.until(lambda seen: seen.summary.sessions_bound == 1 and not seen.summary.generations)
    assert watching.nodes["node-1"].sessions == 1


@pytest.mark.parametrize(
    "journal,durability",
    [
        (NoJournal(), admin_pb.DURABILITY_MEMORY),
        (StoreJournal(MemoryStore(), Durability.RELAXED, broken=print), admin_pb.DURABILITY_RELAXED),
        (StoreJournal(MemoryStore(), Durability.STRICT, broken=print), admin_pb.DURABILITY_STRICT),
    ],
)
async def test_a_watcher_sees_how_what_the_head_has_is_kept(
    world: World, journal: Journal, durability: admin_pb.Durability
) -> None:
    server = await world.head()
    server.head.journal = journal
    watching = await Watching(server).until(lambda seen: seen.messages)
    assert (watching.summary.durability, watching.summary.store_trouble) == (durability, "")


async def test_a_watcher_sees_that_the_store_fails_and_that_it_works_again(world: World) -> None:
    server = await world.head()
    server.head.journal = journal = FailingJournal()
    watching = await Watching(server).until(lambda seen: seen.messages)
    journal.trouble = FULL
    await watching.until(lambda seen: seen.summary.store_trouble)
    assert watching.summary.store_trouble == str(FULL)
    journal.trouble = None
    await watching.until(lambda seen: not seen.summary.store_trouble)
    assert watching.summary.durability == admin_pb.DURABILITY_STRICT


async def test_a_watcher_sees_a_node_die_and_its_answers_move(world: World) -> None:
    dying, other = await local_nodes(world, 2)
    server = await world.head(dying, other)
    ids = [await open_session_on(server, dying, prompt(10, salt)) for salt in range(3)]
    readings = [Reading(generate(server, session_id, 60)) for session_id in ids]
    for reading in readings:
        await reading.until_tokens(2)
    watching = await Watching(server).until(lambda seen: seen.messages)
    assert watching.nodes["node-1"].running == 3
    await dying.kill()
    await watching.until(lambda seen: seen.nodes["node-1"].state == admin_pb.NODE_STATE_DOWN)
    await watching.until(lambda seen: sum(event.HasField("moved") for event in seen.events) == 3)
    for event in watching.events:
        if event.HasField("moved"):
            assert (event.moved.from_node, event.moved.to_node) == ("node-1", "node-2")
            assert event.moved.cause == pb.MOVE_CAUSE_LINK_LOST
    for salt, reading in enumerate(readings):
        assert (await reading.end()).tokens == expected(prompt(10, salt), 60)
    await watching.until(lambda seen: sum(event.HasField("ended") for event in seen.events) == 3)


async def test_a_watcher_sees_nodes_come_and_go_and_be_drained(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    watching = await Watching(server).until(lambda seen: seen.messages)
    late = await local_node(world, "late")
    if world.kind != "join":
        await server.admin.AddNode(admin_pb.AddNodeRequest(address=late.address))
    await watching.until(lambda seen: "late" in seen.nodes)
    assert late.address not in watching.nodes
    await cordon(server, node)
    await watching.until(lambda seen: seen.nodes["node-1"].cordoned)
    request = admin_pb.DrainNodeRequest(node="late", note="new disk", by="olga")
    assert [each.drain.state async for each in server.admin.DrainNode(request)][-1] == (
        admin_pb.DRAIN_STATE_DRAINED
    )
    await watching.until(lambda seen: seen.nodes["late"].drain.state == admin_pb.DRAIN_STATE_DRAINED)
    assert watching.nodes["late"].drain.note == "new disk"
    await server.admin.RemoveNode(admin_pb.RemoveNodeRequest(node="late"))
    await watching.until(lambda seen: set(seen.nodes) == {"node-1"})


async def test_messages_are_gathered_and_none_is_sent_per_token(world: World) -> None:
    node = await local_node(world, "node-1", decode_rate=400)
    server = await world.head(node)
    watching = await Watching(server).until(lambda seen: seen.messages)
    loop = asyncio.get_running_loop()
    begun_s, before = loop.time(), len(watching.messages)
    answer = await read_all(complete(server, prompt(10), 400))
    assert len(answer.tokens) == 400
    await watching.until(lambda seen: any(event.HasField("ended") for event in seen.events))
    told = len(watching.messages) - before
    assert told <= 2 + (loop.time() - begun_s) / 0.2
    assert len(watching.events) == 2


async def test_a_watcher_may_leave_out_the_events(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    watching = await Watching(server, without_events=True).until(lambda seen: seen.messages)
    await read_all(complete(server, prompt(10), 4))
    await watching.until(lambda seen: seen.nodes["node-1"].report.kv_blocks_total)
    await cordon(server, node)
    await watching.until(lambda seen: seen.nodes["node-1"].cordoned)
    assert watching.events == []


async def test_a_slow_watcher_is_told_how_much_it_missed_and_gets_the_newest_state(world: World) -> None:
    node = await local_node(world, "node-1", lanes=8, decode_rate=0)
    server = await world.head(node, watch_events_kept=4)
    watcher = server.head.operators.watch_fleet(with_turns=True)
    first = await watcher.read()
    assert first is not None
    assert first.snapshot
    for salt in range(6):
        await read_all(complete(server, prompt(10, salt), 2))
    await cordon(server, node)
    await server.admin.UncordonNode(admin_pb.UncordonNodeRequest(node="node-1"))
    await server.admin.CordonNode(admin_pb.CordonNodeRequest(node="node-1", note="the last"))
    change = await watcher.read()
    assert change is not None
    assert (len(change.turns), change.skipped) == (4, 8)
    assert [info.cordon_note for info in change.nodes] == ["the last"]
    watcher.close()


async def test_a_stream_that_is_not_read_holds_little_and_harms_nobody(world: World) -> None:
    node = await local_node(world, "node-1", lanes=8, decode_rate=0)
    server = await world.head(node, watch_events_kept=10)
    stream = server.admin.WatchFleet(admin_pb.WatchFleetRequest())
    await anext(aiter(stream))  # and never again
    for salt in range(40):
        answer = await read_all(complete(server, prompt(10, salt), 2))
        assert answer.tokens == expected(prompt(10, salt), 2)
    stream.cancel()
    turns = server.head.fleet.turns
    await until(lambda: turns.listener is None, "the head noticed that nobody watches")


async def test_without_a_watcher_nothing_listens_and_too_many_are_refused(world: World) -> None:
    server = await world.head(await local_node(world, "node-1"), max_watchers=2)
    turns = server.head.fleet.turns
    assert turns.listener is None
    watchings = [await Watching(server).until(lambda seen: seen.messages) for _ in range(2)]
    more = await refusal_of(server.admin.WatchFleet(admin_pb.WatchFleetRequest()))
    assert more.what == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    for watching in watchings:
        await watching.leave()
    await until(lambda: turns.listener is None, "nobody watches any more")
    again = await Watching(server).until(lambda seen: seen.messages)
    assert set(again.nodes) == {"node-1"}


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
async def test_a_head_that_ends_says_so_and_ends_its_watchers_streams(world: World, grace_s: float) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    watching = await Watching(server).until(lambda seen: seen.messages)
    reading = Reading(complete(server, prompt(10), 30))
    await reading.until_tokens(1)
    drain = server.admin.DrainNode(admin_pb.DrainNodeRequest(node="node-1"))
    told = [(await anext(aiter(drain))).drain.state]
    assert told == [admin_pb.DRAIN_STATE_DRAINING]
    ending = asyncio.create_task(server.head.stop(grace_s))
    await watching.end()
    assert (await refusal_of(drain)).what == ("UNAVAILABLE", "HEAD_DRAINING")
    assert watching.summary.stopping
    ends = [event.ended.finished.reason for event in watching.events if event.HasField("ended")]
    assert ends == [FINISH_REASON_LENGTH if grace_s else FINISH_REASON_CANCELLED]
    await ending
    world.heads.remove(server)
    await server.stop()
