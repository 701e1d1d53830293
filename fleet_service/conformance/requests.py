"""What the commands of a check carry, and how answers are told to people."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.domain.context import crc32_of

_TERM_SHIFT = 32
_TEXT_LIMIT_CHARS = 200

_PHASES = {value.number: value.name for value in pb.GenerationPhase.DESCRIPTOR.values}
_FINISHES = {value.number: value.name for value in types_pb2.FinishReason.DESCRIPTOR.values}
_CODES = {value.number: value.name for value in pb.RefusalCode.DESCRIPTOR.values}


def epoch_of(term: int, n: int) -> int:
    """The n-th epoch of a term."""
    return term << _TERM_SHIFT | n


def crc32(token_ids: Sequence[int]) -> int:
    """As Generate names it."""
    return crc32_of(array("I", token_ids))


def greedy() -> types_pb2.SamplingParams:
    """Every field that an engine may need, as a head sets them."""
    return sampled(temperature=0, seed=0)


def sampled(temperature: float, seed: int) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(temperature=temperature, top_p=1, min_p=0, top_k=0, seed=seed)


def code_name(code: int) -> str:
    """STALE_EPOCH and the like; "done" for a command that was not refused."""
    return _CODES.get(code, str(code)).removeprefix("REFUSAL_CODE_") if code else "done"


def refusal_text(refusal: pb.Refusal) -> str:
    """A refusal for people, with what it tells besides its code."""
    told = [
        f"{name} {value}"
        for name in ("current_epoch", "context_length", "max_context_tokens", "detail")
        if (value := getattr(refusal, name))
    ]
    name = code_name(refusal.code)
    return f"{name} ({', '.join(told)[:_TEXT_LIMIT_CHARS]})" if told else name


def phase_name(phase: int) -> str:
    return _PHASES.get(phase, str(phase)).removeprefix("GENERATION_PHASE_")


def finish_name(finish: int) -> str:
    return _FINISHES.get(finish, str(finish)).removeprefix("FINISH_REASON_")
