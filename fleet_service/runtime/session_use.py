"""When sessions were last used, and what becomes of those that are not: put to rest, moved off, expired."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from fleet_service.runtime.node import Node
from fleet_service.runtime.session import Session
from fleet_service.runtime.settings import HeadSettings

LEAVE_AT_ONCE = 100
"""Sessions looked at before others have their turn, when a node is drained."""


class SessionUse:
    """The sessions by their last use. `clock` is the loop's, `wall_clock` gives unix seconds.

    `contexts_may_leave`: a context need not be in memory while its session rests.
    """

    def __init__(
        self,
        settings: HeadSettings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        contexts_may_leave: bool,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._contexts_may_leave = contexts_may_leave
        # Both with the longest unused first, so that housekeeping costs what it does. Awake: those bound to
        # a node, or with a context that need not be here.
        self._by_use: OrderedDict[str, Session] = OrderedDict()
        self._awake_by_use: OrderedDict[str, Session] = OrderedDict()

    def latest_first(self) -> Iterator[Session]:
        """All, the last used first."""
        return reversed(self._by_use.values())

    def touch(self, session: Session) -> None:
        """It was used just now."""
        session.last_used_s = self._clock()
        session.last_used_at = self._wall_clock()
        self._by_use[session.session_id] = session
        self._by_use.move_to_end(session.session_id)
        if _is_drained(session):
            self._leave_drained(session)
        else:
            self.wake(session)

    def wake(self, session: Session) -> None:
        """It may be put to rest again when it has not been used for long."""
        if session.binding is not None or (self._contexts_may_leave and not session.context.is_away):
            self._awake_by_use[session.session_id] = session
            self._awake_by_use.move_to_end(session.session_id)

    def restore(self, sessions: Iterable[Session]) -> None:
        """Put the sessions of an earlier run of the head in order of their last use."""
        for session in sorted(sessions, key=lambda each: each.last_used_s):
            self._by_use[session.session_id] = session

    def forget(self, session: Session) -> None:
        """It is over."""
        self._by_use.pop(session.session_id, None)

    def leave_node(self, session: Session) -> None:
        """It is bound to no node any more."""
        session.unbind()
        self._awake_by_use.pop(session.session_id, None)

    def rest(self, session: Session) -> None:
        """Nobody uses it for long: its node may forget it, and its context need not be here."""
        self.leave_node(session)
        if self._contexts_may_leave:
            session.context.put_away()

    # Housekeeping

    def unbind_idle(self, now_s: float, most: int) -> int:
        """Unbind what was not used for `idle_unbind_s`; how many were looked at, at most `most`."""
        return self._sweep(self._awake_by_use, now_s - self._settings.idle_unbind_s, self.rest, most)

    def expire(self, now_s: float, remove: Callable[[Session], object], most: int) -> int:
        """`remove` what was not used for `session_expiry_s`; how many were looked at, at most `most`."""
        return self._sweep(self._by_use, now_s - self._settings.session_expiry_s, remove, most)

    def _sweep(
        self,
        by_use: OrderedDict[str, Session],
        before_s: float,
        act: Callable[[Session], object],
        most: int,
    ) -> int:
        done = 0
        while by_use and done < most:
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
            if session is not None and _is_drained(session, node):
                self._leave_drained(session)
            if number % LEAVE_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _leave_drained(self, session: Session) -> None:
        binding = session.binding
        if binding is not None and binding.node.drain is not None:
            binding.node.drain.unbound += 1
        self.leave_node(session)
        self.wake(session)


def _is_drained(session: Session, node: Node | None = None) -> bool:
    """It is idle and bound to a node (that one) which is being drained."""
    binding = session.binding
    if binding is None or binding.node.drain is None or session.generation_id:
        return False
    return node is None or binding.node is node
