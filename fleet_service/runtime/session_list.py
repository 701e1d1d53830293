"""The sessions as they are listed: page by page from the oldest on, or the last used first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice

from fleet_service.domain.errors import invalid
from fleet_service.domain.session_table import SessionState
from fleet_service.runtime.session import Session
from fleet_service.runtime.views import SessionView

SCAN_LIMIT = 10_000
"""Sessions looked at for one page of a filtered list; a page may come back short, with a token."""


class SessionList:
    """The sessions by their numbers, in which they were made; a page costs what it looks at."""

    def __init__(self) -> None:
        self._by_number: dict[int, Session] = {}
        self._numbers: list[int] = []

    def add(self, session: Session) -> None:
        """Its number is above those of all that were added before."""
        self._by_number[session.number] = session
        self._numbers.append(session.number)

    def remove(self, session: Session) -> None:
        """It is listed no more."""
        del self._by_number[session.number]
        # The numbers of removed sessions are dropped once they are the greater part.
        if len(self._numbers) > 64 and len(self._numbers) > 2 * len(self._by_number):
            self._numbers = [number for number in self._numbers if number in self._by_number]

    def page(
        self, page_size: int, page_token: str, state: SessionState | None, node: str, owner: str | None
    ) -> tuple[list[SessionView], str]:
        """Sessions from the oldest on, and the token of the next page ("" at the end).

        Raises INVALID_FIELD for a token that is none.
        """
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


def first_matching(
    sessions: Iterable[Session], count: int, state: SessionState | None, node: str, text: str
) -> list[SessionView]:
    """Up to `count` of the sessions, with `text` in their id, model or owner ("" = any)."""
    views: list[SessionView] = []
    for session in islice(sessions, SCAN_LIMIT):
        if state not in (None, session.state) or (node and session.node_name != node):
            continue
        if any(text in name for name in (session.session_id, session.spec.model, session.owner)):
            views.append(session.view())
            if len(views) == count:
                break
    return views


def _number_of(page_token: str) -> int:
    if not page_token:
        return 0
    if not page_token.isascii() or not page_token.isdigit() or len(page_token) > 18:
        raise invalid("page_token", "is not a token that this head gave; start without one")
    return int(page_token)
