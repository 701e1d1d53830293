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
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkError,
    LinkListener,
    LinkLostError,
    LinkTimeoutError,
    RunSink,
)
from tests.sim.explain import Hearing
from tests.sim.link_runs import SimRun
from tests.sim.network import Command, Machine, Peer, Pipe, SimNetwork, Wire


class SimDialer:
    """The runtime's Dialer."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> SimLink:
        wire, hello = await self._shake_hands(address, introduction)
        link = SimLink(wire, introduction, hello, listener)
        self._network.wires[wire] = None
        link.opened()
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
        if machine.cut_off:
            raise LinkLostError("no route")
        if machine.process is None:
            raise LinkLostError("connection refused", refused=True)
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
        self, wire: Wire, introduction: Introduction, hello: NodeHello, listener: LinkListener | None
    ) -> None:
        self._wire = wire
        wire.head_end = self
        self._introduction = introduction
        self._hello = hello
        self._listener = listener
        self._network = wire.network
        self._calls: dict[asyncio.Future[object], None] = {}
        self._closed = False
        self._ended: asyncio.Future[None] = wire.network.loop.create_future()
        self._news: tuple[Report, tuple[ModelInfo, ...]] | None = None
        self._reports = Pipe(wire)
        self.found: set[tuple[str, int]] = set()  # sessions that the node held when the link began
        self.since_s = wire.network.loop.time()
        self.hearing = Hearing(self.since_s, self.since_s)
        self.runs: dict[SimRun, None] = {}

    @property
    def hello(self) -> NodeHello:
        return self._hello

    @property
    def introduction(self) -> Introduction:
        return self._introduction

    @property
    def process(self) -> Peer:
        """Whom it leads to."""
        return self._wire.process

    @property
    def machine(self) -> Machine:
        return self._wire.machine

    @property
    def whole(self) -> bool:
        """Neither end has gone, and nothing holds it up."""
        return not self._closed and self._wire.node_end_open and not self._wire.stalled

    @property
    def attached(self) -> bool:
        """Somebody listens."""
        return self._listener is not None

    def opened(self) -> None:
        """From here on it is a link; its reports begin."""
        self._network.links[self] = None
        self.found = {
            (each.session_id, each.epoch) for each in self._wire.process.rules.holdings() if not each.fenced
        }
        self._network.linked(self)
        if not self._wire.node_end_open or self._wire.machine.process is not self._wire.process:
            self._wire.break_("the node went while it was being connected")
        else:
            self.start_reports()

    def attach(self, listener: LinkListener) -> bool:
        """As OfferedLink.attach."""
        if self._closed:
            return False
        self._listener = listener
        if self._news is not None:
            listener.on_report(*self._news)
        return True

    async def ended(self) -> None:
        await asyncio.shield(self._ended)

    def _end(self) -> None:
        self._closed = True
        self._network.links.pop(self, None)
        if not self._ended.done():
            self._ended.set_result(None)

    async def assign(self, command: Assign) -> Refusal | None:
        return await self._command(command)

    async def append(self, command: Append) -> Refusal | None:
        return await self._command(command)

    async def cancel(self, command: CancelRun) -> Refusal | None:
        return await self._command(command)

    async def revoke(self, command: Revoke) -> Refusal | None:
        self._network.revoking(self, command)
        return await self._command(command)

    @property
    def resumes(self) -> bool:
        return Feature.RESUME in self._hello.features

    async def reconcile(self) -> Sequence[HeldSession]:
        answer = await self._call(lambda: self._wire.process.held(self._introduction))
        assert isinstance(answer, list)
        return answer

    async def ping(self) -> None:
        await self._call(lambda: True)

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        answer = await self._call(lambda: self._wire.process.renew(self._introduction, lease_s, term))
        assert isinstance(answer, bool)
        return answer

    def run(self, command: Run, sink: RunSink) -> SimRun:
        self._network.asked(command)
        run = SimRun(self, self._wire, sink, command)
        if self._closed:
            self._network.loop.call_soon(run.break_, LinkLostError("the link is closed"))
            return run
        self.runs[run] = None
        self._wire.to_node(lambda: run.start(self._introduction, command))
        return run

    async def close(self) -> None:
        if self._closed:
            return
        self._end()
        self._wire.network.wires.pop(self._wire, None)
        self._network.loop.call_later(
            self._network.delay_s(),
            self._wire.machine.when_running,
            self._wire.process,
            self._wire.close_node_end,
            context=self._network.loop.node_side,
        )
        self._fail_all(LinkLostError("closed"))
        await asyncio.sleep(self._network.rng.random() * 0.05)

    def lose(self, error: LinkError) -> None:
        """The wire broke: tell the runtime, in either order."""
        if self._closed:
            return
        self._end()
        first = self._network.rng.random() < 0.5
        if first and self._listener is not None:
            self._listener.on_lost(error)
        self._fail_all(error)
        if not first and self._listener is not None:
            self._listener.on_lost(error)

    def die(self) -> None:
        """The head was killed: the node sees a reset, and here nobody is left to be told, or to hang up."""
        self._end()
        for run in list(self.runs):
            run.die()
        self._wire.head_end = None
        self._wire.break_("the head is gone")

    def sign(self) -> bool:
        """Something arrived; whether anyone still listens."""
        if self._closed:
            return False
        self.hearing.heard(self._network.loop.time())
        if self._listener is not None:
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
            context=self._network.loop.node_side,
        )

    def _on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        if not self.sign():
            return
        if self._listener is not None:
            self._listener.on_report(report, models)
        else:
            self._news = (report, models)

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
