"""Why a request cannot be placed, as the error its caller gets: what is wrong and whether waiting helps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import NodeState
from fleet_service.domain.placement.candidate import Candidate, Demand, is_unlearned
from fleet_service.domain.placement.filters import (
    QUEUE_LIMIT,
    LeftOut,
    carries_labels,
    not_now,
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
    known = _Known(demand, now_s, queue_limit)
    known.count(nodes)
    unlearned = [node for node in all_nodes if is_unlearned(node)]
    # A first connection under way may yet bring what is missing; a node that could not be reached may
    # serve an unknown model, but does not make a wider or labelled node out of those that are known.
    connecting = [node for node in unlearned if node.state is NodeState.CONNECTING]
    if not known.nodes:
        if not unlearned:
            return _not_found(demand)
        return _no_eligible_node(demand, Counter(_BY_STATE[node.state] for node in unlearned))
    if not known.labelled and not connecting:
        return _unplaceable(demand, known.nodes)
    if known.revised and not known.could_hold and not connecting:
        return _too_long(known.widest_tokens, demand)
    if known.full:
        return _saturated(demand, known)
    reasons = known.reasons + Counter(_BY_STATE[node.state] for node in connecting)
    return _no_eligible_node(demand, reasons)


_BY_STATE = {NodeState.CONNECTING: LeftOut.CONNECTING, NodeState.DOWN: LeftOut.DOWN}


class _Known:
    """What the nodes that serve a model have against a demand, counted in one pass over them."""

    def __init__(self, demand: Demand, now_s: float, queue_limit: int) -> None:
        self._demand = demand
        self._now_s = now_s
        self._queue_limit = queue_limit
        self.nodes = 0
        self.labelled = False
        self.revised = False
        """Some have the labels, and the revision too."""
        self.could_hold = False
        """Of these, some could hold it."""
        self.widest_tokens = 0
        """Of these; where only a refusal told a window, it is the refused one."""
        self.full = 0
        self.free_again_s = math.inf
        self.reasons: Counter[LeftOut] = Counter()

    def count(self, nodes: Iterable[Candidate]) -> None:
        """Written for speed: whoever asks for what cannot be has all nodes looked at."""
        demand, reasons = self._demand, self.reasons
        name, revision, selector = demand.model, demand.model_revision, demand.selector
        for node in nodes:
            model = node.models.get(name)
            if model is None:
                continue
            self.nodes += 1
            labelled = not selector or carries_labels(node, demand)
            self.labelled = self.labelled or labelled
            if revision and model.revision != revision:
                reasons[LeftOut.REVISION] += 1
            elif not labelled:
                reasons[LeftOut.LABEL] += 1
            elif not self._count_window(node, model.max_context_tokens or window_tokens(node, name)):
                reasons[LeftOut.CONTEXT] += 1
            else:
                self._count_now(node)

    def _count_window(self, node: Candidate, window: int) -> bool:
        """Whether it holds the demand."""
        demand = self._demand
        self.revised = True
        self.widest_tokens = max(self.widest_tokens, window or demand.min_window_tokens)
        held = not window or (demand.prompt_tokens <= window and demand.min_window_tokens < window)
        # A node that tells no window and has already been tried for a length that was refused does not count.
        if held and not (demand.min_window_tokens and not window and node.name in demand.avoid):
            self.could_hold = True
        return held

    def _count_now(self, node: Candidate) -> None:
        reason = not_now(node, self._demand, self._now_s, self._queue_limit)
        if reason is None:
            return
        self.reasons[reason] += 1
        if reason in (LeftOut.BUSY, LeftOut.QUEUE_FULL):
            self.full += 1
            if node.busy_until_s > self._now_s:
                self.free_again_s = min(self.free_again_s, node.busy_until_s - self._now_s)


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


def _too_long(widest: int, demand: Demand) -> FleetError:
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


def _saturated(demand: Demand, known: _Known) -> FleetError:
    free_again_s = _RETRY_AFTER_S if known.free_again_s == math.inf else known.free_again_s
    return FleetError(
        Reason.FLEET_SATURATED,
        f"{_nodes(known.full)} could take model {demand.model}, but no more work may wait there; retry later",
        metadata={"model": demand.model, "fullNodes": str(known.full)},
        retry_after_s=max(free_again_s, _MIN_RETRY_AFTER_S),
    )


def _no_eligible_node(demand: Demand, counts: Counter[LeftOut]) -> FleetError:
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
