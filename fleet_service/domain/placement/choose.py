"""The choice of a node for a request, and the explanation of how it would fall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleet_service.domain.node_types import Report
from fleet_service.domain.placement.candidate import Candidate, Demand
from fleet_service.domain.placement.filters import QUEUE_LIMIT, LeftOut, left_out, takers, window_tokens
from fleet_service.domain.placement.load import (
    Rates,
    estimate_ms,
    generations_ahead,
    kv_used_pct,
    rates_of,
    typical_rates,
)
from fleet_service.domain.placement.policies import Policy
from fleet_service.domain.placement.refusals import refusal


@dataclass(frozen=True, slots=True)
class Verdict:
    """One node's part in a placement (fleet.v1.NodeVerdict, same fields and units)."""

    node: str
    eligible: bool
    left_out: str
    eta_ms: int | None
    ahead: int
    decode_tokens_per_s: int
    prefill_tokens_per_s: int
    kv_used_pct: int | None
    sessions: int
    reservations: int
    max_context_tokens: int
    report_age_ms: int | None
    decode_reported: bool
    prefill_reported: bool


def choose(
    nodes: Iterable[Candidate],
    all_nodes: Iterable[Candidate],
    demand: Demand,
    policy: Policy,
    now_s: float,
    queue_limit: int = QUEUE_LIMIT,
) -> Candidate:
    """The node that takes `demand`; the caller reserves on it in the same step, so that a burst spreads.

    `nodes`: every node known to serve the model, up or down (others are passed over); `all_nodes`: the whole
    fleet, or of it at least the nodes never heard from, looked at only to explain a refusal. Costs O(nodes);
    where there are very many, `Pool.choose` compares some. Raises FleetError as `refusal` says.
    """
    eligible = takers(nodes, demand, now_s, queue_limit)
    if not eligible:
        raise refusal(nodes, all_nodes, demand, now_s, queue_limit)
    winner = policy.order(eligible, demand, now_s)[0]
    policy.chosen(eligible, winner)
    return winner


def explain(
    nodes: Iterable[Candidate],
    demand: Demand,
    policy: Policy,
    now_s: float,
    queue_limit: int = QUEUE_LIMIT,
) -> list[Verdict]:
    """A verdict on each of `nodes`: the eligible ones best first, then those left out in the order given.

    Changes nothing: `choose` would take the first, if it is eligible.
    """
    reasons = [(node, left_out(node, demand, now_s, queue_limit)) for node in nodes]
    eligible = [node for node, reason in reasons if reason is None]
    ordered = policy.order(eligible, demand, now_s)
    preferred = {node.name for node in ordered}
    typical = typical_rates(ordered)
    others = [(node, reason or LeftOut.HOT) for node, reason in reasons if node.name not in preferred]
    return [
        _verdict(node, reason, demand, policy, typical, now_s)
        for node, reason in [*((node, "") for node in ordered), *others]
    ]


def _verdict(
    node: Candidate, reason: str, demand: Demand, policy: Policy, typical: Rates, now_s: float
) -> Verdict:
    rates = rates_of(node, typical)
    reported = node.report or Report()
    return Verdict(
        node=node.name,
        eligible=not reason,
        left_out=str(reason),
        eta_ms=estimate_ms(node, demand, typical, now_s) if policy.uses_estimate else None,
        ahead=generations_ahead(node, now_s),
        decode_tokens_per_s=rates.decode_tokens_per_s,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        kv_used_pct=kv_used_pct(node, now_s),
        sessions=node.sessions,
        reservations=node.reservations,
        max_context_tokens=window_tokens(node, demand.model),
        report_age_ms=None if node.report_at_s is None else max(int((now_s - node.report_at_s) * 1000), 0),
        decode_reported=reported.decode_tokens_per_s > 0,
        prefill_reported=reported.prefill_tokens_per_s > 0,
    )
