"""Keeps one node connected: dials, listens, redials at once when the link breaks, then for ever.

Also its courier: the revokes that are owed go out here. One keeper task and one courier task per node.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from fleet_service.domain.commands import HeldSession, Introduction, Refusal, RefusalCode, Revoke
from fleet_service.domain.epochs import term_of
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, NodeState, Report
from fleet_service.runtime.dials import Dials
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import Dialer, LinkError, LinkLostError, NodeLink
from fleet_service.runtime.settings import HeadSettings

log = structlog.get_logger(__name__)

COURIER_BATCH = 64
RELINK_PAUSE_S = 0.05
"""Between two redials of a link that has just broken."""

STABLE_S = 5.0
"""A link that lived longer did not die young."""

CLOSE_S = 2.0
"""How long a keeper that ends waits for its connections to."""

_SETTLED_BY = frozenset({RefusalCode.STALE_EPOCH, RefusalCode.UNKNOWN_SESSION})


class _Listener:
    """A link's listener for as long as the link is the node's current one."""

    def __init__(self, node: Node, lost: asyncio.Future[LinkError]) -> None:
        self._node = node
        self._lost = lost

    def on_sign(self) -> None:
        if not self._lost.done():
            self._node.sign_of_life()

    def on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        if not self._lost.done():
            self._node.sign_of_life()
            self._node.take_report(report, models)

    def on_leaving(self) -> None:
        if not self._lost.done():
            self._node.leaves()

    def on_lost(self, error: LinkError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)


class NodeKeeper:
    """The life of one node's connection.

    `introduce` gives the head's introduction; `admit` is asked about every hello and raises
    HandshakeRefusedError; `orphans` says what of the sessions a node holds it should not.
    """

    def __init__(
        self,
        node: Node,
        dialer: Dialer,
        settings: HeadSettings,
        rng: random.Random,
        dials: Dials,
        introduce: Callable[[], Introduction],
        admit: Callable[[Node, NodeHello], Awaitable[None]],
        orphans: Callable[[Node, Sequence[HeldSession]], Sequence[HeldSession]],
    ) -> None:
        self._node = node
        self._dialer = dialer
        self._settings = settings
        self._rng = rng
        self._dials = dials
        self._introduce = introduce
        self._admit = admit
        self._orphans = orphans
        self._lost: asyncio.Future[LinkError] | None = None
        self._died_young = 0
        self._closing: set[asyncio.Task[None]] = set()
        self.first_try = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled: connect, watch, reconnect; without haste where links keep dying young."""
        node, loop = self._node, asyncio.get_running_loop()
        try:
            lost = await self._connect_for_ever()
            while True:
                up_s = loop.time()
                error = await lost
                await self._dials.turnstile.through()
                self._died_young = 0 if loop.time() - up_s > STABLE_S else self._died_young + 1
                self._fell(error)
                left = node.leaving
                again = await self._relink() if self._died_young <= 1 and not left else None
                if again is None:
                    node.set_state(NodeState.DOWN, "it was stopped" if left else str(error))
                    node.relink_decided()
                    # One that is stopped may take a last connection while it goes.
                    await asyncio.sleep(self._pause_s(1 if left else self._died_young - 1))
                    again = await self._connect_for_ever()
                lost = again
        finally:
            self._close_link()
            node.relink_decided()
            if self._closing:
                await asyncio.wait(self._closing, timeout=CLOSE_S)

    def drop_link(self, why: str) -> None:
        """Close the link as broken, e.g. after the node violated the protocol; it is redialed."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(LinkLostError(why))

    def _fell(self, error: LinkError) -> None:
        node = self._node
        self._close_link()
        if not node.leaving:
            node.count_failure(FailureClass.LINK_LOST)
        node.set_state(NodeState.SUSPECT, f"link lost, redialing: {error}")
        node.fail_running(FailureClass.LINK_LOST, str(error))
        log.info("node_left" if node.leaving else "node_link_lost", node=node.name, error=str(error))

    def _close_link(self) -> None:
        """Let go of the link; a redial does not wait for the old connection's end."""
        link = self._node.unlinked()
        if link is not None:
            closing = asyncio.get_running_loop().create_task(link.close(), name=f"close {self._node.address}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _relink(self) -> asyncio.Future[LinkError] | None:
        """Redial at once, and for `relink_s` unless nobody listens there; None when the node is not back."""
        try:
            async with asyncio.timeout(self._settings.relink_s):
                return await self._connect_soon()
        except (LinkError, TimeoutError):
            return None
        except Exception:
            log.exception("redial_failed", node=self._node.name)
            return None

    async def _connect_soon(self) -> asyncio.Future[LinkError]:
        while True:
            try:
                return await self._connect()
            except LinkLostError as error:
                if error.refused:
                    raise
                await asyncio.sleep(RELINK_PAUSE_S)
                await self._dials.turnstile.through()

    async def _connect_for_ever(self) -> asyncio.Future[LinkError]:
        def remember(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            why = str(error)
            if not isinstance(error, LinkError) and why != self._node.state_detail:
                log.error("dial_failed", node=self._node.name, exc_info=error)
            if self._node.state is not NodeState.DOWN or self._node.state_detail != why:
                self._node.set_state(NodeState.DOWN, why)
                log.warning("node_down", node=self._node.name, address=self._node.address, why=why)
            self.first_try.set()

        retrying = AsyncRetrying(
            sleep=asyncio.sleep,
            wait=self._jittered,
            retry=retry_if_exception_type(Exception),
            after=remember,
        )
        self._dials.failing += 1
        try:
            return await retrying(self._connect_in_turn)
        finally:
            self._dials.failing -= 1

    def _jittered(self, state: RetryCallState) -> float:
        return self._pause_s(state.attempt_number)

    def _pause_s(self, failures: int) -> float:
        """Jittered, under a cap that doubles with each failure up to redial_max_s; 0 for none."""
        if failures <= 0:
            return 0.0
        longest_s = self._dials.longest_pause_s(self._settings.redial_max_s)
        cap = min(longest_s, self._settings.redial_min_s * 2 ** min(failures, 16))
        return self._rng.uniform(self._settings.redial_min_s, cap)

    async def _connect_in_turn(self) -> asyncio.Future[LinkError]:
        await self._dials.turnstile.through()
        return await self._connect()

    async def _connect(self) -> asyncio.Future[LinkError]:
        """A connection that the head has accepted; resolves when it is lost."""
        node = self._node
        lost: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        link = await self._dialer.connect(node.address, self._introduce(), _Listener(node, lost))
        try:
            held = await self._agree(link)
        except BaseException:
            await link.close()
            raise
        finally:
            node.arriving = None
        self._lost = lost
        self._came_up(link)
        for orphan in self._orphans(node, held):
            node.owe_revoke(orphan.session_id, orphan.epoch, surely_held=True)
        self.first_try.set()
        return lost

    async def _agree(self, link: NodeLink) -> Sequence[HeldSession]:
        """The head's own check of who is there, and a clean start with one it has not met.

        Gives what the node holds, where it can say so.
        """
        node, hello = self._node, link.hello
        await self._admit(node, hello)
        # Removed and added again, back after another run of the node, or away for a lease: what it may still
        # hold of this head is not known here.
        own_term = self._introduce().term
        known = node.hello is not None and node.hello.incarnation == hello.incarnation
        if not known and term_of(hello.highest_epoch) == own_term:
            await link.renew_lease(0.0, own_term)
        elif node.owes_lease_end:
            for term in list(node.leases):
                await link.renew_lease(0.0, term)
            node.nothing_is_bound()
        return await link.reconcile() if Feature.RECONCILE in hello.features else ()

    def _came_up(self, link: NodeLink) -> None:
        node, hello = self._node, link.hello
        again = node.hello is not None and node.hello.incarnation == hello.incarnation
        if not again:
            node.new_life()
            node.report = None
        node.hello = hello
        node.leaving = False
        node.linked(link)
        node.ever_heard = True
        node.models = {model.name: model for model in hello.models}
        node.sign_of_life()
        node.take_report(hello.report, hello.models)
        node.set_state(NodeState.UP, "")
        node.relink_decided()
        node.outbox_wake.set()
        log.info(
            "node_up",
            node=node.name,
            address=node.address,
            incarnation=hello.incarnation,
            again=again,
            models=sorted(node.models),
            lanes=node.lanes,
        )

    async def deliver_revokes(self) -> None:
        """Until cancelled: send what the outbox holds, whenever there is something and a link."""
        node = self._node
        while True:
            await node.outbox_wake.wait()
            node.outbox_wake.clear()
            while node.outbox and (link := node.link) is not None:
                batch = [Revoke(s, owed.epoch) for s, owed in islice(node.outbox.items(), COURIER_BATCH)]
                answers = await asyncio.gather(*map(link.revoke, batch), return_exceptions=True)
                settled = [self._settles(*each) for each in zip(batch, answers, strict=True)]
                if not all(settled):
                    break  # kept; the tender wakes the courier again

    def _settles(self, revoke: Revoke, answer: Refusal | BaseException | None) -> bool:
        if isinstance(answer, LinkError):
            log.info("revoke_unanswered", node=self._node.name, session=revoke.session_id, error=str(answer))
            return False
        if isinstance(answer, BaseException):
            raise answer
        if answer is None or answer.code in _SETTLED_BY:
            self._node.settle_revoke(revoke)
            return True
        log.warning("revoke_refused", node=self._node.name, session=revoke.session_id, code=answer.code.value)
        return False

    async def renew_lease(self, term: int) -> None:
        """Renew a lease. One that had run out shows when a session is next used: FENCED, bound anew."""
        node, link = self._node, self._node.link
        if link is None:
            return
        asked_at = asyncio.get_running_loop().time()
        try:
            renewed = await link.renew_lease(self._settings.lease_s, term)
        except LinkError as error:
            log.info("lease_not_renewed", node=node.name, error=str(error))
            return
        if renewed:
            node.leases[term] = asked_at
        elif node.leases.get(term, asked_at) < asked_at:
            del node.leases[term]  # the next binding starts another
            log.info("lease_had_run_out", node=node.name, sessions=node.sessions)
