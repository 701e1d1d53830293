"""How a generation ends that cannot go on: finish ERROR with a cause, what was delivered stands."""

from __future__ import annotations

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import types_pb2
from fleet_service.domain.commands import Append, Refusal, RefusalCode
from fleet_service.runtime.protocols import NodeLink
from tests.e2e.callers import Reading, complete, cordon, generate, open_session, open_session_on, read_all
from tests.e2e.harness import World, expected, prompt, until
from tests.e2e.local_nodes import local_node, local_nodes
from tests.e2e.refused import refusal_of
from tests.e2e.tap import Tap


async def test_a_session_that_another_head_took_over_ends_its_readers_with_the_next_index(
    world: World,
) -> None:
    tap = Tap()

    async def taken(link: NodeLink, command: Append) -> Refusal | None:
        return Refusal(RefusalCode.STALE_EPOCH, current_epoch=command.epoch + (1 << 32))

    tap.on_append = taken
    node = await local_node(world, "node-1", inline_bind=False)
    server = await world.head(node, through=tap)
    answer = await read_all(generate(server, await open_session(server, prompt(10)), 8))
    assert (answer.reason, answer.finished.error.reason) == ("ERROR", "OWNER_CHANGED")
    assert answer.finished.error.metadata["nextIndex"] == "0"


async def test_a_session_that_must_not_be_replayed_ends_with_its_node(world: World) -> None:
    first, second = await local_nodes(world, 2, resume=False)
    server = await world.head(first, second)
    await cordon(server, second)
    session_id = await open_session(server, prompt(10), replay=types_pb2.REPLAY_MODE_NEVER)
    await first.faults(
        stub_pb.Fault(
            point=stub_pb.FAULT_POINT_AFTER_TOKENS, action=stub_pb.FAULT_ACTION_DROP_LINK, after_tokens=3
        )
    )
    answer = await read_all(generate(server, session_id, 8))
    assert (answer.reason, answer.finished.error.reason) == ("ERROR", "NODE_LOST")
    assert answer.finished.error.metadata["nextIndex"] == "3"
    assert answer.tokens == expected(prompt(10), 3)


async def test_a_generation_with_no_node_to_go_on_at_ends_with_the_reason(world: World) -> None:
    first, second = await local_nodes(world, 2)
    server = await world.head(first, second, placement_wait_s=0.5)
    await second.kill()
    known = server.head.fleet.find("node-2")
    assert known is not None
    await until(lambda: known.state.value == "down", "the other is down")
    session_id = await open_session_on(server, first, prompt(10))
    reading = Reading(generate(server, session_id, 4000))
    await reading.until_tokens(3)
    await first.kill()
    answer = await reading.end()
    assert (answer.reason, answer.finished.error.reason) == ("ERROR", "NO_ELIGIBLE_NODE")
    assert answer.finished.error.metadata["nextIndex"] == str(len(answer.tokens))
    assert answer.tokens == expected(prompt(10), len(answer.tokens))


async def test_a_node_of_another_fleet_is_shown_as_such_and_gets_nothing(world: World) -> None:
    strange = await world.node("strange", "--fleet-id", "another-fleet")
    server = await world.head(strange)
    (shown,) = (await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes
    assert shown.state == admin_pb.NODE_STATE_DOWN
    assert "same fleet id" in shown.state_detail
    (probe,) = (await server.admin.ProbeNodes(admin_pb.ProbeNodesRequest())).probes
    assert (probe.reachable, "same fleet id" in probe.detail) == (False, True)
    error = await refusal_of(complete(server, prompt(10), 4))
    assert error.what == ("UNAVAILABLE", "NO_ELIGIBLE_NODE")
