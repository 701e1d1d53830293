"""What the command line says of a node, its cordon and its drain, wherever it says it."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from fleet.v1.admin_service_pb2 import (
    DRAIN_STATE_DRAINED,
    DRAIN_STATE_DRAINING,
    Drain,
    DrainState,
    Node,
    NodeProbe,
    NodeState,
)
from fleet_service.cli.output import count, enum_name, timestamp
from fleet_service.runtime.join_desk import JOINED_PREFIX


def has_joined(node: Node | NodeProbe) -> bool:
    """Whether it dialed the head, which therefore cannot dial it."""
    return node.address.startswith(JOINED_PREFIX)


def is_emptied(node: Node) -> bool:
    """Whether a drain has ended with nothing left on it: it may be stopped."""
    return node.HasField("drain") and node.drain.state == DRAIN_STATE_DRAINED


def state_text(node: Node) -> str:
    """Its state, and whether it is kept from new work: up, draining."""
    state = enum_name(NodeState.DESCRIPTOR, node.state).lower()
    if node.HasField("drain"):
        return f"{state}, {enum_name(DrainState.DESCRIPTOR, node.drain.state).lower()}"
    return f"{state}, cordoned" if node.cordoned else state


def order_text(what: str, note: str, by: str, at: Timestamp) -> str:
    """Who ordered something, when and why: cordoned by olga at 2025-03-01T10:00:00.000Z: new driver."""
    parts = [what]
    if by:
        parts.append(f"by {by}")
    if at.seconds:
        parts.append(f"at {timestamp(at)}")
    text = " ".join(parts)
    return f"{text}: {note}" if note else text


def kept_from_work(node: Node) -> str:
    """The order that keeps new work off it, and how far its drain is; "" when there is none."""
    if node.HasField("drain"):
        drain = node.drain
        return f"{order_text('drained', drain.note, drain.by, drain.start_time)}; {progress_text(drain)}"
    if node.cordoned:
        return order_text("cordoned", node.cordon_note, node.cordoned_by, node.cordon_time)
    return ""


def progress_text(drain: Drain) -> str:
    """How far a drain is: 3 sessions left, 2 generations (1 waits for a lane elsewhere); 5 moved."""
    done = f"{drain.moved} moved, {drain.unbound} unbound"
    if drain.state == DRAIN_STATE_DRAINED:
        return f"empty, it can be stopped; {done}"
    if drain.state != DRAIN_STATE_DRAINING:
        ended = enum_name(DrainState.DESCRIPTOR, drain.state).lower().replace("_", " ")
        return f"{ended} with {count(drain.sessions, 'session')} left; {done}"
    if not (drain.sessions or drain.generations or drain.owed):
        return f"nothing left; {done}"
    left = f"{count(drain.sessions, 'session')} left"
    if drain.generations:
        left += f", {count(drain.generations, 'generation')}"
    where = []
    if drain.waiting:
        where.append(f"{drain.waiting} waiting for a lane elsewhere")
    if drain.staying:
        where.append(f"{drain.staying} to end there, as no other node can take them")
    if where:
        left += f" ({', '.join(where)})"
    if not drain.sessions and drain.owed:
        left += f", {count(drain.owed, 'revoke')} on the way"
    return f"{left}; {done}"
