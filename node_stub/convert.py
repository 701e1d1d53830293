"""Between the messages of fleet.v1 and fleet.stub.v1 and the node's plain values."""

from __future__ import annotations

from dataclasses import asdict

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.engine import Finish, Phase
from node_stub.faults import Action, Fault, FaultError, Point, ReportLies
from node_stub.journal import Entry
from node_stub.node import NodeSettings, Report
from node_stub.rules import (
    Append,
    Assign,
    Code,
    Generate,
    Holding,
    Model,
    Owner,
    Refusal,
    Sampling,
)
from node_stub.runs import Step

PHASES: dict[Phase, pb.GenerationPhase] = {
    phase: getattr(pb, f"GENERATION_PHASE_{phase.name}") for phase in Phase
}
FINISHES: dict[Finish, types_pb2.FinishReason] = {
    finish: getattr(types_pb2, f"FINISH_REASON_{finish.name}") for finish in Finish
}

# --------------------------------------------------------------------------------------------------- commands


def assign_from(message: pb.AssignRequest) -> Assign:
    return Assign(
        session_id=message.session_id,
        epoch=message.epoch,
        command_id=message.command_id,
        fleet_id=message.fleet_id,
        head_id=message.head_id,
        model=message.model,
        model_revision=message.model_revision,
        sampling=sampling_from(message.sampling),
        # Not said means INTERACTIVE.
        qos=message.qos_class or types_pb2.QOS_CLASS_INTERACTIVE,
        engine_options=message.engine_options,
        lease_ms=message.lease_ms,
    )


def append_from(message: pb.AppendRequest) -> Append:
    return Append(
        session_id=message.session_id,
        epoch=message.epoch,
        command_id=message.command_id,
        base_length=message.base_length,
        token_ids=message.token_ids,
    )


def generate_from(message: pb.NodeServiceGenerateRequest, *, inline: bool) -> Generate:
    """A Generate; without feature INLINE_BIND the parts that ride along are not looked at."""
    return Generate(
        session_id=message.session_id,
        epoch=message.epoch,
        command_id=message.command_id,
        generation_id=message.generation_id,
        context_length=message.context_length,
        context_crc32=message.context_crc32,
        max_new_tokens=message.max_new_tokens,
        prefix_token_ids=message.prefix_token_ids,
        first_index=message.first_index,
        max_wall_ms=message.max_wall_ms,
        sampling=sampling_from(message.sampling) if message.HasField("sampling") else None,
        qos=message.qos_class,
        assign=assign_from(message.assign) if inline and message.HasField("assign") else None,
        append=append_from(message.append) if inline and message.HasField("append") else None,
    )


def sampling_from(message: types_pb2.SamplingParams) -> Sampling:
    """An absent field is its default, which is what proto3 reads it as."""
    return Sampling(message.temperature, message.top_p, message.min_p, message.top_k, message.seed)


# ---------------------------------------------------------------------------------------------------- answers


def refusal_to(refusal: Refusal | None) -> pb.Refusal | None:
    if refusal is None:
        return None
    return pb.Refusal(
        code=f"REFUSAL_CODE_{refusal.code.name}",
        current_epoch=refusal.current_epoch,
        context_length=refusal.context_length,
        max_context_tokens=refusal.max_context_tokens,
        retry_after_ms=refusal.retry_after_ms,
        detail=refusal.detail,
    )


def step_to(step: Step, epoch: int) -> pb.NodeServiceGenerateResponse:
    return pb.NodeServiceGenerateResponse(
        epoch=epoch,
        first_index=step.first_index,
        token_ids=step.token_ids,
        phase=PHASES[step.phase] if step.phase else None,
        finish=FINISHES[step.finish] if step.finish else None,
        refusal=refusal_to(step.refusal),
    )


def model_to(model: Model) -> types_pb2.Model:
    return types_pb2.Model(
        name=model.name,
        revision=model.revision,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        max_context_tokens=model.max_context_tokens,
    )


def report_to(report: Report) -> types_pb2.CapacityReport:
    return types_pb2.CapacityReport(**asdict(report))


def features_of(settings: NodeSettings) -> list[admin_pb.NodeFeature]:
    features = [
        (settings.inline_bind, admin_pb.NODE_FEATURE_INLINE_BIND),
        (settings.engine_options, admin_pb.NODE_FEATURE_ENGINE_OPTIONS),
        (settings.link, admin_pb.NODE_FEATURE_LINK),
        (settings.link and settings.resume, admin_pb.NODE_FEATURE_RESUME),
        (settings.reconcile, admin_pb.NODE_FEATURE_RECONCILE),
    ]
    return [feature for announced, feature in features if announced]


def held_to(holding: Holding, generation_ids: list[str]) -> pb.HeldSession:
    return pb.HeldSession(
        session_id=holding.session_id,
        epoch=holding.epoch,
        head_id=holding.owner.head_id,
        context_length=holding.context_length,
        fenced=holding.fenced,
        generation_ids=generation_ids,
    )


def owner_from(message: pb.HandshakeRequest | pb.RenewLeaseRequest | pb.WatchStatusRequest) -> Owner:
    return Owner(message.fleet_id, message.head_id, message.term)


# ------------------------------------------------------------------------------------------------ the control


def fault_from(message: stub_pb.Fault) -> Fault:
    """A fault; raises FaultError for one that makes no sense."""
    try:
        point, action = Point(message.point), Action(message.action)
    except ValueError:
        raise FaultError("point and action must be set to known values") from None
    code = None
    if message.refusal_code:
        known = pb.RefusalCode.keys()
        names = [name for name in known if pb.RefusalCode.Value(name) == message.refusal_code]
        if not names:
            raise FaultError(f"refusal_code {message.refusal_code} is not a fleet.v1.RefusalCode")
        code = Code[names[0].removeprefix("REFUSAL_CODE_")]
    fault = Fault(
        point=point,
        action=action,
        after_tokens=message.after_tokens,
        times=message.times,
        session_prefix=message.session_prefix,
        refusal_code=code,
        delay_ms=message.delay_ms,
    )
    fault.check()
    return fault


def fault_to(fault: Fault) -> stub_pb.Fault:
    code = fault.refusal_code
    return stub_pb.Fault(
        point=f"FAULT_POINT_{fault.point.name}",
        action=f"FAULT_ACTION_{fault.action.name}",
        after_tokens=fault.after_tokens,
        times=fault.times,
        session_prefix=fault.session_prefix,
        refusal_code=pb.RefusalCode.Value(f"REFUSAL_CODE_{code.name}") if code else 0,
        delay_ms=fault.delay_ms,
    )


def lies_from(message: stub_pb.ReportFaults) -> ReportLies:
    told = {field.name: value for field, value in message.ListFields()}
    return ReportLies(**told)


def lies_to(lies: ReportLies) -> stub_pb.ReportFaults:
    return stub_pb.ReportFaults(**asdict(lies))


def entry_to(entry: Entry) -> stub_pb.JournalEntry:
    return stub_pb.JournalEntry(
        kind=entry.kind,
        session_id=entry.session_id,
        epoch=entry.epoch,
        generation_id=entry.generation_id,
        at_ms=entry.at_ms,
        outcome=entry.outcome,
        tokens_sent=entry.tokens_sent,
        cancel_seen_ms=entry.cancel_seen_ms,
        ended_ms=entry.ended_ms,
        prompt_tokens=entry.prompt_tokens,
        resumes=entry.resumes,
    )


def holding_to(holding: Holding) -> stub_pb.Holding:
    return stub_pb.Holding(
        session_id=holding.session_id,
        epoch=holding.epoch,
        context_length=holding.context_length,
        fenced=holding.fenced,
    )
