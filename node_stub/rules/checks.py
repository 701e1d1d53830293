"""Judgments that need nothing but a session's record: vocabulary, window, shape of a Generate."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from node_stub.rules.record import Record
from node_stub.rules.values import Admission, Assign, Code, Generate, Model, Refusal

BLOCK_TOKENS = 16
MAX_ID_CHARACTERS = 128
QOS_CLASSES = range(1, 5)


def blocks_of(length_tokens: int) -> int:
    """KV-cache blocks that so many tokens take."""
    return -(-length_tokens // BLOCK_TOKENS)


def parts_refusal(command: Generate) -> Refusal | None:
    """Refuse an Assign or Append that rides on a Generate of another session or epoch."""
    for part in (command.assign, command.append):
        if part and (part.session_id, part.epoch) != (command.session_id, command.epoch):
            return Refusal(Code.CONSTRAINT, detail="a part names another session or epoch")
    return None


def assign_refusal(command: Assign, model: Model | None) -> Refusal | None:
    """Refuse what no session of this node could be: an odd id, another model, an unknown class."""
    if refusal := _id_refusal("session id", command.session_id):
        return refusal
    if model is None:
        return Refusal(Code.CONSTRAINT, detail=f"no model {command.model!r} here")
    if command.model_revision not in ("", model.revision):
        detail = f"revision {command.model_revision!r} asked for, {model.revision!r} served"
        return Refusal(Code.CONSTRAINT, detail=detail)
    return _qos_refusal(command.qos)


def generate_refusal(command: Generate, model: Model) -> Refusal | None:
    """Refuse a Generate that contradicts itself or the model."""
    if refusal := _id_refusal("generation id", command.generation_id):
        return refusal
    prefix = command.prefix_token_ids
    if command.first_index != len(prefix):
        detail = f"first index {command.first_index}, {len(prefix)} prefix tokens"
        return Refusal(Code.CONSTRAINT, detail=detail)
    if command.qos and (refusal := _qos_refusal(command.qos)):
        return refusal
    return vocabulary_refusal(model, prefix)


def vocabulary_refusal(model: Model, token_ids: Sequence[int]) -> Refusal | None:
    if model.vocab_size and token_ids and (highest := max(token_ids)) >= model.vocab_size:
        detail = f"token {highest}; the vocabulary ends at {model.vocab_size - 1}"
        return Refusal(Code.CONSTRAINT, detail=detail)
    return None


def window_refusal(model: Model, length_tokens: int) -> Refusal | None:
    window = model.max_context_tokens
    if window and length_tokens > window:
        return Refusal(Code.CONTEXT_TOO_LONG, max_context_tokens=window)
    return None


def admission(command: Generate, record: Record) -> Admission:
    prompt = record.context.token_ids[:]
    prompt.extend(array("I", command.prefix_token_ids))
    window, wanted = record.model.max_context_tokens, command.max_new_tokens
    return Admission(
        session_id=record.session_id,
        epoch=record.epoch,
        generation_id=command.generation_id,
        model=record.model,
        prompt_token_ids=prompt,
        first_index=command.first_index,
        max_new_tokens=min(wanted, window - len(prompt)) if window else wanted,
        max_wall_ms=command.max_wall_ms,
        sampling=command.sampling or record.sampling,
        qos=command.qos or record.qos,
        engine_options=record.engine_options,
        context_length=len(record.context),
    )


def _id_refusal(what: str, value: str) -> Refusal | None:
    if not 0 < len(value) <= MAX_ID_CHARACTERS:
        detail = f"{what} of {len(value)} characters; 1 to {MAX_ID_CHARACTERS} are taken"
        return Refusal(Code.CONSTRAINT, detail=detail)
    return None


def _qos_refusal(qos: int) -> Refusal | None:
    if qos not in QOS_CLASSES:
        return Refusal(Code.CONSTRAINT, detail=f"unknown QoS class {qos}")
    return None
