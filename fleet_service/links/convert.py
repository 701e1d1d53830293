"""Messages of fleet.v1.NodeService <-> the domain's values. Pure; token ids pass as whole sequences."""

from __future__ import annotations

import math

from fleet.v1 import admin_service_pb2, node_service_pb2, types_pb2
from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Phase,
    Refusal,
    RefusalCode,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.domain.specs import Qos, Sampling

PROTOCOL_VERSION = 1
DEFAULT_MESSAGE_BYTES = 16 * 1024 * 1024
_UINT32_MAX = 0xFFFF_FFFF

QOS_TO_PROTO = {
    Qos.INTERACTIVE: types_pb2.QOS_CLASS_INTERACTIVE,
    Qos.COMPLETION: types_pb2.QOS_CLASS_COMPLETION,
    Qos.AGENT: types_pb2.QOS_CLASS_AGENT,
    Qos.BACKGROUND: types_pb2.QOS_CLASS_BACKGROUND,
}

REFUSAL_CODES = {
    node_service_pb2.REFUSAL_CODE_UNKNOWN_SESSION: RefusalCode.UNKNOWN_SESSION,
    node_service_pb2.REFUSAL_CODE_STALE_EPOCH: RefusalCode.STALE_EPOCH,
    node_service_pb2.REFUSAL_CODE_FENCED: RefusalCode.FENCED,
    node_service_pb2.REFUSAL_CODE_REPLAYED: RefusalCode.REPLAYED,
    node_service_pb2.REFUSAL_CODE_CONTEXT_MISMATCH: RefusalCode.CONTEXT_MISMATCH,
    node_service_pb2.REFUSAL_CODE_CONTEXT_TOO_LONG: RefusalCode.CONTEXT_TOO_LONG,
    node_service_pb2.REFUSAL_CODE_CONSTRAINT: RefusalCode.CONSTRAINT,
    node_service_pb2.REFUSAL_CODE_BUSY: RefusalCode.BUSY,
    node_service_pb2.REFUSAL_CODE_ENGINE_ERROR: RefusalCode.ENGINE_ERROR,
}

# A phase that is not listed, 0 included, is no change: a later version may know more of them.
PHASES = {
    node_service_pb2.GENERATION_PHASE_QUEUED: Phase.QUEUED,
    node_service_pb2.GENERATION_PHASE_PREFILL: Phase.PREFILL,
    node_service_pb2.GENERATION_PHASE_DECODE: Phase.DECODE,
}

# STOP is the head's own finish, never a node's.
RUN_FINISHES = {
    types_pb2.FINISH_REASON_EOS: RunFinish.EOS,
    types_pb2.FINISH_REASON_LENGTH: RunFinish.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: RunFinish.CANCELLED,
    types_pb2.FINISH_REASON_WALL_CLOCK: RunFinish.WALL_CLOCK,
    types_pb2.FINISH_REASON_ERROR: RunFinish.ERROR,
}

FEATURES = {
    admin_service_pb2.NODE_FEATURE_INLINE_BIND: Feature.INLINE_BIND,
    admin_service_pb2.NODE_FEATURE_ENGINE_OPTIONS: Feature.ENGINE_OPTIONS,
    admin_service_pb2.NODE_FEATURE_LINK: Feature.LINK,
    admin_service_pb2.NODE_FEATURE_RESUME: Feature.RESUME,
    admin_service_pb2.NODE_FEATURE_RECONCILE: Feature.RECONCILE,
}


def milliseconds(duration_s: float) -> int:
    """Whole milliseconds, rounded up so that a short time is not none at all, within a uint32."""
    return min(max(math.ceil(duration_s * 1000), 0), _UINT32_MAX)


# ------------------------------------------------------------------------------------------- head to node


def handshake_request(introduction: Introduction) -> node_service_pb2.HandshakeRequest:
    return node_service_pb2.HandshakeRequest(
        min_version=PROTOCOL_VERSION,
        max_version=PROTOCOL_VERSION,
        fleet_id=introduction.fleet_id,
        head_id=introduction.head_id,
        term=introduction.term,
    )


def link_hello(introduction: Introduction, report_period_s: float) -> node_service_pb2.HandshakeRequest:
    """The head's hello on a multiplexed link: the handshake, and how often to report there."""
    request = handshake_request(introduction)
    request.report_period_ms = milliseconds(report_period_s)
    return request


def watch_request(introduction: Introduction, period_s: float) -> node_service_pb2.WatchStatusRequest:
    return node_service_pb2.WatchStatusRequest(
        period_ms=milliseconds(period_s),
        fleet_id=introduction.fleet_id,
        head_id=introduction.head_id,
        term=introduction.term,
    )


def renew_request(
    introduction: Introduction, lease_s: float, term: int
) -> node_service_pb2.RenewLeaseRequest:
    return node_service_pb2.RenewLeaseRequest(
        fleet_id=introduction.fleet_id,
        head_id=introduction.head_id,
        term=term,
        lease_ms=milliseconds(lease_s),
    )


def reconcile_request(introduction: Introduction) -> node_service_pb2.ReconcileRequest:
    return node_service_pb2.ReconcileRequest(fleet_id=introduction.fleet_id, head_id=introduction.head_id)


# These are written in place into the message they are part of, at half of what it takes to build and copy.


def write_sampling(target: types_pb2.SamplingParams, sampling: Sampling) -> None:
    target.temperature = sampling.temperature
    target.top_p = sampling.top_p
    target.min_p = sampling.min_p
    target.top_k = sampling.top_k
    target.seed = sampling.seed


def write_assign(target: node_service_pb2.AssignRequest, command: Assign, introduction: Introduction) -> None:
    target.session_id = command.session_id
    target.epoch = command.epoch
    target.command_id = command.command_id
    target.fleet_id = introduction.fleet_id
    target.head_id = introduction.head_id
    target.model = command.model
    target.model_revision = command.model_revision
    write_sampling(target.sampling, command.sampling)
    target.qos_class = QOS_TO_PROTO[command.qos]
    target.engine_options = command.engine_options
    target.lease_ms = milliseconds(command.lease_s)


def write_append(target: node_service_pb2.AppendRequest, command: Append) -> None:
    target.session_id = command.session_id
    target.epoch = command.epoch
    target.command_id = command.command_id
    target.base_length = command.base_length
    target.token_ids.extend(command.token_ids)


def write_generate(
    target: node_service_pb2.NodeServiceGenerateRequest, command: Run, introduction: Introduction
) -> None:
    target.session_id = command.session_id
    target.epoch = command.epoch
    target.command_id = command.command_id
    target.generation_id = command.generation_id
    target.context_length = command.context_length
    target.context_crc32 = command.context_crc32
    target.prefix_token_ids.extend(command.prefix_token_ids)
    target.first_index = command.first_index
    target.max_new_tokens = command.max_new_tokens
    target.max_wall_ms = milliseconds(command.max_wall_s)
    write_sampling(target.sampling, command.sampling)
    target.qos_class = QOS_TO_PROTO[command.qos]
    if command.assign is not None:
        write_assign(target.assign, command.assign, introduction)
    if command.append is not None:
        write_append(target.append, command.append)


def assign_request(command: Assign, introduction: Introduction) -> node_service_pb2.AssignRequest:
    request = node_service_pb2.AssignRequest()
    write_assign(request, command, introduction)
    return request


def append_request(command: Append) -> node_service_pb2.AppendRequest:
    request = node_service_pb2.AppendRequest()
    write_append(request, command)
    return request


def generate_request(command: Run, introduction: Introduction) -> node_service_pb2.NodeServiceGenerateRequest:
    request = node_service_pb2.NodeServiceGenerateRequest()
    write_generate(request, command, introduction)
    return request


def cancel_request(command: CancelRun) -> node_service_pb2.CancelRequest:
    return node_service_pb2.CancelRequest(
        session_id=command.session_id,
        epoch=command.epoch,
        generation_id=command.generation_id,
    )


def ping_request() -> node_service_pb2.CancelRequest:
    """What a node is asked to see that it lives: to cancel a run that cannot be, as no epoch is 0.

    Every node must answer a Cancel, and this one costs it a look-up and changes nothing.
    """
    return node_service_pb2.CancelRequest(session_id="ping", epoch=0, generation_id="ping")


def revoke_request(command: Revoke) -> node_service_pb2.RevokeRequest:
    return node_service_pb2.RevokeRequest(session_id=command.session_id, epoch=command.epoch)


# ------------------------------------------------------------------------------------------- node to head


def refusal(message: node_service_pb2.Refusal) -> Refusal:
    """A code of a later version becomes UNRECOGNISED: refused it is all the same."""
    return Refusal(
        code=REFUSAL_CODES.get(message.code, RefusalCode.UNRECOGNISED),
        current_epoch=message.current_epoch,
        context_length=message.context_length,
        max_context_tokens=message.max_context_tokens,
        retry_after_s=message.retry_after_ms / 1000,
        detail=message.detail,
    )


def held_sessions(message: node_service_pb2.ReconcileResponse) -> list[HeldSession]:
    return [
        HeldSession(
            session_id=held.session_id,
            epoch=held.epoch,
            head_id=held.head_id,
            context_length=held.context_length,
            fenced=held.fenced,
            generation_ids=tuple(held.generation_ids),
        )
        for held in message.sessions
    ]


def report(message: types_pb2.CapacityReport) -> Report:
    return Report(
        gpu_memory_bytes=message.gpu_memory_bytes,
        gpu_memory_free_bytes=message.gpu_memory_free_bytes,
        host_memory_bytes=message.host_memory_bytes,
        active_sessions=message.active_sessions,
        max_sessions=message.max_sessions,
        max_context_tokens=message.max_context_tokens,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks_total=message.kv_blocks_total,
        lanes_active=message.lanes_active,
        max_lanes=message.max_lanes,
        queue_depth=message.queue_depth,
        own_lanes_active=message.own_lanes_active,
        own_queue_depth=message.own_queue_depth,
        decode_tokens_per_s=message.decode_tokens_per_s,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        sampled_at_ms=message.sampled_at_ms,
    )


def model(message: types_pb2.Model) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        revision=message.revision,
        vocab_size=message.vocab_size,
        eos_token_ids=frozenset(message.eos_token_ids),
        max_context_tokens=message.max_context_tokens,
    )


def hello(
    message: node_service_pb2.HandshakeResponse, *, authenticated: bool = False, encrypted: bool = False
) -> NodeHello:
    """Features of a later version are left out: the head could not use them."""
    return NodeHello(
        identity=message.identity,
        incarnation=message.incarnation,
        version=message.version,
        labels=dict(message.labels),
        report=report(message.report),
        models=tuple(model(each) for each in message.models),
        features=frozenset(FEATURES[each] for each in message.features if each in FEATURES),
        max_message_bytes=message.max_message_bytes or DEFAULT_MESSAGE_BYTES,
        highest_epoch=message.highest_epoch,
        authenticated=authenticated,
        encrypted=encrypted,
    )
