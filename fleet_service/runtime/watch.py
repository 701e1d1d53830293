"""WatchFleet: the fleet once, then what changes, for watchers that each read at their own pace.

Nodes are looked at at most once a period for all watchers together, and not at all without one; sessions are
never gone through. What a watcher has not read yet is bounded: of nodes only the newest state is kept, of
turns the last few.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import Moved
from fleet_service.runtime.fairness import in_turns
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.node import Node
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.views import EndedOn, FleetChange, FleetSummary, NodeInfo, PlacedOn, Turn

PERIOD_S = 0.2
"""Least time between two messages to a watcher."""


class _NodesSeen:
    """The nodes as they were when last looked at, each with the number of the look that found it new."""

    def __init__(self, fleet: Fleet, info: Callable[[Node], NodeInfo]) -> None:
        self._fleet = fleet
        self._info = info
        self._marks: dict[str, tuple[object, ...]] = {}
        self.infos: dict[str, tuple[int, NodeInfo]] = {}
        self.look = 0

    async def again(self) -> None:
        """Look at all nodes, others having their turn in between; a picture only of those that changed."""
        self.look += 1
        async for node in in_turns(self._fleet.nodes):
            if node.removed:
                continue
            mark = _mark(node)
            if self._marks.get(node.name) != mark:
                self._marks[node.name] = mark
                self.infos[node.name] = (self.look, self._info(node))
        nodes = self._fleet.nodes
        if len(self.infos) > len(nodes):
            names = {node.name for node in nodes}
            for name in [name for name in self.infos if name not in names]:
                del self.infos[name], self._marks[name]

    def forget(self) -> None:
        self._marks.clear()
        self.infos.clear()


def _mark(node: Node) -> tuple[object, ...]:
    """Differs when there is something new to show; what only grows older does not count."""
    return (
        id(node),
        node.life,
        node.state,
        node.state_detail,
        node.cordoned_at,
        node.cordon_note,
        node.drain.info() if node.drain is not None else None,
        node.unlisted,
        node.report_at_s,
        node.reports_stale,
        node.lanes,
        node.sessions,
        len(node.running),
        len(node.queue),
        node.reservations,
        len(node.outbox),
        node.failures.total(),
    )


class FleetWatch:
    """All watchers of a head. `places` counts them, with those of drains, against `max_watchers`."""

    def __init__(
        self,
        fleet: Fleet,
        settings: HeadSettings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        info: Callable[[Node], NodeInfo],
        summary: Callable[[], FleetSummary],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._summary = summary
        self.info = info
        self._nodes = _NodesSeen(fleet, info)
        self._looked_s: float | None = None
        self._looking = asyncio.Lock()
        self._watchers: set[Watcher] = set()
        self._places = 0
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self, *, with_turns: bool = True) -> Watcher:
        """A watcher, from now on. Raises LIMIT_EXCEEDED."""
        leave = self.enter()
        watcher = Watcher(self, self._settings.watch_events_kept if with_turns else None, leave)
        self._watchers.add(watcher)
        self._fleet.turns.listener = self._on_turn
        return watcher

    def enter(self, spare: int = 0) -> Callable[[], None]:
        """A place among the streams that watch, and how to give it back. Raises LIMIT_EXCEEDED.

        `spare`: places beyond the usual ones, for those whom others that look on must not keep out.
        """
        limit = self._settings.max_watchers + spare
        if self._places >= limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"{limit} streams watch the fleet or a drain, the most there may be; end one",
                metadata={"limit": "max_watchers", "value": str(limit)},
                retry_after_s=1.0,
            )
        self._places += 1
        left = False

        def leave() -> None:
            nonlocal left
            self._places -= not left
            left = True

        return leave

    def close(self) -> None:
        """The head ends: so do the streams that watch it."""
        if not self.stopping.done():
            self.stopping.set_result(None)

    def gone(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._fleet.turns.listener = None
            self._nodes.forget()
            self._looked_s = None

    async def look(self) -> tuple[_NodesSeen, FleetSummary]:
        """The nodes as of this period."""
        async with self._looking:  # one look for all watchers
            now_s = self._clock()
            if self._looked_s is None or now_s - self._looked_s >= PERIOD_S / 2:
                self._looked_s = now_s
                await self._nodes.again()
        return self._nodes, self._summary()

    def now_s(self) -> float:
        return self._clock()

    def _on_turn(self, generation: Generation, what: PlacedOn | Moved | EndedOn) -> None:
        session = generation.session
        turn = Turn(
            at=self._wall_clock(),
            generation_id=generation.generation_id,
            session_id=session.session_id,
            model=session.spec.model,
            what=what,
        )
        for watcher in self._watchers:
            watcher.take(turn)


class Watcher:
    """One watcher. `kept`: how many turns are kept until it reads; None = it wants none."""

    def __init__(self, watch: FleetWatch, kept: int | None, leave: Callable[[], None]) -> None:
        self._watch = watch
        self._kept = kept
        self._leave = leave
        self._turns: deque[Turn] = deque()
        self._skipped = 0
        self._look: int | None = None
        self._names: frozenset[str] = frozenset()
        self._summary: FleetSummary | None = None
        self._due_s = 0.0

    def take(self, turn: Turn) -> None:
        """Keep a turn until it is read; the oldest goes when there are too many."""
        if self._kept is None:
            return
        self._turns.append(turn)
        if len(self._turns) > self._kept:
            self._turns.popleft()
            self._skipped += 1

    async def read(self) -> FleetChange | None:
        """The whole fleet, and from then on what has changed, when it has. None: the head has ended."""
        stopping = self._watch.stopping
        while True:
            wait_s = self._due_s - self._watch.now_s()
            if self._look is not None and wait_s > 0:
                await asyncio.wait({stopping}, timeout=wait_s)
            self._due_s = self._watch.now_s() + PERIOD_S
            change = await self._gather()
            if change is not None or stopping.done():
                return change

    def close(self) -> None:
        """It has gone. Idempotent."""
        self._leave()
        self._watch.gone(self)

    async def _gather(self) -> FleetChange | None:
        seen, summary = await self._watch.look()
        first, last = self._look is None, self._look or 0
        nodes = [info for look, info in seen.infos.values() if first or look > last]
        names = frozenset(seen.infos)
        removed: Sequence[str] = sorted(self._names - names)
        turns, skipped = list(self._turns), self._skipped
        told = summary if summary != self._summary else None
        if not (first or nodes or removed or told or turns or skipped):
            self._look = seen.look
            return None
        self._look, self._names, self._summary = seen.look, names, summary
        self._turns.clear()
        self._skipped = 0
        nodes.sort(key=lambda info: info.name)
        return FleetChange(first, nodes, removed, told, turns, skipped)
