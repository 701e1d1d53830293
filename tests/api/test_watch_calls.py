"""DrainNode and WatchFleet say what the head tells of, and keep who ordered what."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import types_pb2 as types
from fleet_service.api.admin_servicer import AdminServicer
from fleet_service.api.validate import Limits
from fleet_service.domain.access import Caller
from tests.api.conftest import Edge
from tests.api.fakes import FakeHead


async def test_a_drain_tells_its_progress_until_the_node_is_empty(edge: Edge) -> None:
    call = edge.admin.DrainNode(admin.DrainNodeRequest(node="node-a", note="new driver", by="ops"))
    first, last = [response async for response in call]
    assert edge.head.calls["drain_node"] == ("node-a", "new driver", "ops")
    assert (first.node, last.node) == ("node-a", "node-a")
    drain = first.drain
    assert drain.state == admin.DRAIN_STATE_DRAINING
    assert (drain.by, drain.note, drain.start_time.ToMilliseconds()) == (
        "ops",
        "new driver",
        1_700_000_000_500,
    )
    assert not drain.HasField("end_time")
    assert (drain.sessions, drain.generations, drain.waiting, drain.staying) == (2, 2, 1, 1)
    assert (drain.owed, drain.moved, drain.unbound) == (3, 5, 4)
    assert (last.drain.state, last.drain.sessions) == (admin.DRAIN_STATE_DRAINED, 0)
    assert last.drain.end_time.ToMilliseconds() == 1_700_000_009_250
    assert edge.head.progress.closed_times == 1
    (node,) = (await edge.admin.ListNodes(admin.ListNodesRequest())).nodes
    assert node.drain == drain
    assert (node.cordoned_by, node.cordon_time.ToMilliseconds()) == ("ops", 1_700_000_000_500)


@dataclass
class NamedCall:
    """A call of somebody whom the head knows by name."""

    caller: Caller
    trace: object | None = None
    written: list[object] = field(default_factory=list)

    async def write(self, message: object) -> None:
        self.written.append(message)


async def test_an_order_is_kept_under_the_name_that_the_head_knows_the_caller_by() -> None:
    head, call = FakeHead(), NamedCall(Caller("olga"))
    servicer = AdminServicer(head, Limits())
    await servicer.CordonNode(admin.CordonNodeRequest(node="node-a", by="somebody"), call)
    await servicer.DrainNode(admin.DrainNodeRequest(node="node-a", by="somebody"), call)
    assert head.calls["cordon_node"] == ("node-a", "", "olga")
    assert head.calls["drain_node"] == ("node-a", "", "olga")
    assert len(call.written) == 2


async def test_a_watcher_sees_the_fleet_and_then_what_changes(edge: Edge) -> None:
    call = edge.admin.WatchFleet(admin.WatchFleetRequest(without_events=True))
    first, second = [response async for response in call]
    assert edge.head.calls["watch_fleet"] == (False,)
    assert (first.snapshot, [node.name for node in first.nodes]) == (True, ["node-a"])
    assert first.summary == admin.FleetSummary(
        sessions_unbound=1,
        sessions_bound=2,
        sessions_generating=3,
        sessions_parked=4,
        generations=3,
        queued=1,
        context_tokens=900,
        books_balance=True,
        durability=admin.DURABILITY_RELAXED,
        store_trouble="no space is left",
    )
    assert (second.snapshot, list(second.removed_nodes), second.skipped_events) == (False, ["node-b"], 7)
    assert not second.HasField("summary")
    placed, moved, ended = second.events
    assert (placed.placed.node, placed.generation_id, placed.model) == ("node-b", "gen-1", "toy")
    assert (moved.moved.from_node, moved.moved.to_node) == ("node-b", "node-a")
    assert (moved.moved.cause, moved.moved.gap_ms) == (fleet.MOVE_CAUSE_DRAIN, 125)
    assert (ended.ended.node, ended.ended.finished.reason) == ("node-a", types.FINISH_REASON_LENGTH)
    assert ended.time.seconds == 1_700_000_005
    assert edge.head.watcher.closed_times == 1
