"""What a process of the load driver is told, what it says afterwards, and how results are summed up.

Plans and outcomes cross between processes as JSON, one a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

STEP_US = 10
"""What times in histograms are rounded down to."""

Histogram = dict[int, int]
"""How many times were so long, by the number of STEP_US."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`slots` calls at a time, each followed by the next; or `arrivals_per_s` calls at set times, however
    long they take. Only what comes from `from_s` until `until_s` is counted; both are seconds after the
    start.
    """

    shape: str
    """complete, connect, sse, or link (nodes by themselves)."""
    address: str
    slots: int
    tokens: int
    """Of each call."""
    connections: int
    from_s: float
    until_s: float
    arrivals_per_s: float = 0.0
    once: bool = False
    """A slot makes one call, and the run ends when all have ended, or then."""
    salt: int = 0
    """Makes the prompts of this process its own."""


@dataclass(slots=True)
class Outcome:
    """What one process, or all together, saw between `from_s` and `until_s`."""

    tokens: int = 0
    requests: int = 0
    """Calls that ended well."""
    lost: int = 0
    """Calls that ended otherwise than they should."""
    unfinished: int = 0
    """With `once`: calls that had not ended."""
    way_us: Histogram = field(default_factory=dict)
    """How long tokens were on their way, where their ids say when they were made."""
    first_us: Histogram = field(default_factory=dict)
    """From the time a call was to be made to its first token."""
    took_us: Histogram = field(default_factory=dict)
    """From the time a call was to be made to its end."""
    lag_us: Histogram = field(default_factory=dict)
    """By how much the driver itself was late."""
    cpu_s: list[float] = field(default_factory=list)
    """Of each process of the driver."""
    messages_out: int = 0
    messages_in: int = 0
    calls_out: int = 0
    replies_in: int = 0
    """With Connect: calls in the messages sent, ends of calls in those that came."""
    gaps_ms: list[float] = field(default_factory=list)
    """With `once`: the longest time without a token of each call that moved or was lost."""
    quiet_ms: list[float] = field(default_factory=list)
    """With `once`: the same of all other calls."""
    failure: str = ""
    """What the first call that was lost was told."""


def to_line(value: Plan | Outcome) -> str:
    return json.dumps(asdict(value))


def plan_of(line: str) -> Plan:
    return Plan(**json.loads(line))


def outcome_of(line: str) -> Outcome:
    values = json.loads(line)
    for name in ("way_us", "first_us", "took_us", "lag_us"):
        values[name] = {int(step): count for step, count in values[name].items()}
    return Outcome(**values)


def count(histogram: Histogram, time_us: int, times: int = 1) -> None:
    step = max(time_us, 0) // STEP_US
    histogram[step] = histogram.get(step, 0) + times


def add(total: Histogram, more: Mapping[int, int]) -> None:
    for step, times in more.items():
        total[step] = total.get(step, 0) + times


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """What several processes saw in the same time."""
    total = Outcome()
    for outcome in outcomes:
        for name in ("way_us", "first_us", "took_us", "lag_us"):
            add(getattr(total, name), getattr(outcome, name))
        for name in (
            "tokens",
            "requests",
            "lost",
            "unfinished",
            "messages_out",
            "messages_in",
            "calls_out",
            "replies_in",
        ):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        for name in ("cpu_s", "gaps_ms", "quiet_ms"):
            getattr(total, name).extend(getattr(outcome, name))
        total.failure = total.failure or outcome.failure
    return total


def percentile_ms(histogram: Mapping[int, int], percent: float) -> float | None:
    """The time that so many percent are not above, in ms; None of no times."""
    wanted = math.ceil(sum(histogram.values()) * percent / 100)
    for step in sorted(histogram):
        wanted -= histogram[step]
        if wanted <= 0:
            return step * STEP_US / 1e3
    return None


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of several runs."""

    least: float
    middle: float
    most: float


def spread(values: Sequence[float | None]) -> Spread | None:
    """Of those that there are; None of none."""
    known = [value for value in values if value is not None]
    return Spread(min(known), median(known), max(known)) if known else None


def shared_out(whole: int, parts: int) -> list[int]:
    """`whole` in `parts` that differ by at most one."""
    return [whole // parts + (number < whole % parts) for number in range(parts)]


def due_s(number: int, per_s: float) -> float:
    """When call `number` of an open loop is to be made, in seconds after the start."""
    return number / per_s
