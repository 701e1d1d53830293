"""How a simulated caller makes its requests: patiently, now and then twice, again after a head has died."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.views import RequestKey, SessionView
from tests.sim.plans import Surroundings
from tests.sim.talking import Talk

T = TypeVar("T")
Answer = SessionView | Generation

_TRIES = 40
_TRY_AGAIN_S = 1.5
_IS_THERE = frozenset({Reason.GENERATION_ALREADY_EXISTS, Reason.GENERATION_IN_PROGRESS})
_NOT_NOW = frozenset({Reason.NO_ELIGIBLE_NODE, Reason.FLEET_SATURATED})


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request with an id, and what came of it."""

    ask: Callable[[Head], Awaitable[Answer]]
    key: RequestKey
    answer: object
    life: int  # of the head that answered
    told_s: float


class Requests:
    """What every caller does alike."""

    def __init__(self, label: str, rng: random.Random, world: Surroundings) -> None:
        self.label = label
        self._rng = rng
        self._world = world
        self._oracle = world.oracle
        self._line = Talk(world.heads, world.oracle, random.Random(f"line of {label}"))
        self._requests = 0
        self._answered: list[_Answered] = []

    def _key(self, what: str, *, needed: bool = False) -> RequestKey | None:
        """Now and then one; always where the request may have to be made again."""
        if self._rng.random() >= 0.5 and not (needed and self._line.lasts):
            return None
        self._requests += 1
        return RequestKey(f"{self.label}-{what}-{self._requests}", what.encode())

    async def _patiently(
        self, spec: SessionSpec, context_tokens: int, ask: Callable[[Head], Awaitable[T]]
    ) -> T | None:
        """Ask until it is granted; None when it never can be, or not for long."""
        for _ in range(_TRIES):
            try:
                return await self._line.call(ask)
            except FleetError as error:
                self._world.check_refusal(error, spec, context_tokens)
                if error.reason not in _NOT_NOW:
                    self._note("is refused: %s", error.reason)
                    return None
            await asyncio.sleep(_TRY_AGAIN_S)
        self._note("gives up")
        return None

    async def _must_be_refused(
        self, reason: Reason, request: Callable[[Head], Awaitable[object]], *, again: bool = True
    ) -> None:
        try:
            answer = await self._line.call(request, again=again)
        except FleetError as error:
            if error.reason is not reason:
                self._oracle.violation(f"{self.label} was refused with {error}, not {reason}")
        else:
            self._oracle.violation(f"{self.label} got {answer} instead of {reason}")

    # The same again

    async def _ask_again(
        self, ask: Callable[[Head], Awaitable[Answer]], key: RequestKey, answer: Answer, *, now: bool
    ) -> None:
        """The same request once more, now or when another head lives: the same answer."""
        given, told_s = _told(answer), asyncio.get_running_loop().time()
        if now and _told(await self._line.call(ask)) != given:
            self._oracle.violation(f"{self.label}: one request got {given}, and then another answer")
        if self._line.lasts:
            self._answered.append(_Answered(ask, key, given, self._line.lives, told_s))

    async def _remember_answers(self) -> None:
        """Heads that came after give the answers of those before."""
        for answered in [each for each in self._answered if each.life < self._line.lives]:
            self._answered.remove(answered)
            again = _told(await self._line.call(answered.ask))
            self._oracle.met("a later head repeats an answer")
            if again != answered.answer:
                self._oracle.violation(f"{self.label}: a request got {answered.answer}, and later {again}")

    # What may have been done by a head that died

    def _resume(self, session_id: str) -> Callable[[Head], Awaitable[SessionView]]:
        asked = 0

        async def resume(head: Head) -> SessionView:
            nonlocal asked
            asked += 1
            try:
                return await head.resume_session(session_id)
            except FleetError as error:
                if error.reason is not Reason.SESSION_NOT_PARKED or asked == 1 or not self._line.lasts:
                    raise
                return head.get_session(session_id)  # the head that died has done it

        return resume

    def _finishes(self, session_id: str) -> Callable[[Head], Awaitable[None]]:
        asked = 0

        async def finish(head: Head) -> None:
            nonlocal asked
            asked += 1
            try:
                await head.finish_session(session_id)
            except FleetError as error:
                if error.reason is not Reason.SESSION_NOT_FOUND or asked == 1 or not self._line.lasts:
                    raise

        return finish

    def _or_attach(
        self, ask: Callable[[Head], Awaitable[Generation]], generation_id: str
    ) -> Callable[[Head], Awaitable[Generation]]:
        """Ask; where the head that died had taken it, under the id that the caller chose, attach."""
        asked = 0

        async def attach(head: Head) -> Generation:
            nonlocal asked
            asked += 1
            try:
                return await ask(head)
            except FleetError as error:
                if error.reason not in _IS_THERE or asked == 1 or not self._line.lasts:
                    raise
                return head.find_generation(generation_id)

        return attach

    def _note(self, text: str, *values: object) -> None:
        self._oracle.story.note(f"{self.label} {text}", *values)


def _told(answer: Answer) -> object:
    """What is the same each time: the session as it was then, or the generation's id."""
    return answer.generation_id if isinstance(answer, Generation) else answer
