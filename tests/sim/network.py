"""A simulated network between one head and its nodes: the `Dialer` and `NodeLink` of the runtime's Protocols.

Every message takes a seeded time. Commands are calls of their own and may overtake one another, be lost, come
late or come twice; the messages of one run keep their order. A wire can break (for both ends, each noticing in
its own time) or stall: silence both ways, and everything held arrives when the stall ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    Introduction,
    Phase,
    Refusal,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import ModelInfo, NodeHello, Report
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkError,
    LinkListener,
    LinkLostError,
    LinkTimeoutError,
    RunSink,
)

Command = Assign | Append | CancelRun | Revoke


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


class Peer(Protocol):
    """A node's process, as the network sees it. Every method is called when the message arrives."""

    def hello(self, introduction: Introduction) -> NodeHello: ...

    def execute(self, introduction: Introduction, command: Command) -> Refusal | None: ...

    def renew(self, introduction: Introduction, lease_s: float) -> bool: ...

    def start_run(self, introduction: Introduction, command: Run, port: RunPort) -> None: ...

    def stream_gone(self, port: RunPort) -> None: ...

    def report(self, introduction: Introduction) -> tuple[Report, tuple[ModelInfo, ...]] | None: ...


class Machine(Protocol):
    """Where a node's process lives: it may be down, and its process may be stopped."""

    address: str
    refuses: str  # why it refuses handshakes; "" = it does not
    stalled: bool  # nothing gets through to it or from it, for now
    unreachable: bool  # packets vanish, so that dialing times out instead of being refused

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
        self.link: SimLink | None = None
        self.node_end_open = True
        self.ports: dict[SimRun, None] = {}  # runs the node has on it
        self.stalled = False
        self._held: list[Callable[[], None]] = []
        if machine.stalled:
            self.stall()

    def later(self, deliver: Callable[[], None], extra_s: float = 0.0) -> None:
        self.network.loop.call_later(self.network.delay_s() + extra_s, self._arrive, deliver)

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if self.stalled:
            self._held.append(deliver)
        else:
            deliver()

    def to_node(self, action: Callable[[], None], extra_s: float = 0.0) -> None:
        """Have the node's process do something, unless it or its end has gone by then."""
        self.later(lambda: self.machine.when_running(self.process, lambda: self._at_node(action)), extra_s)

    def _at_node(self, action: Callable[[], None]) -> None:
        if self.node_end_open:
            action()

    def stall(self) -> None:
        self.stalled = True
        self.network.hold(self)
        self.network.loop.call_later(self.network.timeouts.keepalive_s, self._keepalive)

    def release(self) -> None:
        """End the stall: everything held arrives, in order."""
        self.stalled = False
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def _keepalive(self) -> None:
        if self.stalled:
            self.break_("keepalive had no answer")

    def break_(self, why: str) -> None:
        """The connection is gone; each end notices in its own time, and what is under way is lost."""
        network = self.network
        network.wires.pop(self, None)
        if self.link is not None:
            network.loop.call_later(network.delay_s(), self.link.lose, LinkLostError(why))
        notice_s = network.delay_s() + (network.rng.random() * 2.0 if network.rng.random() < 0.2 else 0.0)
        network.loop.call_later(notice_s, self.machine.when_running, self.process, self.close_node_end)

    def close_node_end(self) -> None:
        """The node sees the connection end; its streams on it end with it."""
        if not self.node_end_open:
            return
        self.node_end_open = False
        ports, self.ports = list(self.ports), {}
        for port in ports:
            self.process.stream_gone(port)


class SimNetwork:
    """All machines and wires. `note` writes the story's lines about the network."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, note: Callable[[str], None]
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.note = note
        self.noise = Noise()
        self.timeouts = Timeouts()
        self.report_period_s = 2.0
        self.machines: dict[str, Machine] = {}
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


class SimDialer:
    """The runtime's Dialer."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> SimLink:
        wire, hello = await self._shake_hands(address, introduction)
        link = SimLink(wire, introduction, hello, listener)
        wire.link = link
        self._network.wires[wire] = None
        if not wire.node_end_open or wire.machine.process is not wire.process:
            wire.break_("the node went while it was being connected")
        else:
            link.start_reports()
        return link

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        _, hello = await self._shake_hands(address, introduction)
        return hello

    async def _shake_hands(self, address: str, introduction: Introduction) -> tuple[Wire, NodeHello]:
        network = self._network
        await asyncio.sleep(network.delay_s())
        machine = network.machines.get(address)
        if machine is None:
            raise LinkLostError("connection refused")
        if machine.unreachable:
            await asyncio.sleep(network.timeouts.connect_s)
            raise LinkTimeoutError("no connection in time")
        if machine.process is None:
            raise LinkLostError("connection refused")
        wire = Wire(network, machine, machine.process)
        answer: asyncio.Future[NodeHello] = network.loop.create_future()

        def greet() -> None:
            if machine.refuses:
                wire.later(lambda: _fail(answer, HandshakeRefusedError(machine.refuses)))
            else:
                hello = wire.process.hello(introduction)
                wire.later(lambda: _settle(answer, hello))

        wire.to_node(greet)
        try:
            async with asyncio.timeout(network.timeouts.handshake_s):
                return wire, await answer
        except TimeoutError:
            if machine.process is not wire.process:
                raise LinkLostError("connection reset") from None
            raise LinkTimeoutError("no answer to the handshake in time") from None


class SimLink:
    """The runtime's NodeLink over one wire."""

    def __init__(
        self, wire: Wire, introduction: Introduction, hello: NodeHello, listener: LinkListener
    ) -> None:
        self._wire = wire
        self._introduction = introduction
        self._hello = hello
        self._listener = listener
        self._network = wire.network
        self._calls: dict[asyncio.Future[object], None] = {}
        self._closed = False
        self._reports = Pipe(wire)
        self.runs: dict[SimRun, None] = {}

    @property
    def hello(self) -> NodeHello:
        return self._hello

    async def assign(self, command: Assign) -> Refusal | None:
        return await self._command(command)

    async def append(self, command: Append) -> Refusal | None:
        return await self._command(command)

    async def cancel(self, command: CancelRun) -> Refusal | None:
        return await self._command(command)

    async def revoke(self, command: Revoke) -> Refusal | None:
        return await self._command(command)

    async def renew_lease(self, lease_s: float) -> bool:
        answer = await self._call(lambda: self._wire.process.renew(self._introduction, lease_s))
        assert isinstance(answer, bool)
        return answer

    def run(self, command: Run, sink: RunSink) -> SimRun:
        run = SimRun(self, self._wire, sink)
        if self._closed:
            self._network.loop.call_soon(run.break_, LinkLostError("the link is closed"))
            return run
        self.runs[run] = None
        self._wire.to_node(lambda: run.start(self._introduction, command))
        return run

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wire.network.wires.pop(self._wire, None)
        self._network.loop.call_later(
            self._network.delay_s(),
            self._wire.machine.when_running,
            self._wire.process,
            self._wire.close_node_end,
        )
        self._fail_all(LinkLostError("closed"))
        await asyncio.sleep(0)

    def lose(self, error: LinkError) -> None:
        """The wire broke: tell the runtime, in either order."""
        if self._closed:
            return
        self._closed = True
        told = [lambda: self._listener.on_lost(error), lambda: self._fail_all(error)]
        self._network.rng.shuffle(told)
        for tell in told:
            tell()

    def sign(self) -> bool:
        """Something arrived; whether anyone still listens."""
        if self._closed:
            return False
        self._listener.on_sign()
        return True

    def start_reports(self) -> None:
        self._wire.machine.when_running(self._wire.process, self._send_report)

    def _send_report(self) -> None:
        if self._closed or not self._wire.node_end_open:
            return
        told = self._wire.process.report(self._introduction)
        if told is not None:
            self._reports.send(lambda: self._on_report(*told))
        self._network.loop.call_later(
            self._network.report_period_s,
            self._wire.machine.when_running,
            self._wire.process,
            self._send_report,
        )

    def _on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        if self.sign():
            self._listener.on_report(report, models)

    async def _command(self, command: Command) -> Refusal | None:
        answer = await self._call(lambda: self._wire.process.execute(self._introduction, command), command)
        assert answer is None or isinstance(answer, Refusal)
        return answer

    async def _call(self, work: Callable[[], object], command: Command | None = None) -> object:
        """One call: there, executed, and back; LinkTimeoutError when that takes too long."""
        network = self._network
        if self._closed:
            raise LinkLostError("the link is closed")
        answer: asyncio.Future[object] = network.loop.create_future()
        self._calls[answer] = None
        noise, rng = network.noise, network.rng
        what = "" if command is None else f"{type(command).__name__} of {command.session_id}"
        lost = rng.random() < noise.lose
        lost_there = lost and rng.random() < 0.5
        extra_s = rng.random() * noise.late_max_s if rng.random() < noise.late else 0.0
        if lost:
            network.note(f"wire: {what or 'a call'} {'never arrives' if lost_there else 'is not answered'}")
        elif extra_s:
            network.note(f"wire: {what or 'a call'} comes {extra_s:.2f} s late")

        def execute() -> None:
            result = work()
            if not lost:
                self._wire.later(lambda: self._on_answer(answer, result))

        if not lost_there:
            self._wire.to_node(execute, extra_s)
        if command is not None and rng.random() < noise.repeat:
            network.note(f"wire: {what} comes twice")
            self._wire.to_node(lambda: _discard(work()), rng.random() * noise.late_max_s)
        timer = network.loop.call_later(
            network.timeouts.command_s, _fail, answer, LinkTimeoutError("no answer in time")
        )
        try:
            return await answer
        finally:
            timer.cancel()
            self._calls.pop(answer, None)

    def _on_answer(self, answer: asyncio.Future[object], result: object) -> None:
        if self.sign():
            _settle(answer, result)

    def _fail_all(self, error: LinkError) -> None:
        waiting: list[Callable[[], None]] = []
        for answer in self._calls:
            waiting.append(_failing(answer, error))
        for run in self.runs:
            waiting.append(_breaking(run, error))
        self._network.rng.shuffle(waiting)
        for end in waiting:
            self._network.loop.call_soon(end)


class SimRun:
    """A run's two ends: the head's handle, and the port that its node sends by."""

    __slots__ = ("_closed", "_gone", "_link", "_pipe", "_sink", "_wire")

    def __init__(self, link: SimLink, wire: Wire, sink: RunSink) -> None:
        self._link = link
        self._wire = wire
        self._sink = sink
        self._pipe = Pipe(wire)
        self._closed = False
        self._gone = False

    def start(self, introduction: Introduction, command: Run) -> None:
        """The command reaches the node, unless the head has hung up before."""
        if not self._gone:
            self._wire.ports[self] = None
            self._wire.process.start_run(introduction, command, self)

    def close(self) -> None:
        """The head listens no more; the node hears of it and cancels."""
        if self._closed:
            return
        self._end()
        self._wire.to_node(self._hang_up)

    def _hang_up(self) -> None:
        self._gone = True
        if self._wire.ports.pop(self, True) is None:
            self._wire.process.stream_gone(self)

    def break_(self, error: LinkError) -> None:
        if not self._closed:
            self._end()
            self._sink.on_broken(error)

    def send(self, step: Step) -> None:
        """Node to head."""
        if step.last:
            self._wire.ports.pop(self, None)
        if self._wire.node_end_open:
            self._pipe.send(lambda: self._on_step(step))

    def _on_step(self, step: Step) -> None:
        if not self._link.sign() or self._closed:
            return
        if step.last:
            self._end()
        self._sink.on_step(
            step.epoch, step.first_index, step.token_ids, step.phase, step.finish, step.refusal
        )

    def _end(self) -> None:
        self._closed = True
        self._link.runs.pop(self, None)


def _failing(answer: asyncio.Future[object], error: LinkError) -> Callable[[], None]:
    return lambda: _fail(answer, error)


def _breaking(run: SimRun, error: LinkError) -> Callable[[], None]:
    return lambda: run.break_(error)


def _discard(result: object) -> None:
    """The answer to a command that came twice finds nobody waiting."""


def _settle(answer: asyncio.Future[object] | asyncio.Future[NodeHello], result: object) -> None:
    if not answer.done():
        answer.set_result(result)  # type: ignore[arg-type]


def _fail(answer: asyncio.Future[object] | asyncio.Future[NodeHello], error: LinkError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # whoever waited may have been cancelled in the meantime
