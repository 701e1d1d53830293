"""What operators ordered outlives the head: nodes added and removed, names, cordons, drains."""

from __future__ import annotations

import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import FleetClient
from tests.e2e.restarts import Durable, Stream, expected, generation_spec, open_session, session, until_so

UP = admin_pb.NODE_STATE_UP


async def nodes_of(client: FleetClient) -> dict[str, admin_pb.Node]:
    reply = await client.ask(client.admin.ListNodes(admin_pb.ListNodesRequest()))
    return {node.name: node for node in reply.nodes}


async def names_of(client: FleetClient) -> list[str]:
    reply = await client.ask(client.admin.ListNodes(admin_pb.ListNodesRequest()))
    return [name.name for name in reply.names]


async def add(client: FleetClient, address: str) -> None:
    await client.ask(client.admin.AddNode(admin_pb.AddNodeRequest(address=address)))


async def remove(client: FleetClient, node: str) -> None:
    await client.ask(client.admin.RemoveNode(admin_pb.RemoveNodeRequest(node=node)))


async def cordon(client: FleetClient, node: str, note: str) -> None:
    await client.ask(client.admin.CordonNode(admin_pb.CordonNodeRequest(node=node, note=note, by="ann")))


async def uncordon(client: FleetClient, node: str) -> None:
    await client.ask(client.admin.UncordonNode(admin_pb.UncordonNodeRequest(node=node)))


async def up(durable: Durable, *names: str) -> FleetClient:
    """A client, once just these nodes are up."""
    client = await durable.client()

    async def there() -> bool:
        return {node.name for node in (await nodes_of(client)).values() if node.state == UP} == set(names)

    await until_so(there, f"{names} are up")
    return client


@pytest.mark.slow
async def test_nodes_and_names_are_those_that_operators_left(durable: Durable) -> None:
    configured = [await durable.node("kept"), await durable.node("removed")]
    added = [await durable.node(name, listed=False) for name in ("added", "brief", "named")]
    name = f"dns:///localhost:{added[2].address.rpartition(':')[2]}"
    await durable.start()
    client = await up(durable, "kept", "removed")
    await add(client, added[0].address)
    await add(client, added[1].address)
    await add(client, name)
    await remove(client, "brief")
    await remove(client, configured[1].address)
    before = await nodes_of(client)
    assert set(before) == {"kept", "added", "named"}
    await durable.crash()
    client = await up(durable, "kept", "added", "named")
    assert set(await nodes_of(client)) == set(before)
    assert await names_of(client) == [name]
    assert (await nodes_of(client))["named"].found_by == name
    # What is taken out of a name stays out as long as the name lists it, and what was removed can be added.
    await remove(client, "named")
    await add(client, configured[1].address)
    await durable.crash()
    client = await up(durable, "kept", "added", "removed")
    assert await names_of(client) == [name]
    await remove(client, name)
    await add(client, added[2].address)
    await durable.crash()
    client = await up(durable, "kept", "added", "removed", "named")
    assert not await names_of(client)


async def test_cordons_stay_with_who_and_when_and_why(durable: Durable) -> None:
    nodes = {name: await durable.node(name, joins=name == "joined") for name in ("dialed", "joined", "free")}
    late = await durable.node_process("late")
    await late.kill()
    await durable.start()
    client = await up(durable, *nodes)
    for name in nodes:
        await cordon(client, name, f"note of {name}")
    await uncordon(client, "free")
    await cordon(client, late.address, "before it was ever met")
    before = await nodes_of(client)
    await durable.crash()
    client = await up(durable, *nodes)
    for name, node in (await nodes_of(client)).items():
        if name in nodes:
            was = before[name]
            assert (node.cordoned, node.cordoned_by, node.cordon_note) == (
                was.cordoned,
                was.cordoned_by,
                was.cordon_note,
            )
            assert node.cordon_time == was.cordon_time
    assert (await nodes_of(client))["dialed"].cordoned
    await open_session(client, "s", [1])
    assert (await session(client, "s"))[0].node == "free"
    await late.start()
    client = await up(durable, *nodes, "late")
    assert (await nodes_of(client))["late"].cordon_note == "before it was ever met"
    # An order that was taken back stays so, by whichever name it was given.
    await uncordon(client, "late")
    await uncordon(client, "dialed")
    await remove(client, "joined")
    await durable.crash()
    client = await up(durable, *nodes, "late")
    assert not any(node.cordoned for node in (await nodes_of(client)).values())
    await durable.ends_quiet()


@pytest.mark.slow
async def test_a_drain_goes_on_after_the_head_was_killed(durable: Durable) -> None:
    """What runs there moves once another node has room; what is idle there leaves."""
    await durable.node("old", rate=20, lanes=8)
    await durable.start()
    client = await up(durable, "old")
    streams = []
    for number in range(3):
        await open_session(client, f"s-{number}", [number, 2])
        streams.append(Stream(client, f"s-{number}", f"s-{number}", generation_spec(150)))
        await streams[-1].until_tokens(3)
    await open_session(client, "idle", [7])
    await Stream(client, "idle", "idle", generation_spec(1)).until_tokens(1)
    drain = client.admin.DrainNode(admin_pb.DrainNodeRequest(node="old", note="new disk", by="bob"))
    progress = await drain.read()
    assert isinstance(progress, admin_pb.DrainNodeResponse)
    assert progress.drain.state == admin_pb.DRAIN_STATE_DRAINING
    before = (await nodes_of(client))["old"]
    await durable.crash()
    client = await up(durable, "old")
    after = (await nodes_of(client))["old"]
    assert (after.drain.by, after.drain.note, after.cordoned) == ("bob", "new disk", True)
    assert abs(after.drain.start_time.ToMilliseconds() - before.drain.start_time.ToMilliseconds()) <= 1
    new = await durable.node("new", rate=40, listed=False)
    await add(client, new.address)
    for number, stream in enumerate(streams):
        tokens, others = await durable.rest(f"s-{number}", len(stream.tokens))
        assert stream.tokens + tokens == expected([number, 2], 150)
        moves = [(event.moved.to_node, event.moved.cause) for event in others if event.HasField("moved")]
        assert ("new", pb.MOVE_CAUSE_DRAIN) in moves

    async def drained() -> bool:
        return (await nodes_of(client))["old"].drain.state == admin_pb.DRAIN_STATE_DRAINED

    await until_so(drained, "the node is drained")
    assert not [each for each in (await durable.nodes[0].holdings()).holdings if not each.fenced]
    await durable.ends_quiet()
