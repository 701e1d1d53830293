"""Which nodes could take a request at all, and for each other the one reason that explains it best."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from fleet_service.domain.node_types import NodeState
from fleet_service.domain.placement.candidate import Candidate, Demand, is_unlearned

QUEUE_LIMIT = 256
"""Attempts that may wait at the head for one node, unless configured otherwise."""


class LeftOut(StrEnum):
    """Why a node is left out. Values are those of fleet.v1.NodeVerdict.left_out."""

    MODEL = "model"
    REVISION = "revision"
    LABEL = "label"
    CONTEXT = "context"
    DOWN = "down"
    SUSPECT = "suspect"
    CONNECTING = "connecting"
    CORDONED = "cordoned"
    UNLISTED = "unlisted"
    TRIED = "tried"
    BUSY = "busy"
    QUEUE_FULL = "queue_full"
    HOT = "hot"


C = TypeVar("C", bound=Candidate)

_UP = NodeState.UP

_BY_STATE = {
    NodeState.DOWN: LeftOut.DOWN,
    NodeState.SUSPECT: LeftOut.SUSPECT,
    NodeState.CONNECTING: LeftOut.CONNECTING,
}


def left_out(
    candidate: Candidate, demand: Demand, now_s: float, queue_limit: int = QUEUE_LIMIT
) -> str | None:
    """Why `candidate` cannot take `demand` now; None when it can.

    What would still hold if the node were up and idle goes first: a node that is too narrow and also down is
    left out for its context, so that every node counted as down is one whose return would help.
    """
    return never(candidate, demand) or not_now(candidate, demand, now_s, queue_limit)


def takers(candidates: Iterable[C], demand: Demand, now_s: float, queue_limit: int = QUEUE_LIMIT) -> list[C]:
    """Those that `left_out` has nothing against, in order. Written for speed: every placement asks it."""
    name, revision, selector, avoid = demand.model, demand.model_revision, demand.selector, demand.avoid
    needed = max(demand.prompt_tokens, demand.min_window_tokens + 1 if demand.min_window_tokens else 0)
    found = []
    for node in candidates:
        if node.state is not _UP or node.cordoned or node.unlisted or node.busy_until_s > now_s:
            continue
        model = node.models.get(name)
        if model is None or (revision and model.revision != revision):
            continue
        window = model.max_context_tokens
        if not window and node.report is not None:
            window = node.report.max_context_tokens
        if window and window < needed:
            continue
        if (avoid and node.name in avoid) or (selector and not carries_labels(node, demand)):
            continue
        if node.waiting < queue_limit:
            found.append(node)
    return found


def never(candidate: Candidate, demand: Demand) -> LeftOut | None:
    """Why `candidate`, as it is known, could not take `demand` even when up and idle."""
    model = candidate.models.get(demand.model)
    if model is None:
        return None if is_unlearned(candidate) else LeftOut.MODEL
    if demand.model_revision and model.revision != demand.model_revision:
        return LeftOut.REVISION
    if demand.selector and not carries_labels(candidate, demand):
        return LeftOut.LABEL
    if not holds(candidate, demand):
        return LeftOut.CONTEXT
    return None


def not_now(candidate: Candidate, demand: Demand, now_s: float, queue_limit: int) -> LeftOut | None:
    """Why `candidate`, which could take `demand` when up and idle, cannot take it now."""
    if candidate.state is not _UP:
        return _BY_STATE[candidate.state]
    if candidate.cordoned:
        return LeftOut.CORDONED
    if candidate.unlisted:
        return LeftOut.UNLISTED
    if candidate.name in demand.avoid:
        return LeftOut.TRIED
    if candidate.busy_until_s > now_s:
        return LeftOut.BUSY
    if candidate.waiting >= queue_limit:
        return LeftOut.QUEUE_FULL
    return None


def carries_labels(candidate: Candidate, demand: Demand) -> bool:
    """`candidate` has every label that the selector asks for, with the same value."""
    return demand.selector.items() <= candidate.labels.items()


def window_tokens(candidate: Candidate, model_name: str) -> int:
    """The longest context of that model there, in tokens; 0 = unknown, holds anything.

    Where the node tells no window for the model, that of its report stands in, which is the widest of any of
    its models.
    """
    model = candidate.models.get(model_name)
    if model is not None and model.max_context_tokens:
        return model.max_context_tokens
    return candidate.report.max_context_tokens if candidate.report is not None else 0


def holds(candidate: Candidate, demand: Demand) -> bool:
    """The prompt fits the candidate's window, which is also wider than the one that refused it."""
    window = window_tokens(candidate, demand.model)
    if not window:
        return True
    return demand.prompt_tokens <= window and demand.min_window_tokens < window
