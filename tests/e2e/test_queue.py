"""Waiting for a lane: at the head, by class and arrival, bounded, and never longer than elsewhere."""

from __future__ import annotations

import asyncio

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.rules import Limits
from tests.e2e.callers import Answer, Reading, complete, cordon, generate, open_session, read_all, uncordon
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.local_nodes import local_node, local_nodes
from tests.e2e.refused import refusal_of

STALL = stub_pb.Fault(
    point=stub_pb.FAULT_POINT_AFTER_GENERATE, action=stub_pb.FAULT_ACTION_STALL, session_prefix="plug"
)
BUSY = 8


async def plug(server: HeadServer, node: NodeProcess, lanes: int) -> list[Reading]:
    """Fill a node's lanes with generations that stand still until they are left."""
    await node.faults(STALL)
    readings = []
    for i in range(lanes):
        session_id = f"plug-{node.identity}-{i}"
        spec = pb.SessionSpec(model="stub-model")
        create = pb.CreateSessionRequest(session_id=session_id, spec=spec, token_ids=prompt(10))
        await server.fleet.CreateSession(create)
        readings.append(Reading(generate(server, session_id, 8)))
        await readings[-1].until(lambda answer: bool(answer.started))
    return readings


async def queued(server: HeadServer, node: NodeProcess, count: int) -> None:
    known = server.head.fleet.find(node.identity)
    assert known is not None
    await until(lambda: known.waiting == count, f"{count} wait for {node.identity}")


async def accepted(reading: Reading) -> Answer:
    return await reading.until(lambda answer: bool(answer.events))


async def test_what_waits_goes_by_class_and_then_by_arrival(world: World) -> None:
    node = await local_node(world, "node-1", lanes=1)
    server = await world.head(node)
    plugs = await plug(server, node, 1)
    order: list[str] = []
    asked = [
        ("background", types_pb2.QOS_CLASS_BACKGROUND),
        ("agent 1", types_pb2.QOS_CLASS_AGENT),
        ("completion", types_pb2.QOS_CLASS_COMPLETION),
        ("agent 2", types_pb2.QOS_CLASS_AGENT),
        ("interactive", types_pb2.QOS_CLASS_INTERACTIVE),
    ]
    waiting = []
    for salt, (name, qos) in enumerate(asked, start=1):
        reading = Reading(complete(server, prompt(10, salt), 4, qos_class=qos))
        await queued(server, node, salt)
        waiting.append((name, reading))

    async def note(name: str, reading: Reading) -> None:
        await reading.until(lambda answer: bool(answer.started))
        order.append(name)

    notes = [asyncio.create_task(note(name, reading)) for name, reading in waiting]
    assert order == []
    await plugs[0].leave()
    answers = [await reading.end() for _, reading in waiting]
    await asyncio.gather(*notes)
    assert order == ["interactive", "completion", "agent 1", "agent 2", "background"]
    assert [answer.tokens for answer in answers] == [expected(prompt(10, salt), 4) for salt in range(1, 6)]
    assert (await node.holdings()).peak_lanes_active == 1


async def test_time_in_the_queue_is_told_and_counts_against_the_wall(world: World) -> None:
    node = await local_node(world, "node-1", lanes=1)
    server = await world.head(node)
    plugs = await plug(server, node, 1)
    patient = Reading(complete(server, prompt(10, 2), 4))
    await queued(server, node, 1)
    late = Reading(complete(server, prompt(10, 1), 4, max_wall_ms=500))
    answer = await late.end()
    assert (answer.reason, answer.tokens, answer.started) == ("WALL_CLOCK", [], [])
    assert 0 < answer.finished.timings.queued_ms <= answer.finished.timings.total_ms
    assert not answer.finished.timings.HasField("first_token_ms")
    await plugs[0].leave()
    answer = await patient.end()
    assert answer.tokens == expected(prompt(10, 2), 4)
    assert answer.finished.timings.queued_ms >= 400


async def test_a_full_queue_is_said_with_a_hint_and_the_next_one_fits_when_there_is_room(
    world: World,
) -> None:
    node = await local_node(world, "node-1", lanes=1)
    server = await world.head(node, queue_limit_per_node=2)
    plugs = await plug(server, node, 1)
    waiting = [Reading(complete(server, prompt(10, salt), 4)) for salt in (1, 2)]
    await queued(server, node, 2)
    error = await refusal_of(complete(server, prompt(10, 3), 4))
    assert error.what == ("RESOURCE_EXHAUSTED", "FLEET_SATURATED")
    assert error.metadata == {"model": "stub-model", "fullNodes": "1"}
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    assert server.head.operators.books_balance
    await waiting[0].leave()
    await queued(server, node, 1)
    third = Reading(complete(server, prompt(10, 3), 4))
    await accepted(third)
    await plugs[0].leave()
    assert (await waiting[1].end()).tokens == expected(prompt(10, 2), 4)
    assert (await third.end()).tokens == expected(prompt(10, 3), 4)


async def test_what_waits_moves_when_another_node_is_much_sooner_free(world: World) -> None:
    """Done there in less than half of what is left here, which is three times their own length or more."""
    first, second = await local_nodes(world, 2, lanes=2)
    server = await world.head(first, second)
    await cordon(server, second)
    plugs = await plug(server, first, 2)
    waiting = [Reading(complete(server, prompt(10, salt), 64)) for salt in (1, 2, 3)]
    await queued(server, first, 3)
    await uncordon(server, second)
    for salt, reading in enumerate(waiting, start=1):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(10, salt), 64)
        assert (answer.started[0].node, answer.moves) == ("node-2", [])
    for reading in plugs:
        await reading.leave()


async def test_a_node_that_says_busy_is_passed_over_for_a_moment_and_not_blamed(world: World) -> None:
    busy, free = await local_nodes(world, 2)
    server = await world.head(busy, free)
    await busy.faults(
        stub_pb.Fault(
            point=stub_pb.FAULT_POINT_BEFORE_ASSIGN,
            action=stub_pb.FAULT_ACTION_REFUSE,
            refusal_code=BUSY,
        )
    )
    answers = await asyncio.gather(*(read_all(complete(server, prompt(10, salt), 8)) for salt in range(6)))
    assert [answer.tokens for answer in answers] == [expected(prompt(10, salt), 8) for salt in range(6)]
    assert await busy.journal(kind="generate") == []
    assert [node.failures for node in server.head.fleet.nodes] == [{}, {}]


async def test_when_the_only_node_is_busy_for_a_while_the_work_waits_and_is_done(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    await node.faults(
        stub_pb.Fault(
            point=stub_pb.FAULT_POINT_BEFORE_ASSIGN,
            action=stub_pb.FAULT_ACTION_REFUSE,
            refusal_code=BUSY,
            times=5,
        )
    )
    answer = await read_all(complete(server, prompt(10), 8))
    assert answer.tokens == expected(prompt(10), 8)


async def test_a_node_with_no_place_for_another_session_is_busy(world: World) -> None:
    small = await local_node(world, "small", limits=Limits(max_sessions=1))
    large = await local_node(world, "large")
    server = await world.head(small, large)
    ids = [await open_session(server, prompt(10, salt)) for salt in range(6)]
    answers = [await read_all(generate(server, session_id, 8)) for session_id in ids]
    assert [answer.tokens for answer in answers] == [expected(prompt(10, salt), 8) for salt in range(6)]
    assert len((await small.holdings()).holdings) == 1
