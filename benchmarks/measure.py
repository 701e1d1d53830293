"""One work on one target, measured: what it cost the process in the middle, and what callers saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plan import Outcome, Plan, percentile_ms
from benchmarks.pool import Drivers
from benchmarks.processes import all_cpu_s, all_rss_bytes
from benchmarks.targets import Nodes, Running
from benchmarks.works import Work

BUSY_SHARE = 0.85
"""A process of the driver that takes more of a core may be what limits the load."""
LATE_MS = 10.0
"""The same of one whose timers are later than this, at the median."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long everything begins, and is then measured, in seconds."""

    ramp_s: float = 1.0
    window_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one work on one target. CPU is that of the process in the middle, user and system; times
    are of callers. None = does not apply.
    """

    work: str
    target: str
    run: int
    tokens_per_s: float
    requests_per_s: float
    us_per_token: float | None
    us_per_request: float | None
    """Of one-token requests."""
    way_p50_ms: float | None
    """How long tokens were on their way from the node."""
    way_p99_ms: float | None
    first_p50_ms: float | None
    first_p99_ms: float | None
    took_p50_ms: float | None
    took_p99_ms: float | None
    rss_mb: float | None
    lost: int
    failure: str
    driver_share: float
    """Of a core, of the busiest process of the driver."""
    lag_p50_ms: float
    lag_p99_ms: float
    calls_per_message: float | None
    """With Connect: requests in a message of callers that has any; in answers, ends of them."""
    replies_per_message: float | None

    @property
    def driver_limits(self) -> bool:
        return self.driver_share > BUSY_SHARE or self.lag_p50_ms > LATE_MS


def nodes_for(works: Sequence[Work]) -> Nodes:
    """Nodes that can run all calls of each of these at once, wherever they are placed; they are of one
    pace.
    """
    return Nodes(works[0].rate, max(64, *(work.slots for work in works)), timed=works[0].rate > 0)


def plan_of_work(work: Work, address: str, shape: str, times: Times) -> Plan:
    return Plan(
        shape=shape,
        address=address,
        slots=work.slots,
        tokens=work.tokens,
        connections=min(work.connections, work.slots),
        from_s=times.ramp_s,
        until_s=times.ramp_s + times.window_s,
        arrivals_per_s=work.arrivals_per_s,
    )


async def measure(
    drivers: Drivers, running: Running, work: Work, name: str, shape: str, run: int, times: Times
) -> Result:
    begun = await drivers.prepare(plan_of_work(work, running.address, shape, times))
    begin_s = await begun.go()
    await asyncio.sleep(max(begin_s + times.ramp_s - time.monotonic(), 0))
    before_s, from_s = all_cpu_s(running.pids), time.monotonic()
    await asyncio.sleep(max(begin_s + times.ramp_s + times.window_s - time.monotonic(), 0))
    after_s, until_s = all_cpu_s(running.pids), time.monotonic()
    rss_bytes = all_rss_bytes(running.pids)
    outcome = await begun.outcome()
    # What was read a little late was used a little longer.
    used_s = (after_s - before_s) * times.window_s / (until_s - from_s)
    return result_of(
        work, name, run, outcome, times.window_s, used_s if running.middle else None, rss_bytes or None
    )


def result_of(
    work: Work,
    name: str,
    run: int,
    outcome: Outcome,
    window_s: float,
    used_s: float | None,
    rss_bytes: int | None,
) -> Result:
    def each(number: int) -> float | None:
        return None if used_s is None or not number else used_s / number * 1e6

    return Result(
        work=work.key,
        target=name,
        run=run,
        tokens_per_s=outcome.tokens / window_s,
        requests_per_s=outcome.requests / window_s,
        us_per_token=None if work.per_request else each(outcome.tokens),
        us_per_request=each(outcome.requests) if work.per_request else None,
        way_p50_ms=percentile_ms(outcome.way_us, 50),
        way_p99_ms=percentile_ms(outcome.way_us, 99),
        first_p50_ms=percentile_ms(outcome.first_us, 50),
        first_p99_ms=percentile_ms(outcome.first_us, 99),
        took_p50_ms=percentile_ms(outcome.took_us, 50),
        took_p99_ms=percentile_ms(outcome.took_us, 99),
        rss_mb=rss_bytes / 1e6 if rss_bytes else None,
        lost=outcome.lost,
        failure=outcome.failure,
        driver_share=max(outcome.cpu_s) / window_s,
        lag_p50_ms=percentile_ms(outcome.lag_us, 50) or 0.0,
        lag_p99_ms=percentile_ms(outcome.lag_us, 99) or 0.0,
        calls_per_message=outcome.calls_out / outcome.messages_out if outcome.messages_out else None,
        replies_per_message=outcome.replies_in / outcome.messages_in if outcome.messages_in else None,
    )
