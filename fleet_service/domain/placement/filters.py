"""Which nodes could take a request at all, and for each other the one reason that explains it best."""

from __future__ import annotations

from enum import StrEnum

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
    return never(candidate, demand) or _not_now(candidate, demand, now_s, queue_limit)


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


def _not_now(candidate: Candidate, demand: Demand, now_s: float, queue_limit: int) -> LeftOut | None:
    if candidate.state is not NodeState.UP:
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
    labels = candidate.labels
    return all(labels.get(key) == value for key, value in demand.selector.items())


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
