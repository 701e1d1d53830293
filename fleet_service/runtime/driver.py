"""Drives one generation through its attempts: waits for a lane, tries, and on a failure decides what is next.

Design: Failures. The straight story of failover; the rules it follows are domain/failures.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from fleet_service.runtime.records import AttemptStarted, SessionBound
from fleet_service.runtime.reservation import Grant, Reservation
from fleet_service.runtime.session import Binding

log = structlog.get_logger(__name__)

OLD_NODE_S = 3.0
"""How long a generation of an earlier run of the head waits for the node that had it."""


_NOT_KNOWN_YET = {Reason.MODEL_NOT_FOUND, Reason.MODEL_UNPLACEABLE, Reason.CONTEXT_TOO_LONG}
"""Refusals that say nothing while a head that has just started may not have met all nodes."""

_MAY_HAVE_COST_NOTHING = {MoveCause.NODE_SILENT, MoveCause.SESSION_LOST}
"""Causes of failures some of which are no attempt: which it was, the next run of the head cannot tell."""

_NO_FAILURES = {FailureClass.DRAINED, FailureClass.REBALANCED, FailureClass.REMOVED}
"""Moves that the head itself decided on."""


class Driver:
    """One generation's way through the fleet. `reservation` is its first place, taken on acceptance.

    None: an earlier run of the head had accepted it, and it `was_bound` to a node then.
    """

    def __init__(
        self,
        generation: Generation,
        reservation: Reservation | None,
        fleet: Fleet,
        context: AttemptContext,
        was_bound: SessionBound | None = None,
    ) -> None:
        self._generation = generation
        # Until then there may be nodes that an earlier run of the head knew, and this one does not yet.
        patience_s = 0.0 if reservation is not None else context.settings.placement_wait_s
        self._nodes_known_s = context.loop.time() + patience_s
        self._place = reservation
        self._was_bound = was_bound
        self._fleet = fleet
        self._context = context
        self._budget = AttemptBudget(replay_allowed=generation.session.spec.replay is not Replay.NEVER)
        if reservation is None:
            moves = [event for _index, event in generation.log.marks if isinstance(event, Moved)]
            sure = [move for move in moves if move.cause not in _MAY_HAVE_COST_NOTHING]
            self._budget.taken_up(generation.log.received, sure)
        self._last: Attempt | None = None
        self._kept: Place | None = None
        self._seen_alive = False
        self._cause = MoveCause.LINK_LOST

    async def run(self) -> None:
        """Until the generation is decided, by this driver or by whoever cancels it."""
        try:
            if self._place is None:
                await self._first_place_again()
            while self._generation.finished is None and self._place is not None:
                place = self._place
                failure = await self._one_attempt(place)
                self._let_go(place)
                if self._generation.finished is None:
                    await self._after(failure)
        except Exception:
            log.exception("driver_failed", generation=self._generation.generation_id)
            fault = ErrorCause(Reason.INTERNAL, "a fault of the head ended the generation")
            self._generation.decide(FinishReason.ERROR, error=fault)
        finally:
            if self._place is not None:
                self._place.release()
            if self._kept is not None:
                self._kept.release()
            self._last = None  # it holds the driver: without a cycle both go at once

    async def _first_place_again(self) -> None:
        """On the node that had it, if it comes back soon and still holds the session; else anywhere."""
        generation, session = self._generation, self._generation.session
        give_up_s = self._context.loop.time() + OLD_NODE_S
        while session.was_bound is not None and (left_s := give_up_s - self._context.loop.time()) > 0:
            node = self._fleet.named(session.was_bound.node)
            if node is not None and node.usable:
                break  # it is back, and holds the session no more
            await asyncio.wait({self._fleet.changed()}, timeout=left_s)
        session.was_bound = None
        binding = session.binding if session.binding is not None and session.binding.usable else None
        goes_on = binding is not None and self._goes_on_by_itself(binding)
        nothing = Failure(FailureClass.EVICTED, self._was_bound.node if self._was_bound is not None else "")
        next_step = self._budget.after(nothing, generation.log.received)
        if binding is not None and (goes_on or isinstance(next_step, TryAgain)):
            try:
                self._place = self._fleet.reserve_on(binding.node, generation, replays=not goes_on)
            except QueueFullError:
                session.unbind()
            else:
                if generation.attempts and not goes_on:
                    session.unbind()  # under the epoch that it had, the node would not run it a second time
                    session.bind(binding.node, self._fleet.next_epoch)
                return
        if isinstance(next_step, GiveUp):
            generation.decide(FinishReason.ERROR, error=next_step.cause)
        else:
            await self._place_again(nothing, next_step)

    def _goes_on_by_itself(self, binding: Binding) -> bool:
        """The node has kept the run, which costs it no prefill, and its lane."""
        link = binding.node.link
        return link is not None and link.resumes and self._generation.generation_id in binding.kept_runs

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
        if (not binding.sent or binding.overhang) and self._context.journal.keeps:
            bound = SessionBound(session.session_id, node.name, node.incarnation, binding.epoch)
            self._context.journal.put(bound)
        self._generation.attempts += 1
        attempt = Attempt(self._context, self._generation, reservation, binding, link)
        failure = await attempt.run(self._announce)
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
        was = (last.node.name, last.epoch) if last is not None else _last_told(generation.log.marks)
        if was is None:
            self._mark(Started(attempt.node.name, attempt.epoch))
        elif was != (attempt.node.name, attempt.epoch):
            # Of what an earlier run of the head began, the gap counts from when this one took it up.
            seen_s = last.last_sign_s if last is not None else generation.begun_s
            moved = Moved(
                from_node=was[0],
                to_node=attempt.node.name,
                cause=self._cause if last is not None else MoveCause.HEAD_RESTARTED,
                next_index=generation.log.received,
                gap_s=self._context.loop.time() - seen_s,
                epoch=attempt.epoch,
            )
            self._mark(moved)
            generation.trace.moved(moved)
            self._fleet.turns.moved(generation, moved)

    def _mark(self, event: Started | Moved) -> None:
        generation = self._generation
        index = generation.log.received
        generation.log.mark(event)
        if self._context.journal.keeps:
            started = AttemptStarted(generation.generation_id, index, event, generation.attempts)
            self._context.journal.put(started)

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
                self._place = self._fleet.reserve_on(node, generation, replays=True)
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
        self._place = kept.take()
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
                self._place = self._fleet.place_again(generation, self._demands(step))
                return
            except FleetError as error:
                refusal = error
            if refusal.reason in _NOT_KNOWN_YET and loop.time() < self._nodes_known_s:
                await self._something_changed(changed, self._nodes_known_s)
                continue
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


def _last_told(marks: Sequence[tuple[int, Started | Moved]]) -> tuple[str, int] | None:
    """Node and epoch that readers were told of last; None = of none yet."""
    if not marks:
        return None
    event = marks[-1][1]
    return (event.node if isinstance(event, Started) else event.to_node), event.epoch
