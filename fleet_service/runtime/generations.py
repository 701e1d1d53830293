"""The generations: accepted, found, cancelled (also before they are asked for), kept for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import FinishReason
from fleet_service.domain.session_table import SessionOp, apply
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.attempt import AttemptContext
from fleet_service.runtime.driver import Driver
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generation_maker import GenerationMaker
from fleet_service.runtime.ids import Ids
from fleet_service.runtime.observer import FleetObserver
from fleet_service.runtime.records import (
    CancelHeld,
    GenerationEnded,
    GenerationGone,
    SavedGeneration,
    SessionBound,
)
from fleet_service.runtime.reservation import Reservation
from fleet_service.runtime.session import Session
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.tokenlog import comes_back
from fleet_service.runtime.views import CancelOutcome, CancelResult

FORGOTTEN_AT_ONCE = 100
"""Of what is over, when there must be room for more."""


class Generations:
    """All generations of the head, running and lately finished."""

    def __init__(
        self,
        sessions: Sessions,
        fleet: Fleet,
        settings: HeadSettings,
        ids: Ids,
        context: AttemptContext,
        observer: FleetObserver,
        wall_clock: Callable[[], float],
        branch: int = 0,
    ) -> None:
        """`branch`: that of the head's run."""
        self._branch = branch
        self._journal = context.journal
        self._wall_clock = wall_clock
        self._sessions = sessions
        self._fleet = fleet
        self._settings = settings
        self._ids = ids
        self._context = context
        self._loop = context.loop
        self._maker = GenerationMaker(
            fleet, settings, ids, context.journal, observer, wall_clock, self._decided, branch
        )
        self._by_id: dict[str, Generation] = {}
        self._running: dict[str, Generation] = {}
        self._finished: deque[tuple[float, Generation]] = deque()
        self._finished_tokens = 0
        self._held_cancels: OrderedDict[tuple[str, str], float] = OrderedDict()
        """By whose it is and the generation's id."""

    @property
    def running(self) -> Sequence[Generation]:
        return list(self._running.values())

    def knows(self, generation_id: str) -> bool:
        """Whether there is such a generation, running or lately finished."""
        return generation_id in self._by_id

    def running_one(self, generation_id: str) -> Generation | None:
        """The generation while it has not ended."""
        return self._running.get(generation_id)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def kept_count(self) -> int:
        """Those that have ended and can still be read."""
        return len(self._finished)

    # Starting

    async def start(
        self,
        session_id: str,
        generation_id: str,
        spec: GenerationSpec,
        parent: object | None,
        owner: str | None = None,
    ) -> Generation:
        """A generation of a session. Raises FleetError when it cannot be taken; then nothing has changed."""
        session = await self._sessions.settled(session_id, owner)
        apply(session.state, SessionOp.GENERATE, session_id=session_id)
        return self._start(session, generation_id, spec, parent)

    async def complete(
        self,
        session_spec: SessionSpec,
        token_ids: Sequence[int],
        spec: GenerationSpec,
        generation_id: str,
        parent: object | None,
        owner: str = "",
    ) -> Generation:
        """A session for one answer: made, used and finished."""
        session = self._sessions.draft("", session_spec, token_ids, owner)
        session.ephemeral = True
        generation = self._start(session, generation_id, spec, parent)
        if generation.finished is None:
            self._sessions.keep(session)
        return generation

    def _start(
        self, session: Session, generation_id: str, spec: GenerationSpec, parent: object | None
    ) -> Generation:
        self._check_limits(generation_id)
        self._maker.check(spec)
        held = self._take_held_cancel((session.owner, generation_id))
        node = None if held else self._maker.place(session)
        generation = self._maker.make(generation_id or self._ids.generation(), session, spec, node, parent)
        self._by_id[generation.generation_id] = generation
        self._running[generation.generation_id] = generation
        if self._journal.keeps:
            self._journal.put(self._maker.record(generation))
        if node is not None:
            self._fleet.turns.placed(generation, node.name)
        session.generates(generation.generation_id)
        end = generation.rules.end_now()
        if held:
            generation.cancel()
        elif end is not None:
            generation.decide_end(end)
        elif node is not None:
            self._drive(generation, self._fleet.reserve_on(node, generation), None)
        if not session.ephemeral:
            self._sessions.touch(session)
        return generation

    def restore(self, saved: SavedGeneration, session: Session) -> Generation:
        """A generation as an earlier run of the head left it; one that has not ended is still to go on."""
        generation, end = self._maker.restore(saved, session)
        self._by_id[generation.generation_id] = generation
        if saved.ended is not None:
            generation.was_decided(saved.ended.finished)
            self._keep_for_a_while(generation, self._wall_clock() - saved.ended.ended_at)
            return generation
        self._running[generation.generation_id] = generation
        session.generates(generation.generation_id)
        if generation.log.branch < self._branch:
            self._journal.put(generation.log.cut(self._branch))
        if end is not None:
            generation.decide_end(end)
        elif generation.remaining_wall_s() <= 0:
            generation.decide(FinishReason.WALL_CLOCK)
        return generation

    def go_on(self, generation: Generation) -> None:
        """Drive a generation that an earlier run of the head began."""
        if generation.finished is None:
            self._drive(generation, None, generation.session.was_bound)

    def _drive(
        self, generation: Generation, reservation: Reservation | None, was_bound: SessionBound | None
    ) -> None:
        driver = Driver(generation, reservation, self._fleet, self._context, was_bound)
        generation.task = self._loop.create_task(driver.run(), name=f"drive {generation.generation_id}")
        # A task that is cancelled before its first step runs nothing of its own, `finally` neither.
        generation.session.winding_down = generation.task

        def over(task: asyncio.Task[None]) -> None:
            # A task that is kept keeps the frames it ended in, and all they hold.
            if reservation is not None:
                reservation.release()
            generation.task = None
            if generation.session.winding_down is task:
                generation.session.winding_down = None

        generation.task.add_done_callback(over)

    def _check_limits(self, generation_id: str) -> None:
        if generation_id in self._by_id:
            raise FleetError(
                Reason.GENERATION_ALREADY_EXISTS,
                f"generation {generation_id} is there already; attach to it, or choose another id",
                metadata={"generationId": generation_id},
                resource=_resource(generation_id),
            )
        limit = self._settings.max_generations
        if len(self._running) >= limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"{limit} generations are running, the most the head takes; retry later",
                metadata={"limit": "max_generations", "value": str(limit)},
                retry_after_s=1.0,
            )

    # Their end

    def _decided(self, generation: Generation) -> None:
        """In the step that decides: the session is free again, its context extended where asked for."""
        session = generation.session
        session.generates("")
        if generation.finished is not None and self._journal.keeps:
            ended = GenerationEnded(generation.generation_id, generation.finished, self._wall_clock())
            self._journal.put(ended)
        if generation.spec.extend_context and not session.finished:
            self._sessions.extend_context(session, generation.log.slice(0))
        self._running.pop(generation.generation_id, None)
        if generation.finished is not None:
            self._fleet.turns.ended(generation, generation.finished)
        self._keep_for_a_while(generation)
        if session.ephemeral:
            self._after_winding_down(session, lambda: self._sessions.remove(session))
        elif not session.finished:
            self._sessions.used(session)

    def _keep_for_a_while(self, generation: Generation, ended_ago_s: float = 0.0) -> None:
        settings = self._settings
        self._finished.append((self._loop.time() + settings.finished_kept_s - ended_ago_s, generation))
        self._finished_tokens += generation.log.received
        while (
            len(self._finished) > settings.max_generations
            or self._finished_tokens > settings.max_finished_tokens
        ):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _until_s, generation = self._finished.popleft()
        self._finished_tokens -= generation.log.received
        self._by_id.pop(generation.generation_id, None)
        self._journal.put(GenerationGone(generation.generation_id))

    @staticmethod
    def _after_winding_down(session: Session, then: Callable[[], object]) -> None:
        task = session.winding_down
        if task is None or task.done():
            then()
        else:
            task.add_done_callback(lambda _task: then())

    def forget_old(self, now_s: float, most: int) -> int:
        """Drop what was finished long enough ago, and cancels nobody came for; how many, at most `most`."""
        dropped = 0
        while self._finished and self._finished[0][0] <= now_s and dropped < most:
            self._forget_oldest()
            dropped += 1
        while self._held_cancels and dropped < most:
            held, until_s = next(iter(self._held_cancels.items()))
            if until_s > now_s:
                break
            del self._held_cancels[held]
            self._journal.put(CancelHeld(*held, 0.0))
            dropped += 1
        return dropped

    # Finding and cancelling

    def find(self, generation_id: str, owner: str | None = None) -> Generation:
        """The generation, if it is that caller's (None: whose ever). Raises GENERATION_NOT_FOUND."""
        generation = self._by_id.get(generation_id)
        if generation is None or owner not in (None, generation.session.owner):
            raise FleetError(
                Reason.GENERATION_NOT_FOUND,
                f"no generation {generation_id}: it was never made, or ended too long ago to be kept",
                metadata={"generationId": generation_id},
                resource=_resource(generation_id),
            )
        return generation

    def cancel(self, generation_id: str, owner: str | None = None) -> CancelResult:
        """End a generation; one not asked for yet is cancelled when it comes within `cancel_held_s`.

        Raises GENERATION_NOT_FOUND for an id of the head's own making that it does not know, HEAD_DRAINING
        for one that is the next run's.
        """
        if generation_id not in self._by_id and not self._ids.is_own(generation_id):
            return self._hold_cancel((owner or "", generation_id))
        generation = self.find(generation_id, owner)
        if generation.left:
            raise comes_back(generation.log.received)
        generation.cancel()
        finished = generation.finished
        cancelled = finished is not None and finished.reason is FinishReason.CANCELLED
        outcome = CancelOutcome.CANCELLED if cancelled else CancelOutcome.ALREADY_FINISHED
        return CancelResult(outcome, finished)

    def check_not_left(self, session: Session) -> None:
        """Raises HEAD_DRAINING when what the session runs is the next run's."""
        generation = self._running.get(session.generation_id)
        if generation is not None and generation.left:
            raise comes_back(generation.log.received)

    def cancel_session(self, session: Session) -> None:
        """End what the session runs."""
        generation = self._running.get(session.generation_id)
        if generation is not None:
            generation.cancel()

    def _hold_cancel(self, held: tuple[str, str]) -> CancelResult:
        self.forget_old(self._loop.time(), FORGOTTEN_AT_ONCE)
        if len(self._held_cancels) >= self._settings.max_held_cancels:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                "too many cancels are held for generations that were not asked for yet",
                metadata={"limit": "max_held_cancels", "value": str(self._settings.max_held_cancels)},
                retry_after_s=1.0,
            )
        until_s = self._settings.cancel_held_s
        self._journal.put(CancelHeld(*held, self._wall_clock() + until_s))
        self._held_cancels[held] = self._loop.time() + until_s
        self._held_cancels.move_to_end(held)
        return CancelResult(CancelOutcome.HELD, None)

    def restore_cancel(self, held: CancelHeld) -> None:
        """A cancel that waits for its generation since an earlier run of the head."""
        left_s = held.until - self._wall_clock()
        if left_s > 0:
            self._held_cancels[held.owner, held.generation_id] = self._loop.time() + left_s

    def _take_held_cancel(self, held: tuple[str, str]) -> bool:
        until_s = self._held_cancels.pop(held, None)
        if until_s is not None:
            self._journal.put(CancelHeld(*held, 0.0))
        return until_s is not None and until_s > self._loop.time()

    async def let_go(self, grace_s: float) -> None:
        """Wait at most `grace_s` for what runs to end; then cancel it, or leave it to the head's next run."""
        tasks = {generation.task for generation in self.running if generation.task is not None}
        if tasks and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)
        for generation in self.running:
            if self._journal.keeps:
                generation.leave()
            else:
                generation.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _resource(generation_id: str) -> tuple[str, str]:
    return ("fleet.v1.Generation", f"generations/{generation_id}")
