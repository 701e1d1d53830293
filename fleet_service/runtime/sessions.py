"""The sessions: made, found, read, appended to, parked, resumed, finished.

Which operation is allowed when is domain/session_table.py; here it is carried out. How sessions are listed is
session_list.py, what becomes of those that nobody uses session_use.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import structlog

from fleet_service.domain.commands import HeldSession
from fleet_service.domain.context import Context
from fleet_service.domain.errors import FleetError, Reason, invalid
from fleet_service.domain.placement import window_tokens
from fleet_service.domain.session_table import SessionOp, SessionState, apply
from fleet_service.domain.specs import GREEDY, SessionSpec
from fleet_service.runtime.context_limits import ContextLimits
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
from fleet_service.runtime.session_list import SessionList, first_matching
from fleet_service.runtime.session_use import SessionUse
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.store import StoreError
from fleet_service.runtime.views import SessionView

log = structlog.get_logger(__name__)


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
        self._limits = ContextLimits(fleet, settings)
        self._list = SessionList()
        self._use = SessionUse(settings, clock, wall_clock, contexts_may_leave=journal.keeps)
        self._by_id: dict[str, Session] = {}
        self._last_number = 0
        self._context_tokens = 0
        self._parked = 0

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
        self._limits.check_length(self._context_tokens, 0, len(token_ids))
        self._limits.check_vocabulary(spec.model, token_ids)
        self._last_number += 1
        session = Session(
            session_id or self._ids.session(),
            spec,
            spec.sampling.over(GREEDY, self._ids.seed()),
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
        self._list.add(session)
        self.used(session)
        context = session.context
        if len(context) and self._journal.keeps:
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
        self._list.add(session)
        session.last_used_at = kept.last_used_at
        session.last_used_s -= max(0.0, self._wall_clock() - kept.last_used_at)
        return session

    def restored(self) -> None:
        """All are back: put them in order of their last use."""
        self._use.restore(self._by_id.values())

    async def here(self, session: Session) -> Session:
        """The session, with its context. Raises STORE_UNAVAILABLE, CONTEXT_LOST, SESSION_NOT_FOUND."""
        if session.context.is_away:
            try:
                session.context.take_out(await self._journal.context(session.session_id))
            except (StoreError, KeyError, ValueError) as error:
                self.get(session.session_id)  # it may have ended meanwhile
                log.error("context_not_read", session=session.session_id, error=str(error))  # noqa: TRY400 - it says all
                if isinstance(error, StoreError) and error.may_pass:
                    raise unavailable() from error
                raise _lost(session.session_id) from error
            self._use.wake(session)
        return session

    async def settled(self, session_id: str, owner: str | None) -> Session:
        """The session, with nothing of its last generation under way, and with its context."""
        await self.here(self.get(session_id, owner))
        await self.get(session_id, owner).settle()
        session = self.get(session_id, owner)
        return session if not session.context.is_away else await self.settled(session_id, owner)

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
        self._use.touch(session)

    def used(self, session: Session) -> None:
        """It was used just now, which is to outlive the head."""
        self.touch(session)
        if self._journal.keeps and session.session_id in self._by_id:
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
        return self._list.page(page_size, page_token, state, node, owner)

    def lately_used(self, count: int, state: SessionState | None, node: str, text: str) -> list[SessionView]:
        """Up to `count`, the last used first, with `text` in their id, model or owner ("" = any)."""
        return first_matching(self._use.latest_first(), count, state, node, text)

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
        self._limits.check_length(self._context_tokens, base, len(token_ids))
        self._limits.check_vocabulary(session.spec.model, token_ids)
        self._limits.check_windows(session, base + len(token_ids))
        self._change_context(session, base, token_ids)
        self.used(session)
        return session.view()

    async def park(self, session_id: str, owner: str | None = None) -> SessionView:
        session = await self.settled(session_id, owner)
        apply(session.state, SessionOp.PARK, session_id=session_id)
        self._use.rest(session)
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

    def remove(self, session: Session) -> None:
        """The session is over; its node is owed a revoke."""
        session.finished = True
        self._use.leave_node(session)
        if self._by_id.pop(session.session_id, None) is not None:
            self._journal.put(SessionGone(session.session_id))
            self._list.remove(session)
            self._parked -= session.parked
            self._context_tokens -= len(session.context)
            session.context = Context()  # its last generation may be kept for long
            self._use.forget(session)

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
                self._use.wake(session)
        return [each for each in own if not self._is_bound(node, each)]

    def _is_bound(self, node: Node, held: HeldSession) -> bool:
        session = self._by_id.get(held.session_id)
        binding = session.binding if session is not None else None
        return binding is not None and binding.node is node and binding.epoch == held.epoch

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
                self._use.leave_node(session)

    # Housekeeping

    def unbind_idle(self, now_s: float, most: int) -> int:
        """Unbind what was not used for `idle_unbind_s`; how many were looked at, at most `most`."""
        return self._use.unbind_idle(now_s, most)

    def expire(self, now_s: float, most: int) -> int:
        """Remove what was not used for `session_expiry_s`; how many were looked at, at most `most`."""
        return self._use.expire(now_s, self.remove, most)

    async def leave_drained(self, node: Node) -> None:
        """Unbind the idle sessions of a node that is being drained; others have their turn in between."""
        await self._use.leave_drained(node)


def unavailable() -> FleetError:
    """STORE_UNAVAILABLE."""
    return FleetError(
        Reason.STORE_UNAVAILABLE,
        "what the head keeps on disk cannot be read or written now; retry later",
        retry_after_s=1.0,
    )


def _lost(session_id: str) -> FleetError:
    return FleetError(
        Reason.CONTEXT_LOST,
        f"the context of session {session_id} is damaged on disk; finish the session, and make it anew",
        metadata={"sessionId": session_id},
        resource=_resource(session_id),
    )


def _resource(session_id: str) -> tuple[str, str]:
    return ("fleet.v1.Session", f"sessions/{session_id}")
