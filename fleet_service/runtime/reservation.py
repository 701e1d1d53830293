"""The head's own count of work it put on a node (design: Words, reservation)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from fleet_service.domain.failures import FailureClass
from fleet_service.domain.lane_queue import Ticket
from fleet_service.domain.placement import Demand

if TYPE_CHECKING:
    from fleet_service.runtime.node import Node


class Grant(Enum):
    """What became of waiting for a lane."""

    LANE = "lane"
    EVICTED = "evicted"  # the node cannot be used any more
    MOVED = "moved"  # another node is to be free much sooner


class KeptPlace(Protocol):
    """A place on another node (place.Place)."""

    @property
    def ready(self) -> bool:
        """Nothing more has to be waited for; until then it is only for when the attempt fails."""

    def release(self) -> None:
        """Give it back, unless it was taken. Idempotent."""


class Reservation:
    """The head's own count of one attempt it put on a node: queued, then running, until release().

    Taken in the same step as the choice of the node; `granted` resolves when a lane is free, or when the
    attempt must look elsewhere. `demand`: what it would ask of another node now. `successor`: a place kept
    for the next attempt, which goes with this one.
    """

    __slots__ = (
        "demand",
        "generation_id",
        "granted",
        "kept",
        "node",
        "on_lost",
        "released",
        "replays",
        "successor",
        "ticket",
    )

    def __init__(
        self,
        node: Node,
        demand: Callable[[], Demand],
        granted: asyncio.Future[Grant],
        *,
        replays: bool,
        generation_id: str = "",
    ) -> None:
        self.node = node
        self.demand = demand
        self.granted = granted
        self.replays = replays
        self.generation_id = generation_id
        self.kept = False  # for a generation that is elsewhere, and may never come
        self.successor: KeptPlace | None = None
        self.ticket: Ticket | None = None
        self.on_lost: Callable[[FailureClass, str], None] | None = None
        self.released = False

    def to_move(self) -> bool:
        """A place is kept elsewhere: the attempt is to go on there."""
        return self.successor is not None and self.successor.ready

    def caught_up(self) -> None:
        """The first new token came: what had to be prefilled again after a failure is."""
        if self.replays:
            self.replays = False
            self.node.replayed(self)

    def release(self) -> None:
        """Give the place back, on every way out. Idempotent."""
        if not self.released:
            self.released = True
            self.node.forget(self)
            if self.successor is not None:
                self.successor.release()
