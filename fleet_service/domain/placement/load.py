"""How long a request would take on a node, and how full the node is: integer arithmetic on its last report.

    eta_ms = ahead * out * 1000 // decode + prompt * 1000 // prefill + out * 1000 // decode

ahead: generations in front of it there; out: tokens it is expected to produce; rates are the node's totals
while busy, in tokens per second. It takes a node for one server that works through what it has at its rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleet_service.domain.node_types import Report
from fleet_service.domain.placement.candidate import Candidate, Demand

LOAD_TTL_S = 10.0
"""A report this old or older tells nothing of load any more; rates are of the machine and stay."""

NOMINAL_DECODE_TOKENS_PER_S = 20
NOMINAL_PREFILL_TOKENS_PER_S = 200


class Rates(NamedTuple):
    """Tokens per second, both above 0."""

    decode_tokens_per_s: int
    prefill_tokens_per_s: int


def fresh_report(candidate: Candidate, now_s: float) -> Report | None:
    """The candidate's report while its load figures count."""
    at_s = candidate.report_at_s
    if candidate.report is None or at_s is None or now_s - at_s >= LOAD_TTL_S:
        return None
    return candidate.report


def typical_rates(candidates: Iterable[Candidate]) -> Rates:
    """What stands in for a rate that a node has not reported: so that it is neither shunned nor flooded.

    The integer mean of the candidates that have reported one, else 20 and 200 tokens/s.
    """
    decode, prefill = [], []
    for candidate in candidates:
        report = candidate.report
        if report is not None and report.decode_tokens_per_s > 0:
            decode.append(report.decode_tokens_per_s)
        if report is not None and report.prefill_tokens_per_s > 0:
            prefill.append(report.prefill_tokens_per_s)
    return Rates(
        sum(decode) // len(decode) if decode else NOMINAL_DECODE_TOKENS_PER_S,
        sum(prefill) // len(prefill) if prefill else NOMINAL_PREFILL_TOKENS_PER_S,
    )


def rates_of(candidate: Candidate, typical: Rates) -> Rates:
    """The candidate's own rates, `typical` for one it has not reported."""
    report = candidate.report
    if report is None:
        return typical
    return Rates(
        report.decode_tokens_per_s or typical.decode_tokens_per_s,
        report.prefill_tokens_per_s or typical.prefill_tokens_per_s,
    )


def generations_ahead(candidate: Candidate, now_s: float) -> int:
    """Generations in front of a new one there.

    Others' as last reported (the totals less this head's own part at that sample), and the head's own as it
    counts them now, so that none of its own is counted twice.
    """
    report = fresh_report(candidate, now_s)
    if report is None:
        return candidate.reservations
    reported = report.lanes_active + report.queue_depth
    own = report.own_lanes_active + report.own_queue_depth
    return max(reported - own, 0) + candidate.reservations


def estimate_ms(candidate: Candidate, demand: Demand, typical: Rates, now_s: float) -> int:
    """Estimated time from now to completion on `candidate`, in milliseconds (formula: see the module)."""
    decode, prefill = rates_of(candidate, typical)
    out = demand.expected_output_tokens
    return (
        generations_ahead(candidate, now_s) * out * 1000 // decode
        + demand.prompt_tokens * 1000 // prefill
        + out * 1000 // decode
    )


def estimates_ms(
    candidates: Sequence[Candidate], demand: Demand, now_s: float, typical: Rates | None = None
) -> list[int]:
    """`estimate_ms` of each; `typical`: None = of these. Written for speed, since every placement asks it."""
    work, prompt = demand.expected_output_tokens * 1000, demand.prompt_tokens * 1000
    found = []
    for node in candidates:
        report, ahead, decode, prefill = node.report, node.reservations, 0, 0
        if report is not None:
            decode, prefill = report.decode_tokens_per_s, report.prefill_tokens_per_s
            at_s = node.report_at_s
            if at_s is not None and now_s - at_s < LOAD_TTL_S:
                others = report.lanes_active + report.queue_depth
                others -= report.own_lanes_active + report.own_queue_depth
                if others > 0:
                    ahead += others
        if not decode or not prefill:
            typical = typical or typical_rates(candidates)
            decode = decode or typical.decode_tokens_per_s
            prefill = prefill or typical.prefill_tokens_per_s
        found.append(ahead * work // decode + prompt // prefill + work // decode)
    return found


def kv_used_pct(candidate: Candidate, now_s: float) -> int | None:
    """KV occupancy in percent, rounded down; None when not reported, or not lately."""
    report = fresh_report(candidate, now_s)
    return None if report is None else _kv_used_pct(report)


def _kv_used_pct(report: Report) -> int | None:
    return report.kv_blocks_used * 100 // report.kv_blocks_total if report.kv_blocks_total > 0 else None


def is_hot(candidate: Candidate, pool_high_pct: int, now_s: float) -> bool:
    """The KV cache is so full that new work would evict or be refused.

    Judged by a fresh report; without one, a node last seen hot is hot still.
    """
    report = fresh_report(candidate, now_s)
    if report is None:
        return candidate.was_hot
    used_pct = _kv_used_pct(report)
    return used_pct is not None and used_pct >= pool_high_pct
