"""The token log: what a generation has produced, append-only, and its readers' cursors (design: Parts).

One writer at a time (the current attempt), any number of readers. Advancing calls the readers back
synchronously; a reader takes all that is new at once, so a slow one holds nobody up.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import Accepted, Event, Finished, Moved, Started, Tokens
from fleet_service.runtime.journal import Journal, NoJournal
from fleet_service.runtime.records import BranchCut


class TokenLog:
    """Token ids and, between them, the other events of a generation.

    `received` counts the tokens the head has, `visible` those readers may see: the journal says when. So do
    `marks` and `marks_visible`; `finished` is the terminal event from its decision on, `ended` once it may be
    seen.
    """

    # Read for every token and reader: attributes, which cost a tenth of properties.
    __slots__ = (
        "_cuts",
        "_first_branch",
        "_ids",
        "_journal",
        "_marks",
        "_readers",
        "accepted",
        "ended",
        "finished",
        "marks_visible",
        "received",
        "visible",
        "written",
    )

    def __init__(self, accepted: Accepted, journal: Journal | None = None, branch: int = 0) -> None:
        """`branch`: that of the head's run which accepted it."""
        self.accepted = accepted
        self._first_branch = branch
        self.finished: Finished | None = None
        self.ended: Finished | None = None
        self.written = 0
        self.received = 0
        self.visible = 0
        self.marks_visible = 0
        self._journal = journal or NoJournal()
        self._ids = array("I")
        self._marks: list[tuple[int, Started | Moved]] = []
        self._cuts: list[BranchCut] = []
        self._readers: list[Callable[[], None]] = []

    @property
    def generation_id(self) -> str:
        return self.accepted.generation_id

    @property
    def marks(self) -> Sequence[tuple[int, Started | Moved]]:
        return self._marks

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens at index `received`."""
        self._ids.extend(token_ids)
        self.received += len(token_ids)
        self._journal.has_tokens(self)

    def show(self, visible: int, *, end: bool = False) -> None:
        """Let readers see so many tokens, and the terminal event."""
        if visible > self.visible:
            self.visible = visible
        elif not end:
            return
        if end:
            self.ended = self.finished
        self._call_back()

    def restore(
        self,
        token_ids: array[int],
        marks: Sequence[tuple[int, Started | Moved]],
        cuts: Sequence[BranchCut],
        finished: Finished | None,
    ) -> None:
        """As an earlier run of the head left it; all of it was seen."""
        self._ids, self._marks, self._cuts = token_ids, list(marks), list(cuts)
        self.written = self.received = self.visible = len(token_ids)
        self.marks_visible = len(self._marks)
        self.finished = self.ended = finished

    def cut(self, branch: int) -> BranchCut:
        """What readers had beyond the tokens there are is lost: what follows is of that branch."""
        cut = BranchCut(self.generation_id, branch, self.received)
        self._cuts.append(cut)
        return cut

    @property
    def branch(self) -> int:
        """That of the next token; 0 = nothing was ever lost."""
        return self._cuts[-1].branch if self._cuts else self._first_branch

    def sure_index(self, branch: int) -> int | None:
        """Up to where a reader of that branch has what is here; None = in all."""
        if branch != self._first_branch and all(cut.branch != branch for cut in self._cuts):
            return 0  # what it has is of a run that nothing is known of here
        return min((cut.index for cut in self._cuts if cut.branch > branch), default=None)

    def mark(self, event: Started | Moved) -> None:
        """Put an event behind the tokens there are."""
        self._marks.append((self.received, event))
        self._journal.then(partial(self._show_marks, len(self._marks)))

    def _show_marks(self, visible: int) -> None:
        self.marks_visible = visible
        self._call_back()

    def finish(self, event: Finished) -> None:
        """The one terminal event. Raises RuntimeError when there is one already."""
        if self.finished is not None:
            raise RuntimeError("a generation has one terminal event")
        self.finished = event
        self._journal.end(self)

    def slice(self, start: int, stop: int | None = None) -> array[int]:
        """A copy of the ids from `start` to `stop`."""
        return self._ids[start:stop]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._readers.append(callback)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        self._readers.remove(callback)

    def _call_back(self) -> None:
        for callback in self._readers:
            callback()


class Cursor:
    """One reader's place in a log: two numbers. `take` returns what is new."""

    __slots__ = ("_done", "_index", "_log", "_mark", "_opened")

    def __init__(self, log: TokenLog, from_index: int) -> None:
        self._log = log
        self._index = from_index
        self._mark = 0
        self._opened = False
        self._done = False

    @property
    def index(self) -> int:
        """Index of the next token this reader gets."""
        return self._index

    @property
    def done(self) -> bool:
        """The terminal event was taken."""
        return self._done

    def take(self) -> list[Event]:
        """All events that are new, in order; empty when there are none."""
        log, events = self._log, list[Event]()
        if not self._opened:
            self._open(events)
        if self._mark < log.marks_visible:
            self._up_to_marks(log.visible, events)
        if self._index < log.visible:
            self._tokens_up_to(log.visible, events)
        self._end(events)
        return events

    def take_some(self, most_tokens: int) -> list[Event]:
        """As `take`, up to so many tokens; what lies behind a mark that has tokens before it is left."""
        log, events = self._log, list[Event]()
        if not self._opened:
            self._open(events)
        stop = min(log.visible, self._index + most_tokens)
        if self._mark < log.marks_visible:
            self._up_to_marks(self._index, events)
            if self._mark < log.marks_visible:
                stop = min(stop, log.marks[self._mark][0])
        if self._index < stop:
            self._tokens_up_to(stop, events)
        if self._mark == log.marks_visible:
            self._end(events)
        return events

    def has_some(self, most_tokens: int) -> bool:
        """Whether `take_some` gives anything."""
        log = self._log
        if not self._opened or (self._mark < log.marks_visible and log.marks[self._mark][0] <= self._index):
            return True
        if self._index < log.visible:
            return most_tokens > 0
        return log.ended is not None and not self._done and self._index >= log.received

    def _end(self, events: list[Event]) -> None:
        log = self._log
        if log.ended is not None and not self._done and self._index >= log.received:
            events.append(log.ended)
            self._done = True

    def _up_to_marks(self, stop: int, events: list[Event]) -> None:
        """The marks up to index `stop` that may be seen, and the tokens before each."""
        marks, marks_visible = self._log.marks, self._log.marks_visible
        while self._mark < marks_visible and marks[self._mark][0] <= stop:
            position, event = marks[self._mark]
            self._tokens_up_to(position, events)
            events.append(event)
            self._mark += 1

    def _open(self, events: list[Event]) -> None:
        self._opened = True
        events.append(self._log.accepted)
        marks, marks_visible = self._log.marks, self._log.marks_visible
        while self._mark < marks_visible and marks[self._mark][0] < self._index:
            if isinstance(marks[self._mark][1], Started):
                events.append(marks[self._mark][1])
            self._mark += 1

    def _tokens_up_to(self, position: int, events: list[Event]) -> None:
        if position > self._index:
            events.append(Tokens(self._index, self._log.slice(self._index, position)))
            self._index = position


def _nothing() -> None:
    """For a reader that has gone."""


class Follower:
    """One reader, told by `on_news`, in the step they come, of news; `on_close`: once, when it goes."""

    __slots__ = ("_closed", "_cursor", "_left", "_log", "_on_close", "_on_news")

    def __init__(
        self,
        log: TokenLog,
        from_index: int,
        on_close: Callable[[Follower], None],
        on_news: Callable[[], None],
    ) -> None:
        self._log = log
        self._cursor = Cursor(log, from_index)
        self._on_close = on_close
        self._on_news = on_news
        self._closed = False
        self._left = False
        log.subscribe(on_news)

    @property
    def branch(self) -> int:
        """That of the log."""
        return self._log.branch

    @property
    def done(self) -> bool:
        """The terminal event was taken, or the reader has gone: there is no more."""
        return self._closed or self._cursor.done

    def take_some(self, most_tokens: int) -> list[Event]:
        """What is new, up to so many tokens, and up to a mark that has tokens before it.

        Raises FleetError HEAD_DRAINING after leave(), once it may have no more.
        """
        events = self._cursor.take_some(most_tokens)
        if self._left and not events and not self.done:
            raise comes_back(self._cursor.index)
        return events

    def has_some(self, most_tokens: int) -> bool:
        """Whether `take_some` gives or raises anything now."""
        return not self.done and (self._left or self._cursor.has_some(most_tokens))

    def leave(self) -> None:
        """The head ends: once this one has what there is, it is told where to come back to."""
        self._left = True
        self._on_news()

    def close(self) -> None:
        """The reader is gone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._log.unsubscribe(self._on_news)
        self._on_news = _nothing  # it may know this reader: a cycle would have to be looked for
        self._on_close(self)


class Reader(Follower):
    """A follower that waits for news."""

    __slots__ = ("_waiter",)

    def __init__(self, log: TokenLog, from_index: int, on_close: Callable[[Follower], None]) -> None:
        self._waiter: asyncio.Future[None] | None = None
        super().__init__(log, from_index, on_close, self._wake)

    async def read(self) -> list[Event]:
        """Everything new, waiting for something.

        Raises RuntimeError after the terminal event or close(), FleetError HEAD_DRAINING after leave().
        """
        while True:
            if self.done:
                raise RuntimeError("this reader has ended")
            events = self._cursor.take()
            if events:
                return events
            if self._left:
                raise comes_back(self._cursor.index)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        super().close()
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def comes_back(index: int) -> FleetError:
    """HEAD_DRAINING, of a head whose next run goes on."""
    return FleetError(
        Reason.HEAD_DRAINING,
        f"the head is shutting down; attach again at index {index} once it is back",
        metadata={"nextIndex": str(index)},
        retry_after_s=1.0,
    )
