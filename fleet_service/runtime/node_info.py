"""The picture of a node that operators are shown."""

from __future__ import annotations

from fleet_service.runtime.node import Node
from fleet_service.runtime.views import NodeInfo


def node_info(node: Node, now_s: float, unix_s: float) -> NodeInfo:
    """At `now_s` on the loop's clock, which is `unix_s` on the wall."""
    return NodeInfo(
        name=node.name,
        address=node.address,
        incarnation=node.incarnation,
        state=node.state,
        state_detail=node.state_detail,
        cordoned=node.cordoned,
        cordon_note=node.cordon_note,
        reports_stale=node.reports_stale,
        labels=node.labels,
        models=tuple(node.models.values()),
        features=node.features,
        report=node.report,
        report_age_s=None if node.report_at_s is None else now_s - node.report_at_s,
        lanes=node.lanes,
        sessions=node.sessions,
        running=len(node.running),
        queued=len(node.queue),
        reservations=node.reservations,
        outbox=len(node.outbox),
        failures=dict(node.failures),
        last_seen_at=unix_s - (now_s - node.last_sign_s) if node.ever_heard else None,
        version=node.hello.version if node.hello else 0,
        authenticated=node.hello is not None and node.hello.authenticated,
        encrypted=node.hello is not None and node.hello.encrypted,
        found_by=node.found_by,
        unlisted=node.unlisted,
        cordoned_by=node.cordoned_by,
        cordoned_at=node.cordoned_at,
        drain=node.drain.info() if node.drain is not None else None,
    )
