"""The background tender: nodes, queues, leases, outboxes, old sessions and the books, once a tick.

Nothing here does work per session per tick: what is swept is kept in order of age. Where there is much to do
at once, others have their turn in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from fleet_service.domain.placement import Demand
from fleet_service.runtime.fairness import in_turns
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.keeper import NodeKeeper
from fleet_service.runtime.ledger import RequestLedger
from fleet_service.runtime.node import Node
from fleet_service.runtime.reservation import Grant
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.silence import judge_silence

log = structlog.get_logger(__name__)

# A tick this much late means that the head itself did not run: its nodes' silence is not theirs.
OWN_STALL_S = 0.5
# After that, what came meanwhile is let in for so long before a node is judged.
LET_IN_S = 0.2
# Waiting attempts looked at for a move, per tick.
REBALANCE_LIMIT = 64
# Nodes that are looked after, where nothing is to be done for them, before others have their turn.
LOOKED_AFTER_AT_ONCE = 256
# Sessions, generations and request ids that are swept before others have their turn.
SWEPT_AT_ONCE = 100


class Tender:
    """Runs every `tick_s`, or oftener where the silence limit asks for it."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        generations: Generations,
        ledger: RequestLedger,
        settings: HeadSettings,
        clock: Callable[[], float],
        keeper_of: Callable[[Node], NodeKeeper | None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._generations = generations
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._keeper_of = keeper_of
        self._spawn = spawn
        self._renewing: set[tuple[Node, int]] = set()
        self._rebalance_next: Node | None = None
        self.period_s = min(settings.tick_s, settings.silence_s / 4)

    async def run(self) -> None:
        """Until cancelled."""
        due_s = self._clock() + self.period_s
        while True:
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            now_s = self._clock()
            if now_s - due_s > OWN_STALL_S:
                self._excuse(now_s - due_s)
                await asyncio.sleep(LET_IN_S)
                now_s = self._clock()
            await self.tick(now_s)
            due_s = now_s + self.period_s

    async def tick(self, now_s: float) -> None:
        """One round."""
        await judge_silence(self._fleet.nodes, self._settings.silence_s, now_s)
        async for node in in_turns(self._fleet.nodes, LOOKED_AFTER_AT_ONCE):
            if self._look_after(node, now_s):
                await asyncio.sleep(0)  # what was woken is carried out before the next is
        await self._rebalance()
        await _in_pieces(partial(self._sessions.unbind_idle, now_s, SWEPT_AT_ONCE))
        await _in_pieces(partial(self._sessions.expire, now_s, SWEPT_AT_ONCE))
        await _in_pieces(partial(self._generations.forget_old, now_s, SWEPT_AT_ONCE))
        await _in_pieces(partial(self._ledger.expire, SWEPT_AT_ONCE))
        self._check_books()

    def _excuse(self, stalled_s: float) -> None:
        log.warning("head_stalled", stalled_s=round(stalled_s, 3))
        for node in self._fleet.nodes:
            node.last_sign_s += stalled_s

    def _look_after(self, node: Node, now_s: float) -> bool:
        """Whether there was anything to do."""
        settings, busy = self._settings, False
        if node.link is None and now_s - node.last_sign_s > settings.lease_s:
            node.lease_ran_out()
        elif node.outbox:
            node.outbox_wake.set()
            busy = True
        if node.leases and node.usable:
            for term, renewed_s in node.leases.items():
                if now_s - renewed_s >= settings.lease_renew_s:
                    self._renew(node, term)
                    busy = True
        return busy

    def _renew(self, node: Node, term: int) -> None:
        keeper, renewal = self._keeper_of(node), (node, term)
        if keeper is None or renewal in self._renewing:
            return
        self._renewing.add(renewal)

        async def renew() -> None:
            try:
                await keeper.renew_lease(term)
            finally:
                self._renewing.discard(renewal)

        self._spawn(renew())

    async def _rebalance(self) -> None:
        """Waiting attempts move when elsewhere they would be done in less than half of what is left here.

        One move a tick to any node, so that each is judged by what the one before has left. The next tick
        begins with the nodes that this one did not come to.
        """
        waiting = [node for node in self._fleet.nodes if node.queue]
        begin = next((at for at, node in enumerate(waiting) if node is self._rebalance_next), 0)
        self._rebalance_next = None
        looked_at = 0
        for node in [*waiting[begin:], *waiting[:begin]]:
            for place, reservation in enumerate(node.queue):
                if looked_at >= REBALANCE_LIMIT:
                    self._rebalance_next = node
                    return
                if looked_at:
                    await asyncio.sleep(0)
                looked_at += 1
                if reservation.ticket is None or reservation.granted.done():
                    continue  # it has moved on while others had their turn
                if self._better_elsewhere(node, reservation.demand(), len(node.running) + place):
                    node.send_elsewhere(reservation, Grant.MOVED)
                    break

    def _better_elsewhere(self, node: Node, demand: Demand, ahead: int) -> bool:
        soonest = self._fleet.soonest_free(demand)
        if soonest is None or soonest[0] is node:
            return False
        return soonest[1] < self._settings.rebalance_ratio * self._fleet.left_here_ms(node, demand, ahead)

    def _check_books(self) -> None:
        wrong = [node for node in self._fleet.nodes if not node.books_balance]
        self._fleet.observer.books_checked(len(wrong))
        for node in wrong:
            log.error(
                "books_do_not_balance",
                node=node.name,
                reservations=node.reservations,
                running=len(node.running),
                queued=len(node.queue),
            )


async def _in_pieces(sweep: Callable[[], int]) -> None:
    """Sweep until there is nothing left; `sweep` does a piece, and gives how many it was."""
    while True:
        if sweep() < SWEPT_AT_ONCE:
            return
        await asyncio.sleep(0)
