"""Why a request cannot be placed, as the error its caller gets: what is wrong and whether waiting helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import NodeState
from fleet_service.domain.placement.candidate import Candidate, Demand, is_unlearned
from fleet_service.domain.placement.filters import (
    QUEUE_LIMIT,
    LeftOut,
    carries_labels,
    holds,
    left_out,
    window_tokens,
)

_RETRY_AFTER_S = 1.0
_MIN_RETRY_AFTER_S = 0.1


def refusal(
    nodes: Iterable[Candidate],
    all_nodes: Iterable[Candidate],
    demand: Demand,
    now_s: float,
    queue_limit: int = QUEUE_LIMIT,
) -> FleetError:
    """The error for a demand that no node can take now, to be raised or shown (arguments as of `choose`).

    Permanent ones come first, each only when nothing that is known or still being found out contradicts it:
    MODEL_NOT_FOUND, MODEL_UNPLACEABLE, CONTEXT_TOO_LONG. Then FLEET_SATURATED, when every node that is
    otherwise eligible has a full queue or said BUSY, and NO_ELIGIBLE_NODE. The permanent
    ones do not depend on which nodes are up, so they may be asked for ahead of a placement as well.
    """
    known = [node for node in nodes if demand.model in node.models]
    unlearned = [node for node in all_nodes if is_unlearned(node)]
    # A first connection under way may yet bring what is missing; a node that could not be reached may
    # serve an unknown model, but does not make a wider or labelled node out of those that are known.
    connecting = [node for node in unlearned if node.state is NodeState.CONNECTING]
    if not known:
        return _no_eligible_node(demand, unlearned, now_s, queue_limit) if unlearned else _not_found(demand)
    labelled = [node for node in known if carries_labels(node, demand)]
    if not labelled and not connecting:
        return _unplaceable(demand, len(known))
    revised = [
        node
        for node in labelled
        if not demand.model_revision or node.models[demand.model].revision == demand.model_revision
    ]
    if revised and not connecting and not any(_could_hold(node, demand) for node in revised):
        return _too_long(revised, demand)
    reasons = {node.name: left_out(node, demand, now_s, queue_limit) for node in known}
    full = [node for node in known if reasons[node.name] in (LeftOut.BUSY, LeftOut.QUEUE_FULL)]
    if full:
        return _saturated(demand, full, now_s)
    return _no_eligible_node(demand, [*known, *connecting], now_s, queue_limit)


def _could_hold(node: Candidate, demand: Demand) -> bool:
    """A node that tells no window and has already been tried for a length that was refused does not count."""
    if demand.min_window_tokens and node.name in demand.avoid and not window_tokens(node, demand.model):
        return False
    return holds(node, demand)


def _not_found(demand: Demand) -> FleetError:
    return FleetError(
        Reason.MODEL_NOT_FOUND,
        f"no node serves model {demand.model}; list the models that are served and ask for one of them",
        metadata={"model": demand.model},
        resource=("fleet.v1.Model", f"models/{demand.model}"),
    )


def _unplaceable(demand: Demand, known: int) -> FleetError:
    wanted = ", ".join(f"{key}={value}" for key, value in sorted(demand.selector.items()))
    return FleetError(
        Reason.MODEL_UNPLACEABLE,
        f"model {demand.model} is served by {_nodes(known)}, none with the labels {wanted}; "
        "change the node selector, or add such a node",
        metadata={"model": demand.model, "knownNodes": str(known), "nodeSelector": wanted},
        resource=("fleet.v1.Model", f"models/{demand.model}"),
    )


def _too_long(nodes: list[Candidate], demand: Demand) -> FleetError:
    # Where only a refusal told the window, it is the refused one.
    widest = max(window_tokens(node, demand.model) or demand.min_window_tokens for node in nodes)
    what = "the session's context" if demand.state_dependent else "the prompt"
    remedy = "truncate" if demand.state_dependent else "shorten"
    return FleetError(
        Reason.CONTEXT_TOO_LONG,
        f"{what} has {demand.prompt_tokens} tokens, but the widest window of model {demand.model} has "
        f"{widest}; {remedy} it",
        metadata={
            "model": demand.model,
            "promptTokens": str(demand.prompt_tokens),
            "maxContextTokens": str(widest),
        },
        resource=("fleet.v1.Model", f"models/{demand.model}"),
        state_dependent=demand.state_dependent,
    )


def _saturated(demand: Demand, full: list[Candidate], now_s: float) -> FleetError:
    free_again_s = [node.busy_until_s - now_s for node in full if node.busy_until_s > now_s]
    retry_after_s = max(min(free_again_s, default=_RETRY_AFTER_S), _MIN_RETRY_AFTER_S)
    return FleetError(
        Reason.FLEET_SATURATED,
        f"{_nodes(len(full))} could take model {demand.model}, but no more work may wait there; retry later",
        metadata={"model": demand.model, "fullNodes": str(len(full))},
        retry_after_s=retry_after_s,
    )


def _no_eligible_node(demand: Demand, nodes: list[Candidate], now_s: float, queue_limit: int) -> FleetError:
    counts = Counter(reason for node in nodes if (reason := left_out(node, demand, now_s, queue_limit)))
    told = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(counts.items()))
    return FleetError(
        Reason.NO_ELIGIBLE_NODE,
        f"no node can take model {demand.model} now ({told}); retry shortly",
        metadata={"model": demand.model}
        | {_lower_camel(reason): str(count) for reason, count in sorted(counts.items())},
        retry_after_s=_RETRY_AFTER_S,
        resource=("fleet.v1.Model", f"models/{demand.model}"),
    )


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _lower_camel(snake: str) -> str:
    first, *rest = snake.split("_")
    return first + "".join(word.capitalize() for word in rest)
