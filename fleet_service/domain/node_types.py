"""What a node says of itself: models, reports, features, its answer to the handshake (design: Words)."""

from __future__ import annotations

import re
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
    authenticated: bool = False
    """Head and node have proven to each other that they know the fleet token."""
    encrypted: bool = False
    """The link is TLS."""


IDENTITY = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_LABELS = 64
MAX_MODELS = 1_000
MAX_TEXT = 256
"""Characters of a label's key or value, a model's name or revision, an incarnation."""


def unacceptable(hello: NodeHello) -> str | None:
    """What of a hello is out of bounds, and what to change; None when nothing is."""
    if not IDENTITY.fullmatch(hello.identity):
        return "its identity must be 1 to 128 characters of [A-Za-z0-9._:-]; start it with another --identity"
    if len(hello.labels) > MAX_LABELS or len(hello.models) > MAX_MODELS:
        return (
            f"it has {len(hello.labels)} labels and {len(hello.models)} models; "
            f"at most {MAX_LABELS} and {MAX_MODELS} are taken"
        )
    texts = [hello.incarnation, *hello.labels, *hello.labels.values()]
    texts += [text for model in hello.models for text in (model.name, model.revision)]
    if any(len(text) > MAX_TEXT or not text.isprintable() for text in texts):
        return (
            f"its incarnation, labels, models and revisions must be printable, {MAX_TEXT} characters at most"
        )
    return None


class NodeState(Enum):
    """Whether the head can use a node."""

    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
