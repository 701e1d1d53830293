"""The sessions as they are listed: page by page from the oldest on, or the last used first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

from fleet_service.domain.errors import invalid
from fleet_service.domain.session_table import SessionState
from fleet_service.runtime.session import Session
from fleet_service.runtime.views import SessionView

SCAN_LIMIT = 2_000
"""Sessions looked at for one page of a filtered list; a page may come back short, with a token."""


_SHELF = 1_024


class SessionList:
    """The sessions by their numbers, in which they were made; a page costs what it looks at.

    They stand on shelves of so many numbers each, so that taking one out moves no others.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, dict[int, Session]] = {}
        self._order: list[int] = []

    def add(self, session: Session) -> None:
        """Its number is above those of all that were added before."""
        at = session.number // _SHELF
        if at not in self._shelves:
            self._shelves[at] = {}
            self._order.append(at)
        self._shelves[at][session.number] = session

    def remove(self, session: Session) -> None:
        """It is listed no more."""
        at = session.number // _SHELF
        del self._shelves[at][session.number]
        if not self._shelves[at]:
            del self._shelves[at]
            self._order.pop(bisect_left(self._order, at))

    def _after(self, number: int) -> Iterator[Session]:
        for at in self._order[bisect_left(self._order, number // _SHELF) :]:
            for each, session in self._shelves[at].items():
                if each > number:
                    yield session

    def page(
        self, page_size: int, page_token: str, state: SessionState | None, node: str, owner: str | None
    ) -> tuple[list[SessionView], str]:
        """Sessions from the oldest on, and the token of the next page ("" at the end).

        Raises INVALID_FIELD for a token that is none.
        """
        views: list[SessionView] = []
        last = 0
        for scanned, session in enumerate(self._after(_number_of(page_token))):
            if scanned == SCAN_LIMIT or len(views) == page_size:
                return views, str(last)
            last = session.number
            if (
                owner in (None, session.owner)
                and state in (None, session.state)
                and (not node or session.node_name == node)
            ):
                views.append(session.view())
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
