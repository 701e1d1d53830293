"""The order in which eligible nodes are preferred. Asking changes nothing; a choice moves a turn on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from fleet_service.domain.placement.candidate import Candidate, Demand
from fleet_service.domain.placement.load import estimates_ms, is_hot

SAMPLE_SIZE = 64
"""Candidates that a policy which compares them is given, where there are too many to compare all."""

DEFAULT_POOL_HIGH_PCT = 90

C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Prefers among eligible nodes. Deterministic: equal calls in equal order give equal answers."""

    @property
    def name(self) -> str: ...

    @property
    def uses_estimate(self) -> bool:
        """It orders by the estimated time to completion."""

    @property
    def sample_size(self) -> int:
        """How many it wants to compare where there are too many to compare all; 1 = it takes who is next."""

    @property
    def shuns_hot(self) -> bool:
        """It takes hot nodes only where there are no others."""

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        """The candidates, best first; some may be left out, but never all. Changes nothing."""

    def ranked(self, candidates: Sequence[C], demand: Demand, now_s: float) -> list[C]:
        """A sample, best first, what is equal in the order given; its hot nodes are left out already."""

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
    sample_size = SAMPLE_SIZE
    shuns_hot = True

    def __init__(self, pool_high_pct: int = DEFAULT_POOL_HIGH_PCT) -> None:
        """`pool_high_pct`: KV occupancy from which a node is hot, 1..100. ValueError beyond."""
        if not 1 <= pool_high_pct <= 100:
            raise ValueError(f"pool_high_pct {pool_high_pct} is not in 1..100")
        self._pool_high_pct = pool_high_pct
        self._rotation = Rotation()

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        turns = self._rotation.rotated(candidates)
        cool = [node for node in turns if not is_hot(node, self._pool_high_pct, now_s)] or turns
        return self.ranked(cool, demand, now_s)

    def ranked(self, candidates: Sequence[C], demand: Demand, now_s: float) -> list[C]:
        estimates = estimates_ms(candidates, demand, now_s)
        sessions = [node.sessions for node in candidates]
        places = range(len(candidates))
        return [candidates[place] for *_, place in sorted(zip(estimates, sessions, places, strict=True))]

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        self._rotation.chosen(candidates, winner)


class LeastLoaded:
    """Fewest sessions placed, then by turns."""

    name = "least-loaded"
    uses_estimate = False
    sample_size = SAMPLE_SIZE
    shuns_hot = False

    def __init__(self) -> None:
        self._rotation = Rotation()

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        return self.ranked(self._rotation.rotated(candidates), demand, now_s)

    def ranked(self, candidates: Sequence[C], demand: Demand, now_s: float) -> list[C]:
        return sorted(candidates, key=lambda node: node.sessions)

    def chosen(self, candidates: Sequence[Candidate], winner: Candidate) -> None:
        self._rotation.chosen(candidates, winner)


class RoundRobin:
    """By turns within each set of eligible nodes."""

    name = "round-robin"
    uses_estimate = False
    sample_size = 1
    shuns_hot = False

    def __init__(self) -> None:
        self._rotation = Rotation()

    def order(self, candidates: Sequence[Candidate], demand: Demand, now_s: float) -> list[Candidate]:
        return self._rotation.rotated(candidates)

    def ranked(self, candidates: Sequence[C], demand: Demand, now_s: float) -> list[C]:
        return list(candidates)

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
