"""What a node says of itself: models, reports, features, its answer to the handshake (design: Words)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model as a node serves it. vocab_size and max_context_tokens: 0 = unknown, holds anything."""

    name: str
    revision: str = ""
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    max_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A node's capacity summary (fleet.v1.CapacityReport, same fields and units)."""

    gpu_memory_bytes: int = 0
    gpu_memory_free_bytes: int = 0
    host_memory_bytes: int = 0
    active_sessions: int = 0
    max_sessions: int = 0
    max_context_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    lanes_active: int = 0
    max_lanes: int = 0
    queue_depth: int = 0
    own_lanes_active: int = 0
    own_queue_depth: int = 0
    decode_tokens_per_s: int = 0
    prefill_tokens_per_s: int = 0
    sampled_at_ms: int = 0


class Feature(Enum):
    """What a node can do beyond the minimum."""

    INLINE_BIND = "inline_bind"
    ENGINE_OPTIONS = "engine_options"
    LINK = "link"
    RESUME = "resume"
    RECONCILE = "reconcile"


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A node's answer to the handshake."""

    identity: str
    incarnation: str
    version: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    report: Report = Report()
    models: tuple[ModelInfo, ...] = ()
    features: frozenset[Feature] = frozenset()
    max_message_bytes: int = 16 * 1024 * 1024
    highest_epoch: int = 0


class NodeState(Enum):
    """Whether the head can use a node."""

    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
