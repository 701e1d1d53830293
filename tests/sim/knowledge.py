"""What a caller was told: of its session, and of the generations that it asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.views import RequestKey, SessionView
from node_stub.reference import StubModel
from tests.sim.records import Plan, Record
from tests.sim.stores import SimStore


@dataclass(frozen=True, slots=True)
class Being:
    """How a session is at a time."""

    context: tuple[int, ...]
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """A change of the context, and how it was asked for."""

    ask: Callable[[Head], Awaitable[SessionView]]
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(slots=True)
class Knowledge:
    """The session as its caller means it to be, which is as it was told that it is."""

    session_id: str
    spec: SessionSpec
    model: StubModel
    context: list[int] = field(default_factory=list)
    told: list[tuple[float, Being | None]] = field(default_factory=list)  # when, and what; None = it is over
    asked: list[Being | None] = field(default_factory=list)  # what it has asked for, and has no answer yet
    appended: Appended | None = None  # last

    @property
    def being(self) -> Being | None:
        """As was told last."""
        return self.told[-1][1]

    @property
    def is_parked(self) -> bool:
        """By its caller, who could not have it resumed."""
        return self.being is not None and self.being.parked

    def is_told(self, being: Being | None, told_s: float) -> None:
        """It is so now, by the head's word."""
        self.told.append((told_s, being))
        self.asked.clear()

    def may_be(self, kept_s: float) -> list[Being | None]:
        """How it may be when all that was told before `kept_s` is kept."""
        sure = [being for told_s, being in self.told if told_s < kept_s][-1:] or [None]
        return sure + [being for told_s, being in self.told if told_s >= kept_s]


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
    over: bool = False  # its caller has seen its end
    cancel_told_s: float | None = None  # that of a cancel which waits for it


def kept_as(store: SimStore, session_id: str) -> Being | None:
    """How the store has a session."""
    saved = store.saved.sessions.get(session_id)
    return None if saved is None else Being(tuple(store.contexts[session_id]), saved.kept.parked)
