"""Simulated callers: each lives through one session, by seed, and knows what its context must be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.specs import (
    GenerationSpec,
    Qos,
    Replay,
    SamplingOverride,
    SessionSpec,
)
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.head import Head
from fleet_service.runtime.views import CancelOutcome, RequestKey, SessionView
from node_stub.reference import StubModel
from tests.sim.knowledge import Appended, Asked, Being, Knowledge
from tests.sim.losses import Losses
from tests.sim.plans import Surroundings, plan_generation
from tests.sim.readers import ReadingHabits, cancel, pick_habits, read_along
from tests.sim.records import Record
from tests.sim.talking import BrokenOffError
from tests.sim.transcripts import Transcript

_HELD_S = 5.0
"""How long at most a cancel that came before its generation waits for it."""
TOO_LONG_TOKENS = 4200
"""Longer than any node's window."""


class Caller(Losses):
    """One caller and its session. `live` runs to the session's end."""

    def __init__(self, label: str, rng: random.Random, world: Surroundings) -> None:
        super().__init__(label, rng, world)
        self._generations = 0

    async def live(self) -> None:
        """From a seeded start to the end of the session; anew from its start where a head forgets."""
        await asyncio.sleep(self._rng.random() * 12.0)
        while True:
            await self._world.heads.lives()
            talk = asyncio.get_running_loop().create_task(self._talk(), name=f"talk of {self.label}")
            self._line.owns(talk)
            self._talking = talk
            try:
                await asyncio.wait({talk})
            finally:
                talk.cancel()
            if not talk.cancelled():
                talk.result()
                if await self._line.is_kept() or not self.has_lost:
                    return
            if self.has_lost:
                continue
            self._note("sees its streams break")
            if self._rng.random() < 0.7:
                self._requests = self._generations = 0  # the same ids again
            await asyncio.sleep(self._rng.random())

    async def _talk(self) -> None:
        """A session to its end; gives up when the fleet takes it for too long."""
        mine = await self._take_stock() if self.has_lost else None
        if self._mine is not None and self._mine.being is None:
            return  # it has had its session finished
        if mine is None and self._rng.random() < 0.3:
            for _ in range(self._rng.randint(1, 3)):
                await self._complete()
                await asyncio.sleep(self._rng.random() * 2.0)
            return
        mine = mine or await self._create()
        if mine is None:
            return
        for _ in range(self._rng.randint(1, 4)):
            if mine.is_parked or not await self._between(mine):
                break
            if not await self._generate(mine):
                return
            await self._check_context(mine)
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

    async def _create(self) -> Knowledge | None:
        spec, rng = self._spec(), self._rng
        context = self._tokens(60)
        session_id = f"{self.label}-session" if rng.random() < 0.5 else ""
        key = self._key("create", needed=True)

        async def create(head: Head) -> SessionView:
            return await head.create_session(session_id, spec, context, key)

        view = await self._patiently(spec, len(context), create)
        if view is None:
            return None
        mine = self._mine = Knowledge(view.session_id, view.spec, self._model_of(view.spec), context)
        self._tells(mine)
        if key is not None:
            await self._ask_again(create, key, view, now=rng.random() < 0.5)
        self._note("created %s with %d tokens", view.session_id, len(context))
        await self._check_context(mine)
        return mine

    async def _between(self, mine: Knowledge) -> bool:
        """What a caller does before it asks for tokens. False: the session stays parked."""
        rng = self._rng
        await self._remember_answers()
        if rng.random() < 0.1:
            await self._ask_nonsense(mine)
        if rng.random() < 0.7:
            await self._append(mine)
        if rng.random() < 0.15:
            await asyncio.sleep(rng.choice([1.0, 5.0, self._world.settings.idle_unbind_s + 3.0]))
        if rng.random() < 0.2:
            mine.asked.append(Being(tuple(mine.context), parked=True))
            await self._line.call(lambda head: head.park_session(mine.session_id))
            self._tells(mine, parked=True)
            self._note("parked")
            self._oracle.met("a session is parked")
            self._oracle.staying.parked(mine.session_id)
            await self._must_be_refused(
                Reason.SESSION_PARKED,
                lambda head: head.append_tokens(mine.session_id, [5], None, None, None),
            )
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 3.0)
            if not await self._resumes(mine):
                return False
            self._note("resumed")
        return True

    async def _ask_nonsense(self, mine: Knowledge) -> None:
        """Requests that are the caller's own fault: refused, and nothing changes (rule 7)."""
        session_id, length = mine.session_id, len(mine.context)
        odd = GenerationSpec(max_new_tokens=self._world.settings.max_new_tokens_limit + 1)
        nonsense: list[tuple[Reason, Callable[[Head], Awaitable[object]]]] = [
            (Reason.INVALID_FIELD, lambda head: head.append_tokens(session_id, [5], None, length + 1, None)),
            (Reason.INVALID_FIELD, lambda head: head.generate(session_id, "", odd, None, None)),
            (Reason.SESSION_NOT_FOUND, lambda head: head.park_session("never-made")),
            (
                Reason.SESSION_ALREADY_EXISTS,
                lambda head: head.create_session(session_id, mine.spec, [], None),
            ),
        ]
        for reason, ask in nonsense:
            await self._must_be_refused(reason, ask)
        await self._check_context(mine)

    async def _append(self, mine: Knowledge) -> None:
        rng = self._rng
        length = len(mine.context)
        truncate_to = rng.randint(0, length) if rng.random() < 0.3 else None
        tokens = self._tokens(25)
        expected_length = length if rng.random() < 0.5 else None
        key = self._key("append", needed=True)
        if rng.random() < 0.1:
            await self._must_be_refused(
                Reason.CONTEXT_CHANGED,
                lambda head: head.append_tokens(mine.session_id, tokens, length + 1, truncate_to, None),
            )

        async def append(head: Head) -> SessionView:
            return await head.append_tokens(mine.session_id, tokens, expected_length, truncate_to, key)

        after = mine.context[:truncate_to] + tokens
        mine.asked.append(Being(tuple(after)))
        try:
            view = await self._line.call(append)
        except FleetError as error:
            if error.reason is not Reason.CONTEXT_TOO_LONG:
                raise
            mine.asked.clear()
            self._world.check_refusal(error, mine.spec, (truncate_to or length) + len(tokens))
            return
        mine.appended = Appended(append, tuple(mine.context), tuple(after))
        mine.context = after
        self._tells(mine)
        if key is not None:
            await self._ask_again(append, key, view, now=rng.random() < 0.5)
        self._note("appended %d tokens to %s", len(tokens), "the end" if truncate_to is None else truncate_to)
        await self._check_context(mine)

    async def _finish(self, mine: Knowledge) -> None:
        mine.asked.append(None)
        await self._line.call(self._finishes(mine.session_id))
        self._tells_end(mine)
        self._note("finished %s", mine.session_id)
        await self._must_be_refused(
            Reason.SESSION_NOT_FOUND,
            lambda head: head.append_tokens(mine.session_id, [5], None, None, None),
        )
        await self._remember_answers()

    # Generations

    async def _complete(self) -> None:
        spec = self._spec()
        model = self._model_of(spec)
        context = self._tokens(60) if self._rng.random() < 0.95 else [9] * TOO_LONG_TOKENS
        plan = plan_generation(self._rng, self._world, self.label, model, spec, context)
        generation_id, key = self._names()

        async def ask(head: Head) -> Generation:
            return await head.complete(spec, context, plan.spec, generation_id, key, plan)

        await self._have(Asked(plan, spec, generation_id, key, ask, None))

    async def _generate(self, mine: Knowledge) -> bool:
        """One generation of the session, to its end. False: the session is over."""
        plan = plan_generation(self._rng, self._world, self.label, mine.model, mine.spec, mine.context)
        generation_id, key = self._names()

        async def ask(head: Head) -> Generation:
            return await head.generate(mine.session_id, generation_id, plan.spec, key, plan)

        asked = Asked(plan, mine.spec, generation_id, key, ask, mine)
        record = await self._have(asked)
        return record is None or self._ends(asked, record)

    def _names(self) -> tuple[str, RequestKey | None]:
        self._generations += 1
        chosen = f"{self.label}.{self._generations}" if self._rng.random() < 0.5 else ""
        return chosen, self._key("generate", needed=not chosen)

    async def _have(self, asked: Asked, earlier: Transcript | None = None) -> Record | None:
        """Ask for a generation and stay with it to its end; None when it could not be had."""
        rng, plan, generation_id = self._rng, asked.plan, asked.generation_id
        self._asking = asked
        plan.cancelled_before = bool(generation_id) and rng.random() < 0.1
        if plan.cancelled_before:
            self._note("cancels %s before it asks for it", generation_id)
            result = await self._line.call(lambda head: head.cancel_generation(generation_id))
            asked.cancel_told_s = asyncio.get_running_loop().time()
            if result.outcome is not CancelOutcome.HELD:
                self._oracle.violation(f"a cancel of {generation_id}, yet to come, gave {result}")
            plan.cancelled_behind_s = self._world.heads.behind_s
            if self._line.lasts:
                await asyncio.sleep(rng.random() * _HELD_S)
        if asked.key is not None and rng.random() < 0.2:
            await self._ask_and_leave(asked.ask)
        return await self._have_now(asked)

    async def _ask_anew(self, asked: Asked) -> bool:
        """Who read what is lost, and has not heard of that, reads on."""
        before, asked.record = asked.record, None
        reader = None if before is None or not asked.generation_id else before.first_reader
        reads_on = reader is not None and reader.finished is None
        record = await self._have_now(asked, reader if reads_on else None)
        return record is None or self._ends(asked, record)

    async def _have_now(self, asked: Asked, earlier: Transcript | None = None) -> Record | None:
        rng, plan, key = self._rng, asked.plan, asked.key
        ask = self._or_attach(asked.ask, asked.generation_id)
        generation = await self._patiently(asked.spec, len(plan.context), ask)
        self._asking = None
        if generation is None:
            return None
        record = asked.record = self._staying = self._oracle.records[generation.generation_id]
        asked.told_s, asked.over = asyncio.get_running_loop().time(), False
        self._told_of[record.generation_id] = asked
        if earlier is not None:
            earlier.follows(record)
        if key is not None:
            await self._ask_again(asked.ask, key, generation, now=rng.random() < 0.3)
        habits = pick_habits(rng, plan)
        async with asyncio.TaskGroup() as group:
            along = read_along(self._oracle, self._line, record, habits, rng, earlier)
            reading = group.create_task(along)
            self._line.owns(reading)
            self._disturb(group, record, habits, asked.mine)
        await self._stay(record)
        return record

    async def _ask_and_leave(self, ask: Callable[[Head], Awaitable[Generation]]) -> None:
        """A caller that goes away while its request is being taken; it will ask again."""
        task = asyncio.ensure_future(ask(await self._world.heads.lives()))
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
            self._line.owns(group.create_task(self._cancel(record, habits.cancel_after_s)))
        if mine is not None and rng.random() < 0.2:
            self._line.owns(group.create_task(self._meddle(mine, record, rng.random() * 2.0)))
        if mine is not None and rng.random() < 0.05:
            self._line.owns(group.create_task(self._finish_early(mine, record, rng.random() * 2.0)))

    async def _cancel(self, record: Record, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await cancel(self._oracle, self._line, record)

    async def _meddle(self, mine: Knowledge, record: Record, after_s: float) -> None:
        """Use the session while it generates: refused, and nothing changes (design: session table)."""
        await asyncio.sleep(after_s)
        if record.finished is not None:
            return
        wrong: list[Callable[[Head], Awaitable[object]]] = [
            lambda head: head.append_tokens(mine.session_id, [5], None, None, None),
            lambda head: head.park_session(mine.session_id),
            lambda head: head.generate(mine.session_id, "", GenerationSpec(max_new_tokens=1), None, None),
        ]
        chosen = self._rng.choice(wrong)

        async def meddle(head: Head) -> object:
            if record.finished is not None:  # it is, by the head that was waited for
                raise BrokenOffError
            return await chosen(head)

        with suppress(BrokenOffError):
            await self._must_be_refused(Reason.GENERATION_IN_PROGRESS, meddle, again=False)

    async def _finish_early(self, mine: Knowledge, record: Record, after_s: float) -> None:
        await asyncio.sleep(after_s)
        record.session_finished_s = asyncio.get_running_loop().time()
        self._note("finishes %s while it generates", mine.session_id)
        finishes = self._finishes(mine.session_id)

        async def finish(head: Head) -> None:
            await finishes(head)
            if record.finished is None:
                self._oracle.violation(f"{record.generation_id} outlives its session")

        async def finish_and_tell() -> None:
            await self._line.call(finish)
            self._tells_end(mine)

        mine.asked.append(None)
        finishing = asyncio.ensure_future(finish_and_tell())
        self._line.owns(finishing)
        try:
            while self._is_there(self._world.heads.head, mine):
                await asyncio.sleep(0.01 if self._line.lasts else 0)

            async def use(head: Head) -> object:
                if self._line.lasts and self._is_there(head, mine):  # the finish went with its head
                    raise BrokenOffError
                return await head.generate(mine.session_id, "", GenerationSpec(max_new_tokens=1), None, None)

            with suppress(BrokenOffError):
                await self._must_be_refused(Reason.SESSION_NOT_FOUND, use, again=False)
            await finishing
        finally:
            if self._line.may_lose:
                finishing.cancel()

    @staticmethod
    def _is_there(head: Head | None, mine: Knowledge) -> bool:
        try:
            return head is not None and head.get_session(mine.session_id) is not None
        except FleetError:
            return False
