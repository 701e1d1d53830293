"""Messages of DrainNode and WatchFleet from what the head shows of drains and of what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.v1 import admin_service_pb2 as admin
from fleet_service.api import convert_sessions
from fleet_service.api.convert_admin import drain_message
from fleet_service.api.convert_shared import timestamp
from fleet_service.domain.events import Moved
from fleet_service.domain.session_table import SessionState
from fleet_service.runtime.journal import Durability
from fleet_service.runtime.views import DrainInfo, EndedOn, FleetChange, FleetSummary, PlacedOn, Turn

_DURABILITIES: Mapping[Durability, admin.Durability] = {
    Durability.MEMORY: admin.DURABILITY_MEMORY,
    Durability.RELAXED: admin.DURABILITY_RELAXED,
    Durability.STRICT: admin.DURABILITY_STRICT,
}


def drain_response(node: str, drain: DrainInfo) -> admin.DrainNodeResponse:
    return admin.DrainNodeResponse(node=node, drain=drain_message(drain))


def change_message(change: FleetChange, nodes: Sequence[admin.Node]) -> admin.WatchFleetResponse:
    return admin.WatchFleetResponse(
        snapshot=change.snapshot,
        nodes=nodes,
        removed_nodes=change.removed,
        summary=None if change.summary is None else summary_message(change.summary),
        events=[turn_message(turn) for turn in change.turns],
        skipped_events=change.skipped,
    )


def summary_message(summary: FleetSummary) -> admin.FleetSummary:
    sessions: Mapping[SessionState, int] = summary.sessions
    return admin.FleetSummary(
        sessions_unbound=sessions[SessionState.UNBOUND],
        sessions_bound=sessions[SessionState.BOUND],
        sessions_generating=sessions[SessionState.GENERATING],
        sessions_parked=sessions[SessionState.PARKED],
        generations=summary.generations,
        queued=summary.queued,
        context_tokens=summary.context_tokens,
        books_balance=summary.books_balance,
        stopping=summary.stopping,
        durability=_DURABILITIES[summary.durability],
        store_trouble=summary.store_trouble,
    )


def turn_message(turn: Turn) -> admin.FleetEvent:
    message = admin.FleetEvent(
        time=timestamp(turn.at),
        generation_id=turn.generation_id,
        session_id=turn.session_id,
        model=turn.model,
    )
    match turn.what:
        case PlacedOn(node):
            message.placed.node = node
        case Moved() as moved:
            message.moved.CopyFrom(convert_sessions.moved_message(moved))
        case EndedOn(node, finished):
            message.ended.node = node
            message.ended.finished.CopyFrom(convert_sessions.finished_message(finished))
    return message
