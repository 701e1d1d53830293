"""The sessions: made, read, appended to, parked, resumed, finished, unbound when idle, expired.

Which operation is allowed when is domain/session_table.py; here it is carried out.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

import structlog

from fleet_service.domain.commands import HeldSession
from fleet_service.domain.context import Context
from fleet_service.domain.errors import FleetError, Reason, invalid
from fleet_service.domain.placement import window_tokens
from fleet_service.domain.session_table import SessionOp, SessionState, apply
from fleet_service.domain.specs import Sampling, SessionSpec
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.ids import Ids
from fleet_service.runtime.journal import Journal
from fleet_service.runtime.node import Node
from fleet_service.runtime.records import (
    ContextExtended,
    SavedSession,
    SessionBound,
    SessionGone,
    SessionKept,
)
from fleet_service.runtime.session import Session
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.store import StoreError
from fleet_service.runtime.views import SessionView

log = structlog.get_logger(__name__)

SCAN_LIMIT = 10_000
"""Sessions looked at for one page of a filtered list; a page may come back short, with a token."""

LEAVE_AT_ONCE = 1_000
"""Sessions looked at before others have their turn, when a node is drained."""


class Sessions:
    """All sessions of the head. `clock` is the loop's, `wall_clock` gives unix seconds."""

    def __init__(
        self,
        fleet: Fleet,
        settings: HeadSettings,
        ids: Ids,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        journal: Journal,
    ) -> None:
        self._journal = journal
        self._fleet = fleet
        self._settings = settings
        self._ids = ids
        self._clock = clock
        self._wall_clock = wall_clock
        self._by_id: dict[str, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._numbers: list[int] = []
        self._last_number = 0
        self._context_tokens = 0
        self._parked = 0
        # Both by last use, the longest unused first, so that housekeeping costs what it does. Awake: those
        # bound to a node, or with a context that need not be here.
        self._by_use: OrderedDict[str, Session] = OrderedDict()
        self._awake_by_use: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def parked(self) -> int:
        """How many are parked."""
        return self._parked

    @property
    def context_tokens(self) -> int:
        """Tokens of all contexts together."""
        return self._context_tokens

    # Making and finding

    def create(
        self, session_id: str, spec: SessionSpec, token_ids: Sequence[int], owner: str = ""
    ) -> Session:
        """A session, bound to a node. Raises FleetError: it exists, a limit, or why it cannot be placed."""
        session = self.draft(session_id, spec, token_ids, owner)
        self._fleet.bind(session, self._fleet.session_demand(session, grown=False))
        self.keep(session)
        return session

    def draft(self, session_id: str, spec: SessionSpec, token_ids: Sequence[int], owner: str = "") -> Session:
        """A session nobody knows yet and that no node was chosen for."""
        if session_id in self._by_id:
            raise FleetError(
                Reason.SESSION_ALREADY_EXISTS,
                f"session {session_id} is there already; choose another id, or none",
                metadata={"sessionId": session_id},
                resource=_resource(session_id),
            )
        if len(self._by_id) >= self._settings.max_sessions:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"the head has {len(self._by_id)} sessions, the most it keeps; finish some",
                metadata={"limit": "max_sessions", "value": str(self._settings.max_sessions)},
                retry_after_s=1.0,
            )
        self._check_length(0, len(token_ids))
        self._check_vocabulary(spec.model, token_ids)
        self._last_number += 1
        session = Session(
            session_id or self._ids.session(),
            spec,
            spec.sampling.over(Sampling(), self._ids.seed()),
            now_s=self._clock(),
            unix_s=self._wall_clock(),
            number=self._last_number,
            owner=owner,
        )
        session.context.append(token_ids)
        return session

    def keep(self, session: Session) -> None:
        """From now on it can be found."""
        self._by_id[session.session_id] = session
        self._context_tokens += len(session.context)
        self._by_number[session.number] = session
        self._numbers.append(session.number)
        self.used(session)
        if len(session.context):
            context = session.context
            self._journal.put(ContextExtended(session.session_id, 0, context.token_ids(), context.crc32))

    def restore(self, saved: SavedSession) -> Session:
        """A session as an earlier run of the head left it: its context stays away until it is used.

        By their numbers; `restored` follows the last.
        """
        kept = saved.kept
        session = Session(
            kept.session_id,
            kept.spec,
            kept.sampling,
            now_s=self._clock(),
            unix_s=kept.created_at,
            number=kept.number,
            owner=kept.owner,
        )
        session.context = Context.kept_elsewhere(saved.context_length, saved.context_crc32)
        session.parked, session.ephemeral, session.was_bound = kept.parked, kept.ephemeral, saved.bound
        self._last_number = max(self._last_number, kept.number)
        self._by_id[session.session_id] = session
        self._context_tokens += len(session.context)
        self._parked += session.parked
        self._by_number[session.number] = session
        self._numbers.append(session.number)
        session.last_used_at = kept.last_used_at
        session.last_used_s -= max(0.0, self._wall_clock() - kept.last_used_at)
        return session

    def restored(self) -> None:
        """All are back: put them in order of their last use."""
        for session in sorted(self._by_id.values(), key=lambda each: each.last_used_s):
            self._by_use[session.session_id] = session

    async def here(self, session: Session) -> Session:
        """The session, with its context. Raises STORE_UNAVAILABLE."""
        if session.context.is_away:
            try:
                session.context.take_out(await self._journal.context(session.session_id))
            except (StoreError, KeyError, ValueError) as error:
                log.exception("context_not_read", session=session.session_id)
                raise unavailable() from error
            self._wake(session)
        return session

    def _kept(self, session: Session) -> SessionKept:
        return SessionKept(
            session_id=session.session_id,
            number=session.number,
            owner=session.owner,
            spec=session.spec,
            sampling=session.sampling,
            created_at=session.created_at,
            last_used_at=session.last_used_at,
            parked=session.parked,
            ephemeral=session.ephemeral,
        )

    def get(self, session_id: str, owner: str | None = None) -> Session:
        """The session, if it is that caller's (None: whose ever it is). Raises SESSION_NOT_FOUND."""
        session = self._by_id.get(session_id)
        if session is None or owner not in (None, session.owner):
            raise FleetError(
                Reason.SESSION_NOT_FOUND,
                f"no session {session_id}: it was never made, was finished, or expired; create one",
                metadata={"sessionId": session_id},
                resource=_resource(session_id),
            )
        return session

    def known(self, session_id: str) -> Session | None:
        """The session, whose ever it is."""
        return self._by_id.get(session_id)

    def touch(self, session: Session) -> None:
        """It was used just now."""
        session.last_used_s = self._clock()
        session.last_used_at = self._wall_clock()
        self._by_use[session.session_id] = session
        self._by_use.move_to_end(session.session_id)
        if self._is_drained(session):
            self._leave_drained(session)
        else:
            self._wake(session)

    def _wake(self, session: Session) -> None:
        """It may be put to rest again when it has not been used for long."""
        if session.binding is not None or (self._journal.keeps and not session.context.is_away):
            self._awake_by_use[session.session_id] = session
            self._awake_by_use.move_to_end(session.session_id)

    def used(self, session: Session) -> None:
        """It was used just now, which is to outlive the head."""
        self.touch(session)
        if session.session_id in self._by_id:
            self._journal.put(self._kept(session))

    def page(
        self,
        page_size: int,
        page_token: str,
        state: SessionState | None,
        node: str,
        owner: str | None = None,
    ) -> tuple[list[SessionView], str]:
        """Sessions from the oldest on, and the token of the next page ("" at the end)."""
        after = _number_of(page_token)
        views: list[SessionView] = []
        start = bisect_right(self._numbers, after)
        for scanned, number in enumerate(self._numbers[start : start + SCAN_LIMIT], start=1):
            session = self._by_number.get(number)
            if session is not None and owner in (None, session.owner):
                view = session.view()
                if (state is None or view.state is state) and (not node or view.node == node):
                    views.append(view)
            more = start + scanned < len(self._numbers)
            if len(views) == page_size or (scanned == SCAN_LIMIT and more):
                return views, str(number) if more else ""
        return views, ""

    def lately_used(self, count: int, state: SessionState | None, node: str, text: str) -> list[SessionView]:
        """Up to `count`, the last used first, with `text` in their id, model or owner ("" = any)."""
        views: list[SessionView] = []
        for session in islice(reversed(self._by_use.values()), SCAN_LIMIT):
            if state not in (None, session.state) or (node and session.node_name != node):
                continue
            if any(text in name for name in (session.session_id, session.spec.model, session.owner)):
                views.append(session.view())
                if len(views) == count:
                    break
        return views

    # What callers do to them

    async def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_length: int | None,
        truncate_to: int | None,
        owner: str | None = None,
    ) -> SessionView:
        """Set context = context[:truncate_to] + token_ids. Nothing changes when it is refused."""
        session = await self.settled(session_id, owner)
        apply(session.state, SessionOp.APPEND, session_id=session_id)
        length = len(session.context)
        if expected_length is not None and expected_length != length:
            raise FleetError(
                Reason.CONTEXT_CHANGED,
                f"the context has {length} tokens, not {expected_length}; read the session and retry",
                metadata={"contextLength": str(length), "expectedLength": str(expected_length)},
                resource=_resource(session_id),
            )
        base = length if truncate_to is None else truncate_to
        if base > length:
            raise invalid("truncate_to", f"must be at most the context's length, {length}")
        self._check_length(base, len(token_ids))
        self._check_vocabulary(session.spec.model, token_ids)
        too_long = self._grown_too_long(session, base + len(token_ids))
        if too_long is not None:
            raise too_long
        self._change_context(session, base, token_ids)
        self.used(session)
        return session.view()

    async def park(self, session_id: str, owner: str | None = None) -> SessionView:
        session = await self.settled(session_id, owner)
        apply(session.state, SessionOp.PARK, session_id=session_id)
        self._rest(session)
        self._parked += not session.parked
        session.parked = True
        self.used(session)
        return session.view()

    async def resume(self, session_id: str, owner: str | None = None) -> SessionView:
        session = await self.settled(session_id, owner)
        apply(session.state, SessionOp.RESUME, session_id=session_id)
        self._fleet.bind(session, self._fleet.session_demand(session))
        self._parked -= session.parked
        session.parked = False
        self.used(session)
        return session.view()

    def remove(self, session: Session) -> SessionView:
        """The session is over; its node is owed a revoke."""
        view = session.view()
        session.finished = True
        self._leave_node(session)
        if self._by_id.pop(session.session_id, None) is not None:
            self._journal.put(SessionGone(session.session_id))
            del self._by_number[session.number]
            self._parked -= session.parked
            self._context_tokens -= len(session.context)
            session.context = Context()  # its last generation may be kept for long
            self._by_use.pop(session.session_id, None)
            self._compact()
        return view

    def extend_context(self, session: Session, token_ids: Sequence[int]) -> None:
        """A generation's output joins the context."""
        self._change_context(session, len(session.context), token_ids)

    def orphans(self, node: Node, held: Sequence[HeldSession]) -> list[HeldSession]:
        """Of what a node holds, the sessions of this head that are not, or not so, bound to it.

        One that an earlier run of the head bound there, as it is held there now, is bound to it again.
        """
        own = [each for each in held if each.head_id == self._settings.head_id]
        for each in own:
            session = self._by_id.get(each.session_id)
            if session is not None and not each.fenced and session.adopt(node, each, self._fleet.term):
                self._wake(session)
        return [each for each in own if not self._is_bound(node, each)]

    def _is_bound(self, node: Node, held: HeldSession) -> bool:
        session = self._by_id.get(held.session_id)
        binding = session.binding if session is not None else None
        return binding is not None and binding.node is node and binding.epoch == held.epoch

    # Housekeeping

    def unbind_idle(self, now_s: float) -> int:
        """Unbind what was not used for `idle_unbind_s`; O(what is unbound)."""
        return self._sweep(self._awake_by_use, now_s - self._settings.idle_unbind_s, self._rest)

    def expire(self, now_s: float) -> int:
        """Remove what was not used for `session_expiry_s`; O(what is removed)."""
        return self._sweep(self._by_use, now_s - self._settings.session_expiry_s, self.remove)

    def _sweep(
        self, by_use: OrderedDict[str, Session], before_s: float, act: Callable[[Session], object]
    ) -> int:
        done = 0
        while by_use:
            session = next(iter(by_use.values()))
            if session.last_used_s > before_s:
                break
            if session.generation_id:
                self.touch(session)
            else:
                by_use.pop(session.session_id)
                act(session)
                done += 1
        return done

    async def leave_drained(self, node: Node) -> None:
        """Unbind the idle sessions of a node that is being drained; others have their turn in between."""
        for number, session_id in enumerate(list(self._awake_by_use), start=1):
            session = self._awake_by_use.get(session_id)
            if session is not None and self._is_drained(session, node):
                self._leave_drained(session)
            if number % LEAVE_AT_ONCE == 0:
                await asyncio.sleep(0)

    @staticmethod
    def _is_drained(session: Session, node: Node | None = None) -> bool:
        """It is idle and bound to a node (that one) which is being drained."""
        binding = session.binding
        if binding is None or binding.node.drain is None or session.generation_id:
            return False
        return node is None or binding.node is node

    def _leave_drained(self, session: Session) -> None:
        binding = session.binding
        if binding is not None and binding.node.drain is not None:
            binding.node.drain.unbound += 1
        self._leave_node(session)
        self._wake(session)

    async def settled(self, session_id: str, owner: str | None) -> Session:
        """The session, with nothing of its last generation under way, and with its context."""
        await self.here(self.get(session_id, owner))
        await self.get(session_id, owner).settle()
        session = self.get(session_id, owner)
        return session if not session.context.is_away else await self.settled(session_id, owner)

    def _rest(self, session: Session) -> None:
        """Nobody used it for long: its node may forget it, and its context need not be here."""
        self._leave_node(session)
        if self._journal.keeps:
            session.context.put_away()

    def _leave_node(self, session: Session) -> None:
        session.unbind()
        self._awake_by_use.pop(session.session_id, None)

    def _change_context(self, session: Session, base: int, token_ids: Sequence[int]) -> None:
        binding = session.binding
        if binding is not None:
            binding.cut(base)
        before = len(session.context)
        if base < before:
            session.context.truncate(base)
            if session.was_bound is not None or (binding is not None and binding.overhang):
                # What the node holds is of no use to a run of the head that does not know of the cut.
                session.was_bound = None
                self._journal.put(SessionBound(session.session_id))
        session.context.append(token_ids)
        if session.session_id in self._by_id:  # one for an answer that ended at once never was
            crc32 = session.context.crc32
            self._journal.put(ContextExtended(session.session_id, base, array("I", token_ids), crc32))
        self._context_tokens += len(session.context) - before
        if binding is not None:
            window = window_tokens(binding.node, session.spec.model)
            if window and len(session.context) > window:
                self._leave_node(session)

    def _check_length(self, kept: int, added: int) -> None:
        total, limit = self._context_tokens + added, self._settings.max_total_context_tokens
        if added and total > limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"the sessions' contexts would have {total} tokens in all, more than the {limit} kept",
                metadata={"limit": "max_total_context_tokens", "value": str(limit), "tokens": str(total)},
                retry_after_s=1.0,
            )
        tokens, limit = kept + added, self._settings.max_context_tokens
        if tokens > limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"a context of {tokens} tokens is longer than the {limit} the head keeps",
                metadata={"limit": "max_context_tokens", "value": str(limit), "tokens": str(tokens)},
            )

    def _check_vocabulary(self, model: str, token_ids: Sequence[int]) -> None:
        sizes = (node.models[model].vocab_size for node in self._fleet.serving(model))
        size = next((size for size in sizes if size), 0)
        if size and token_ids and max(token_ids) >= size:
            raise invalid("token_ids", f"must be below {size}, the size of the vocabulary of model {model}")

    def _grown_too_long(self, session: Session, tokens: int) -> FleetError | None:
        demand = self._fleet.session_demand(session, tokens=tokens)
        return self._fleet.too_long(demand) if self._fleet.serving(session.spec.model) else None

    def _compact(self) -> None:
        """Drop the numbers of removed sessions once they are the greater part."""
        if len(self._numbers) > 64 and len(self._numbers) > 2 * len(self._by_number):
            self._numbers = [number for number in self._numbers if number in self._by_number]


def unavailable() -> FleetError:
    """STORE_UNAVAILABLE."""
    return FleetError(
        Reason.STORE_UNAVAILABLE,
        "what the head keeps on disk cannot be read or written now; retry later",
        retry_after_s=1.0,
    )


def _resource(session_id: str) -> tuple[str, str]:
    return ("fleet.v1.Session", f"sessions/{session_id}")


def _number_of(page_token: str) -> int:
    if not page_token:
        return 0
    if not page_token.isascii() or not page_token.isdigit() or len(page_token) > 18:
        raise invalid("page_token", "is not a token that this head gave; start without one")
    return int(page_token)
