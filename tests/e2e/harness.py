"""A fleet to test against: stub nodes as real processes, a real head behind real gRPC, and a quiet end.

The head runs in the test's own loop, so that what it holds can be looked at; its edge, its links and its
nodes are the real ones. `World` checks at its end that the books balance and nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.stub.v1.stub_service_pb2_grpc import StubServiceStub
from fleet.v1.admin_service_pb2_grpc import AdminServiceStub
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet_service.api.interceptors import NullRpcObserver, RpcObserver
from fleet_service.api.server import EdgeParts, Listener, callers_listener, join_listener, operators_listener
from fleet_service.domain.errors import FleetError
from fleet_service.domain.node_types import NodeState
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.join import JoinDoor
from fleet_service.links.plain import PlainDialer
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.head import Head
from fleet_service.runtime.node import Node
from fleet_service.runtime.observer import FleetObserver
from fleet_service.runtime.protocols import Dialer, Resolver
from fleet_service.runtime.settings import DiscoverySettings, HeadSettings
from node_stub.reference import StubModel, reference_tokens
from tests.e2e.connected import ConnectedStub
from tests.ports import quiet_port

if TYPE_CHECKING:
    from fleet.stub.v1.stub_service_pb2_grpc import StubServiceAsyncStub
    from fleet.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

PATIENCE_S = 30.0
"""Longest wait for anything; a bound that tells a hang, not a speed."""

MODEL = StubModel("stub-model")


def prompt(length: int, salt: int = 0) -> list[int]:
    """A prompt of its own for each salt."""
    return [3 + (salt * 7919 + i * 104729) % 31_000 for i in range(length)]


def expected(context: Sequence[int], n: int, model: StubModel = MODEL) -> list[int]:
    """The exact greedy answer to `context`."""
    return reference_tokens(model, 0, context, n)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that no event tells of."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"did not happen within {PATIENCE_S} s: {what}")
        await asyncio.sleep(0.01)


class NodeProcess:
    """One `fleet-node` process and its control service."""

    def __init__(self, identity: str, flags: Sequence[str], said: Path | None = None) -> None:
        """`said`: a file for what it says on standard error."""
        self.identity = identity
        self.flags = list(flags)
        self._said = said or Path(os.devnull)
        self.address = ""
        self.frozen = False
        self._process: asyncio.subprocess.Process | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def control(self) -> StubServiceAsyncStub:
        assert self._channel is not None
        return StubServiceStub(self._channel)

    async def start(self, port: int = 0) -> NodeProcess:
        """Start the process and wait for its line; `port` 0 = any, or the one it had."""
        own = port or self.address.rpartition(":")[2]
        line = await self._launch(f"127.0.0.1:{own or quiet_port()}")
        if not line and not own:  # that port may have been somebody's
            line = await self._launch(f"127.0.0.1:{quiet_port()}")
        assert " on " in line, f"fleet-node said {line!r}"
        self.address = line.strip().rpartition(" on ")[2]  # with --join, that of its control
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        return self

    async def _launch(self, listen: str) -> str:
        """Start the process there; the line that it says, "" when it ended instead."""
        with self._said.open("ab") as said:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "node_stub",
                "--listen",
                listen,
                "--identity",
                self.identity,
                *self.flags,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
            )
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 2 * PATIENCE_S)).decode()

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.signal(signal.SIGKILL)
            await self.wait_dead()

    async def leave(self, grace_s: float) -> None:
        """SIGTERM; what runs may end within the grace the process was started with, `grace_s` at most."""
        if self.alive:
            self.signal(signal.SIGTERM)
            await self.wait_dead()

    async def wait_dead(self) -> None:
        """Until the process has ended, and its pipe with it."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._process.wait()
            await self._process.stdout.read()

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)
        self.frozen = False

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        await self.kill()

    # What it did and what it should do wrong

    async def faults(self, *faults: stub_pb.Fault, reports: stub_pb.ReportFaults | None = None) -> None:
        await self.control.SetFaults(stub_pb.SetFaultsRequest(faults=faults, reports=reports))

    async def journal(self, session_id: str = "", kind: str = "") -> list[stub_pb.JournalEntry]:
        answer = await self.control.GetJournal(stub_pb.GetJournalRequest(session_id=session_id))
        return [entry for entry in answer.entries if not kind or entry.kind == kind]

    async def holdings(self) -> stub_pb.GetHoldingsResponse:
        return await self.control.GetHoldings(stub_pb.GetHoldingsRequest())


@dataclass
class HeadServer:
    """A head with its listeners, and stubs to call them."""

    head: Head
    listeners: list[Listener]
    channels: list[grpc.aio.Channel]
    fleet: FleetServiceAsyncStub
    admin: AdminServiceAsyncStub
    address: str

    async def stop(self, grace_s: float = 0.0) -> None:
        if isinstance(self.fleet, ConnectedStub):
            await self.fleet.close()
        for channel in self.channels:
            await channel.close()
        await self.head.stop(grace_s)
        for listener in self.listeners:
            await listener.stop(0)

    def new_channel(self, *more: tuple[str, int]) -> grpc.aio.Channel:
        """A connection of its own to the callers' listener, with `more` gRPC options."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1), *more]
        channel = grpc.aio.insecure_channel(self.address, options=options)
        self.channels.append(channel)
        return channel


def settings(**overrides: object) -> HeadSettings:
    """The head's settings with short waits, but patience with nodes of a busy machine."""
    defaults: dict[str, object] = {"silence_s": 5.0, "tick_s": 0.25, "command_timeout_s": 5.0}
    return HeadSettings(**(defaults | overrides))  # type: ignore[arg-type]


@dataclass
class World:
    """Everything a test starts, and its end."""

    kind: str = "plain"
    """How the head and its nodes speak: "plain" RPCs, a multiplexed "link", or the nodes "join".

    "connect" is "link" with callers whose calls all go over one stream.
    """
    join_port: int = 0
    nodes: list[NodeProcess] = field(default_factory=list)
    heads: list[HeadServer] = field(default_factory=list)

    async def node(self, identity: str = "", *flags: str, model: str = MODEL.name) -> NodeProcess:
        """A stub node process; by default with 4 lanes and 200 decode steps a second."""
        name = identity or f"node-{len(self.nodes) + 1}"
        defaults = () if "--decode-rate" in flags else ("--decode-rate", "200")
        lanes = () if "--lanes" in flags else ("--lanes", "4")
        joins = ("--join", f"127.0.0.1:{self.join_port}") if self.kind == "join" else ()
        node = await NodeProcess(name, ["--model", model, *joins, *defaults, *lanes, *flags]).start()
        self.nodes.append(node)
        return node

    async def start_nodes(self, count: int, *flags: str) -> list[NodeProcess]:
        return list(await asyncio.gather(*(self.node(f"node-{i + 1}", *flags) for i in range(count))))

    async def head(
        self,
        *nodes: NodeProcess | str,
        observer: FleetObserver | None = None,
        rpc_observer: RpcObserver | None = None,
        through: Callable[[Dialer], Dialer] | None = None,
        resolver: Resolver | None = None,
        dns_refresh_s: float = 0.2,
        **overrides: object,
    ) -> HeadServer:
        """A head that dials `nodes` (`through` a dialer of the test's own), ready to be called."""
        config = settings(**overrides)
        links = LinkSettings(
            report_period_s=min(0.5, config.silence_s / 3), command_timeout_s=config.command_timeout_s
        )
        dialer: Dialer = PlainDialer(links) if self.kind == "plain" else FleetDialer(links)
        if through is not None:
            dialer = through(dialer)
        head = Head(
            config,
            dialer=dialer,
            rng=random.Random(len(self.heads)),
            wall_clock=time.time,
            observer=observer,
            resolver=resolver,
            discovery=DiscoverySettings(dns_refresh_s=dns_refresh_s),
        )
        rng = random.Random(11)
        parts = EdgeParts(
            log=structlog.get_logger("edge"),
            observer=rpc_observer or NullRpcObserver(),
            rng=rng,
            new_request_id=lambda: f"req-{rng.getrandbits(64):016x}",
        )
        listeners = [
            callers_listener(head, parts, "127.0.0.1:0"),
            operators_listener(head.operators, parts, "127.0.0.1:0"),
        ]
        dialed = [each if isinstance(each, str) else each.address for each in nodes]
        if self.kind == "join":
            door = JoinDoor(head.nodes.desk, head.nodes.introduction, links)
            listeners.append(join_listener(door, parts, f"127.0.0.1:{self.join_port}"))
            await listeners[-1].start()
            dialed = []
        await head.start(dialed)
        # On a busy machine the first connection may take longer than the head waits for it.
        awake = [node for node in nodes if isinstance(node, NodeProcess) and node.alive and not node.frozen]
        await until(lambda: all(self._met(head, node) for node in awake), "nodes answered")
        for listener in listeners[:2]:
            await listener.start()
            listener.set_serving(serving=True)
        address = f"127.0.0.1:{listeners[0].port}"
        callers = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        admin = grpc.aio.insecure_channel(f"127.0.0.1:{listeners[1].port}")
        fleet: Any = FleetServiceStub(callers)
        if self.kind == "connect":
            fleet = ConnectedStub(fleet)
        server = HeadServer(head, listeners, [callers, admin], fleet, AdminServiceStub(admin), address)
        self.heads.append(server)
        return server

    async def close(self) -> None:
        """Check that all is quiet and nothing is left, then end everything. A test may do so itself."""
        try:
            for server in self.heads:
                await self._quiet(server)
        finally:
            for server in self.heads:
                await server.stop()
            await asyncio.gather(*(node.close() for node in self.nodes))
            self.heads.clear()
            self.nodes.clear()

    async def _quiet(self, server: HeadServer) -> None:
        head = server.head
        for generation in head.generations.running:
            generation.cancel()
        views, _ = head.list_sessions(1000, "", None, "")
        for view in views:
            with suppress(FleetError):  # a session for one answer goes by itself
                await head.finish_session(view.session_id)
        # Asked each time: one that has just died may not be known to be dead yet.
        await until(lambda: not self._owed(head), "revokes were delivered")
        assert head.operators.books_balance
        assert [node.reservations for node in head.fleet.nodes] == [0] * len(head.fleet.nodes)
        assert [len(node.queue) for node in head.fleet.nodes] == [0] * len(head.fleet.nodes)
        assert [node.sessions for node in head.fleet.nodes] == [0] * len(head.fleet.nodes)
        drivers = [task for task in asyncio.all_tasks() if task.get_name().startswith("drive ")]
        assert drivers == []
        for node in self._alive():
            if self._at_head(head, node) is not None:
                await self._holds_nothing(node)

    def _alive(self) -> list[NodeProcess]:
        return [node for node in self.nodes if node.alive and not node.frozen]

    def _owed(self, head: Head) -> bool:
        """Whether a node that lives is owed a revoke."""
        known = [self._at_head(head, node) for node in self._alive()]
        return any(node is not None and node.outbox for node in known)

    def _at_head(self, head: Head, process: NodeProcess) -> Node | None:
        address = f"joined:{process.identity}" if self.kind == "join" else process.address
        return head.fleet.at(address)

    def _met(self, head: Head, process: NodeProcess) -> bool:
        node = self._at_head(head, process)
        return node is not None and node.state is not NodeState.CONNECTING

    @staticmethod
    async def _holds_nothing(node: NodeProcess) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            held = await node.holdings()
            left = [holding.session_id for holding in held.holdings if not holding.fenced]
            if not left and not held.lanes_active and not held.queue_depth:
                return
            assert time.monotonic() < give_up, f"{node.identity} still holds {left} or runs: {held}"
            await asyncio.sleep(0.02)
