"""A simulated network between one head and its nodes: machines, wires, and what messages meet on them.

Every message takes a seeded time; the messages of one run keep their order. A wire can break (for both ends,
each noticing in its own time) or stall: silence both ways, and all that was held arrives when the stall ends.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Phase,
    Refusal,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import ModelInfo, NodeHello, Report
from fleet_service.runtime.protocols import LinkError, LinkLostError
from node_stub.rules import NodeRules
from tests.sim.loop import SimLoop

if TYPE_CHECKING:
    from tests.sim.links import SimLink

Command = Assign | Append | CancelRun | Revoke
RunKey = tuple[str, int, str]
"""Session, epoch, generation."""


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a run, node to head."""

    epoch: int
    first_index: int
    token_ids: Sequence[int] = ()
    phase: Phase | None = None
    finish: RunFinish | None = None
    refusal: Refusal | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.refusal is not None


@dataclass(slots=True)
class Noise:
    """How the network behaves. Times in seconds, chances in [0, 1]."""

    delay_min_s: float = 0.0005
    delay_max_s: float = 0.01
    lose: float = 0.0  # a command or its reply never arrives
    late: float = 0.0  # a command arrives up to `late_max_s` later
    late_max_s: float = 8.0
    repeat: float = 0.0  # a command arrives a second time


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What the real links wait for. Seconds."""

    connect_s: float = 5.0
    handshake_s: float = 10.0
    command_s: float = 5.0
    keepalive_s: float = 35.0


class RunPort(Protocol):
    """A run's way back, as its node sees it."""

    def send(self, step: Step) -> None: ...


class HeadEnd(Protocol):
    """The head's end of a wire."""

    def lose(self, error: LinkError) -> None:
        """The connection is gone."""

    def die(self) -> None:
        """The head is gone, and so is its end."""


class Peer(Protocol):
    """A node's process, as the network sees it. Every method is called when the message arrives."""

    @property
    def rules(self) -> NodeRules: ...

    def hello(self, introduction: Introduction) -> NodeHello: ...

    def execute(self, introduction: Introduction, command: Command) -> Refusal | None: ...

    def renew(self, introduction: Introduction, lease_s: float, term: int) -> bool: ...

    def start_run(self, introduction: Introduction, command: Run, port: RunPort) -> None: ...

    def stream_gone(self, port: RunPort) -> None:
        """The connection that a run was sent over has ended."""

    def run_cancelled(self, run: RunKey, port: RunPort) -> None:
        """The head has closed a run."""

    def acknowledged(self, run: RunKey, index: int) -> None:
        """The head has all tokens of a run before `index`."""

    def held(self, introduction: Introduction) -> list[HeldSession]:
        """What it holds of the head's fleet."""

    def report(self, introduction: Introduction) -> tuple[Report, tuple[ModelInfo, ...]] | None: ...


class Machine(Protocol):
    """Where a node's process lives: it may be down, and its process may be stopped."""

    address: str
    refuses: str  # why it refuses handshakes; "" = it does not
    stalled: bool  # nothing gets through to it or from it, for now
    unreachable: bool  # packets vanish, so that dialing times out instead of being refused

    @property
    def cut_off(self) -> bool:
        """No connection can be made, for now."""

    @property
    def process(self) -> Peer | None: ...

    def when_running(self, process: Peer, action: Callable[[], None]) -> None:
        """Do it now, or once the stopped process is continued; never if it has died."""


class Pipe:
    """Messages one way, in order, each taking its own time; everything waits while the wire is stalled."""

    __slots__ = ("_messages", "_wire")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._messages: deque[Callable[[], None]] = deque()

    def send(self, message: Callable[[], None]) -> None:
        self._messages.append(message)
        self._wire.later(self._deliver)

    def _deliver(self) -> None:
        self._messages.popleft()()


class Wire:
    """One connection. `later` delays one delivery; nothing is delivered once the end it is for has gone."""

    def __init__(self, network: SimNetwork, machine: Machine, process: Peer) -> None:
        self.network = network
        self.machine = machine
        self.process = process
        self.head_end: HeadEnd | None = None
        self.node_end_open = True
        self.closed_at_node: Callable[[], None] | None = None
        self.refused = False
        self.late_s = 0.0  # how much later than the node the head may notice its end
        self.ports: dict[RunPort, None] = {}  # runs the node has on it
        self.stalled = False
        self._held: list[tuple[Callable[[], None], Context]] = []
        if machine.stalled:
            self.stall()

    def later(self, deliver: Callable[[], None]) -> None:
        """Have the head get something."""
        self._send(deliver, 0.0, self.network.loop.head_side)

    def to_node(self, action: Callable[[], None], extra_s: float = 0.0) -> None:
        """Have the node's process do something, unless it or its end has gone by then."""
        self._send(
            lambda: self.machine.when_running(self.process, lambda: self._at_node(action)),
            extra_s,
            self.network.loop.node_side,
        )

    def _send(self, deliver: Callable[[], None], extra_s: float, side: Context) -> None:
        delay_s = self.network.delay_s() + extra_s
        self.network.loop.call_later(delay_s, self._arrive, deliver, side, context=side)

    def _arrive(self, deliver: Callable[[], None], side: Context) -> None:
        if self.stalled:
            self._held.append((deliver, side))
        else:
            deliver()

    def _at_node(self, action: Callable[[], None]) -> None:
        if self.node_end_open:
            action()

    def stall(self) -> None:
        self.stalled = True
        self.network.hold(self)
        self.network.loop.call_later(
            self.network.timeouts.keepalive_s, self._keepalive, context=self.network.loop.node_side
        )

    def release(self) -> None:
        """End the stall: everything held arrives."""
        self.stalled = False
        held, self._held = self._held, []
        for deliver, side in held:
            self.network.loop.call_soon(self._arrive, deliver, side, context=side)

    def _keepalive(self) -> None:
        if self.stalled:
            self.break_("keepalive had no answer")

    def break_(self, why: str) -> None:
        """The connection is gone; each end notices in its own time, and what is under way is lost."""
        network = self.network
        network.wires.pop(self, None)
        if self.head_end is not None:
            late_s = network.delay_s() + self.late_s * network.rng.random()
            network.loop.call_later(
                late_s, self.head_end.lose, LinkLostError(why), context=network.loop.head_side
            )
        notice_s = network.delay_s() + (network.rng.random() * 2.0 if network.rng.random() < 0.2 else 0.0)
        network.loop.call_later(
            notice_s,
            self.machine.when_running,
            self.process,
            self.close_node_end,
            context=network.loop.node_side,
        )

    def close_node_end(self) -> None:
        """The node sees the connection end; its streams on it end with it."""
        if not self.node_end_open:
            return
        self.node_end_open = False
        ports, self.ports = list(self.ports), {}
        for port in ports:
            self.process.stream_gone(port)
        if self.closed_at_node is not None:
            self.closed_at_node()


class SimNetwork:
    """All machines and wires. `note` writes the story's lines about the network."""

    def __init__(self, loop: SimLoop, rng: random.Random, note: Callable[[str], None]) -> None:
        self.loop = loop
        self.rng = rng
        self.note = note
        self.asked: Callable[[Run], None] = lambda _command: None  # told of every run that the head asks for
        self.noise = Noise()
        self.timeouts = Timeouts()
        self.report_period_s = 2.0
        self.machines: dict[str, Machine] = {}  # those that can be dialed, by address
        self.links: dict[SimLink, None] = {}  # those that are open at the head
        self.revoking: Callable[[SimLink, Revoke], None] = lambda _link, _command: None
        self.linked: Callable[[SimLink], None] = lambda _link: None  # told of each that opens
        self.wires: dict[Wire, None] = {}
        self._stalled: dict[Wire, None] = {}  # gone for the head or not, they hold messages

    def delay_s(self) -> float:
        noise = self.noise
        return noise.delay_min_s + (noise.delay_max_s - noise.delay_min_s) * self.rng.random()

    def wires_of(self, machine: Machine) -> list[Wire]:
        return [wire for wire in self.wires if wire.machine is machine]

    def hold(self, wire: Wire) -> None:
        self._stalled[wire] = None

    def stalled_wires_of(self, machine: Machine) -> list[Wire]:
        """Its wires that hold messages back; they are taken off the list."""
        wires = [wire for wire in self._stalled if wire.machine is machine]
        for wire in wires:
            del self._stalled[wire]
        return wires
