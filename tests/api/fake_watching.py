"""Drains and changes as the edge's tests are shown them, and those who tell of them."""

from __future__ import annotations

from dataclasses import replace

from fleet_service.domain.events import Finished, MoveCause, Moved
from fleet_service.domain.session_table import SessionState
from fleet_service.runtime.journal import Durability
from fleet_service.runtime.views import (
    DrainInfo,
    DrainState,
    EndedOn,
    FleetChange,
    FleetSummary,
    PlacedOn,
    Turn,
)

DRAIN = DrainInfo(
    state=DrainState.DRAINING,
    by="ops",
    note="new driver",
    started_at=1_700_000_000.5,
    ended_at=None,
    sessions=2,
    generations=2,
    waiting=1,
    staying=1,
    owed=3,
    moved=5,
    unbound=4,
)
DRAINED = replace(
    DRAIN,
    state=DrainState.DRAINED,
    ended_at=1_700_000_009.25,
    sessions=0,
    generations=0,
    waiting=0,
    staying=0,
    owed=0,
)
SUMMARY = FleetSummary(
    sessions=dict(zip(SessionState, (1, 2, 3, 4), strict=True)),
    generations=3,
    queued=1,
    context_tokens=900,
    books_balance=True,
    stopping=False,
    durability=Durability.RELAXED,
    store_trouble="no space is left",
)


def change(finished: Finished) -> FleetChange:
    """What a watcher may be told, the end of a generation among it."""
    return FleetChange(
        snapshot=False,
        nodes=(),
        removed=["node-b"],
        summary=None,
        turns=[
            Turn(1_700_000_003.0, "gen-1", "s1", "toy", PlacedOn("node-b")),
            Turn(
                1_700_000_004.0,
                "gen-1",
                "s1",
                "toy",
                Moved("node-b", "node-a", MoveCause.DRAIN, 17, 0.125, 9),
            ),
            Turn(1_700_000_005.0, "gen-1", "s1", "toy", EndedOn("node-a", finished)),
        ],
        skipped=7,
    )


class FakeProgress:
    """Tells what it was given, one after the other."""

    def __init__(self, *steps: DrainInfo) -> None:
        self._steps = list(steps)
        self.closed_times = 0

    async def read(self) -> tuple[str, DrainInfo]:
        return "node-a", self._steps.pop(0)

    def close(self) -> None:
        self.closed_times += 1


class FakeWatcher:
    """Tells what it was given, then that the head ends."""

    def __init__(self, *changes: FleetChange) -> None:
        self._changes = list(changes)
        self.closed_times = 0

    async def read(self) -> FleetChange | None:
        return self._changes.pop(0) if self._changes else None

    def close(self) -> None:
        self.closed_times += 1
