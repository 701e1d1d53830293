"""Drains nodes: what they run goes on elsewhere, a few at a time; what is idle is unbound; progress is told.

A generation streams on where it is until another node has kept a lane for it and has answered. A lane that
somebody waits for is not taken. What no other node can take stays, and runs to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.lane_queue import QueueFullError
from fleet_service.domain.placement import Demand
from fleet_service.domain.specs import Replay
from fleet_service.runtime.alive import answers
from fleet_service.runtime.drain_record import DrainRecord, Fate
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.node import Node
from fleet_service.runtime.place import Place
from fleet_service.runtime.reservation import Grant, Reservation
from fleet_service.runtime.session import Binding
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.views import DrainInfo, DrainState

log = structlog.get_logger(__name__)

LOOK_S = 0.25
"""How often a drain looks again at what nothing tells of: busy nodes' pauses, delivered revokes."""

PROGRESS_S = 0.2
"""Least time between two tellings of the progress."""

LOOKED_AT_ONCE = 16
"""Generations placed before others have their turn."""


class Drains:
    """All drains of a head; a task for each that is under way."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        generations: Generations,
        settings: HeadSettings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._generations = generations
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._spawn = spawn

    def start(self, node: Node, by: str, note: str, ordered_at: float | None = None) -> DrainRecord:
        """Nothing new is placed on the node from this step on. A drain that there is goes on as it is.

        `ordered_at`: unix seconds, where it was ordered of an earlier run of the head.
        """
        if node.drain is not None:
            return node.drain
        now = self._wall_clock() if ordered_at is None else ordered_at
        record = DrainRecord(node, by, note, started_at=now)
        node.drain = record
        if not node.cordoned:
            node.cordon(by, note, now)
        log.info("node_draining", node=node.name, by=by, note=note, sessions=node.sessions)
        for reservation in node.queue:  # before a lane gets free for them here
            self._try(record, reservation)
        self._spawn(self._run(record))
        return record

    def cordon(self, node: Node, by: str, note: str) -> None:
        """No new work from now on; what runs goes on."""
        node.cordon(by, note, self._wall_clock())

    def end(self, node: Node) -> None:
        """What is left stays; what is about to move stays too."""
        record = node.drain
        if record is None:
            return
        node.drain = None
        record.end(DrainState.ENDED, self._wall_clock())
        log.info("drain_ended", node=node.name, sessions=node.sessions)

    async def _run(self, record: DrainRecord) -> None:
        try:
            await self._carry_out(record)
        except Exception:
            log.exception("drain_failed", node=record.node.name)
            record.end(DrainState.ENDED, self._wall_clock())

    async def _carry_out(self, record: DrainRecord) -> None:
        await self._sessions.leave_drained(record.node)
        while record.under_way:
            room = self._fleet.room_for_more()
            if not await self._look(record):
                return
            if record.node.removed:
                record.end(DrainState.NODE_REMOVED, self._wall_clock())
            elif record.empty:
                record.end(DrainState.DRAINED, self._wall_clock())
                log.info("node_drained", node=record.node.name, moved=record.moved, unbound=record.unbound)
            else:
                await asyncio.wait({room}, timeout=LOOK_S)

    async def _look(self, record: DrainRecord) -> bool:
        """Move what can be moved now, and count what cannot; False when the drain was ended meanwhile."""
        node = record.node
        fates: list[Fate] = []
        for number, reservation in enumerate([*node.queue, *node.running], start=1):
            fates.append(self._try(record, reservation))
            if number % LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
                if not record.under_way:
                    return False
        record.waiting = fates.count(Fate.WAITS)
        record.staying = fates.count(Fate.STAYS)
        return True

    def _try(self, record: DrainRecord, old: Reservation) -> Fate:
        generation = self._generations.running_one(old.generation_id)
        if generation is None or old.released or old.kept or old.successor is not None:
            return Fate.MOVES
        if old.ticket is not None:
            return self._send_on(record, generation, old)
        if generation.session.spec.replay is Replay.NEVER:
            return Fate.STAYS
        place, fate = self._keep_lane(record, generation)
        if place is not None:
            old.successor = place
            self._spawn(self._hand_over(record, old, place))
        return fate

    def _send_on(self, record: DrainRecord, generation: Generation, old: Reservation) -> Fate:
        """What waits for a lane here waits for one elsewhere, as anything new would."""
        try:
            node = self._fleet.choose(self._demand(generation))
            place = self._keep(record, generation, node, replays=generation.attempts > 0)
        except (FleetError, QueueFullError):
            return Fate.STAYS
        place.ready = True
        old.successor = place
        old.node.send_elsewhere(old, Grant.MOVED)
        return Fate.MOVES

    def _keep_lane(self, record: DrainRecord, generation: Generation) -> tuple[Place | None, Fate]:
        """A lane that nobody waits for, on a node that may take one more prefill now."""
        demand = self._demand(generation)
        try:
            chosen = self._fleet.choose_with(demand, lambda node: node.has_room_for_move)
            if chosen is not None:
                return self._keep(record, generation, chosen, replays=True), Fate.MOVES
        except (FleetError, QueueFullError):
            pass
        return None, Fate.WAITS if self._fleet.could_take(demand) else Fate.STAYS

    def _demand(self, generation: Generation) -> Demand:
        """As of any further attempt, but only where all that may still come fits, so that it stays there."""
        demand = self._fleet.demand_of(generation)
        most = demand.prompt_tokens + generation.rules.remaining
        return replace(
            demand,
            min_window_tokens=max(generation.min_window_tokens, most - 1),
            avoid=generation.barred,
        )

    def _keep(self, record: DrainRecord, generation: Generation, node: Node, *, replays: bool) -> Place:
        reservation = self._fleet.reserve_on(node, generation, replays=replays)
        binding = Binding(node, self._fleet.next_epoch(), generates=True)

        def taken() -> None:
            record.moved += 1
            self._fleet.moved_by_plan(generation, node)

        return Place(generation, reservation, binding, taken)

    async def _hand_over(self, record: DrainRecord, old: Reservation, place: Place) -> None:
        """The other node has to answer first: what runs here is stopped for nothing less."""
        try:
            link = place.node.link
            place.seen_alive = link is not None and await answers(link)
            if not place.seen_alive:
                place.node.busy_until_s = self._clock() + self._settings.busy_backoff_s
            elif record.under_way and old.successor is place and place.good:
                place.ready = True
                if old.on_lost is not None:
                    old.on_lost(FailureClass.DRAINED, "")
        finally:
            if old.successor is place and not place.ready:
                old.successor = None
                place.release()


class DrainProgress:
    """One watcher of a drain. `stopping`: the head ends."""

    def __init__(
        self, record: DrainRecord, stopping: asyncio.Future[None], close: Callable[[], None]
    ) -> None:
        self._record = record
        self._stopping = stopping
        self._told: DrainInfo | None = None
        self.close = close

    async def read(self) -> tuple[str, DrainInfo]:
        """The node's name and its drain: at once, and from then on when it has changed.

        The last one is not DRAINING any more. Raises HEAD_DRAINING when the head ends first.
        """
        while True:
            if self._told:
                await asyncio.wait({self._stopping}, timeout=PROGRESS_S)
                if self._stopping.done():
                    raise FleetError(
                        Reason.HEAD_DRAINING,
                        "the head is shutting down; drain the node again once it is back",
                        retry_after_s=1.0,
                    )
            info = self._record.info()
            if info != self._told:
                self._told = info
                return self._record.node.name, info
