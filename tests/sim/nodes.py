"""Simulated nodes: what they are like, what can go wrong with them, and the machines they live on.

A `SimMachine` outlives its processes: it kills, stops, continues and starts them, and holds up its wires.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from fleet_service.domain.commands import Run
from fleet_service.domain.node_types import Feature
from node_stub import rules
from node_stub.reference import StubModel
from tests.sim.network import Peer, RunKey, SimNetwork


class RunFault(Enum):
    """What goes wrong with one run, once it has sent so many tokens."""

    DIE = "the process dies"
    DIE_BEFORE_FINISH = "the process dies before the finish"
    FREEZE = "the process is stopped for a while"
    DROP_LINK = "the link breaks"
    BLIP = "the link is cut for a moment"
    ENGINE_ERROR = "the engine fails"
    STALL = "no more tokens come"
    SKIP_INDEX = "an index is left out"
    REPEAT_INDEX = "old indexes come again"
    FUTURE_EPOCH = "an epoch never issued"
    OLD_EPOCH = "tokens of an older epoch"
    BUSY = "refused as busy"
    LATE_FINISH = "the finish comes later, alone"


@dataclass(slots=True)
class ArmedFault:
    """Strikes the next run on the machine that gets so far."""

    fault: RunFault
    after_tokens: int
    duration_s: float = 3.0
    cut_s: float = 0.1


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a machine's processes are like. Rates in tokens per second, times in seconds."""

    name: str
    models: tuple[StubModel, ...]
    max_context_tokens: int
    lanes: int
    step_s: float
    tokens_per_step: int
    prefill_tokens_per_s: float
    limits: rules.Limits
    labels: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[Feature] = frozenset({Feature.INLINE_BIND})
    tells_window: bool = True
    joins: bool = False
    """It dials the head, and cannot be dialed."""
    keep_s: float = 10.0
    """How long a run is kept for its head to come back to (feature RESUME)."""
    buffer_tokens: int = 4096
    """Tokens of a run kept at most, beyond what was acknowledged."""

    @property
    def resumes(self) -> bool:
        return Feature.RESUME in self.features


class NodeProcess(Peer, Protocol):
    """A node's process, as the checks see it."""

    @property
    def machine(self) -> SimMachine: ...

    @property
    def rules(self) -> rules.NodeRules: ...

    @property
    def lanes_active(self) -> int: ...

    @property
    def queue_depth(self) -> int: ...

    @property
    def incarnation(self) -> str: ...

    def runs(self, *, kept: bool = False) -> list[RunKey]:
        """What it has, queued or running; with `kept`, what has ended and is kept as well."""

    def could_take_up(self, generation_id: str, epoch: int, index: int) -> bool:
        """Whether it keeps a run of it that can go on from that index."""


class Boot(Protocol):
    """Makes a process of a machine, of that incarnation."""

    def __call__(self, machine: SimMachine, incarnation: str) -> NodeProcess: ...


class Overseer(Protocol):
    """Told what nodes do, for the checks and the story."""

    def run_admitted(self, process: NodeProcess, run: Run, admission: rules.Admission) -> None: ...

    def run_taken_up(self, process: NodeProcess, run: Run) -> None:
        """A run that was kept goes on, from the command's first index."""

    def struck(self, machine: SimMachine, fault: str, run: RunKey | None = None) -> None:
        """A fault happened, at once over; `run` is what it happened to."""

    def met(self, what: str) -> None:
        """Something worth counting happened that is no fault."""

    def lasts(self, node: str, change: int) -> None:
        """A disturbance that lasts has begun (+1) or ended (-1)."""

    def violation(self, text: str) -> None: ...

    def engine_fails_at(self, run: RunKey) -> int | None:
        """After how many tokens every engine fails on it."""

    def kills_at(self, run: RunKey) -> int | None:
        """After how many tokens every node dies of it."""


class SimMachine:
    """One node's place in the network: its address, its process if it runs, and what holds it up."""

    def __init__(
        self,
        profile: NodeProfile,
        network: SimNetwork,
        rng: random.Random,
        overseer: Overseer,
        boot: Boot,
        label: str = "",
    ) -> None:
        self.profile = profile
        self.label = label or profile.name  # a clone has the name of another
        self.address = f"joined:{profile.name}" if profile.joins else f"{profile.name}:8454"
        self.network = network
        self.rng = rng
        self.overseer = overseer
        self.refuses = ""
        self.stalled = False
        self.unreachable = False
        self.frozen = False
        self.cuts = 0
        self.silent_reports = False
        self.lies: dict[str, int] = {}
        self.lose_appends = 0
        self.armed: list[ArmedFault] = []
        self._boot = boot
        self._incarnations = 0
        self._is_off = False
        self._backlog: list[tuple[NodeProcess, Callable[[], None]]] = []
        self._process: NodeProcess | None = None
        self.dials_in: Callable[[NodeProcess], None] | None = None
        if not profile.joins:
            network.machines[self.address] = self
        self.start()

    @property
    def process(self) -> NodeProcess | None:
        return self._process

    @property
    def cut_off(self) -> bool:
        """No connection can be made, for now."""
        return self.cuts > 0

    def when_running(self, process: object, action: Callable[[], None]) -> None:
        if process is not self._process:
            return
        if self.frozen:
            assert self._process is not None
            self._backlog.append((self._process, action))
        else:
            action()

    def start(self) -> None:
        """Boot a process, unless one runs."""
        if self._process is not None or self._is_off:
            return
        self._incarnations += 1
        self._process = self._boot(self, f"{self.label}-run-{self._incarnations}")
        self.unreachable = False
        if self.dials_in is not None:
            self.dials_in(self._process)
        for wire in self.network.wires_of(self):
            if wire.process is not self._process:
                wire.break_("connection reset")  # the machine is back, and knows nothing of it

    def die(self, return_s: float, *, silently: bool = False) -> bool:
        """The process is gone; another starts after `return_s`. False when none ran.

        `silently`: its machine goes with it, so that only keepalive finds out.
        """
        if self._process is None:
            return False
        self.thaw_without_work()
        self._process = None
        self.unreachable = silently
        for wire in self.network.wires_of(self):
            if silently:
                self._later(self.network.timeouts.keepalive_s, lambda each=wire: each.break_("keepalive"))  # type: ignore[misc]
            else:
                wire.break_("connection reset")
        self._lasting(return_s, self.start)
        return True

    def switch_off(self) -> None:
        """The process is gone for good."""
        self._is_off = True
        self.thaw_without_work()
        self._process = None
        for wire in self.network.wires_of(self):
            wire.break_("connection reset")

    def freeze(self, duration_s: float) -> bool:
        """SIGSTOP, and SIGCONT after `duration_s`. False when there was nothing to stop."""
        if self._process is None or self.frozen:
            return False
        self.frozen = True
        for wire in self.network.wires_of(self):
            self._later(
                self.network.timeouts.keepalive_s,
                lambda each=wire: self._give_up(each.break_),  # type: ignore[misc]
            )
        self._lasting(duration_s, self.thaw)
        return True

    def _give_up(self, break_: Callable[[str], None]) -> None:
        if self.frozen:
            break_("keepalive had no answer")

    def thaw(self) -> None:
        """SIGCONT: everything that waited happens, in order, until the process is stopped anew."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for process, action in backlog:
            self.when_running(process, action)

    def thaw_without_work(self) -> None:
        self.frozen = False
        self._backlog.clear()

    def stall(self, duration_s: float) -> bool:
        """Nothing gets through, either way, for `duration_s`; then all that was held arrives."""
        if self.stalled:
            return False
        self.stalled = True
        for wire in self.network.wires_of(self):
            wire.stall()
        self._lasting(duration_s, self.release)
        return True

    def release(self) -> None:
        self.stalled = False
        for wire in self.network.stalled_wires_of(self):
            wire.release()

    def arm(self, fault: ArmedFault) -> bool:
        self.armed.append(fault)
        return True

    def loses_appends(self, count: int) -> bool:
        self.lose_appends += count
        return True

    def cut(self, duration_s: float) -> bool:
        """Its connections break, and none can be made for `duration_s`."""
        self.cuts += 1
        self.drop_links()
        self._lasting(duration_s, self._uncut)
        return True

    def _uncut(self) -> None:
        self.cuts -= 1

    def heal(self) -> None:
        """Nothing is wrong with it any more."""
        self.refuses = ""
        self.silent_reports = False
        self.lies = {}
        self.lose_appends = 0
        self.armed.clear()
        self.start()
        self.thaw()
        self.release()

    def drop_links(self) -> None:
        for wire in self.network.wires_of(self):
            wire.break_("link dropped")

    def _lasting(self, duration_s: float, end: Callable[[], None]) -> None:
        name = self.profile.name
        self.overseer.lasts(name, 1)

        def over() -> None:
            end()
            self.overseer.lasts(name, -1)

        self._later(duration_s, over)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.network.loop.call_later(delay_s, action, context=self.network.loop.node_side)
