"""The head: its parts put together, and the operations that the edge calls.

Every operation either does what it says or raises FleetError and changes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from fleet_service.addresses import is_name
from fleet_service.domain.commands import HeldSession
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import Feature
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.attempt import AttemptContext
from fleet_service.runtime.discovery import Discovery, NoResolver
from fleet_service.runtime.drain import Drains
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.gauges import HeadGauges, read_gauges, read_summary
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.ids import Ids
from fleet_service.runtime.journal import Journal
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.ledger import RequestLedger
from fleet_service.runtime.node import Node
from fleet_service.runtime.node_info import node_info
from fleet_service.runtime.nodes import Nodes
from fleet_service.runtime.observer import FleetObserver, NullObserver
from fleet_service.runtime.operators import Operators
from fleet_service.runtime.protocols import Dialer, Resolver
from fleet_service.runtime.records import RequestAnswered, RevokeOwed, TermRaised
from fleet_service.runtime.recovery import Recovery, addresses_after, branch_after, term_after
from fleet_service.runtime.sessions import Sessions, unavailable
from fleet_service.runtime.settings import DiscoverySettings, HeadSettings
from fleet_service.runtime.store import StoreError
from fleet_service.runtime.tender import Tender
from fleet_service.runtime.views import CancelResult, ModelSummary, RequestKey, SessionView
from fleet_service.runtime.watch import FleetWatch

T = TypeVar("T")
A = TypeVar("A", SessionView, str)

log = structlog.get_logger(__name__)


class Head:
    """One head. Make it inside the event loop it runs on; `wall_clock` gives unix seconds."""

    def __init__(
        self,
        settings: HeadSettings,
        *,
        dialer: Dialer,
        rng: random.Random,
        wall_clock: Callable[[], float],
        observer: FleetObserver | None = None,
        resolver: Resolver | None = None,
        discovery: DiscoverySettings | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`kept`: what outlives the head; None = nothing does."""
        kept = Kept() if kept is None else kept
        saved = kept.saved
        self.journal: Journal = kept.journal
        loop = asyncio.get_running_loop()
        observer = NullObserver() if observer is None else observer
        ids = Ids(rng)
        self._settings = settings
        self._background: set[asyncio.Task[None]] = set()
        self._tender_task: asyncio.Task[None] | None = None
        self._draining = False
        self.fleet = Fleet(settings, loop.time, term_after(saved, int(wall_clock())), observer)
        self.branch = branch_after(saved, self.fleet.term)
        """Of what begins in this run, and of what goes on in it."""
        self.fleet.on_owed, self.fleet.on_term = self._owed, self._goes_on_in
        self.sessions = Sessions(self.fleet, settings, ids, loop.time, wall_clock, self.journal)
        self.nodes = Nodes(self.fleet, dialer, settings, rng, loop.time, wall_clock, orphans=self._met)
        context = AttemptContext(
            settings=settings,
            loop=loop,
            own_term=lambda: self.fleet.term,
            journal=self.journal,
            violated=self.nodes.violated,
        )
        self.generations = Generations(
            self.sessions, self.fleet, settings, ids, context, observer, wall_clock, self.branch
        )
        self.discovery = Discovery(
            self.fleet,
            self.nodes,
            resolver or NoResolver(),
            discovery or DiscoverySettings(),
            rng,
            loop.time,
            wall_clock,
            self._spawn,
        )
        self._watch = FleetWatch(
            self.fleet,
            settings,
            loop.time,
            wall_clock,
            info=lambda node: node_info(node, loop.time(), wall_clock()),
            summary=lambda: read_summary(
                self.fleet, self.sessions, self.generations, self.journal, stopping=self._draining
            ),
        )
        self.drains = Drains(
            self.fleet, self.sessions, self.generations, settings, loop.time, wall_clock, self._spawn
        )
        self.operators = Operators(
            kept,
            self.fleet,
            self.nodes,
            self.sessions,
            settings,
            self.discovery,
            self.drains,
            self._watch,
        )
        self._wall_clock = wall_clock
        self._ledger = RequestLedger(
            loop.time,
            settings.request_id_kept_s,
            settings.max_request_ids,
            self._answered_before,
            earlier=saved.term > 0,
        )
        self._recovery = Recovery(saved, self.sessions, self.generations, self.drains.start)
        self._listed = saved.listed
        self.discovery.restore_removed([address for address, there in saved.listed.items() if not there])
        self._recovery.restore()
        self.tender = Tender(
            self.fleet,
            self.sessions,
            self.generations,
            self._ledger,
            settings,
            loop.time,
            self.nodes.keeper_of,
            self._spawn,
        )

    # Life

    async def start(self, addresses: Sequence[str]) -> None:
        """Take in the nodes at `addresses`, or at all of a name's, and wait, briefly, for first answers."""
        for address in addresses:
            if not self._listed.get(address, True):
                log.warning(
                    "node_not_dialed", address=address, why="an operator removed it; `fleet nodes add`"
                )
        addresses = addresses_after(tuple(addresses), self._listed)
        nodes = [self.nodes.add(address) for address in addresses if not is_name(address)]
        await self._recovery.go_on()
        self._tender_task = asyncio.get_running_loop().create_task(self.tender.run(), name="tender")
        await self.nodes.first_try(*nodes)
        self.nodes.tell_unanswered(*nodes)
        # After those: a node that has an address of its own here is known by that one.
        await self.discovery.start([address for address in addresses if is_name(address)])
        self._recovery.callers_may_come()
        asyncio.get_running_loop().call_later(
            self._settings.lease_s, lambda: self.journal.put(*self._recovery.leases_ran_out())
        )

    def drain(self) -> None:
        """Take no more new work; what runs goes on."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    async def stop(self, grace_s: float) -> None:
        """Drain, let generations end within `grace_s`, cancel the others, and let go of the nodes."""
        self.drain()
        await self.generations.let_go(grace_s)
        self._watch.close()
        await self.discovery.stop()
        await self.nodes.stop(comes_back=self.journal.keeps)
        tasks = list(self._background)
        if self._tender_task is not None:
            tasks.append(self._tender_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """At least one node can be used."""
        return self.journal.trouble is None and any(node.usable for node in self.fleet.nodes)

    async def gauges(self) -> HeadGauges:
        """What it holds now, as numbers; each node as it was when its turn came."""
        nodes = await self.operators.all_nodes()
        return read_gauges(
            self.fleet,
            self.sessions,
            self.generations,
            nodes,
            draining=self._draining,
            store_failing=self.journal.trouble is not None,
        )

    # Sessions. `owner` names the caller, whose alone they are; None = whose ever they are.

    async def create_session(
        self,
        session_id: str,
        spec: SessionSpec,
        token_ids: Sequence[int],
        key: RequestKey | None,
        owner: str | None = None,
    ) -> SessionView:
        """A new session, bound to a node; `session_id` "" = the head makes one."""
        self._open_for_work()

        async def make() -> SessionView:
            return self.sessions.create(session_id, spec, token_ids, owner or "").view()

        return await self._kept(key, make)

    async def told(self, read: Callable[[], T]) -> T:
        """What `read` gives, or why it refuses, once that may be told of: nobody sees what may yet be lost.

        Raises STORE_UNAVAILABLE as well, while nothing can be kept.
        """
        try:
            answer = read()
        except FleetError:
            await self._settled(None, patient=False)
            raise
        return await self._settled(answer, patient=False)

    def get_session(self, session_id: str, owner: str | None = None) -> SessionView:
        return self.sessions.get(session_id, owner).view()

    async def context_of(self, session_id: str, owner: str | None = None) -> Sequence[int]:
        session = await self.sessions.here(self.sessions.get(session_id, owner))
        return await self._settled(session.context.token_ids(), patient=False)

    def list_sessions(
        self,
        page_size: int,
        page_token: str,
        state: SessionState | None,
        node: str,
        owner: str | None = None,
    ) -> tuple[list[SessionView], str]:
        return self.sessions.page(page_size, page_token, state, node, owner)

    async def append_tokens(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_length: int | None,
        truncate_to: int | None,
        key: RequestKey | None,
        owner: str | None = None,
    ) -> SessionView:
        async def make() -> SessionView:
            self._check_store()
            return await self.sessions.append(session_id, token_ids, expected_length, truncate_to, owner)

        return await self._kept(key, make)

    async def park_session(self, session_id: str, owner: str | None = None) -> SessionView:
        return await self._done(self.sessions.park(session_id, owner))

    async def resume_session(self, session_id: str, owner: str | None = None) -> SessionView:
        self._open_for_work()
        return await self._done(self.sessions.resume(session_id, owner))

    async def finish_session(self, session_id: str, owner: str | None = None) -> SessionView:
        """End a session; what it runs ends as CANCELLED."""
        return await self._done(self._finish(session_id, owner))

    async def _finish(self, session_id: str, owner: str | None) -> SessionView:
        session = self.sessions.get(session_id, owner)
        self.generations.check_not_left(session)
        view = session.view()
        self.sessions.remove(session)
        self.generations.cancel_session(session)
        await session.settle()
        return view

    # Generations

    async def generate(
        self,
        session_id: str,
        generation_id: str,
        spec: GenerationSpec,
        key: RequestKey | None,
        trace: object | None = None,
        owner: str | None = None,
    ) -> Generation:
        """Start a generation; `generation_id` "" = the head makes one. `trace` goes to the observer."""

        async def make() -> str:
            self._open_for_work()
            generation = await self.generations.start(session_id, generation_id, spec, trace, owner)
            return generation.generation_id

        return await self._once(key, make)

    async def complete(
        self,
        spec: SessionSpec,
        token_ids: Sequence[int],
        generation_spec: GenerationSpec,
        generation_id: str,
        key: RequestKey | None,
        trace: object | None = None,
        owner: str | None = None,
    ) -> Generation:
        """A session for one answer."""

        async def make() -> str:
            self._open_for_work()
            generation = await self.generations.complete(
                spec, token_ids, generation_spec, generation_id, trace, owner or ""
            )
            return generation.generation_id

        return await self._once(key, make)

    def list_models(self) -> list[ModelSummary]:
        return self.operators.list_models()

    def find_generation(self, generation_id: str, owner: str | None = None) -> Generation:
        return self.generations.find(generation_id, owner)

    async def cancel_generation(self, generation_id: str, owner: str | None = None) -> CancelResult:
        async def cancel() -> CancelResult:
            return self.generations.cancel(generation_id, owner)

        return await self._done(cancel())

    async def _once(self, key: RequestKey | None, make: Callable[[], Coroutine[Any, Any, str]]) -> Generation:
        return self.generations.find(await self._kept(key, make))

    async def _kept(self, key: RequestKey | None, make: Callable[[], Coroutine[Any, Any, A]]) -> A:
        """What `make` gives, once, and once it may be told of."""

        async def make_and_keep() -> A:
            answer = await self._or_refused(make())
            if key is not None:
                until = self._wall_clock() + self._settings.request_id_kept_s
                kept = RequestAnswered(key.owner, key.request_id, key.fingerprint, answer, until)
                self.journal.put(kept)
            return await self._settled(answer)

        return await self._ledger.once(key, make_and_keep)

    async def _answered_before(self, key: RequestKey) -> tuple[bytes, SessionView | str] | None:
        try:
            found = await self.journal.answered(key.owner, key.request_id)
        except StoreError as error:
            log.error("request_not_read", request_id=key.request_id, error=str(error))  # noqa: TRY400 - it says all
            raise unavailable() from error
        alive = found is not None and found.until > self._wall_clock()
        return (found.fingerprint, found.answer) if found is not None and alive else None

    async def _done(self, work: Coroutine[Any, Any, T]) -> T:
        """What an operation gives, or why it refuses, once that may be told of."""
        return await self._settled(await self._or_refused(work))

    async def _or_refused(self, work: Coroutine[Any, Any, T]) -> T:
        """The refusal tells of what there is, too."""
        try:
            return await work
        except FleetError as refusal:
            if refusal.reason is not Reason.STORE_UNAVAILABLE:
                await self._settled(None, patient=False)
            raise

    async def _settled(self, answer: T, *, patient: bool = True) -> T:
        """`answer`, once it may be told of. Raises STORE_UNAVAILABLE."""
        try:
            await self.journal.settled(patient=patient)
        except StoreError as error:
            raise unavailable() from error
        return answer

    def _met(self, node: Node, held: Sequence[HeldSession]) -> Sequence[HeldSession]:
        """A node is connected: what of what it holds it should not."""
        self.journal.put(*self._recovery.node_is_back(node), *self._recovery.owed_to(node))
        return self.sessions.orphans(node, [self._unless_unknown(each) for each in held])

    def _owed(self, node: Node, session_id: str, epoch: int, settled: bool) -> None:  # noqa: FBT001 - as called
        """Nodes that say what they hold are found out by that; the others' revokes outlive the head."""
        if self.journal.keeps and Feature.RECONCILE not in node.features and node.incarnation:
            self.journal.put(RevokeOwed(node.name, node.incarnation, session_id, epoch, settled))

    def _goes_on_in(self, term: int) -> None:
        self.journal.put(TermRaised(term))

    def _unless_unknown(self, held: HeldSession) -> HeldSession:
        """A run that an earlier head began and did not keep: its id may come again, and mean another run."""
        known = all(self.generations.knows(generation_id) for generation_id in held.generation_ids)
        return held if known else replace(held, fenced=True)

    def _check_store(self) -> None:
        if self.journal.trouble is not None:
            raise unavailable()

    def _open_for_work(self) -> None:
        self._check_store()
        if self._draining:
            raise FleetError(
                Reason.HEAD_DRAINING,
                "the head is shutting down; retry, elsewhere if you can",
                retry_after_s=1.0,
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
