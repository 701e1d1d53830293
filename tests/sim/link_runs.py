"""A run on a simulated link: the head's handle at one end, the port that its node sends by at the other."""

from __future__ import annotations

from typing import Protocol

from fleet_service.domain.commands import Introduction, Run
from fleet_service.runtime.protocols import LinkError, RunSink
from tests.sim.network import Pipe, Step, Wire

ACK_TOKENS = 16
"""A run that can be taken up again is acknowledged every so many tokens."""


class RunsLink(Protocol):
    """The link it is on."""

    runs: dict[SimRun, None]

    @property
    def resumes(self) -> bool: ...

    def sign(self) -> bool:
        """Something arrived; whether anyone still listens."""


class SimRun:
    """A run's two ends: the head's handle, and the port that its node sends by."""

    __slots__ = ("_acked", "_closed", "_gone", "_key", "_link", "_pipe", "_sink", "_wire")

    def __init__(self, link: RunsLink, wire: Wire, sink: RunSink, command: Run) -> None:
        self._key = (command.session_id, command.epoch, command.generation_id)
        self._acked = command.first_index
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

    def die(self) -> None:
        """The head was killed, and cancels nothing any more."""
        self._end()

    def _hang_up(self) -> None:
        self._gone = True
        started = self._wire.ports.pop(self, True) is None
        if self._link.resumes:
            self._wire.process.run_cancelled(self._key, self)  # a command of its own, by name
        elif started:
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
        next_index = step.first_index + len(step.token_ids)
        if self._link.resumes and next_index - self._acked >= ACK_TOKENS and not self._closed:
            self._acked = next_index
            self._wire.to_node(lambda: self._wire.process.acknowledged(self._key, next_index))

    def _end(self) -> None:
        self._closed = True
        self._link.runs.pop(self, None)
