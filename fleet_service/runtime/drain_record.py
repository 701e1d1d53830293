"""What is known of one drain of a node; drain.py carries it out, the node and the operators look at it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fleet_service.runtime.views import DrainInfo, DrainState

if TYPE_CHECKING:
    from fleet_service.runtime.node import Node


class Fate(Enum):
    """What a drain can do for a generation now."""

    MOVES = "moves"
    WAITS = "waits"  # a node could take it, but has no free lane
    STAYS = "stays"


@dataclass(slots=True, eq=False)
class DrainRecord:
    """A drain, from the order on. `node` is where the node's identity lives; times are unix seconds."""

    node: Node
    by: str
    note: str
    started_at: float
    state: DrainState = DrainState.DRAINING
    ended_at: float | None = None
    waiting: int = 0
    staying: int = 0
    moved: int = 0
    unbound: int = 0

    @property
    def under_way(self) -> bool:
        return self.state is DrainState.DRAINING

    @property
    def empty(self) -> bool:
        """Nothing is left on the node. What is owed to a node that is gone keeps nobody waiting."""
        node = self.node
        return not node.sessions and not node.reservations and (not node.outbox or node.link is None)

    def end(self, state: DrainState, unix_s: float) -> None:
        """It is over. An order that takes it back wins over its being done."""
        self.state = state
        self.ended_at = unix_s
        self.waiting = self.staying = 0

    def info(self) -> DrainInfo:
        node = self.node
        return DrainInfo(
            state=self.state,
            by=self.by,
            note=self.note,
            started_at=self.started_at,
            ended_at=self.ended_at,
            sessions=node.sessions,
            generations=node.reservations,
            waiting=self.waiting,
            staying=self.staying,
            owed=len(node.outbox),
            moved=self.moved,
            unbound=self.unbound,
        )
