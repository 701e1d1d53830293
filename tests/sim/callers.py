"""Simulated callers: each lives through one session, by seed, and knows what its context must be."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.specs import (
    GenerationSpec,
    Qos,
    Replay,
    SamplingOverride,
    SessionSpec,
)
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.views import CancelOutcome, RequestKey
from node_stub.reference import StubModel
from tests.sim.plans import Surroundings, plan_generation
from tests.sim.readers import ReadingHabits, cancel, pick_habits, read_along
from tests.sim.records import Plan, Record

T = TypeVar("T")

_TRIES = 40
TOO_LONG_TOKENS = 4200
"""Longer than any node's window."""
_TRY_AGAIN_S = 1.5
_NOT_NOW = frozenset({Reason.NO_ELIGIBLE_NODE, Reason.FLEET_SATURATED})


@dataclass(slots=True)
class Knowledge:
    """The session as its caller means it to be."""

    session_id: str
    spec: SessionSpec
    model: StubModel
    context: list[int] = field(default_factory=list)


class Caller:
    """One caller and its session. `live` runs to the session's end."""

    def __init__(self, label: str, rng: random.Random, world: Surroundings) -> None:
        self.label = label
        self._rng = rng
        self._world = world
        self._oracle = world.oracle
        self._requests = 0
        self._generations = 0

    async def live(self) -> None:
        """From a seeded start to the end of the session; once more from its start when the head dies."""
        await asyncio.sleep(self._rng.random() * 12.0)
        while True:
            await self._world.heads.lives()
            talk = asyncio.get_running_loop().create_task(self._talk(), name=f"talk of {self.label}")
            try:
                await asyncio.wait({talk})
            finally:
                talk.cancel()
            if not talk.cancelled():
                talk.result()
                return
            self._note("sees its streams break")
            if self._rng.random() < 0.7:
                self._requests = self._generations = 0  # the same ids again
            await asyncio.sleep(self._rng.random())

    async def _talk(self) -> None:
        """A session to its end; gives up when the fleet takes it for too long."""
        if self._rng.random() < 0.3:
            for _ in range(self._rng.randint(1, 3)):
                await self._complete()
                await asyncio.sleep(self._rng.random() * 2.0)
            return
        mine = await self._create()
        if mine is None:
            return
        for _ in range(self._rng.randint(1, 4)):
            if not await self._between(mine):
                break
            if not await self._generate(mine):
                return
            self._check_context(mine)
        await self._finish(mine)

    # A session's life

    def _spec(self) -> SessionSpec:
        rng = self._rng
        sampling = SamplingOverride()
        if rng.random() < 0.4:
            sampling = SamplingOverride(temperature=0.8, seed=rng.choice([None, rng.randint(1, 10**9)]))
        model = rng.choice(self._world.models)
        return SessionSpec(
            model=model.name,
            model_revision=model.revision if rng.random() < 0.2 else "",
            sampling=sampling,
            qos=rng.choice(list(Qos)),
            node_selector={"zone": rng.choice(self._world.zones)} if rng.random() < 0.2 else {},
            expected_output_tokens=rng.choice([0, 0, 20]),
            replay=Replay.NEVER if rng.random() < 0.08 else Replay.ALLOWED,
        )

    def _model_of(self, spec: SessionSpec) -> StubModel:
        """The model, in its first revision where none is asked for."""
        named = [model for model in self._world.models if model.name == spec.model]
        return next(model for model in named if spec.model_revision in ("", model.revision))

    def _tokens(self, most: int) -> list[int]:
        return [self._rng.randint(3, 90) for _ in range(self._rng.randint(0, most))]

    def _key(self, what: str) -> RequestKey:
        self._requests += 1
        return RequestKey(f"{self.label}-{what}-{self._requests}", what.encode())

    async def _create(self) -> Knowledge | None:
        spec, rng = self._spec(), self._rng
        context = self._tokens(60)
        session_id = f"{self.label}-session" if rng.random() < 0.5 else ""
        key = self._key("create") if rng.random() < 0.5 else None
        view = await self._patiently(
            spec, len(context), lambda: self._world.head.create_session(session_id, spec, context, key)
        )
        if view is None:
            return None
        if key is not None and rng.random() < 0.5:
            again = await self._world.head.create_session(session_id, spec, context, key)
            if again.session_id != view.session_id:
                self._oracle.violation(
                    f"{self.label}: one request made {view.session_id}, {again.session_id}"
                )
        self._note("created %s with %d tokens", view.session_id, len(context))
        mine = Knowledge(view.session_id, view.spec, self._model_of(view.spec), context)
        self._check_context(mine)
        return mine

    async def _between(self, mine: Knowledge) -> bool:
        """What a caller does before it asks for tokens. False: the session stays parked."""
        rng, head = self._rng, self._world.head
        if rng.random() < 0.1:
            await self._ask_nonsense(mine)
        if rng.random() < 0.7:
            await self._append(mine)
        if rng.random() < 0.15:
            await asyncio.sleep(rng.choice([1.0, 5.0, self._world.settings.idle_unbind_s + 3.0]))
        if rng.random() < 0.2:
            await head.park_session(mine.session_id)
            self._note("parked")
            self._oracle.met("a session is parked")
            self._oracle.staying.parked(mine.session_id)
            await self._must_be_refused(
                Reason.SESSION_PARKED, head.append_tokens(mine.session_id, [5], None, None, None)
            )
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 3.0)
            resumed = await self._patiently(
                mine.spec, len(mine.context), lambda: head.resume_session(mine.session_id)
            )
            self._check_context(mine)
            if resumed is None:
                return False
            self._note("resumed")
        return True

    async def _ask_nonsense(self, mine: Knowledge) -> None:
        """Requests that are the caller's own fault: refused, and nothing changes (rule 7)."""
        head, session_id, length = self._world.head, mine.session_id, len(mine.context)
        odd = GenerationSpec(max_new_tokens=self._world.settings.max_new_tokens_limit + 1)
        await self._must_be_refused(
            Reason.INVALID_FIELD, head.append_tokens(session_id, [5], None, length + 1, None)
        )
        await self._must_be_refused(Reason.INVALID_FIELD, head.generate(session_id, "", odd, None, None))
        await self._must_be_refused(Reason.SESSION_NOT_FOUND, head.park_session("never-made"))
        await self._must_be_refused(
            Reason.SESSION_ALREADY_EXISTS, head.create_session(session_id, mine.spec, [], None)
        )
        self._check_context(mine)

    async def _append(self, mine: Knowledge) -> None:
        rng, head = self._rng, self._world.head
        length = len(mine.context)
        truncate_to = rng.randint(0, length) if rng.random() < 0.3 else None
        tokens = self._tokens(25)
        expected_length = length if rng.random() < 0.5 else None
        key = self._key("append") if rng.random() < 0.5 else None
        if rng.random() < 0.1:
            await self._must_be_refused(
                Reason.CONTEXT_CHANGED,
                head.append_tokens(mine.session_id, tokens, length + 1, truncate_to, None),
            )
        try:
            for _ in range(2 if key is not None and rng.random() < 0.5 else 1):
                await head.append_tokens(mine.session_id, tokens, expected_length, truncate_to, key)
        except FleetError as error:
            if error.reason is not Reason.CONTEXT_TOO_LONG:
                raise
            self._world.check_refusal(error, mine.spec, (truncate_to or length) + len(tokens))
            return
        mine.context = mine.context[:truncate_to] + tokens
        self._note("appended %d tokens to %s", len(tokens), "the end" if truncate_to is None else truncate_to)
        self._check_context(mine)

    async def _finish(self, mine: Knowledge) -> None:
        await self._world.head.finish_session(mine.session_id)
        self._note("finished %s", mine.session_id)
        await self._must_be_refused(
            Reason.SESSION_NOT_FOUND,
            self._world.head.append_tokens(mine.session_id, [5], None, None, None),
        )

    # Generations

    async def _complete(self) -> None:
        spec = self._spec()
        model = self._model_of(spec)
        context = self._tokens(60) if self._rng.random() < 0.95 else [9] * TOO_LONG_TOKENS
        plan = plan_generation(self._rng, self._world, self.label, model, spec, context)
        generation_id, key = self._names()

        async def ask() -> Generation:
            return await self._world.head.complete(spec, context, plan.spec, generation_id, key, plan)

        await self._have(plan, spec, generation_id, key, ask, None)

    async def _generate(self, mine: Knowledge) -> bool:
        """One generation of the session, to its end. False: the session is over."""
        plan = plan_generation(self._rng, self._world, self.label, mine.model, mine.spec, mine.context)
        generation_id, key = self._names()

        async def ask() -> Generation:
            return await self._world.head.generate(mine.session_id, generation_id, plan.spec, key, plan)

        record = await self._have(plan, mine.spec, generation_id, key, ask, mine)
        if record is None:
            return True
        if record.session_finished_s is not None:
            return False
        if plan.spec.extend_context and record.finished is not None and record.finished.output_tokens:
            assert record.expected is not None
            mine.context += record.expected.token_ids[: record.finished.output_tokens]
        return True

    def _names(self) -> tuple[str, RequestKey | None]:
        self._generations += 1
        chosen = f"{self.label}.{self._generations}" if self._rng.random() < 0.5 else ""
        return chosen, self._key("generate") if self._rng.random() < 0.5 else None

    async def _have(
        self,
        plan: Plan,
        spec: SessionSpec,
        generation_id: str,
        key: RequestKey | None,
        ask: Callable[[], Awaitable[Generation]],
        mine: Knowledge | None,
    ) -> Record | None:
        """Ask for a generation and stay with it to its end; None when it could not be had."""
        rng, head = self._rng, self._world.head
        plan.cancelled_before = bool(generation_id) and rng.random() < 0.1
        if plan.cancelled_before:
            self._note("cancels %s before it asks for it", generation_id)
            result = await head.cancel_generation(generation_id)
            if result.outcome is not CancelOutcome.HELD:
                self._oracle.violation(f"a cancel of {generation_id}, yet to come, gave {result}")
        if key is not None and rng.random() < 0.2:
            await self._ask_and_leave(ask)
        generation = await self._patiently(spec, len(plan.context), ask)
        if generation is None:
            return None
        record = self._oracle.records[generation.generation_id]
        if key is not None and rng.random() < 0.3:
            again = await ask()
            if again.generation_id != generation.generation_id:
                self._oracle.violation(f"one request gave {generation.generation_id}, {again.generation_id}")
        habits = pick_habits(rng, plan)
        async with asyncio.TaskGroup() as group:
            group.create_task(read_along(self._oracle, head, generation, record, habits, rng))
            self._disturb(group, record, habits, mine)
        return record

    async def _ask_and_leave(self, ask: Callable[[], Awaitable[Generation]]) -> None:
        """A caller that goes away while its request is being taken; it will ask again."""
        task = asyncio.ensure_future(ask())
        for _ in range(self._rng.randint(0, 3)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            self._note("left while it asked for %s", task.result().generation_id)

    def _disturb(
        self, group: asyncio.TaskGroup, record: Record, habits: ReadingHabits, mine: Knowledge | None
    ) -> None:
        """What else the caller does while the generation runs."""
        rng = self._rng
        if habits.cancel_after_s is not None:
            group.create_task(self._cancel(record, habits.cancel_after_s))
        if mine is not None and rng.random() < 0.2:
            group.create_task(self._meddle(mine, record, rng.random() * 2.0))
        if mine is not None and rng.random() < 0.05:
            group.create_task(self._finish_early(mine, record, rng.random() * 2.0))

    async def _cancel(self, record: Record, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await cancel(self._oracle, self._world.head, record)

    async def _meddle(self, mine: Knowledge, record: Record, after_s: float) -> None:
        """Use the session while it generates: refused, and nothing changes (design: session table)."""
        await asyncio.sleep(after_s)
        if record.finished is not None:
            return
        head = self._world.head
        wrong: list[Callable[[], Awaitable[object]]] = [
            lambda: head.append_tokens(mine.session_id, [5], None, None, None),
            lambda: head.park_session(mine.session_id),
            lambda: head.generate(mine.session_id, "", GenerationSpec(max_new_tokens=1), None, None),
        ]
        await self._must_be_refused(Reason.GENERATION_IN_PROGRESS, self._rng.choice(wrong)())

    async def _finish_early(self, mine: Knowledge, record: Record, after_s: float) -> None:
        await asyncio.sleep(after_s)
        record.session_finished_s = asyncio.get_running_loop().time()
        self._note("finishes %s while it generates", mine.session_id)
        head = self._world.head
        finishing = asyncio.ensure_future(head.finish_session(mine.session_id))
        while self._is_there(mine):
            await asyncio.sleep(0)
        await self._must_be_refused(
            Reason.SESSION_NOT_FOUND,
            head.generate(mine.session_id, "", GenerationSpec(max_new_tokens=1), None, None),
        )
        await finishing
        if record.finished is None:
            self._oracle.violation(f"{record.generation_id} outlives its session")

    def _is_there(self, mine: Knowledge) -> bool:
        try:
            self._world.head.get_session(mine.session_id)
        except FleetError:
            return False
        return True

    # Helpers

    async def _patiently(
        self, spec: SessionSpec, context_tokens: int, ask: Callable[[], Awaitable[T]]
    ) -> T | None:
        """Ask until it is granted; None when it never can be, or not for long."""
        for _ in range(_TRIES):
            try:
                return await ask()
            except FleetError as error:
                self._world.check_refusal(error, spec, context_tokens)
                if error.reason not in _NOT_NOW:
                    self._note("is refused: %s", error.reason)
                    return None
            await asyncio.sleep(_TRY_AGAIN_S)
        self._note("gives up")
        return None

    async def _must_be_refused(self, reason: Reason, request: Awaitable[object]) -> None:
        try:
            answer = await request
        except FleetError as error:
            if error.reason is not reason:
                self._oracle.violation(f"{self.label} was refused with {error}, not {reason}")
        else:
            self._oracle.violation(f"{self.label} got {answer} instead of {reason}")

    def _check_context(self, mine: Knowledge) -> None:
        """The head means the same context (rule 6)."""
        view = self._world.head.get_session(mine.session_id)
        right = (len(mine.context), zlib.crc32(array("I", mine.context).tobytes()))
        if (view.context_length, view.context_crc32) != right:
            self._oracle.violation(
                f"{mine.session_id}: {view.context_length} tokens, crc {view.context_crc32}; right is {right}"
            )

    def _note(self, text: str, *values: object) -> None:
        self._oracle.story.note(f"{self.label} {text}", *values)
