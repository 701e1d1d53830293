"""FleetService's messages to the domain's values and back. Requests are checked before they come here."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import types_pb2 as types
from fleet_service.api.convert_shared import milliseconds, model_message, timestamp
from fleet_service.domain.events import (
    Accepted,
    Event,
    Finished,
    FinishReason,
    MoveCause,
    Moved,
    Started,
    Tokens,
)
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import (
    AS_BEFORE,
    GenerationSpec,
    OnDisconnect,
    Qos,
    Replay,
    SamplingOverride,
    SessionSpec,
)
from fleet_service.runtime.views import (
    CancelOutcome,
    CancelResult,
    ModelSummary,
    RequestKey,
    SessionView,
)

MAX_TOKENS_PER_MESSAGE = 65_536
"""A client's library takes messages of 4 MiB unless told otherwise; this many ids are at most 0.4 MiB."""

_QOS_OUT = {
    Qos.INTERACTIVE: types.QOS_CLASS_INTERACTIVE,
    Qos.COMPLETION: types.QOS_CLASS_COMPLETION,
    Qos.AGENT: types.QOS_CLASS_AGENT,
    Qos.BACKGROUND: types.QOS_CLASS_BACKGROUND,
}
_QOS: Mapping[int, Qos] = {number: qos for qos, number in _QOS_OUT.items()}
_REPLAY: Mapping[int, Replay] = {
    types.REPLAY_MODE_UNSPECIFIED: Replay.ALLOWED,
    types.REPLAY_MODE_ALLOWED: Replay.ALLOWED,
    types.REPLAY_MODE_NEVER: Replay.NEVER,
}
_REPLAY_OUT = {Replay.ALLOWED: types.REPLAY_MODE_ALLOWED, Replay.NEVER: types.REPLAY_MODE_NEVER}
_ON_DISCONNECT: Mapping[int, OnDisconnect] = {
    fleet.ON_DISCONNECT_UNSPECIFIED: OnDisconnect.CANCEL,
    fleet.ON_DISCONNECT_CANCEL: OnDisconnect.CANCEL,
    fleet.ON_DISCONNECT_CONTINUE: OnDisconnect.CONTINUE,
}
_STATES = {
    SessionState.UNBOUND: fleet.SESSION_STATE_UNBOUND,
    SessionState.BOUND: fleet.SESSION_STATE_BOUND,
    SessionState.GENERATING: fleet.SESSION_STATE_GENERATING,
    SessionState.PARKED: fleet.SESSION_STATE_PARKED,
}
_STATES_IN: Mapping[int, SessionState] = {number: state for state, number in _STATES.items()}
_FINISH_REASONS = {
    FinishReason.EOS: types.FINISH_REASON_EOS,
    FinishReason.STOP: types.FINISH_REASON_STOP,
    FinishReason.LENGTH: types.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types.FINISH_REASON_CANCELLED,
    FinishReason.WALL_CLOCK: types.FINISH_REASON_WALL_CLOCK,
    FinishReason.ERROR: types.FINISH_REASON_ERROR,
}
_MOVE_CAUSES = {
    MoveCause.LINK_LOST: fleet.MOVE_CAUSE_LINK_LOST,
    MoveCause.NODE_SILENT: fleet.MOVE_CAUSE_NODE_SILENT,
    MoveCause.STALLED: fleet.MOVE_CAUSE_STALLED,
    MoveCause.SESSION_LOST: fleet.MOVE_CAUSE_SESSION_LOST,
    MoveCause.ENGINE_ERROR: fleet.MOVE_CAUSE_ENGINE_ERROR,
    MoveCause.PROTOCOL_ERROR: fleet.MOVE_CAUSE_PROTOCOL_ERROR,
    MoveCause.NO_ROOM: fleet.MOVE_CAUSE_NO_ROOM,
    MoveCause.REBALANCED: fleet.MOVE_CAUSE_REBALANCED,
    MoveCause.NODE_REMOVED: fleet.MOVE_CAUSE_NODE_REMOVED,
    MoveCause.DRAIN: fleet.MOVE_CAUSE_DRAIN,
    MoveCause.HEAD_RESTARTED: fleet.MOVE_CAUSE_HEAD_RESTARTED,
}
_OUTCOMES = {
    CancelOutcome.CANCELLED: fleet.CancelGenerationResponse.OUTCOME_CANCELLED,
    CancelOutcome.ALREADY_FINISHED: fleet.CancelGenerationResponse.OUTCOME_ALREADY_FINISHED,
    CancelOutcome.HELD: fleet.CancelGenerationResponse.OUTCOME_HELD,
}

# Requests


def token_ids(message: Sequence[int]) -> array[int]:
    """A request's token ids, four bytes each."""
    return array("I", message)


class _Keyed(Protocol):
    request_id: str

    def CopyFrom(self, other: Any, /) -> None: ...

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...


KeyedT = TypeVar("KeyedT", bound=_Keyed)


def request_key(method: str, request: KeyedT, owner: str) -> RequestKey | None:
    """The key that makes the `owner`'s `request` idempotent; None when it asks for none.

    Its fingerprint is the SHA-256 of the method and of the request without its request_id, serialised
    deterministically.
    """
    if not request.request_id:
        return None
    body = type(request)()
    body.CopyFrom(request)
    body.request_id = ""
    digest = hashlib.sha256(method.encode("ascii") + b"\0")
    digest.update(body.SerializeToString(deterministic=True))
    return RequestKey(request.request_id, digest.digest(), owner)


def sampling_override(params: types.SamplingParams) -> SamplingOverride:
    return SamplingOverride(
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p if params.HasField("top_p") else None,
        min_p=params.min_p if params.HasField("min_p") else None,
        top_k=params.top_k if params.HasField("top_k") else None,
        seed=params.seed if params.HasField("seed") else None,
    )


def session_spec(spec: fleet.SessionSpec) -> SessionSpec:
    return SessionSpec(
        model=spec.model,
        model_revision=spec.model_revision,
        sampling=sampling_override(spec.sampling) if spec.HasField("sampling") else AS_BEFORE,
        qos=_QOS.get(spec.qos_class, Qos.INTERACTIVE),
        node_selector=dict(spec.node_selector),
        expected_output_tokens=spec.expected_output_tokens,
        replay=_REPLAY[spec.replay],
        engine_options=spec.engine_options,
    )


def generation_spec(spec: fleet.GenerationSpec) -> GenerationSpec:
    return GenerationSpec(
        max_new_tokens=spec.max_new_tokens if spec.HasField("max_new_tokens") else None,
        max_wall_s=spec.max_wall_ms / 1000.0 if spec.HasField("max_wall_ms") else None,
        sampling=sampling_override(spec.sampling) if spec.HasField("sampling") else AS_BEFORE,
        stop=tuple([tuple(sequence.token_ids) for sequence in spec.stop]),
        extend_context=spec.extend_context,
        on_disconnect=_ON_DISCONNECT[spec.on_disconnect],
        disconnect_grace_s=spec.disconnect_grace_ms / 1000.0
        if spec.HasField("disconnect_grace_ms")
        else None,
        orphan_timeout_s=spec.orphan_timeout_ms / 1000.0 if spec.HasField("orphan_timeout_ms") else None,
        qos=_QOS.get(spec.qos_class),
        expected_output_tokens=spec.expected_output_tokens,
    )


def session_state(state: int) -> SessionState | None:
    """The state to list, None = any."""
    return _STATES_IN.get(state)


# Replies


def sampling_message(sampling: SamplingOverride) -> types.SamplingParams:
    return types.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
    )


def session_spec_message(spec: SessionSpec) -> fleet.SessionSpec:
    return fleet.SessionSpec(
        model=spec.model,
        model_revision=spec.model_revision,
        sampling=sampling_message(spec.sampling),
        qos_class=_QOS_OUT[spec.qos],
        node_selector=spec.node_selector,
        expected_output_tokens=spec.expected_output_tokens,
        replay=_REPLAY_OUT[spec.replay],
        engine_options=spec.engine_options,
    )


def session_message(view: SessionView) -> fleet.Session:
    return fleet.Session(
        session_id=view.session_id,
        spec=session_spec_message(view.spec),
        state=_STATES[view.state],
        context_length=view.context_length,
        context_crc32=view.context_crc32,
        node=view.node,
        epoch=view.epoch,
        generation_id=view.generation_id,
        create_time=timestamp(view.created_at),
        last_use_time=timestamp(view.last_used_at),
    )


def model_summary_message(summary: ModelSummary) -> fleet.ModelSummary:
    return fleet.ModelSummary(
        model=model_message(summary.model), nodes_up=summary.nodes_up, nodes_known=summary.nodes_known
    )


def finished_message(event: Finished) -> fleet.Finished:
    message = fleet.Finished()
    write_finished(message, event)
    return message


def write_finished(target: fleet.Finished, event: Finished) -> None:
    """Put `event` into `target`, which is empty."""
    target.reason = _FINISH_REASONS[event.reason]
    if event.stop_index is not None:
        target.stop_index = event.stop_index
    target.context_tokens = event.context_tokens
    target.output_tokens = event.output_tokens
    target.attempts = event.attempts
    timings, times = event.timings, target.timings
    times.queued_ms = milliseconds(timings.queued_s)
    if timings.first_token_s is not None:
        times.first_token_ms = milliseconds(timings.first_token_s)
    times.total_ms = milliseconds(timings.total_s)
    times.longest_gap_ms = milliseconds(timings.longest_gap_s)
    if event.error is not None:
        target.error.reason = event.error.reason.value
        target.error.message = event.error.message
        target.error.metadata.update(event.error.metadata)


def moved_message(event: Moved) -> fleet.Moved:
    return fleet.Moved(
        from_node=event.from_node,
        to_node=event.to_node,
        cause=_MOVE_CAUSES[event.cause],
        next_index=event.next_index,
        gap_ms=milliseconds(event.gap_s),
        epoch=event.epoch,
    )


def cancel_message(result: CancelResult) -> fleet.CancelGenerationResponse:
    message = fleet.CancelGenerationResponse(outcome=_OUTCOMES[result.outcome])
    if result.finished is not None:
        write_finished(message.finished, result.finished)
    return message


# Events, written in place into the message that goes out: half the time of building one and copying it.


def _accepted(target: fleet.GenerationEvent, event: Accepted) -> None:
    target.accepted.generation_id = event.generation_id
    target.accepted.session_id = event.session_id


def _started(target: fleet.GenerationEvent, event: Started) -> None:
    target.started.node = event.node
    target.started.epoch = event.epoch


def _tokens(target: fleet.GenerationEvent, event: Tokens) -> None:
    tokens = target.tokens
    tokens.first_index = event.first_index
    tokens.token_ids.extend(event.token_ids)


def _moved(target: fleet.GenerationEvent, event: Moved) -> None:
    target.moved.CopyFrom(moved_message(event))


def _finished(target: fleet.GenerationEvent, event: Finished) -> None:
    write_finished(target.finished, event)


_EVENTS: Mapping[type[Event], Callable[[fleet.GenerationEvent, Any], None]] = {
    Accepted: _accepted,
    Started: _started,
    Tokens: _tokens,
    Moved: _moved,
    Finished: _finished,
}


def write_event(target: fleet.GenerationEvent, event: Event) -> None:
    """Put `event` into `target`, which is empty."""
    _EVENTS[type(event)](target, event)


def in_message_sizes(events: Sequence[Event]) -> Iterator[Event]:
    """`events`, with runs of tokens too long for one message split."""
    for event in events:
        if isinstance(event, Tokens) and len(event.token_ids) > MAX_TOKENS_PER_MESSAGE:
            for start in range(0, len(event.token_ids), MAX_TOKENS_PER_MESSAGE):
                part = event.token_ids[start : start + MAX_TOKENS_PER_MESSAGE]
                yield Tokens(event.first_index + start, part)
        else:
            yield event
