"""Drives one generation through its attempts: waits for a lane, tries, and on a failure decides what is next.

Design: Failures. The straight story of failover; the rules it follows are domain/failures.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import ErrorCause, FinishReason, MoveCause, Moved, Started
from fleet_service.domain.failures import AttemptBudget, Failure, FailureClass, GiveUp, TryAgain, Where
from fleet_service.domain.lane_queue import QueueFullError
from fleet_service.domain.placement import Demand
from fleet_service.domain.specs import Replay
from fleet_service.runtime.alive import answers
from fleet_service.runtime.attempt import Attempt, AttemptContext
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.node import Node
from fleet_service.runtime.place import Place
from fleet_service.runtime.protocols import NodeLink
from fleet_service.runtime.reservation import Grant, Reservation

log = structlog.get_logger(__name__)


_NO_FAILURES = {FailureClass.DRAINED, FailureClass.REBALANCED, FailureClass.REMOVED}
"""Moves that the head itself decided on."""


class Driver:
    """One generation's way through the fleet. `reservation` is its first place, taken on acceptance."""

    def __init__(
        self,
        generation: Generation,
        reservation: Reservation,
        fleet: Fleet,
        context: AttemptContext,
    ) -> None:
        self._generation = generation
        self._reservation = reservation
        self._fleet = fleet
        self._context = context
        self._budget = AttemptBudget(replay_allowed=generation.session.spec.replay is not Replay.NEVER)
        self._last: Attempt | None = None
        self._kept: Place | None = None
        self._seen_alive = False
        self._cause = MoveCause.LINK_LOST

    async def run(self) -> None:
        """Until the generation is decided, by this driver or by whoever cancels it."""
        try:
            while self._generation.finished is None:
                failure = await self._one_attempt(self._reservation)
                self._let_go(self._reservation)
                if self._generation.finished is None:
                    await self._after(failure)
        except Exception:
            log.exception("driver_failed", generation=self._generation.generation_id)
            fault = ErrorCause(Reason.INTERNAL, "a fault of the head ended the generation")
            self._generation.decide(FinishReason.ERROR, error=fault)
        finally:
            self._reservation.release()
            if self._kept is not None:
                self._kept.release()

    def _let_go(self, reservation: Reservation) -> None:
        """Give a place back; one that was kept elsewhere meanwhile is for the next attempt."""
        successor, reservation.successor = reservation.successor, None
        if isinstance(successor, Place):
            self._kept = successor
        reservation.release()

    async def _one_attempt(self, reservation: Reservation) -> Failure:
        node = reservation.node
        self._generation.waits_for_lane()
        grant = await reservation.granted
        self._generation.waits_no_more()
        link = node.link
        if reservation.to_move():
            return Failure(FailureClass.DRAINED, node.name)
        if grant is Grant.MOVED:
            return Failure(FailureClass.REBALANCED, node.name)
        if grant is Grant.EVICTED or link is None:
            return Failure(FailureClass.EVICTED, node.name, node.state_detail)
        if self._last is not None and not self._seen_alive and not await answers(link):
            return Failure(FailureClass.NO_ANSWER, node.name)
        self._seen_alive = False
        if reservation.to_move():
            return Failure(FailureClass.DRAINED, node.name)
        session = self._generation.session
        binding = session.bind(node, self._fleet.next_epoch)
        self._generation.attempts += 1
        attempt = Attempt(self._context, self._generation, reservation, binding, link, self._announce)
        failure = await attempt.run()
        if failure.kind is FailureClass.LINK_LOST:
            self._let_go(reservation)
            return await self._verdict_on(failure, node, link, binding.life)
        return failure

    async def _verdict_on(self, failure: Failure, node: Node, link: NodeLink, life: int) -> Failure:
        """A broken stream is a lost link only when the link itself goes; then a redial says what is left."""
        settings = self._context.settings
        if not await node.link_gone(link, settings.relink_s):
            return replace(failure, kind=FailureClass.NODE_FAULT)
        await node.relink_verdict()
        back = node.usable and node.life == life
        return replace(failure, same_run_is_back=back, node_left=node.left_life == life)

    def _announce(self, attempt: Attempt) -> None:
        """Tell the readers where the generation is now, unless it is where it was."""
        generation, last = self._generation, self._last
        self._last = attempt
        generation.node = attempt.node.name
        if last is None:
            generation.log.mark(Started(attempt.node.name, attempt.epoch))
        elif (last.node.name, last.epoch) != (attempt.node.name, attempt.epoch):
            moved = Moved(
                from_node=last.node.name,
                to_node=attempt.node.name,
                cause=self._cause,
                next_index=generation.log.received,
                gap_s=self._context.loop.time() - last.last_sign_s,
                epoch=attempt.epoch,
            )
            generation.log.mark(moved)
            generation.trace.moved(moved)
            self._fleet.turns.moved(generation, moved)

    async def _after(self, failure: Failure) -> None:
        generation, node = self._generation, self._fleet.find(failure.node)
        if node is not None:
            self._tell_node(node, failure)
        self._cause = failure.rule.cause
        if failure.kind not in _NO_FAILURES:
            generation.trace.failed(failure.kind)
        if not failure.rule.keeps_binding:
            generation.session.unbind()
        next_step = self._budget.after(failure, generation.log.received)
        log.info(
            "attempt_failed",
            generation=generation.generation_id,
            node=failure.node,
            failure=failure.kind.value,
            detail=failure.detail,
            next_index=generation.log.received,
        )
        if isinstance(next_step, GiveUp):
            generation.decide(FinishReason.ERROR, error=next_step.cause)
            return
        generation.barred, generation.min_window_tokens = next_step.never, next_step.min_window_tokens
        if self._takes_kept_place(next_step):
            return
        # A place that was kept elsewhere may be no good any more; here all is still well.
        same = next_step.where is Where.SAME_NODE or failure.kind is FailureClass.DRAINED
        if same and node is not None and node.usable:
            try:
                self._reservation = self._fleet.reserve_on(node, generation, replays=True)
            except QueueFullError:
                pass  # then anywhere, as by placement
            else:
                generation.session.bind(node, self._fleet.next_epoch)
                return
        await self._place_again(failure, next_step)

    def _takes_kept_place(self, step: TryAgain) -> bool:
        kept, self._kept = self._kept, None
        if kept is None:
            return False
        if not kept.good or kept.node.name in step.never:
            kept.release()
            return False
        self._reservation = kept.take()
        self._seen_alive = kept.seen_alive
        return True

    def _tell_node(self, node: Node, failure: Failure) -> None:
        if failure.rule.counts_against_node and failure.kind is not FailureClass.LINK_LOST:
            node.count_failure(failure.kind)  # a lost link was counted once, by its keeper
        if failure.kind in (FailureClass.BUSY, FailureClass.NO_ANSWER):
            # Without the pause, the only node there is would be asked again at once, and for ever.
            backoff_s = failure.retry_after_s or self._context.settings.busy_backoff_s
            node.busy_until_s = self._context.loop.time() + backoff_s

    async def _place_again(self, failure: Failure, step: TryAgain) -> None:
        """The next place, waited for within `placement_wait_s`; ends the generation when there is none."""
        generation, loop = self._generation, self._context.loop
        give_up_s = loop.time() + self._context.settings.placement_wait_s
        while True:
            changed = self._fleet.changed()
            try:
                self._reservation = self._fleet.place_again(generation, self._demands(step))
                return
            except FleetError as error:
                refusal = error
            barred = self._budget.only_option_failed()
            if barred is not None:
                generation.decide(FinishReason.ERROR, error=barred)
                return
            full = failure.kind is FailureClass.CONTEXT_TOO_LONG and failure.detail == "full"
            if full and refusal.reason is Reason.CONTEXT_TOO_LONG:
                generation.decide(FinishReason.LENGTH)  # no node, up or down, has room for one token more
                return
            waits = refusal.reason in (Reason.NO_ELIGIBLE_NODE, Reason.FLEET_SATURATED)
            if not waits or loop.time() >= give_up_s:
                self._fleet.not_placed(refusal)
                generation.fail(refusal)
                return
            await self._something_changed(changed, give_up_s)

    async def _something_changed(self, changed: asyncio.Future[None], give_up_s: float) -> None:
        patience_s = min(self._context.settings.busy_backoff_s, give_up_s - self._context.loop.time())
        await asyncio.wait({changed}, timeout=max(patience_s, 0.001))

    def _demands(self, step: TryAgain) -> list[Demand]:
        """What to ask of placement, the preferred first."""
        wanted = replace(
            self._fleet.demand_of(self._generation),
            min_window_tokens=step.min_window_tokens,
            avoid=step.never | step.prefer_not,
        )
        return [wanted, replace(wanted, avoid=step.never)] if step.prefer_not else [wanted]
