"""Placement among very many nodes: some are dealt out and compared, without a walk over all of them.

The pool holds the nodes that new work may go to, by model and by label, and is told of every change of one.
Nodes are dealt by turns, so that each comes round, and the best of the last deal are compared again, so that
a node which is much better than most is not met only now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar
from zlib import crc32

from fleet_service.domain.node_types import NodeState
from fleet_service.domain.placement.candidate import Candidate, Demand
from fleet_service.domain.placement.filters import QUEUE_LIMIT, takers
from fleet_service.domain.placement.policies import Policy

C = TypeVar("C", bound=Candidate)

EXACT_LIMIT = 256
"""Up to so many nodes of a model all are compared."""

LOOKS = 512
"""Nodes looked at for one choice, once one that can take it was found."""

REMEMBERED = 8
"""The best of a deal, which are compared again in the next."""

_AT_ONCE = 64
"""Nodes dealt at once."""

_Key = tuple[str, ...]


class Deck(Generic[C]):
    """Nodes to be dealt by turns. Adding one, taking one out and dealing cost the same whatever their number.

    They lie in an order that has nothing to do with their names or with when they came, so that the next few
    are as good as drawn by lot.
    """

    __slots__ = ("_nodes", "_places", "_turn", "best")

    def __init__(self) -> None:
        self._nodes: list[C] = []
        self._places: dict[int, int] = {}
        self._turn = 0
        self.best: list[C] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[C]:
        return iter(self._nodes)

    def add(self, node: C) -> None:
        """It is dealt from now on. It must not be here."""
        place = crc32(node.name.encode()) % (len(self._nodes) + 1)
        self._nodes.append(node)
        self._put(self._nodes[place], len(self._nodes) - 1)
        self._put(node, place)

    def take_out(self, node: C) -> None:
        """It is dealt no more. KeyError when it is not here."""
        place = self._places.pop(id(node))
        last = self._nodes.pop()
        if last is not node:
            self._put(last, place)
        self.best = [each for each in self.best if each is not node]

    def _put(self, node: C, place: int) -> None:
        self._nodes[place] = node
        self._places[id(node)] = place

    def deal(self, count: int) -> list[C]:
        """The next `count`, or all where there are fewer; the turn passes to the one after them."""
        start = self._turn if self._turn < len(self._nodes) else 0
        dealt = self._nodes[start : start + count]
        self._turn = start + len(dealt)
        if len(dealt) < min(count, len(self._nodes)):
            self._turn = min(count - len(dealt), start)
            dealt += self._nodes[: self._turn]
        return dealt

    def give_back(self, count: int) -> None:
        """The turn is again that of the last `count` dealt."""
        self._turn = (self._turn - count) % max(1, len(self._nodes))


class Pool(Generic[C]):
    """The nodes that are up and open to work, for a policy that `shuns_hot` nodes or does not."""

    def __init__(self, *, shuns_hot: bool) -> None:
        self._shuns_hot = shuns_hot
        self._decks: dict[_Key, Deck[C]] = {}
        self._keys: dict[int, tuple[_Key, ...]] = {}

    def update(self, node: C) -> None:
        """To be called when a node's state, cordon, listing, models, labels or heat may have changed."""
        keys = self._keys_of(node)
        if keys != self._keys.get(id(node), ()):
            self.take_out(node)
            for key in keys:
                self._decks.setdefault(key, Deck()).add(node)
            if keys:
                self._keys[id(node)] = keys

    def is_current(self, node: C) -> bool:
        """It was told of the last change of `node`."""
        return self._keys_of(node) == self._keys.get(id(node), ())

    def take_out(self, node: C) -> None:
        """It is no candidate any more."""
        for key in self._keys.pop(id(node), ()):
            deck = self._decks[key]
            deck.take_out(node)
            if not deck:
                del self._decks[key]

    def _keys_of(self, node: C) -> tuple[_Key, ...]:
        if node.state is not NodeState.UP or node.cordoned or node.unlisted:
            return ()
        heat = "hot" if self._shuns_hot and node.was_hot else ""
        by_label = [(heat, key, value) for key, value in node.labels.items()]
        return (*((heat, model) for model in node.models), *by_label)

    def _deck(self, heat: str, demand: Demand) -> Deck[C]:
        """The smallest deck that has all of that heat that could take `demand`."""
        keys: list[_Key] = [(heat, demand.model), *((heat, *label) for label in demand.selector.items())]
        return min((self._decks.get(key) or Deck() for key in keys), key=len)

    def choose(
        self, demand: Demand, policy: Policy, now_s: float, queue_limit: int = QUEUE_LIMIT
    ) -> C | None:
        """A node that takes `demand` and is among the best; None only when there is none that can.

        Looks at LOOKS nodes, at more only until one that can take it is found.
        """
        for heat in ("", "hot") if self._shuns_hot else ("",):
            deck = self._deck(heat, demand)
            found = _dealt(deck, demand, policy.sample_size, now_s, queue_limit)
            if found:
                ranked = policy.ranked(found, demand, now_s)
                if policy.sample_size > 1:
                    deck.best = ranked[:REMEMBERED]
                return ranked[0]
        return None

    def compared(self, demand: Demand) -> list[C]:
        """The best of those compared in the last choice for a demand like that."""
        deck = self._deck("", demand) or self._deck("hot", demand)
        return list(deck.best)

    def some(self, demand: Demand, fits: Callable[[C], bool], now_s: float) -> list[C]:
        """Of the next LOOKS nodes those that can take `demand` and fit; there may be others."""
        decks = (self._deck(heat, demand) for heat in ("", "hot"))
        return [node for deck in decks for node in takers(deck.deal(LOOKS), demand, now_s) if fits(node)]


def _dealt(deck: Deck[C], demand: Demand, wanted: int, now_s: float, queue_limit: int) -> list[C]:
    """Up to about `wanted` that can take `demand`: those who are next, then the best of the last deal."""
    best = deck.best if wanted > 1 else []
    again, known = takers(best, demand, now_s, queue_limit), {id(node) for node in best}
    found: list[C] = []
    looked = 0
    while looked < len(deck) and len(found) < wanted and not ((found or again) and looked >= LOOKS):
        dealt = deck.deal(min(_AT_ONCE, len(deck) - looked))
        looked += len(dealt)
        found += takers([node for node in dealt if id(node) not in known], demand, now_s, queue_limit)
        if wanted == 1 and found:
            deck.give_back(next(after for after, node in enumerate(reversed(dealt)) if node is found[0]))
    return found + again
