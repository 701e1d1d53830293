"""A stub node inside one's own process, on a free port, for tests and examples."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from node_stub.engine import Engine
from node_stub.faults import Action, Fault, FaultError, Faults, ReportLies
from node_stub.join import JoinSettings
from node_stub.journal import Entry
from node_stub.link import LinkLimits
from node_stub.node import Node, NodeSettings
from node_stub.reference import StubModel, effective_seed, reference_tokens
from node_stub.rules import Limits
from node_stub.runs import DEFAULT_BUFFER_TOKENS
from node_stub.server import NodeServer
from node_stub.stub_engine import EngineSettings, StubEngine
from node_stub.tls import TlsFiles
from node_stub.token import FleetToken

FAST = EngineSettings(decode_tokens_per_s=0, prefill_tokens_per_s=0)
"""As fast as it goes, for tests that are about anything but time."""


@dataclass(frozen=True, slots=True)
class StubSettings:
    """A stub node. `models` pairs each model with its window in tokens, 0 = none."""

    identity: str = "stub"
    models: Sequence[tuple[StubModel, int]] = ((StubModel("stub"), 32_768),)
    engine: EngineSettings = FAST
    fleet_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    inline_bind: bool = True
    link: bool = True
    resume: bool = True
    reconcile: bool = True
    keep_s: float = 10.0
    buffer_tokens: int = DEFAULT_BUFFER_TOKENS
    link_limits: LinkLimits = field(default_factory=LinkLimits)
    limits: Limits = field(default_factory=Limits)
    address: str = "127.0.0.1:0"
    join: JoinSettings | None = None
    """Dial this head; None = heads dial `address`."""
    idle_timeout_s: float = 120.0
    token: FleetToken | None = None
    tls: TlsFiles | None = None
    faults: Sequence[Fault] = ()


class StubNode:
    """Use as `async with StubNode(settings) as node`, then dial `node.address`.

    DIE ends the server without a word, as well as that can be done within a process; FREEZE needs a process
    of its own and is refused. Started again after `stop`, it is a new incarnation, on the same port.
    """

    def __init__(
        self,
        settings: StubSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        engine: Engine | None = None,
    ) -> None:
        self.settings = settings or StubSettings()
        self._clock = clock
        self._given_engine = engine
        self._port: int | None = None
        self._node: Node | None = None
        self._server: NodeServer | None = None
        self._work: asyncio.Task[None] | None = None
        self._join: asyncio.Task[None] | None = None
        self.told: list[str] = []
        """What it told people about its joining."""
        self._told_more = asyncio.Event()
        self._ending = asyncio.Lock()

    @property
    def address(self) -> str:
        """Where it listens, host:port. Raises RuntimeError before the first start."""
        if self._port is None:
            raise RuntimeError("the node was never started")
        return f"{self._host}:{self._port}"

    @property
    def node(self) -> Node:
        """The node within. Raises RuntimeError before the first start."""
        if self._node is None:
            raise RuntimeError("the node was never started")
        return self._node

    def journal(self, session_id: str = "", kind: str = "") -> list[Entry]:
        """What it executed, oldest first; empty arguments = any."""
        return self.node.journal.entries(session_id, kind)

    def set_faults(self, *faults: Fault, lies: ReportLies | None = None, slow_down: float = 1.0) -> None:
        """Replace the faults. Raises FaultError."""
        _no_freeze(faults)
        self.node.set_faults(list(faults), lies or ReportLies(), slow_down)

    def reference(
        self, prompt: Sequence[int], n: int, seed: int = 0, temperature: float = 0.0, model: str = ""
    ) -> list[int]:
        """The exact answer; `model` "" = the first."""
        stubs = [stub for stub, _ in self.settings.models if model in ("", stub.name)]
        return reference_tokens(stubs[0], effective_seed(temperature, seed), prompt, n)

    async def start(self) -> None:
        """Serve; a new incarnation each time. Raises BindError."""
        settings = self.settings
        _no_freeze(settings.faults)
        engine = self._given_engine or StubEngine(settings.models, settings.engine, self._clock)
        about = NodeSettings(
            identity=settings.identity,
            incarnation=uuid.uuid4().hex,
            fleet_id=settings.fleet_id,
            labels=settings.labels,
            inline_bind=settings.inline_bind,
            link=settings.link,
            resume=settings.resume,
            reconcile=settings.reconcile,
            keep_s=settings.keep_s,
            buffer_tokens=settings.buffer_tokens,
            limits=settings.limits,
        )
        self._node = Node(about, engine, Faults(settings.faults), self._clock)
        server = NodeServer(
            self._node,
            _InProcessHazards(self),
            settings.idle_timeout_s,
            settings.link_limits,
            token=settings.token,
            tls=settings.tls,
        )
        address = self.settings.address if self._port is None else self.address
        self._port = await server.start(address)
        self._server = server
        self._work = asyncio.create_task(self._node.run(), name=f"node {settings.identity}")
        if settings.join:
            joiner = server.joiner(settings.join, random.Random(), self._tell)
            self._join = asyncio.create_task(joiner.run(), name=f"join {settings.identity}")

    async def tells(self, start: str) -> str:
        """The first thing that it tells, or has told, people about its joining that starts so."""
        while True:
            for line in self.told:
                if line.startswith(start):
                    return line
            self._told_more.clear()
            await self._told_more.wait()

    def _tell(self, line: str) -> None:
        self.told.append(line)
        self._told_more.set()

    async def join_ended(self) -> None:
        """Wait until it joins no more. Raises JoinRefusedError."""
        if self._join:
            await asyncio.shield(self._join)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop serving; calls have `grace_s` to end. May be repeated.

        Raises what made the engine fail, and JoinRefusedError of a node that joins.
        """
        async with self._ending:  # who stops it again waits until it has stopped
            await self._stop(grace_s)

    async def _stop(self, grace_s: float) -> None:
        server, tasks = self._server, [task for task in (self._join, self._work) if task]
        self._server = self._work = self._join = None
        if server:
            await server.stop(grace_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()):
                raise error

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def _host(self) -> str:
        return self.settings.address.rpartition(":")[0]


class _InProcessHazards:
    def __init__(self, stub: StubNode) -> None:
        self._stub = stub
        self._stopping: asyncio.Task[None] | None = None

    def die(self) -> None:
        self._stopping = self._stopping or asyncio.create_task(self._stub.stop())

    def freeze(self) -> None:
        raise FaultError("freeze needs a node that is a process of its own")


def _no_freeze(faults: Sequence[Fault]) -> None:
    if any(fault.action is Action.FREEZE for fault in faults):
        raise FaultError("freeze needs a node that is a process of its own")
