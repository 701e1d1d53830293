"""The line of attempts that wait at the head for a lane of one node: by QoS class, then by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class QueueFullError(Exception):
    """The queue holds as many items as it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the queue is full: {limit} wait in it already")
        self.limit = limit


class Ticket(NamedTuple):
    """An item's place: lower goes first. Belongs to the queue that gave it."""

    qos: int
    arrival: int


class LaneQueue(Generic[T]):
    """At most `limit` items, ordered by (qos, arrival).

    Places are found by bisection, O(log n) comparisons; beyond that an insertion or removal only shifts
    pointers, which for the few hundred items of a node's queue is quicker than a heap and keeps the order at
    hand.
    """

    def __init__(self, limit: int) -> None:
        """ValueError when `limit` is negative."""
        if limit < 0:
            raise ValueError(f"limit {limit} is negative")
        self._limit = limit
        self._arrivals = 0
        self._tickets: list[Ticket] = []
        self._items: dict[Ticket, T] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        """The items in order, as they stood when the iteration began."""
        return iter([self._items[ticket] for ticket in self._tickets])

    def push(self, item: T, qos: int) -> Ticket:
        """Queue `item` behind all of its class and better ones. Raises QueueFullError."""
        if len(self._tickets) >= self._limit:
            raise QueueFullError(self._limit)
        self._arrivals += 1
        ticket = Ticket(qos, self._arrivals)
        insort(self._tickets, ticket)
        self._items[ticket] = item
        return ticket

    def pop(self) -> T | None:
        """Take out the first item; None when there is none."""
        if not self._tickets:
            return None
        return self._items.pop(self._tickets.pop(0))

    def remove(self, ticket: Ticket) -> bool:
        """Take out the item of `ticket`; False when it is not there any more."""
        if ticket not in self._items:
            return False
        del self._items[ticket]
        del self._tickets[bisect_left(self._tickets, ticket)]
        return True

    def ahead_of(self, ticket: Ticket) -> int:
        """How many items go before `ticket`'s. KeyError when it is not in the queue."""
        if ticket not in self._items:
            raise KeyError(ticket)
        return bisect_left(self._tickets, ticket)
