"""One seeded world: heads, their nodes, callers and faults, from the first session to the last.

`run_seed` is the whole simulation of one seed. The heads are the product's own, on virtual time; only their
`Dialer` and the links are simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from fleet_service.domain.errors import FleetError
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.head import Head
from node_stub.reference import StubModel
from tests.sim.callers import Caller
from tests.sim.checks import FleetChecks
from tests.sim.clones import Clones
from tests.sim.faults import MIN_FAULTS, FaultPlan
from tests.sim.heads import Heads
from tests.sim.joining import Door
from tests.sim.loop import SimLoop, SimulationError
from tests.sim.making import MODELS, ZONES, make_profiles, make_settings
from tests.sim.masks import ALL, Mask
from tests.sim.network import SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import Oracle
from tests.sim.process import SimProcess
from tests.sim.stores import SimStore
from tests.sim.story import Story
from tests.sim.strikes import Strikes

MIN_CALLERS, MAX_CALLERS = 10, 14
_QUIET_WITHIN_S = 90.0
_WITH_STORE = 0.35
"""Of all worlds, those whose heads keep what they did."""
_RELAXED = 0.35
"""Of those, the ones whose heads tell of it first."""


@dataclass(slots=True)
class Outcome:
    """What came of one seed."""

    seed: int
    violations: list[str]
    story: Story
    mask: Mask = ALL
    drawn: Mask = ALL  # the numbers of all that took part
    nodes: int = 0
    callers: int = 0
    faults: int = 0
    generations: int = 0
    moves: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    finishes: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)

    @property
    def again(self) -> str:
        """How to run exactly this again."""
        only = f" FLEET_SIM_ONLY={self.mask}" if self.mask != ALL else ""
        return f"FLEET_SIM_SEED={self.seed}{only} python -m pytest tests/sim/test_simulation.py"

    def report(self) -> str:
        """For a person: what went wrong, the story, and how to see this one seed again."""
        wrong = "\n".join(f"  {text}" for text in self.violations)
        what = f"seed {self.seed}:\n{wrong}"
        return f"{what}\n\n{self.story.tell()}\n\n{what}\nagain: {self.again}"


def run_seed(seed: int, mask: Mask = ALL) -> Outcome:
    """Simulate one seed to its end, or what `mask` leaves of it."""
    rng = random.Random(f"world {seed}")
    loop = SimLoop(seed, disorder=rng.choice([1.0, 1.0, 0.3]), max_steps=150_000, max_time_s=1500.0)
    world = World(seed, rng, loop, mask)
    with _logs_into(world):
        try:
            loop.drive(world.run())
        except SimulationError as error:
            world.oracle.violation(f"{type(error).__name__}: {error}")
        except _Enough:
            pass
        except BaseExceptionGroup as group:
            if group.split(_Enough)[1] is not None:
                world.oracle.violation(f"unexpected {_leaves(group)}")
        except (FleetError, AssertionError, RuntimeError, LookupError) as error:
            world.oracle.violation(f"unexpected {error!r}")
    for text in loop.unhandled:
        world.oracle.violation(f"nobody caught: {text}")
    return world.outcome()


class _Enough(Exception):
    """A violation was found; the rest is not waited for."""


_WITH_MANY_NODES = 0.3
"""Of the worlds, those whose head places as if it had very many nodes."""


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, rng: random.Random, loop: SimLoop, mask: Mask) -> None:
        self._seed = seed
        self._mask = mask
        self.loop = loop
        self._failed: asyncio.Future[None] | None = None
        self.story = Story(loop.time)
        chance = random.Random(f"store {seed}")
        self.store = SimStore(loop, chance) if chance.random() < _WITH_STORE else None
        self.oracle = Oracle(loop.time, self.story, self._stop, self.store)
        self.network = SimNetwork(loop, random.Random(rng.random()), self.story.note)
        self.models: tuple[StubModel, ...] = MODELS
        self.zones: tuple[str, ...] = ZONES
        self.settings = make_settings(rng)
        if random.Random(f"placement {seed}").random() < _WITH_MANY_NODES:
            self.settings = replace(self.settings, compare_all_nodes=0)
        profiles = make_profiles(rng)
        drawn = [
            SimMachine(
                profile, self.network, random.Random(f"machine {seed} {number}"), self.oracle, SimProcess
            )
            if mask.has_node(number)
            else None
            for number, profile in enumerate(profiles)
        ]
        self.machines = [machine for machine in drawn if machine is not None]
        self.everyone = list(self.machines)
        self.heads = Heads(
            self.settings,
            self.network,
            self.machines,
            self.everyone,
            self.oracle,
            random.Random(f"heads {seed}"),
            self.store,
            relaxed=self.store is not None and random.Random(f"relaxed {seed}").random() < _RELAXED,
        )
        self.strikes = Strikes(self.network, self.machines, self.oracle, self.heads)
        self.door = Door(self.network, self.oracle, self.living_head, random.Random(f"door {seed}"))
        self.clones = Clones(self.network, self.door, self.oracle, self.heads, self.everyone)
        self.faults = FaultPlan(
            str(seed), self.strikes, self.clones, drawn, self.oracle, mask.faults, self.store
        )
        self.checks = FleetChecks(self)
        self.network.asked = self._asked
        self.network.linked = self.checks.linked
        self.network.revoking = self.checks.revoking
        count = random.Random(f"callers {seed}").randint(MIN_CALLERS, MAX_CALLERS)
        self.callers = [
            Caller(f"caller-{number}", random.Random(f"caller {seed} {number}"), self)
            for number in range(count)
            if mask.has_caller(number)
        ]
        if self.heads.relaxed:
            self.heads.lost = self._lost

    # What callers ask of it

    @property
    def head(self) -> Head:
        """The head that they talk to."""
        assert self.heads.head is not None
        return self.heads.head

    def living_head(self) -> Head | None:
        return self.heads.head

    def windows(self, model: StubModel) -> frozenset[int]:
        return frozenset(
            machine.profile.max_context_tokens
            for machine in self.machines
            if any(served.name == model.name for served in machine.profile.models)
        )

    def check_refusal(self, error: FleetError, spec: SessionSpec, context_tokens: int) -> None:
        self.checks.check_refusal(error, spec, context_tokens)

    def _asked(self, command: Any) -> None:
        head = self.heads.head
        if head is not None:
            generation = head.find_generation(command.generation_id)
            self.oracle.asked(command, generation.log.received)

    def _lost(self, kept_s: float) -> None:
        """A head has died; what callers were told before that time is kept, under STRICT all."""
        store, telling = self.store, self.oracle.telling
        if store is not None and telling is not None:
            for caller in self.callers:
                caller.head_died(store, kept_s if telling.ahead else self.loop.time() + 1.0)

    # The run

    async def run(self) -> None:
        loop = self.loop
        self._failed = loop.create_future()
        main = asyncio.current_task()
        assert main is not None
        self.heads.owns(main)
        for machine in self.machines:
            if machine.profile.joins:
                self.door.open_for(machine)
        watch = loop.create_task(self.checks.watch(), name="watch")
        self.heads.owns(watch)
        try:
            await self._unless_failed(self.heads.start())
            await self._unless_failed(self._live())
            await self._unless_failed(self._end())
        finally:
            self.heads.immortal = True
            watch.cancel()
            await asyncio.wait({watch})
        left = [task.get_name() for task in asyncio.all_tasks(loop) if task is not main]
        if left:
            self.oracle.violation(f"tasks are left after the head has stopped: {left}")
        if watch.done() and not watch.cancelled():
            watch.result()

    async def _unless_failed(self, work: Any) -> None:
        """Await it, or the first violation."""
        assert self._failed is not None
        task = asyncio.ensure_future(work)
        self.heads.owns(task)
        await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            task.cancel()
            await asyncio.wait({task}, timeout=30.0)
            raise _Enough
        await task

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            # The TaskGroup waits for it like for the callers; it goes on while the head stands still.
            faults = self.loop.create_task(self.faults.run(), name="faults", context=self.loop.node_side)
            self.heads.owns(faults)
            self.heads.owns(group.create_task(_done(faults), name="faults are over"))
            for caller in self.callers:
                self.heads.owns(group.create_task(caller.live(), name=caller.label))
        self.story.note("* all callers are done")
        await self.faults.undo()

    async def _end(self) -> None:
        """Everything must come to rest by itself; then the head stops."""
        give_up_s = self.loop.time() + _QUIET_WITHIN_S
        while (unrest := self.checks.unrest()) and self.loop.time() < give_up_s:
            await asyncio.sleep(0.5)
        if unrest:
            self.oracle.violation(f"not at rest {_QUIET_WITHIN_S:.0f} s after the last caller: {unrest}")
        for machine in self.machines:
            machine.dials_in = None
        self.door.close()
        await self.heads.stop(1.0)
        await self.door.empty()
        if self.store is not None:
            self.checks.check_kept(self.store)

    def _stop(self) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    def outcome(self) -> Outcome:
        oracle = self.oracle
        if not oracle.violations and self.faults.struck < MIN_FAULTS and self._mask == ALL:
            oracle.violation(f"only {self.faults.struck} faults struck")
        return Outcome(
            seed=self._seed,
            violations=oracle.violations,
            story=self.story,
            mask=self._mask,
            drawn=Mask(
                frozenset(fault.number for fault in self.faults.faults),
                frozenset(int(caller.label.partition("-")[2]) for caller in self.callers),
                frozenset(int(machine.profile.name.partition("-")[2]) for machine in self.machines),
            ),
            nodes=len(self.machines),
            callers=len(self.callers),
            faults=self.faults.struck,
            generations=oracle.started,
            moves=oracle.moves,
            steps=self.loop.steps,
            virtual_s=self.loop.time(),
            finishes=Counter({reason.value: count for reason, count in oracle.finishes.items()}),
            struck=oracle.struck_kinds,
        )


async def _done(task: asyncio.Task[None]) -> None:
    try:
        await task
    finally:
        task.cancel()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[str]:
    found: list[str] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(error)
        elif not isinstance(error, _Enough):
            found.append(repr(error))
    return found


@contextmanager
def _logs_into(world: World) -> Iterator[None]:
    """The head's log lines become lines of the story."""

    def take(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
        text = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        world.story.note("* head: %s %s", event["event"], text)
        match event:
            case {"event": "incarnation_barred", "incarnation": incarnation}:
                world.clones.replaced(incarnation)
            case {"event": "node_link_lost", "node": node, "error": error}:
                world.checks.link_lost(node, error)
            case {"event": "attempt_failed", "failure": "rebalanced" | "evicted", "generation": generation}:
                world.oracle.sent_elsewhere(generation)
            case {"event": "node_silent", "in_doubt": True}:
                world.oracle.met("silence is held in doubt")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[take])
    try:
        yield
    finally:
        structlog.configure(**before)
