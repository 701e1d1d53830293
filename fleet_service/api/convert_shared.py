"""Conversions that both services need: models, times, and enums by name."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from fleet.v1 import types_pb2 as types
from fleet_service.domain.node_types import ModelInfo

_MAX_UINT32 = 2**32 - 1


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, nearest, within what a uint32 field holds."""
    return min(_MAX_UINT32, max(0, round(seconds * 1000.0)))


def timestamp(unix_s: float) -> Timestamp:
    """Unix seconds, to the microsecond."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(unix_s * 1e6))
    return stamp


def model_message(model: ModelInfo) -> types.Model:
    return types.Model(
        name=model.name,
        revision=model.revision,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        max_context_tokens=model.max_context_tokens,
    )
