"""One seeded world: a head, its nodes, callers and faults, from the first session to the last; its checks.

`run_seed` is the whole simulation of one seed. The head is the product's own, on virtual time; only its
`Dialer` and the links are simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import NodeState
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.head import Head
from fleet_service.runtime.views import NodeInfo
from node_stub.reference import StubModel
from tests.sim.callers import Caller
from tests.sim.faults import MIN_FAULTS, FaultPlan
from tests.sim.links import SimDialer
from tests.sim.loop import SimLoop, SimulationError
from tests.sim.making import MODELS, ZONES, make_profiles, make_settings
from tests.sim.network import SimNetwork
from tests.sim.nodes import SimMachine
from tests.sim.oracle import AFTERMATH_S, Oracle
from tests.sim.process import SimProcess
from tests.sim.records import Record
from tests.sim.story import Story

MIN_CALLERS, MAX_CALLERS = 10, 14
EPOCH_UNIX_S = 1_700_000_000.0
_WATCH_PERIOD_S = 0.7
_QUIET_WITHIN_S = 90.0
# How long a node may still run what was decided: a hang-up's way, and how late an end is noticed.
_RUN_ON_S = 3.0
_LONG_WALL_S = 300.0


@dataclass(slots=True)
class Outcome:
    """What came of one seed."""

    seed: int
    violations: list[str]
    story: Story
    nodes: int = 0
    callers: int = 0
    faults: int = 0
    generations: int = 0
    moves: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    finishes: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)

    def report(self) -> str:
        """For a person: what went wrong, the story, and how to see this one seed again."""
        wrong = "\n".join(f"  {text}" for text in self.violations)
        again = f"FLEET_SIM_SEED={self.seed} python -m pytest tests/sim/test_simulation.py"
        return (
            f"seed {self.seed}:\n{wrong}\n\n{self.story.tell()}\n\nseed {self.seed}:\n{wrong}\nagain: {again}"
        )


def run_seed(seed: int) -> Outcome:
    """Simulate one seed to its end."""
    rng = random.Random(f"world {seed}")
    loop = SimLoop(seed, disorder=rng.choice([1.0, 1.0, 0.3]), max_steps=100_000, max_time_s=1500.0)
    world = World(rng, loop)
    with _logs_into(world.story):
        try:
            loop.drive(world.run())
        except SimulationError as error:
            world.violated(f"{type(error).__name__}: {error}")
        except _Enough:
            pass
        except BaseExceptionGroup as group:
            if group.split(_Enough)[1] is not None:
                world.violated(f"unexpected {_leaves(group)}")
        except (FleetError, AssertionError, RuntimeError, LookupError) as error:
            world.violated(f"unexpected {error!r}")
    for text in loop.unhandled:
        world.violated(f"nobody caught: {text}")
    return world.outcome(seed)


class _Enough(Exception):
    """A violation was found; the rest is not waited for."""


class World:
    """Everything of one seed."""

    def __init__(self, rng: random.Random, loop: SimLoop) -> None:
        self._rng = rng
        self._loop = loop
        self._failed: asyncio.Future[None] | None = None
        self.story = Story(loop.time)
        self.oracle = Oracle(loop.time, self.story, self._stop)
        self.oracle.judge_placement = self._judge_placement
        self.network = SimNetwork(loop, random.Random(rng.random()), self.story.note)
        self.models: tuple[StubModel, ...] = MODELS
        self.zones: tuple[str, ...] = ZONES
        self.settings = make_settings(rng)
        self.machines = [
            SimMachine(profile, self.network, random.Random(rng.random()), self.oracle, SimProcess)
            for profile in make_profiles(rng)
        ]
        self.callers: list[Caller] = []
        self.faults: FaultPlan
        self.head: Head

    # What callers ask of it

    def windows(self, model: StubModel) -> frozenset[int]:
        return frozenset(
            machine.profile.max_context_tokens
            for machine in self.machines
            if any(served.name == model.name for served in machine.profile.models)
        )

    def check_refusal(self, error: FleetError, spec: SessionSpec, context_tokens: int) -> None:
        serving = [machine for machine in self.machines if _serves(machine, spec)]
        # One that was removed, or added again while it is down, is not known for what it is.
        known = [machine for machine in serving if self._undisturbed(machine.profile.name)]
        match error.reason:
            case Reason.NO_ELIGIBLE_NODE | Reason.FLEET_SATURATED:
                well = [m.profile.name for m in serving if self._could_take(m, error.reason, context_tokens)]
                if well:
                    self.oracle.violation(f"{error}; but {well} could have taken {context_tokens} tokens")
            case Reason.CONTEXT_TOO_LONG:
                if any(m.profile.max_context_tokens >= context_tokens for m in known):
                    self.oracle.violation(f"{error}; but there is a wider node")
            case Reason.MODEL_NOT_FOUND | Reason.MODEL_UNPLACEABLE:
                if known:
                    self.oracle.violation(f"{error}; but there is one")
            case _:
                self.oracle.violation(f"a caller was refused with {error}")

    def _judge_placement(self, record: Record, reason: Reason) -> None:
        if reason is Reason.CONTEXT_TOO_LONG or record.model is None:
            return
        spec = SessionSpec(model=record.model.name, model_revision=record.model.revision)
        error = FleetError(reason, f"{record.generation_id} ended with ERROR")
        if not record.plan.selector:
            self.check_refusal(error, spec, len(record.plan.context) + record.limit)

    def _undisturbed(self, node: str) -> bool:
        """Nothing has befallen the node for a while, nor the head."""
        now_s = self._loop.time()
        return self.oracle.trouble_of(node).quiet(now_s) and self.oracle.ran_for(now_s) > AFTERMATH_S

    def _could_take(self, machine: SimMachine, reason: Reason, context_tokens: int) -> bool:
        name, profile = machine.profile.name, machine.profile
        if reason is Reason.FLEET_SATURATED and (
            self.settings.queue_limit_per_node < 100
            or profile.limits.max_sessions < 100
            or profile.limits.kv_blocks_total
            or not self.oracle.wire_trouble.quiet(self._loop.time())  # a ping may have been lost
        ):
            return False
        return (
            machine.process is not None
            and self._undisturbed(name)
            and name not in self.faults.cordoned
            and name not in self.faults.removed
            and profile.max_context_tokens >= context_tokens
        )

    # The run

    async def run(self) -> None:
        self._failed = self._loop.create_future()
        self.head = Head(
            self.settings,
            dialer=SimDialer(self.network),
            rng=random.Random(self._rng.random()),
            wall_clock=lambda: EPOCH_UNIX_S + self._loop.time(),
            observer=self.oracle,
        )
        self.faults = FaultPlan(
            random.Random(self._rng.random()), self.head, self.network, self.machines, self.oracle
        )
        self.callers = [
            Caller(f"caller-{number}", random.Random(self._rng.random()), self)
            for number in range(self._rng.randint(MIN_CALLERS, MAX_CALLERS))
        ]
        await self._unless_failed(self.head.start([machine.address for machine in self.machines]))
        watch = self._loop.create_task(self._watch(), name="watch")
        try:
            await self._unless_failed(self._live())
            await self._unless_failed(self._end())
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        left = [
            task.get_name() for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()
        ]
        if left:
            self.oracle.violation(f"tasks are left after the head has stopped: {left}")
        if watch.done() and not watch.cancelled():
            watch.result()

    async def _unless_failed(self, work: Any) -> None:
        """Await it, or the first violation."""
        assert self._failed is not None
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            task.cancel()
            await asyncio.wait({task}, timeout=30.0)
            raise _Enough
        await task

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.faults.run(), name="faults")
            for caller in self.callers:
                group.create_task(caller.live(), name=caller.label)
        self.story.note("* all callers are done")
        await self.faults.undo()

    async def _end(self) -> None:
        """Everything must come to rest by itself; then the head stops."""
        give_up_s = self._loop.time() + _QUIET_WITHIN_S
        while (unrest := self._unrest()) and self._loop.time() < give_up_s:
            await asyncio.sleep(0.5)
        if unrest:
            self.oracle.violation(f"not at rest {_QUIET_WITHIN_S:.0f} s after the last caller: {unrest}")
        await self.head.stop(1.0)

    def _unrest(self) -> list[str]:
        """What is not as it must be when nothing is going on (rules 9 and 10)."""
        unrest: list[str] = []
        for info in self.head.operators.list_nodes():
            counts = (info.sessions, info.running, info.queued, info.reservations, info.outbox)
            if any(counts) or info.state is not NodeState.UP:
                unrest.append(f"{info.name} is {info.state.value}, {counts=}")
        for machine in self.machines:
            process = machine.process
            held = [] if process is None else [h.session_id for h in process.rules.holdings() if not h.fenced]
            if process is None or held or process.runs() or process.lanes_active or process.queue_depth:
                unrest.append(f"{machine.profile.name} holds {held}, runs {process and process.runs()}")
        if len(self.head.sessions) or self.head.generations.running:
            unrest.append(f"{len(self.head.sessions)} sessions, {self.head.generations.running} run")
        return unrest

    # The checks at every tick

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            for info in self.head.operators.list_nodes():
                self._check_node(info)
            for machine in self.machines:
                self._check_machine(machine)
            for record in self.oracle.records.values():
                self._check_record(record)

    def _check_node(self, info: NodeInfo) -> None:
        if info.reservations != info.running + info.queued:
            self.oracle.violation(
                f"{info.name}: {info.reservations} reservations, {info.running} running, {info.queued} queued"
            )
        live = sum(1 for record in self.oracle.records.values() if record.finished is None)
        if info.reservations > live + len(self.oracle.winding_down(self._loop.time())):
            self.oracle.violation(f"{info.name}: {info.reservations} reservations, and {live} generations")
        if info.queued > self.settings.queue_limit_per_node or info.running > max(info.lanes, 1):
            self.oracle.violation(f"{info.name}: {info.running} running, {info.queued} queued: too many")
        trouble = self.oracle.trouble_of(info.address.partition(":")[0])
        undisturbed = trouble.count == 0 and not self.oracle.standstills
        if (
            self._undisturbed(info.address.partition(":")[0])
            and info.state is not NodeState.UP
            and self._loop.time() > 3.0
        ):
            self.oracle.violation(
                f"{info.name} is {info.state.value} ({info.state_detail}), and nothing befell it"
            )
        if undisturbed and not self.oracle.wire_trouble.count and info.failures:
            self.oracle.violation(f"{info.name} is blamed for {dict(info.failures)}, and nothing befell it")
        blamed_for = {"busy", "context_too_long", "constraint", "fenced", "unknown_session", "evicted"}
        if wrongly := blamed_for & info.failures.keys():
            self.oracle.violation(f"{info.name} is blamed for {wrongly}, which is no fault of a node")

    def _check_machine(self, machine: SimMachine) -> None:
        process, name = machine.process, machine.profile.name
        if process is None:
            return
        if process.lanes_active > machine.profile.lanes:
            self.oracle.violation(f"{name} runs {process.lanes_active} on {machine.profile.lanes} lanes")
        if not self._undisturbed(name):
            return
        for generation_id in process.runs():
            record = self.oracle.records[generation_id]
            if record.finished is not None and self._loop.time() - record.finished_s > _RUN_ON_S:
                self.oracle.violation(f"{name} still runs {generation_id}, which ended long ago")

    def _check_record(self, record: Record) -> None:
        now_s = self._loop.time()
        if record.finished is not None:
            return
        if self.oracle.overdue(record.deadline_s, now_s):
            self.oracle.violation(f"{record.generation_id} goes on after its deadline")
        if record.cancel_asked_s is not None and self.oracle.overdue(record.cancel_asked_s, now_s):
            self.oracle.violation(f"{record.generation_id} goes on after its cancel")
        abandoned_s = record.abandoned_s
        if abandoned_s is not None and self.oracle.overdue(abandoned_s + record.plan.grace_s, now_s):
            self.oracle.violation(f"{record.generation_id} goes on, and its readers have long gone")
        if now_s - record.accepted_s > _LONG_WALL_S:
            self.oracle.violation(f"{record.generation_id} goes on for {now_s - record.accepted_s:.0f} s")

    def _stop(self) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    def violated(self, text: str) -> None:
        self.oracle.violation(text)

    def outcome(self, seed: int) -> Outcome:
        oracle = self.oracle
        if not oracle.violations and self.faults.struck < MIN_FAULTS:
            oracle.violation(f"only {self.faults.struck} faults struck")
        return Outcome(
            seed=seed,
            violations=oracle.violations,
            story=self.story,
            nodes=len(self.machines),
            callers=len(self.callers),
            faults=self.faults.struck,
            generations=len(oracle.records),
            moves=oracle.moves,
            steps=self._loop.steps,
            virtual_s=self._loop.time(),
            finishes=Counter({reason.value: count for reason, count in oracle.finishes.items()}),
            struck=oracle.struck_kinds,
        )


def _serves(machine: SimMachine, spec: SessionSpec) -> bool:
    profile = machine.profile
    labels = all(profile.labels.get(key) == value for key, value in spec.node_selector.items())
    return labels and any(
        model.name == spec.model and spec.model_revision in ("", model.revision) for model in profile.models
    )


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[str]:
    found: list[str] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(error)
        elif not isinstance(error, _Enough):
            found.append(repr(error))
    return found


@contextmanager
def _logs_into(story: Story) -> Iterator[None]:
    """The head's log lines become lines of the story."""

    def take(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
        text = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        story.note("* head: %s %s", event["event"], text)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[take])
    try:
        yield
    finally:
        structlog.configure(**before)
