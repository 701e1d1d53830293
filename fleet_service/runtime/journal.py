"""What is to outlive the head, written down in the order it happened, many changes at a time.

Whatever is ready when the store has done with one batch makes up the next, so that a commit costs the same
for one stream as for hundreds. Under STRICT, what is written is seen only then: readers' tokens, answers to
requests. Under RELAXED it is seen at once and begins to be written within RELAXED_S; while the store is in
trouble, as under STRICT.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import structlog
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential

from fleet_service.runtime.records import Record, RequestAnswered, TokensDelivered
from fleet_service.runtime.store import SessionStore, StoreError, StoreTrouble

log = structlog.get_logger(__name__)

RELAXED_S = 0.04
"""How long a change waits for others under RELAXED, so that it is on disk within 50 ms."""
RETRY_MIN_S = 0.05
RETRY_MAX_S = 1.0


class Durability(StrEnum):
    """MEMORY: nothing outlives the process. STRICT: nothing is seen that may be lost. RELAXED: see above."""

    MEMORY = "memory"
    RELAXED = "relaxed"
    STRICT = "strict"


class WrittenLog(Protocol):
    """A generation's tokens as the journal sees them (tokenlog.TokenLog)."""

    written: int
    """Tokens handed to the store."""

    @property
    def generation_id(self) -> str: ...

    @property
    def received(self) -> int: ...

    def slice(self, start: int, stop: int | None = None) -> array[int]: ...

    def show(self, visible: int, *, end: bool = False) -> None:
        """Let readers see so many tokens, and the end."""


class Journal(Protocol):
    """Where the runtime says what is to outlive the head. Synchronous but for `settled`."""

    @property
    def trouble(self) -> StoreError | None:
        """Why nothing can be kept now; new work is not to be begun then."""

    def put(self, *records: Record) -> None:
        """Write these, in this order, all of one batch."""

    def has_tokens(self, tokens: WrittenLog) -> None:
        """There is more in a log: write it, and let readers see it once they may."""

    def end(self, tokens: WrittenLog) -> None:
        """A log has ended: write its rest, before what ends it, and show the end once it may be."""

    def then(self, action: Callable[[], None]) -> None:
        """Do this once all that was put so far may be seen, and what is put in the same step."""

    async def settled(self, *, patient: bool = True) -> None:
        """Return once all that was put so far may be seen. Raises StoreError when it never will be.

        `patient` False: also when nothing can be kept just now.
        """

    async def context(self, session_id: str) -> array[int]:
        """The ids of a context that was put away. Raises StoreError."""

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        """The answer that a request got earlier, in this run or another. Raises StoreError."""

    @property
    def durability(self) -> Durability: ...

    @property
    def keeps(self) -> bool:
        """Whether anything outlives the head; without it, records that cost something need not be made."""


class NoJournal:
    """Keeps nothing: all is seen at once and ends with the head."""

    trouble = None
    durability = Durability.MEMORY
    keeps = False

    def put(self, *records: Record) -> None:
        return

    def has_tokens(self, tokens: WrittenLog) -> None:
        tokens.show(tokens.received)

    def end(self, tokens: WrittenLog) -> None:
        tokens.show(tokens.received, end=True)

    def then(self, action: Callable[[], None]) -> None:
        action()

    async def settled(self, *, patient: bool = True) -> None:
        return

    async def context(self, session_id: str) -> array[int]:
        raise KeyError(session_id)

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return None


class StoreJournal:
    """A Journal that writes to a store.

    `broken` is called once, when that fails for good; `committed` with the seconds that each commit took.
    """

    keeps = True

    def __init__(
        self,
        store: SessionStore,
        durability: Durability,
        *,
        broken: Callable[[StoreError], None],
        committed: Callable[[float], None] = lambda _took_s: None,
    ) -> None:
        self.durability = durability
        self._store = store
        self._strict = durability is Durability.STRICT
        self._broken = broken
        self._committed = committed
        self._records: list[Record] = []
        self._logs: dict[str, WrittenLog] = {}
        self._then: list[Callable[[], None]] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._impatient: set[asyncio.Future[None]] = (
            set()
        )  # of those, and of those that a batch under way has
        self._news = asyncio.Event()
        self._stopping = False
        self._writing = False
        self._task: asyncio.Task[None] | None = None
        self._trouble: StoreError | None = None
        self._ended = False

    @property
    def trouble(self) -> StoreError | None:
        return self._trouble

    @property
    def tells_ahead(self) -> bool:
        """Whether what happens may be seen before it is written."""
        return not self._strict

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="journal")

    # What happens

    def put(self, *records: Record) -> None:
        self._records += records
        self._news.set()

    def has_tokens(self, tokens: WrittenLog) -> None:
        self._logs[tokens.generation_id] = tokens
        if self._at_once:
            tokens.show(tokens.received)
        self._news.set()

    def end(self, tokens: WrittenLog) -> None:
        self._take_rest(tokens)
        self._logs.pop(tokens.generation_id, None)
        self.then(lambda: tokens.show(tokens.received, end=True))
        self._news.set()

    async def context(self, session_id: str) -> array[int]:
        if (self._records or self._writing) and self._trouble is None:
            await self._written()
        return await self._store.context(session_id)

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return await self._store.answered(owner, request_id)

    def then(self, action: Callable[[], None]) -> None:
        if self._at_once:
            action()
        else:
            self._then.append(action)
            self._news.set()

    async def settled(self, *, patient: bool = True) -> None:
        if not self._at_once:
            await self._written(patient=patient)

    @property
    def _at_once(self) -> bool:
        """Whether what happens now is seen now."""
        return not self._strict and self._trouble is None

    async def _written(self, *, patient: bool = True) -> None:
        if self._ended:
            raise self._trouble or _nothing_more()
        if self._trouble is not None and not patient:
            raise self._trouble
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(written)
        if not patient:
            self._impatient.add(written)
            written.add_done_callback(self._impatient.discard)
        self._news.set()
        await written

    async def stop(self) -> None:
        """Write what is left, as far as the store takes it, and end."""
        self._stopping = True
        self._news.set()
        if self._task is not None:
            await self._task

    # The writer

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            if not self._strict and not self._stopping:
                await asyncio.sleep(RELAXED_S)
            self._news.clear()
            # At the end, what came while the last batch was written is written too.
            if not await self._write_what_is_ready() or (self._stopping and not self._news.is_set()):
                break
        self._ended = True
        for written in self._waiting:
            if not written.done():
                written.set_exception(self._trouble or _nothing_more())

    async def _write_what_is_ready(self) -> bool:
        """Whether the store goes on."""
        shown = [(tokens, self._take_rest(tokens)) for tokens in self._logs.values()]
        self._logs = {}
        batch, self._records = self._records, []
        then, self._then = self._then, []
        waiting, self._waiting = self._waiting, []
        self._writing = bool(batch)
        if batch and not await self._keep(batch):
            self._waiting += waiting
            return False
        self._writing = False
        for tokens, visible in shown:
            tokens.show(visible)
        for action in then:
            action()
        for written in waiting:
            if not written.done():  # who waited for it may be gone
                written.set_result(None)
        return True

    def _take_rest(self, tokens: WrittenLog) -> int:
        """What is new of a log becomes a record; how much there is then."""
        received = tokens.received
        if received > tokens.written:
            ids = tokens.slice(tokens.written, received)
            self._records.append(TokensDelivered(tokens.generation_id, tokens.written, ids))
            tokens.written = received
        return received

    async def _keep(self, batch: list[Record]) -> bool:
        """Write until it is written; False when it never will be."""
        try:
            await self._write(batch)
        except StoreError as first:
            return await self._keep_trying(batch, first)
        return True

    async def _write(self, batch: list[Record]) -> None:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        try:
            await self._store.write(batch)
            self._committed(clock() - begun_s)
        except StoreError:
            raise
        except Exception as error:
            # A fault of this program: if only this task ended, streams would wait for ever.
            log.exception("store_fault")
            raise StoreError(StoreTrouble.CORRUPT, f"a change could not be written: {error!r}") from error

    async def _keep_trying(self, batch: list[Record], first: StoreError) -> bool:
        self._trouble = first
        for written in self._impatient:
            if not written.done():
                written.set_exception(first)
        log.warning("store_failed", error=str(first), trouble=first.trouble.value)
        retrying = AsyncRetrying(
            sleep=asyncio.sleep,
            wait=wait_exponential(RETRY_MIN_S, max=RETRY_MAX_S),
            retry=retry_if_exception(lambda error: isinstance(error, StoreError) and error.may_pass),
            stop=lambda _: self._stopping,
            reraise=True,
        )
        try:
            if not first.may_pass:
                raise first
            await retrying(self._write, batch)
        except StoreError as error:
            self._trouble = error
            log.error("store_given_up", error=str(error), trouble=error.trouble.value, changes=len(batch))  # noqa: TRY400 - it says all
            if not self._stopping:
                self._broken(error)
            return False
        log.info("store_works_again")
        self._trouble = None
        return True


def _nothing_more() -> StoreError:
    return StoreError(StoreTrouble.UNAVAILABLE, "the head has ended, and keeps nothing more")
