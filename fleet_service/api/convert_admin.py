"""AdminService's messages from what the head shows of its nodes and decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import types_pb2 as types
from fleet_service.api.convert_shared import milliseconds, model_message, timestamp
from fleet_service.domain.node_types import Feature, NodeState, Report
from fleet_service.domain.placement import Verdict
from fleet_service.runtime.views import DrainInfo, DrainState, Explanation, NameInfo, NodeInfo, ProbeResult

_STATES: Mapping[NodeState, admin.NodeState] = {
    NodeState.CONNECTING: admin.NODE_STATE_CONNECTING,
    NodeState.UP: admin.NODE_STATE_UP,
    NodeState.SUSPECT: admin.NODE_STATE_SUSPECT,
    NodeState.DOWN: admin.NODE_STATE_DOWN,
}
_FEATURES: Mapping[Feature, admin.NodeFeature] = {
    Feature.INLINE_BIND: admin.NODE_FEATURE_INLINE_BIND,
    Feature.ENGINE_OPTIONS: admin.NODE_FEATURE_ENGINE_OPTIONS,
    Feature.LINK: admin.NODE_FEATURE_LINK,
    Feature.RESUME: admin.NODE_FEATURE_RESUME,
    Feature.RECONCILE: admin.NODE_FEATURE_RECONCILE,
}


_DRAIN_STATES: Mapping[DrainState, admin.DrainState] = {
    DrainState.DRAINING: admin.DRAIN_STATE_DRAINING,
    DrainState.DRAINED: admin.DRAIN_STATE_DRAINED,
    DrainState.ENDED: admin.DRAIN_STATE_ENDED,
    DrainState.NODE_REMOVED: admin.DRAIN_STATE_NODE_REMOVED,
}


def drain_message(drain: DrainInfo) -> admin.Drain:
    message = admin.Drain(
        state=_DRAIN_STATES[drain.state],
        by=drain.by,
        note=drain.note,
        start_time=timestamp(drain.started_at),
        sessions=drain.sessions,
        generations=drain.generations,
        waiting=drain.waiting,
        staying=drain.staying,
        owed=drain.owed,
        moved=drain.moved,
        unbound=drain.unbound,
    )
    if drain.ended_at is not None:
        message.end_time.CopyFrom(timestamp(drain.ended_at))
    return message


def report_message(report: Report) -> types.CapacityReport:
    return types.CapacityReport(
        gpu_memory_bytes=report.gpu_memory_bytes,
        gpu_memory_free_bytes=report.gpu_memory_free_bytes,
        host_memory_bytes=report.host_memory_bytes,
        active_sessions=report.active_sessions,
        max_sessions=report.max_sessions,
        max_context_tokens=report.max_context_tokens,
        kv_blocks_used=report.kv_blocks_used,
        kv_blocks_total=report.kv_blocks_total,
        lanes_active=report.lanes_active,
        max_lanes=report.max_lanes,
        queue_depth=report.queue_depth,
        own_lanes_active=report.own_lanes_active,
        own_queue_depth=report.own_queue_depth,
        decode_tokens_per_s=report.decode_tokens_per_s,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        sampled_at_ms=report.sampled_at_ms,
    )


def node_message(node: NodeInfo) -> admin.Node:
    message = admin.Node(
        name=node.name,
        address=node.address,
        incarnation=node.incarnation,
        state=_STATES[node.state],
        state_detail=node.state_detail,
        cordoned=node.cordoned,
        cordon_note=node.cordon_note,
        cordoned_by=node.cordoned_by,
        reports_stale=node.reports_stale,
        labels=node.labels,
        models=[model_message(model) for model in node.models],
        features=sorted(_FEATURES[feature] for feature in node.features),
        lanes=node.lanes,
        sessions=node.sessions,
        running=node.running,
        queued=node.queued,
        reservations=node.reservations,
        outbox=node.outbox,
        failures=node.failures,
        protocol_version=node.version,
        authenticated=node.authenticated,
        encrypted=node.encrypted,
        found_by=node.found_by,
        unlisted=node.unlisted,
    )
    if node.cordoned_at is not None:
        message.cordon_time.CopyFrom(timestamp(node.cordoned_at))
    if node.drain is not None:
        message.drain.CopyFrom(drain_message(node.drain))
    if node.report is not None:
        message.report.CopyFrom(report_message(node.report))
    if node.report_age_s is not None:
        message.report_age_ms = milliseconds(node.report_age_s)
    if node.last_seen_at is not None:
        message.last_seen_time.CopyFrom(timestamp(node.last_seen_at))
    return message


def name_message(name: NameInfo) -> admin.DnsName:
    message = admin.DnsName(
        name=name.entry,
        addresses=name.addresses,
        other_ways=name.other_ways,
        removed=name.removed,
        left_out=name.left_out,
        failure=name.failure,
    )
    if name.resolved_at is not None:
        message.resolved_time.CopyFrom(timestamp(name.resolved_at))
    return message


def probe_message(probe: ProbeResult) -> admin.NodeProbe:
    return admin.NodeProbe(
        name=probe.name,
        address=probe.address,
        reachable=probe.reachable,
        detail=probe.detail,
        identity=probe.identity,
        models=[model_message(model) for model in probe.models],
        latency_ms=milliseconds(probe.latency_s),
        protocol_version=probe.version,
        authenticated=probe.authenticated,
        encrypted=probe.encrypted,
    )


def verdict_message(verdict: Verdict) -> admin.NodeVerdict:
    return admin.NodeVerdict(
        node=verdict.node,
        eligible=verdict.eligible,
        left_out=verdict.left_out,
        eta_ms=verdict.eta_ms,
        ahead=verdict.ahead,
        decode_tokens_per_s=verdict.decode_tokens_per_s,
        prefill_tokens_per_s=verdict.prefill_tokens_per_s,
        kv_used_pct=verdict.kv_used_pct,
        sessions=verdict.sessions,
        reservations=verdict.reservations,
        max_context_tokens=verdict.max_context_tokens,
        report_age_ms=verdict.report_age_ms,
        decode_reported=verdict.decode_reported,
        prefill_reported=verdict.prefill_reported,
    )


def explanation_message(
    explanation: Explanation, verdicts: Sequence[admin.NodeVerdict]
) -> admin.ExplainPlacementResponse:
    refusal = explanation.refusal
    return admin.ExplainPlacementResponse(
        policy=explanation.policy,
        chosen=explanation.chosen,
        refusal_reason="" if refusal is None else refusal.reason.value,
        refusal_message="" if refusal is None else refusal.message,
        verdicts=verdicts,
    )
