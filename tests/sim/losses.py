"""What a caller does when things that it was told went with the head: it sees what is left, and goes on.

Whether they may be lost is judged in the moment the head dies, by what the store has then.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Awaitable, Callable

from fleet_service.domain.errors import Reason
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.views import SessionView
from tests.sim.knowledge import Asked, Being, Knowledge, kept_as
from tests.sim.plans import Surroundings
from tests.sim.readers import read_to_the_end
from tests.sim.records import Record
from tests.sim.requests import Requests
from tests.sim.stores import SimStore

_ASKS_AGAIN = 0.8


class Losses(Requests):
    """A caller that is told what may be lost."""

    def __init__(self, label: str, rng: random.Random, world: Surroundings) -> None:
        super().__init__(label, rng, world)
        self._mine: Knowledge | None = None
        self._told_of: dict[str, Asked] = {}  # generations, by their ids
        self._asking: Asked | None = None
        self._staying: Record | None = None  # with this one until its end
        self._talking: asyncio.Task[None] | None = None
        self.has_lost = False
        self._gone: list[Asked] = []
        self._go_on: list[Asked] = []  # those that had not ended, as it is kept
        self._before: Being | None = None  # what was told of the session before that was lost

    # When a head dies

    def head_died(self, store: SimStore, kept_s: float) -> None:
        """All that it was told before `kept_s` is there. It breaks off where it was told what is not."""
        self._judge_answers(store, kept_s)
        self._judge_cancel(store, kept_s)
        kept = None if self._mine is None else kept_as(store, self._mine.session_id)
        session, generations = self._loses_session(kept, kept_s), self._loses_generations(store, kept_s)
        if not (session or generations or self.has_lost):
            return
        self._starts_from(kept)
        self.has_lost = True
        self._oracle.met("what a caller was told is lost")
        if self._talking is not None:
            self._talking.cancel()

    def _judge_answers(self, store: SimStore, kept_s: float) -> None:
        for answered in list(self._answered):
            if (answered.key.owner, answered.key.request_id) not in store.answers:
                self._answered.remove(answered)
                if answered.told_s < kept_s:
                    self._oracle.violation(f"{self.label}: the answer to {answered.key.request_id} is lost")

    def _judge_cancel(self, store: SimStore, kept_s: float) -> None:
        """Of a generation that is yet to come."""
        asked = self._asking
        if asked is None or asked.cancel_told_s is None or ("", asked.generation_id) in store.saved.cancels:
            return
        if asked.generation_id not in self._oracle.records:
            if asked.cancel_told_s < kept_s:
                self._oracle.violation(f"{self.label}: the cancel of {asked.generation_id} is lost")
            asked.plan.cancelled_before, asked.cancel_told_s = False, None

    def _loses_session(self, kept: Being | None, kept_s: float) -> bool:
        mine = self._mine
        if mine is None:
            return False
        extended = self._extended(mine)
        newer = [*mine.asked, *(extended if mine.being is not None else [])]
        may_be = [*mine.may_be(kept_s), *mine.asked, *extended]
        if kept not in may_be:
            self._oracle.violation(f"{mine.session_id} is kept as {kept}, it may only be one of {may_be}")
        return kept != mine.being and kept not in newer

    def _starts_from(self, kept: Being | None) -> None:
        """All is as it is kept."""
        self._staying = None
        told_of = self._told_of.values()
        self._go_on = [each for each in told_of if each.record is not None and each.record.finished is None]
        for asked in self._go_on:
            asked.over = False
        mine = self._mine
        if mine is None:
            return
        self._before = mine.being
        mine.is_told(kept, asyncio.get_running_loop().time())
        if kept is not None:
            mine.context = list(kept.context)
            for asked in self._told_of.values():
                if asked.record is not None:
                    asked.record.session_finished_s = None  # the session is not over

    def _extended(self, mine: Knowledge) -> list[Being]:
        """The session as its generations may have left it, of whose end the caller has not heard."""
        context, over = tuple(mine.context), {name for name, each in self._told_of.items() if each.over}
        return [
            Being(context + record.expected.token_ids[: record.finished.output_tokens])
            for record in self._oracle.records.values()
            if record.session_id == mine.session_id
            and record.generation_id not in over
            and record.plan.spec.extend_context
            and record.plan.context == context
            and record.finished is not None
            and record.expected is not None
        ]

    def _loses_generations(self, store: SimStore, kept_s: float) -> bool:
        ended = False
        for name, asked in list(self._told_of.items()):
            record = asked.record
            assert record is not None
            ended = ended or (record.end_lost and record is not self._staying)
            if record.lost:
                del self._told_of[name]
                self._gone.append(asked)
                asked.plan.cancelled_before = ("", asked.generation_id) in store.saved.cancels
                if asked.told_s < kept_s:
                    self._oracle.violation(f"{name}, told of at {asked.told_s:.4f} s, is lost")
        return ended or bool(self._gone)

    # Afterwards

    async def _take_stock(self) -> Knowledge | None:
        """The session as it is now, if there is one, with nothing under way."""
        self.has_lost, self._asking, mine = False, None, self._mine
        gone, self._gone = self._gone, []
        self._note("has been told what is lost: %d generations, %s", len(gone), self._before)
        for asked in gone:
            await self._must_be_refused(Reason.GENERATION_NOT_FOUND, _finding(asked.record))
        for asked in self._go_on:
            if asked.record is not None:
                await self._stay(asked.record)
                self._ends(asked, asked.record)
        if mine is not None:
            await self._see_session(mine)
        if mine is not None and mine.being is None:
            mine = self._mine = None
        if mine is not None and not await self._is_resumed(mine):
            return mine
        if mine is not None:
            await self._append_again(mine)
        for asked in gone:
            if self._may_ask_again(asked, mine) and self._rng.random() < _ASKS_AGAIN:
                self._note("asks again for %s", asked.generation_id or "a generation")
                self._oracle.met("a lost request is carried out again")
                if not await self._ask_anew(asked):
                    return None
        return mine

    async def _see_session(self, mine: Knowledge) -> None:
        """What is gone of it is told in plain words."""
        now, before = mine.being, self._before
        if now is None:
            await self._must_be_refused(Reason.SESSION_NOT_FOUND, _seeing(mine.session_id))
            return
        await self._check_context(mine)
        if before is None or now.parked or len(before.context) == len(now.context):
            return
        await self._must_be_refused(
            Reason.CONTEXT_CHANGED,
            lambda head: head.append_tokens(mine.session_id, [5], len(before.context), None, None),
        )

    async def _is_resumed(self, mine: Knowledge) -> bool:
        return not mine.is_parked or await self._resumes(mine)

    def _may_ask_again(self, asked: Asked, mine: Knowledge | None) -> bool:
        """It would be the very same request."""
        if asked.mine is None:
            return True
        return asked.mine is mine and tuple(mine.context) == asked.plan.context

    async def _append_again(self, mine: Knowledge) -> None:
        """The very same request, where what it had done is lost."""
        appended = mine.appended
        if appended is None or appended.before != tuple(mine.context) or self._rng.random() >= _ASKS_AGAIN:
            return
        mine.asked.append(Being(appended.after))
        if await self._patiently(mine.spec, len(appended.after), appended.ask) is None:
            mine.asked.clear()
            return
        self._oracle.met("a lost append is carried out again")
        mine.context = list(appended.after)
        self._tells(mine)
        await self._check_context(mine)

    async def _stay(self, record: Record) -> None:
        """Until it has ended, and the end that was told of is not undone."""
        self._staying = record
        while record.finished is None or record.end_lost:
            await read_to_the_end(self._oracle, self._line, record)
        self._staying = None

    async def _resumes(self, mine: Knowledge) -> bool:
        """Have a parked session resumed. False: it stays parked."""
        mine.asked.append(Being(tuple(mine.context)))
        resumed = await self._patiently(mine.spec, len(mine.context), self._resume(mine.session_id))
        if resumed is None:
            mine.asked.clear()
        else:
            self._tells(mine)
        await self._check_context(mine)
        return resumed is not None

    async def _ask_anew(self, asked: Asked) -> bool:
        """False: the session is over."""
        raise NotImplementedError

    # What it is told

    def _tells(self, mine: Knowledge, *, parked: bool = False, told_s: float | None = None) -> None:
        """Its session is so now."""
        at_s = asyncio.get_running_loop().time() if told_s is None else told_s
        mine.is_told(Being(tuple(mine.context), parked), at_s)

    def _tells_end(self, mine: Knowledge) -> None:
        """Its session is over."""
        mine.is_told(None, asyncio.get_running_loop().time())

    def _ends(self, asked: Asked, record: Record) -> bool:
        """It has ended, and its output may have joined the context. False: its session is over."""
        mine = asked.mine
        if mine is not None and record.session_finished_s is not None:
            return False
        asked.over = True
        if mine is None:
            return True
        if asked.plan.spec.extend_context and record.finished is not None and record.finished.output_tokens:
            assert record.expected is not None
            mine.context += record.expected.token_ids[: record.finished.output_tokens]
            self._tells(mine, told_s=record.finished_s)
        return True

    async def _check_context(self, mine: Knowledge) -> None:
        """The head means the same context (rule 6)."""
        view = await self._line.look(lambda head: head.get_session(mine.session_id))
        right = (len(mine.context), zlib.crc32(array("I", mine.context).tobytes()))
        if (view.context_length, view.context_crc32) != right:
            self._oracle.violation(
                f"{mine.session_id}: {view.context_length} tokens, crc {view.context_crc32}; right is {right}"
            )


def _finding(record: Record | None) -> Callable[[Head], Awaitable[Generation]]:
    async def find(head: Head) -> Generation:
        return head.find_generation("" if record is None else record.generation_id)

    return find


def _seeing(session_id: str) -> Callable[[Head], Awaitable[SessionView]]:
    async def see(head: Head) -> SessionView:
        return head.get_session(session_id)

    return see
