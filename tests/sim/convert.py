"""The head's commands as the node rules' values, and the rules' refusals as the head's."""

from __future__ import annotations

from fleet_service.domain.commands import Append, Assign, Introduction, Refusal, RefusalCode, Run
from fleet_service.domain.specs import Sampling
from node_stub import rules


def node_sampling(sampling: Sampling) -> rules.Sampling:
    return rules.Sampling(sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, sampling.seed)


def node_assign(command: Assign, introduction: Introduction) -> rules.Assign:
    return rules.Assign(
        command.session_id,
        command.epoch,
        command.command_id,
        introduction.fleet_id,
        introduction.head_id,
        command.model,
        command.model_revision,
        node_sampling(command.sampling),
        int(command.qos),
        command.engine_options,
        int(command.lease_s * 1000),
    )


def node_append(command: Append) -> rules.Append:
    return rules.Append(
        command.session_id, command.epoch, command.command_id, command.base_length, list(command.token_ids)
    )


def node_generate(command: Run, introduction: Introduction) -> rules.Generate:
    return rules.Generate(
        session_id=command.session_id,
        epoch=command.epoch,
        command_id=command.command_id,
        generation_id=command.generation_id,
        context_length=command.context_length,
        context_crc32=command.context_crc32,
        max_new_tokens=command.max_new_tokens,
        prefix_token_ids=list(command.prefix_token_ids),
        first_index=command.first_index,
        max_wall_ms=int(command.max_wall_s * 1000),
        sampling=node_sampling(command.sampling),
        qos=int(command.qos),
        assign=None if command.assign is None else node_assign(command.assign, introduction),
        append=None if command.append is None else node_append(command.append),
    )


def without_append(command: rules.Generate) -> rules.Generate:
    return rules.Generate(
        **{name: getattr(command, name) for name in rules.Generate.__dataclass_fields__ if name != "append"}
    )


def head_refusal(refusal: rules.Refusal | None) -> Refusal | None:
    if refusal is None:
        return None
    return Refusal(
        RefusalCode[refusal.code.name],
        refusal.current_epoch,
        refusal.context_length,
        refusal.max_context_tokens,
        refusal.retry_after_ms / 1000,
        refusal.detail,
    )
