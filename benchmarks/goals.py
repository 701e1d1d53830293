"""What the head is to reach, and what it reached in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.failover import SILENCE_S
from benchmarks.measure import Result
from benchmarks.peers import DirectSse
from benchmarks.plan import spread
from benchmarks.targets import Bare, Direct, DirectNodes, Head
from benchmarks.works import BY_KEY

if TYPE_CHECKING:
    from benchmarks.suite import Everything

CONNECT = Head("connect").name
COMPLETE = Head("complete").name
SGLANG, VLLM, LITELLM = peers.SGLANG.name, peers.VLLM.name, peers.LITELLM.name
_WAY_P99_MS = 5.0


_Value = Callable[[Result], float | None]


def _cost(result: Result) -> float | None:
    return result.us_per_request if result.us_per_token is None else result.us_per_token


_WAYS: dict[int, _Value] = {50: lambda r: r.way_p50_ms, 99: lambda r: r.way_p99_ms}
_FIRSTS: dict[int, _Value] = {50: lambda r: r.first_p50_ms, 99: lambda r: r.first_p99_ms}


class Summary:
    """The medians of runs."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results: dict[tuple[str, str], list[Result]] = {}
        for result in results:
            self._results.setdefault((result.work, result.target), []).append(result)
        self.targets = list(dict.fromkeys(result.target for result in results))

    def of(self, work: str, target: str) -> list[Result]:
        return self._results.get((work, target), [])

    def middle(self, work: str, target: str, value: _Value) -> float | None:
        found = spread([value(result) for result in self.of(work, target)])
        return found.middle if found else None

    def cost(self, work: str, target: str) -> float | None:
        """CPU in µs, of a token or of a one-token request."""
        return self.middle(work, target, _cost)

    def added_ms(self, work: str, target: str, percent: int) -> float | None:
        """How much longer a token of paced streams is on its way than without what is in the middle, or the
        first one of a one-token request takes. Full speed is not about time.
        """
        about, direct = BY_KEY[work], _direct_of(target)
        if target == direct or not (about.rate or about.per_request):
            return None
        value = _WAYS[percent] if about.rate else _FIRSTS[percent]
        mine, without = self.middle(work, target, value), self.middle(work, direct, value)
        return None if mine is None or without is None else mine - without


def _direct_of(target: str) -> str:
    if target.startswith("direct"):
        return target
    if target.startswith("head"):
        return DirectNodes().name
    if target == Bare("connect").name:
        return Direct("connect").name
    if target in (SGLANG, VLLM, LITELLM):
        return DirectSse().name
    return Direct("complete").name


@dataclass(frozen=True, slots=True)
class Goal:
    """One of them."""

    what: str
    target: str
    reached: str
    met: bool | None
    """None = not measured."""

    @property
    def verdict(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "missed"


def at_most(what: str, most: float, reached: float | None, unit: str) -> Goal:
    shown = "–" if reached is None else f"{reached:,.2f} {unit}"
    return Goal(what, f"≤ {most:,g} {unit}", shown, None if reached is None else reached <= most)


def share(what: str, most: float, mine: float | None, other: float | None, of: str) -> Goal:
    if mine is None or not other:
        return Goal(what, f"≤ {most:g} × {of}", "–", None)
    return Goal(what, f"≤ {most:g} × {of}", f"{mine / other:.2f} × ({other:,.2f} µs)", mine <= most * other)


def goals(everything: Everything) -> Iterator[Goal]:
    summary = Summary(everything.results)
    yield from _costs(summary)
    yield from _ways(summary)
    for choices in everything.placement:
        if choices.nodes >= 1_000:
            yield at_most(f"placement among {choices.nodes:,} nodes, p99", 0.7, choices.p99_ms, "ms")
    yield from _failover(everything)
    for each in everything.memory:
        if each.what == "idle session":
            yield at_most("an idle session", 4_096, each.bytes_each, "bytes")
        elif each.what == "token of a context":
            yield at_most("a token of a context", 8, each.bytes_each, "bytes")


def _costs(summary: Summary) -> Iterator[Goal]:
    for what, work, most, peer, part in (
        ("Connect, 128 at full speed, a token", "full-128", 4.5, SGLANG, 0.5),
        ("Connect, 512 x 25/s, a token", "paced-512x25-4", 14.0, SGLANG, 0.5),
        ("Connect, 128 x 50/s over 4 connections, a token", "paced-128x50-4", 40.0, SGLANG, 1.3),
        ("Connect, one-token requests, 64 at a time", "one-64", 35.0, VLLM, 0.3),
    ):
        mine = summary.cost(work, CONNECT)
        yield at_most(what, most, mine, "µs")
        yield share(what, part, mine, summary.cost(work, peer), peer)
    yield at_most("Complete, 128 x 50/s, a token", 80.0, summary.cost("paced-128x50-4", COMPLETE), "µs")
    yield at_most("Complete, one-token requests, 64 at a time", 600.0, summary.cost("one-64", COMPLETE), "µs")
    for shape, name in (("complete", "Complete"), ("connect", "Connect")):
        strict = Head(shape, durability="strict").name
        memory = Head(shape).name
        yield share(
            f"{name}, strict, 128 x 50/s, a token",
            1.3,
            summary.cost("paced-128x50-4", strict),
            summary.cost("paced-128x50-4", memory),
            "memory",
        )
        ways = [summary.middle("paced-128x50-4", each, lambda r: r.way_p50_ms) for each in (strict, memory)]
        more = None if ways[0] is None or ways[1] is None else ways[0] - ways[1]
        yield at_most(f"{name}, strict, 128 x 50/s, added p50 to memory", 5.0, more, "ms")


def _ways(summary: Summary) -> Iterator[Goal]:
    work = "paced-128x50-4"
    for name, target, most in (("Complete", COMPLETE, 1.0), ("Connect", CONNECT, 0.7)):
        what = f"{name}, 128 x 50/s, added to a token's way"
        yield at_most(f"{what}, p50", most, summary.added_ms(work, target, 50), "ms")
        yield at_most(f"{what}, p99", _WAY_P99_MS, summary.added_ms(work, target, 99), "ms")


def _failover(everything: Everything) -> Iterator[Goal]:
    for each in everything.failover:
        if not each.target.startswith("head"):
            continue
        killed = each.how == "killed"
        # Prefill is at once in these runs.
        most = 100.0 if killed else SILENCE_S * 1e3 + 500.0
        yield at_most(f"{each.target}: gap p99, node {each.how}", most, each.gap_p99_ms, "ms")
        lost = each.cut + each.stuck
        yield Goal(f"{each.target}: streams lost, node {each.how}", "0", str(lost), not lost)
        if killed:
            yield at_most(f"{each.target}: used again", 2.0, each.again_s, "s")
