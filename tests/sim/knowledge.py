"""What a caller was told: of its session, and of the generations that it asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.views import RequestKey
from node_stub.reference import StubModel
from tests.sim.records import Plan, Record
from tests.sim.stores import SimStore


@dataclass(frozen=True, slots=True)
class Being:
    """How a session is at a time."""

    context: tuple[int, ...]
    parked: bool = False


@dataclass(slots=True)
class Knowledge:
    """The session as its caller means it to be, which is as it was told that it is."""

    session_id: str
    spec: SessionSpec
    model: StubModel
    context: list[int] = field(default_factory=list)
    told: list[tuple[float, Being | None]] = field(default_factory=list)  # when, and what; None = it is over
    asked: list[Being | None] = field(default_factory=list)  # what it has asked for, and has no answer yet

    @property
    def being(self) -> Being | None:
        """As was told last."""
        return self.told[-1][1]

    def is_told(self, being: Being | None, told_s: float) -> None:
        """It is so now, by the head's word."""
        self.told.append((told_s, being))
        self.asked.clear()

    def judge(
        self, kept: Being | None, kept_s: float, also: Sequence[Being]
    ) -> tuple[bool, list[Being | None]]:
        """Whether it may be kept so, where all that was told before `kept_s` is; and what it may be kept as.

        `also`: how it may have become meanwhile. From here on it is what it was kept as.
        """
        sure = [being for told_s, being in self.told if told_s < kept_s][-1:] or [None]
        later = [being for told_s, being in self.told if told_s >= kept_s]
        may_be = [*sure, *later, *self.asked, *also]
        return kept in may_be, may_be


@dataclass(slots=True)
class Asked:
    """A generation, and how its caller asks for it. `mine` None: it has a session of its own."""

    plan: Plan
    spec: SessionSpec
    generation_id: str
    key: RequestKey | None
    ask: Callable[[Head], Awaitable[Generation]]
    mine: Knowledge | None
    record: Record | None = None  # once it was told of
    told_s: float = 0.0
    cancel_told_s: float | None = None  # that of a cancel which waits for it


def kept_as(store: SimStore, session_id: str) -> Being | None:
    """How the store has a session."""
    saved = store.saved.sessions.get(session_id)
    return None if saved is None else Being(tuple(store.contexts[session_id]), saved.kept.parked)
