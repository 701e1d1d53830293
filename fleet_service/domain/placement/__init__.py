"""Placement: which node takes a request. Pure decisions over what the head knows of its nodes."""

from fleet_service.domain.placement.candidate import Candidate, Demand
from fleet_service.domain.placement.choose import Verdict, choose, explain
from fleet_service.domain.placement.filters import LeftOut, left_out, never, takers, window_tokens
from fleet_service.domain.placement.load import (
    Rates,
    estimate_ms,
    estimates_ms,
    is_hot,
    kv_used_pct,
    rates_of,
    typical_rates,
)
from fleet_service.domain.placement.policies import (
    POLICY_NAMES,
    LeastLoaded,
    LoadAware,
    Policy,
    RoundRobin,
    make_policy,
)
from fleet_service.domain.placement.pool import EXACT_LIMIT, Pool
from fleet_service.domain.placement.refusals import refusal

__all__ = [
    "EXACT_LIMIT",
    "POLICY_NAMES",
    "Candidate",
    "Demand",
    "LeastLoaded",
    "LeftOut",
    "LoadAware",
    "Policy",
    "Pool",
    "Rates",
    "RoundRobin",
    "Verdict",
    "choose",
    "estimate_ms",
    "estimates_ms",
    "explain",
    "is_hot",
    "kv_used_pct",
    "left_out",
    "make_policy",
    "never",
    "rates_of",
    "refusal",
    "takers",
    "typical_rates",
    "window_tokens",
]
