"""The runtime's `Dialer` and `NodeLink` over simulated wires.

Commands are calls of their own: they may overtake one another, be lost (or their answers), come late or
twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Refusal,
    Revoke,
    Run,
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
from tests.sim.network import Command, Pipe, SimNetwork, Step, Wire


class SimDialer:
    """The runtime's Dialer."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> SimLink:
        wire, hello = await self._shake_hands(address, introduction)
        link = SimLink(wire, introduction, hello, listener)
        wire.head_end = link
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

    @property
    def resumes(self) -> bool:
        return False

    async def reconcile(self) -> Sequence[HeldSession]:
        return ()

    async def ping(self) -> None:
        await self._call(lambda: True)

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        answer = await self._call(lambda: self._wire.process.renew(self._introduction, lease_s, term))
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
        await asyncio.sleep(self._network.rng.random() * 0.05)

    def lose(self, error: LinkError) -> None:
        """The wire broke: tell the runtime, in either order."""
        if self._closed:
            return
        self._closed = True
        if self._network.rng.random() < 0.5:
            self._listener.on_lost(error)
            self._fail_all(error)
        else:
            self._fail_all(error)
            self._listener.on_lost(error)

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
        waiting = [_failing(answer, error) for answer in self._calls]
        waiting += [_breaking(run, error) for run in self.runs]
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
