"""A node as the head sees it: state, lanes and what waits for them, reservations, and what is owed to it.

Everything here is synchronous bookkeeping; keeper.py does the talking. A Node is a placement Candidate.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from fleet_service.domain.commands import Revoke
from fleet_service.domain.epochs import term_of
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.lane_queue import LaneQueue
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, NodeState, Report
from fleet_service.domain.placement import Demand, is_hot
from fleet_service.domain.specs import Qos
from fleet_service.runtime.drain_record import DrainRecord
from fleet_service.runtime.protocols import NodeLink
from fleet_service.runtime.reservation import Grant, Reservation
from fleet_service.runtime.settings import HeadSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OwedRevoke:
    """A revoke owed up to `epoch`. `surely_held`: the node confirmed the binding, so its lease covers it."""

    epoch: int
    surely_held: bool


class Node:
    """One node. Attributes named in placement.Candidate are read by placement as they are."""

    def __init__(self, address: str, settings: HeadSettings, clock: Callable[[], float]) -> None:
        self.address = self.name = address
        self._settings = settings
        self._clock = clock
        self.state = NodeState.CONNECTING
        self.state_detail = ""
        self.cordoned = False
        self.cordon_note = ""
        self.cordoned_by = ""
        self.cordoned_at: float | None = None  # unix seconds
        self.drain: DrainRecord | None = None  # until it is uncordoned
        self.removed = False
        # The entry it was found by, "" where it was given by its address or dialed in.
        self.found_by = ""
        self.unlisted = False
        # While the head takes it in, what it said; the identity found here that is connected elsewhere.
        self.arriving: NodeHello | None = None
        self.other_way_to = ""
        self.hello: NodeHello | None = None
        self.link: NodeLink | None = None
        self.models: dict[str, ModelInfo] = {}
        self.report: Report | None = None
        self.report_at_s: float | None = None
        self._lanes_told = False
        self.was_hot = False
        self.last_sign_s = clock()
        self.ever_heard = False
        self.busy_until_s = 0.0
        # Sessions are bound to a life of the node; a new incarnation, or a lease run out, starts another.
        self.life = 0
        self.leaving = False
        self.left_life = -1
        """The life in which it last said that it leaves."""
        self.owes_lease_end = False
        self.sessions = 0
        self.generating_sessions = 0  # of them
        # When the lease of each of this head's terms that has anything here was last renewed.
        self.leases: dict[int, float] = {}
        self.running: dict[Reservation, None] = {}
        self._replaying: set[Reservation] = set()  # of them
        self.queue: LaneQueue[Reservation] = LaneQueue(settings.queue_limit_per_node)
        self.reservations = 0
        self.outbox: dict[str, OwedRevoke] = {}
        self.outbox_wake = asyncio.Event()
        self.outbox_empty = asyncio.Event()
        self.outbox_empty.set()
        self.failures: Counter[str] = Counter()
        self.on_change: Callable[[Node], None] = lambda _node: None
        self.on_heat: Callable[[Node], None] = lambda _node: None
        """Called when it has become hot, or is so no more."""
        self.on_room: Callable[[], None] = lambda: None
        self.on_owed: Callable[[Node, str, int, bool], None] = lambda *_: None
        """Called with a session and an epoch when their revoke is owed, and (True) when it is no longer."""
        self._gone: asyncio.Future[None] | None = None
        self._relinked: asyncio.Future[None] | None = None

    # What it is

    @property
    def labels(self) -> Mapping[str, str]:
        return self.hello.labels if self.hello else {}

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation if self.hello else ""

    @property
    def features(self) -> frozenset[Feature]:
        return self.hello.features if self.hello else frozenset()

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def lanes(self) -> int:
        """How many attempts the head dispatches at once."""
        own = self.report.max_lanes if self.report else 0
        wanted = self._settings.lanes_per_node or own or self._settings.default_lanes
        return min(wanted, self._settings.max_lanes_per_node)

    def prefill_tokens_per_s(self) -> int:
        """As last reported; 0 = unknown."""
        return self.report.prefill_tokens_per_s if self.report else 0

    @property
    def usable(self) -> bool:
        """What was placed here may go on."""
        return self.state is NodeState.UP and self.link is not None and not self.removed

    @property
    def open_to_work(self) -> bool:
        """New work may be placed here while it is usable."""
        return not self.cordoned and not self.unlisted and not self.leaving

    @property
    def reports_stale(self) -> bool:
        return (
            self.report_at_s is not None and self._clock() - self.report_at_s > self._settings.report_stale_s
        )

    @property
    def books_balance(self) -> bool:
        return self.reservations == len(self.running) + len(self.queue)

    # Cordon

    def cordon(self, by: str, note: str, unix_s: float) -> None:
        """No new work from now on."""
        self.cordoned, self.cordon_note = True, note
        self.cordoned_by, self.cordoned_at = by, unix_s
        self.on_change(self)

    def uncordon(self) -> None:
        self.cordoned, self.cordon_note = False, ""
        self.cordoned_by, self.cordoned_at, self.drain = "", None, None
        self.on_change(self)

    def take_cordon_of(self, other: Node) -> None:
        """The identity of `other` lives here now: what was ordered for it is ordered for this one."""
        self.cordoned, self.cordon_note = other.cordoned, other.cordon_note
        self.cordoned_by, self.cordoned_at = other.cordoned_by, other.cordoned_at
        self.drain, other.drain = other.drain, None
        if self.drain is not None:
            self.drain.node = self

    def leaves(self) -> None:
        """It is being stopped in order; what it loses is no fault of a request."""
        self.leaving = True
        self.left_life = self.life

    # Signs of life and state

    def sign_of_life(self) -> None:
        """Anything came from it."""
        self.last_sign_s = self._clock()
        if self.state is NodeState.SUSPECT and self.link is not None:
            self.set_state(NodeState.UP, "")

    def take_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        """The newest sample wins, by the node's own clock."""
        if self.report is not None and report.sampled_at_ms < self.report.sampled_at_ms:
            return
        now = self._clock()
        self.report = report
        self.report_at_s = now
        self._tell_of_lanes(report.max_lanes)
        if models:
            self.models = {model.name: model for model in models}
            self.on_change(self)
        hot = is_hot(self, self._settings.pool_high_pct, now)
        if hot is not self.was_hot:
            self.was_hot = hot
            self.on_heat(self)
        self.dispatch()

    def _tell_of_lanes(self, own: int) -> None:
        """Warn, once, of lanes that are not used because the head believes no node to have so many."""
        most = self._settings.max_lanes_per_node
        if own > most and not self._settings.lanes_per_node and not self._lanes_told:
            self._lanes_told = True
            log.warning(
                "lanes_capped",
                node=self.name,
                has=own,
                used=most,
                advice="raise head.max_lanes_per_node to use all",
            )

    def set_state(self, state: NodeState, detail: str) -> None:
        """Enter a state; out of UP, what waits here is sent elsewhere."""
        self.state, self.state_detail = state, detail
        if state is NodeState.UP:
            self.dispatch()
        else:
            self._evict_waiting()
        self.on_change(self)

    def fail_running(self, kind: FailureClass, detail: str) -> None:
        """Tell every running attempt that the node failed under it."""
        for reservation in list(self.running):
            if reservation.on_lost is not None:
                reservation.on_lost(kind, detail)

    def new_life(self) -> None:
        """Another incarnation: nothing is bound here, and nothing owed to the one that is gone."""
        self.nothing_is_bound()
        self._owe_no_more(dict(self.outbox))

    def nothing_is_bound(self) -> None:
        """What was bound here is freed there."""
        self.life += 1
        self.sessions = 0
        self.generating_sessions = 0
        self.owes_lease_end = False
        self.leases.clear()

    # Relinking: a broken link is redialed at once, and attempts wait for the verdict

    def linked(self, link: NodeLink) -> None:
        self.link = link
        self._gone = asyncio.get_running_loop().create_future()

    def unlinked(self) -> NodeLink | None:
        """The link is no more; a redial is under way."""
        link, self.link = self.link, None
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._relinked is None or self._relinked.done():
            self._relinked = asyncio.get_running_loop().create_future()
        return link

    async def link_gone(self, link: NodeLink, within_s: float) -> bool:
        """True once `link` is the node's link no more; False when it still is after `within_s`."""
        if self.link is link and self._gone is not None:
            await asyncio.wait({self._gone}, timeout=within_s)
        return self.link is not link

    def relink_decided(self) -> None:
        if self._relinked is not None and not self._relinked.done():
            self._relinked.set_result(None)

    async def relink_verdict(self) -> None:
        """Wait until a redial under way has succeeded or failed; at once when there is none."""
        if self._relinked is not None and not self._relinked.done():
            await asyncio.shield(self._relinked)

    # Reservations, lanes and the queue at the head

    def reserve(
        self, qos: Qos, demand: Callable[[], Demand], *, replays: bool = False, generation_id: str = ""
    ) -> Reservation:
        """Count an attempt here and let it wait for a lane. Raises QueueFullError.

        `replays`: it goes on with what failed elsewhere. At most `replays_at_once` prefill at a time.
        """
        granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        reservation = Reservation(self, demand, granted, replays=replays, generation_id=generation_id)
        reservation.ticket = self.queue.push(reservation, int(qos))
        self.reservations += 1
        self.dispatch()
        return reservation

    def dispatch(self) -> None:
        """Give free lanes to those that wait."""
        while self.queue and self.usable and len(self.running) < self.lanes:
            reservation = self._next_waiting()
            if reservation is None:
                break
            reservation.ticket = None
            self.running[reservation] = None
            if reservation.replays:
                self._replaying.add(reservation)
            if not reservation.granted.done():
                reservation.granted.set_result(Grant.LANE)
        self.on_room()

    @property
    def may_replay(self) -> bool:
        """Fewer prefill again here, after a failure or a move, than may."""
        return len(self._replaying) < self._settings.replays_at_once

    @property
    def has_room_for_move(self) -> bool:
        """What runs elsewhere can go on here at once, and takes no lane that somebody waits for."""
        return self.usable and len(self.running) < self.lanes and not self.queue and self.may_replay

    def _next_waiting(self) -> Reservation | None:
        """The first in line; past those that replay, while as many as may are at it."""
        if self.may_replay:
            return self.queue.pop()
        for reservation in self.queue:
            if not reservation.replays and reservation.ticket is not None:
                self.queue.remove(reservation.ticket)
                return reservation
        return None

    def replayed(self, reservation: Reservation) -> None:
        """It has what was prefilled again."""
        self._replaying.discard(reservation)
        self.dispatch()

    def forget(self, reservation: Reservation) -> None:
        """Reservation.release() calls this, once."""
        self.reservations -= 1
        if reservation.ticket is not None:
            self.queue.remove(reservation.ticket)
            reservation.ticket = None
        self.running.pop(reservation, None)
        self._replaying.discard(reservation)
        if not reservation.granted.done():
            reservation.granted.cancel()
        self.dispatch()

    def send_elsewhere(self, reservation: Reservation, grant: Grant) -> None:
        """Take a waiting attempt out of the queue; it stays counted until it releases."""
        if not reservation.granted.done():
            reservation.granted.set_result(grant)

    def _evict_waiting(self) -> None:
        for reservation in list(self.queue):
            self.send_elsewhere(reservation, Grant.EVICTED)

    # What is owed

    def owe_revoke(self, session_id: str, epoch: int, *, surely_held: bool) -> None:
        """The node must free `session_id` up to `epoch`; kept until answered or settled otherwise."""
        owed = self.outbox.get(session_id)
        if owed is None or epoch > owed.epoch:
            self.outbox[session_id] = OwedRevoke(epoch, surely_held)
            self.outbox_wake.set()
            self.outbox_empty.clear()
            if owed is not None:
                self.on_owed(self, session_id, owed.epoch, True)
            self.on_owed(self, session_id, epoch, False)

    def settle_revoke(self, revoke: Revoke) -> None:
        """The node answered it."""
        owed = self.outbox.get(revoke.session_id)
        if owed is not None and owed.epoch == revoke.epoch:
            self._owe_no_more({revoke.session_id: owed})

    def lease_ran_out(self) -> None:
        """Away for a lease: what it surely held is forgotten here, and freed there on its return.

        An Assign that was on its way may yet be executed, so its revoke stays owed; it could also start the
        lease anew for all the rest, which is why the lease is ended and not just taken to have run out.
        """
        self.owes_lease_end = True
        self._owe_no_more({name: owed for name, owed in self.outbox.items() if owed.surely_held})

    def _owe_no_more(self, settled: Mapping[str, OwedRevoke]) -> None:
        for session_id, owed in settled.items():
            del self.outbox[session_id]
            self.on_owed(self, session_id, owed.epoch, True)
        if not self.outbox:
            self.outbox_empty.set()

    def unlearn(self) -> None:
        """What lived at this address lives elsewhere now: nothing is known of it any more."""
        self.new_life()
        self.hello = self.report = self.report_at_s = None
        self.models = {}
        self.on_change(self)

    def assigned(self, epoch: int) -> None:
        """The node confirmed a binding, which starts or renews the lease of its term."""
        self.leases[term_of(epoch)] = self._clock()

    def adopted(self, epoch: int) -> None:
        """It holds a binding of an earlier run of the head, whose lease may be about to run out."""
        self.leases.setdefault(term_of(epoch), self._clock() - self._settings.lease_renew_s)

    def count_failure(self, kind: FailureClass) -> None:
        self.failures[kind.value] += 1
