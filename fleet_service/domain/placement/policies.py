"""The order in which eligible nodes are preferred. Asking changes nothing; a choice moves a turn on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from fleet_service.domain.placement.candidate import Candidate, Demand
from fleet_service.domain.placement.load import estimate_ms, is_hot, typical_rates

SAMPLE_SIZE = 256
"""Candidates that load-aware scores at once; of more, a slice that moves on with every choice."""

DEFAULT_POOL_HIGH_PCT = 90


class Policy(Protocol):
    """Prefers among eligible nodes. Deterministic: equal calls in equal order give equal answers."""

    @property
    def name(self) -> str: ...

    @property
    def uses_estimate(self) -> bool:
        """It orders by the estimated time to completion."""

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        """The candidates, best first; some may be left out, but never all. Changes nothing."""

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        """`winner`, one of the candidates given to `order`, was chosen."""


class Rotation:
    """Takes turns within each set of nodes, so that a node missing from a set gives its turns to all others.

    Keeps a position for each of the `max_sets` sets used last. A set not seen lately starts at a place that
    moves on with every choice made, so that changing sets do not all begin at the same node.
    """

    def __init__(self, max_sets: int = 256) -> None:
        self._max_sets = max_sets
        self._next: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._choices = 0

    def __len__(self) -> int:
        """Sets remembered."""
        return len(self._next)

    def rotated(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates from the one whose turn it is."""
        if not candidates:
            return []
        start = self._next.get(_names(candidates), self._choices % len(candidates))
        return [*candidates[start:], *candidates[:start]]

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        """The turn passes to the one after `winner`."""
        names = _names(candidates)
        self._next[names] = (names.index(winner.name) + 1) % len(names)
        self._next.move_to_end(names)
        if len(self._next) > self._max_sets:
            self._next.popitem(last=False)
        self._choices += 1


def _names(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple([candidate.name for candidate in candidates])


class LoadAware:
    """Shortest estimated completion, then fewest sessions, then by turns.

    Hot nodes are left out unless all are hot.
    """

    name = "load-aware"
    uses_estimate = True

    def __init__(self, pool_high_pct: int = DEFAULT_POOL_HIGH_PCT) -> None:
        """`pool_high_pct`: KV occupancy from which a node is hot, 1..100. ValueError beyond."""
        if not 1 <= pool_high_pct <= 100:
            raise ValueError(f"pool_high_pct {pool_high_pct} is not in 1..100")
        self._pool_high_pct = pool_high_pct
        self._rotation = Rotation()

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        turns = self._rotation.rotated(candidates)
        cool = [node for node in turns if not is_hot(node, self._pool_high_pct, now_s)] or turns
        typical = typical_rates(cool)

        def preference(node: Candidate) -> tuple[int, int]:
            return estimate_ms(node, demand, typical, now_s), node.sessions

        # The sort is stable, so what is equal stays in turn.
        return [*sorted(cool[:SAMPLE_SIZE], key=preference), *cool[SAMPLE_SIZE:]]

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        self._rotation.chosen(candidates, winner)


class LeastLoaded:
    """Fewest sessions placed, then by turns."""

    name = "least-loaded"
    uses_estimate = False

    def __init__(self) -> None:
        self._rotation = Rotation()

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        turns = self._rotation.rotated(candidates)
        return sorted(turns, key=lambda node: node.sessions)

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        self._rotation.chosen(candidates, winner)


class RoundRobin:
    """By turns within each set of eligible nodes."""

    name = "round-robin"
    uses_estimate = False

    def __init__(self) -> None:
        self._rotation = Rotation()

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        return self._rotation.rotated(candidates)

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        self._rotation.chosen(candidates, winner)


POLICY_NAMES = (LoadAware.name, LeastLoaded.name, RoundRobin.name)


def make_policy(name: str, pool_high_pct: int = DEFAULT_POOL_HIGH_PCT) -> Policy:
    """The policy of that name, with nothing chosen yet. ValueError for a name not in POLICY_NAMES."""
    if name == LoadAware.name:
        return LoadAware(pool_high_pct)
    if name == LeastLoaded.name:
        return LeastLoaded()
    if name == RoundRobin.name:
        return RoundRobin()
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICY_NAMES)}")
