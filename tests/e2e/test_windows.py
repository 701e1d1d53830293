"""Context windows: what fits nowhere is refused, what fits somewhere goes there, and where output ends."""

from __future__ import annotations

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from node_stub.reference import StubModel
from tests.e2e.callers import Reading, complete, context_of, generate, open_session, open_session_on, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import LocalNode, local_node
from tests.e2e.refused import Refused, refusal_of

NARROW, WIDE = 64, 256
OTHER = StubModel("other-model")
STALL_AFTER_5 = stub_pb.Fault(
    point=stub_pb.FAULT_POINT_AFTER_TOKENS, action=stub_pb.FAULT_ACTION_STALL, after_tokens=5, times=1
)


async def narrow_and_wide(world: World) -> tuple[LocalNode, LocalNode]:
    narrow = await local_node(world, "narrow", window_tokens=NARROW)
    wide = await local_node(world, "wide", window_tokens=WIDE)
    return narrow, wide


async def append(server: HeadServer, session_id: str, token_ids: list[int]) -> pb.Session:
    request = pb.AppendTokensRequest(session_id=session_id, token_ids=token_ids)
    return (await server.fleet.AppendTokens(request)).session


async def went_down(server: HeadServer, node: LocalNode) -> None:
    await node.kill()
    known = server.head.fleet.find(node.identity)
    assert known is not None
    await until(lambda: known.state.value == "down", f"{node.identity} is down")


def check_too_long(error: Refused, code: str, tokens: int, widest: int) -> None:
    assert error.what == (code, "CONTEXT_TOO_LONG")
    assert error.metadata["model"] == MODEL.name
    assert error.metadata["promptTokens"] == str(tokens)
    assert error.metadata["maxContextTokens"] == str(widest)
    assert error.retry_after_s is None


@pytest.mark.parametrize("warm", [False, True], ids=["cold fleet", "warm fleet"])
async def test_a_prompt_too_long_for_all_is_refused_with_the_widest_window_of_its_model(
    world: World, warm: bool
) -> None:
    narrow, wide = await narrow_and_wide(world)
    elsewhere = await local_node(world, "elsewhere", models={OTHER.name: 4096})
    server = await world.head(narrow, wide, elsewhere)
    if warm:
        await read_all(complete(server, prompt(20), 4))
    check_too_long(await refusal_of(complete(server, prompt(300), 4)), "INVALID_ARGUMENT", 300, WIDE)
    spec = pb.SessionSpec(model=MODEL.name)
    create = pb.CreateSessionRequest(spec=spec, token_ids=prompt(300))
    check_too_long(await refusal_of(server.fleet.CreateSession(create)), "INVALID_ARGUMENT", 300, WIDE)
    assert [node.failures for node in server.head.fleet.nodes] == [{}, {}, {}]
    answer = await read_all(complete(server, prompt(300), 4, model=OTHER.name))
    assert answer.tokens == expected(prompt(300), 4, OTHER)


async def test_too_long_is_said_as_well_when_the_nodes_are_down(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    await went_down(server, wide)
    check_too_long(await refusal_of(complete(server, prompt(300), 4)), "INVALID_ARGUMENT", 300, WIDE)


async def test_a_session_cannot_grow_beyond_the_widest_window(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    session_id = await open_session(server, prompt(200))
    grow = pb.AppendTokensRequest(session_id=session_id, token_ids=prompt(57, salt=1))
    check_too_long(await refusal_of(server.fleet.AppendTokens(grow)), "OUT_OF_RANGE", 257, WIDE)
    assert await context_of(server, session_id) == prompt(200)
    await append(server, session_id, prompt(56, salt=1))


async def test_a_wide_node_takes_what_a_narrow_one_cannot(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    for salt in range(3):
        answer = await read_all(complete(server, prompt(100, salt), 8))
        assert answer.started[0].node == "wide"
        assert answer.tokens == expected(prompt(100, salt), 8)
        assert answer.finished.attempts == 1


async def test_a_session_that_outgrows_its_node_moves_to_a_wider_one(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    session_id = await open_session_on(server, narrow, prompt(40))
    await read_all(generate(server, session_id, 4))
    session = await append(server, session_id, prompt(40, salt=1))
    assert (session.state, session.node) == (pb.SESSION_STATE_UNBOUND, "")
    answer = await read_all(generate(server, session_id, 8))
    assert answer.started[0].node == "wide"
    assert answer.tokens == expected(prompt(40) + prompt(40, salt=1), 8)


async def test_a_session_that_outgrows_its_node_by_its_own_output_moves_as_well(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    session_id = await open_session_on(server, narrow, prompt(50))
    first = await read_all(generate(server, session_id, 100, extend_context=True))
    assert (first.reason, len(first.tokens)) == ("LENGTH", NARROW - 50)
    await append(server, session_id, prompt(1, salt=1))
    answer = await read_all(generate(server, session_id, 8))
    assert answer.started[0].node == "wide"
    assert answer.tokens == expected(prompt(50) + first.tokens + prompt(1, salt=1), 8)


async def test_while_the_only_wide_enough_node_is_down_the_caller_is_asked_to_retry(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    session_id = await open_session_on(server, wide, prompt(100))
    await went_down(server, wide)
    for call in (complete(server, prompt(100), 8), generate(server, session_id, 8)):
        error = await refusal_of(call)
        assert error.what == ("UNAVAILABLE", "NO_ELIGIBLE_NODE")
        assert error.metadata["down"] == "1"
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
    await wide.start()
    known = server.head.fleet.find("wide")
    assert known is not None
    await until(lambda: known.usable, "the wide node is back")
    answer = await read_all(generate(server, session_id, 8))
    assert answer.tokens == expected(prompt(100), 8)


async def test_output_ends_with_length_where_the_window_is_full(world: World) -> None:
    node = await local_node(world, "node-1", window_tokens=NARROW)
    server = await world.head(node)
    answer = await read_all(complete(server, prompt(50), 100))
    assert (answer.reason, answer.tokens) == ("LENGTH", expected(prompt(50), NARROW - 50))
    assert answer.finished.attempts == 1


async def test_a_prompt_that_fills_the_window_leaves_no_room_for_output(world: World) -> None:
    node = await local_node(world, "node-1", window_tokens=NARROW)
    server = await world.head(node)
    answer = await read_all(complete(server, prompt(NARROW), 100))
    assert (answer.reason, answer.tokens) == ("LENGTH", [])


async def test_going_on_at_a_wider_node_does_not_change_where_the_output_ends(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide, generation_stall_s=1.0)
    session_id = await open_session_on(server, narrow, prompt(50))
    await narrow.faults(STALL_AFTER_5)
    answer = await read_all(generate(server, session_id, 100))
    assert [move.to_node for move in answer.moves] == ["wide"]
    assert (answer.reason, answer.tokens) == ("LENGTH", expected(prompt(50), NARROW - 50))


async def test_going_on_at_a_narrower_node_does_not_change_where_the_output_ends(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide, generation_stall_s=1.0)
    session_id = await open_session_on(server, wide, prompt(50))
    await wide.faults(STALL_AFTER_5)
    answer = await read_all(generate(server, session_id, 100))
    places = [answer.started[0].node, *(move.to_node for move in answer.moves)]
    assert places == ["wide", "narrow", "wide"]
    assert answer.moves[1].next_index == NARROW - 50
    assert (answer.reason, answer.tokens) == ("LENGTH", expected(prompt(50), 100))


async def test_a_full_narrow_node_waits_for_the_wide_one_that_is_down_to_come_back(world: World) -> None:
    narrow, wide = await narrow_and_wide(world)
    server = await world.head(narrow, wide)
    session_id = await open_session_on(server, wide, prompt(50))
    await wide.faults(STALL_AFTER_5)
    reading = Reading(generate(server, session_id, 100))
    await reading.until_tokens(5)
    await wide.kill()
    await reading.until_tokens(NARROW - 50)
    await wide.start()
    answer = await reading.end()
    assert [move.to_node for move in answer.moves] == ["narrow", "wide"]
    assert (answer.reason, answer.tokens) == ("LENGTH", expected(prompt(50), 100))


async def test_a_node_that_says_no_window_and_refuses_the_length_is_left_for_one_that_holds_it(
    world: World,
) -> None:
    """It refuses the append as too long, though nothing that it announced said so."""
    secretive = await local_node(world, "secretive", window_tokens=0)
    wide = await local_node(world, "wide", window_tokens=WIDE)
    server = await world.head(secretive, wide)
    session_id = await open_session_on(server, secretive, prompt(100))
    await secretive.faults(
        stub_pb.Fault(
            point=stub_pb.FAULT_POINT_AFTER_APPEND,
            action=stub_pb.FAULT_ACTION_REFUSE,
            refusal_code=6,
        )
    )
    answer = await read_all(generate(server, session_id, 8))
    assert [(move.to_node, move.cause) for move in answer.moves] == [("wide", pb.MOVE_CAUSE_NO_ROOM)]
    assert answer.tokens == expected(prompt(100), 8)
    assert [node.failures for node in server.head.fleet.nodes] == [{}, {}]
