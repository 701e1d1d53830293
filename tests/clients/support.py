"""What the example clients are run against: a head and stub nodes as processes, and a connection to cut."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from examples.processes import Child, Children, command_of
from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import FleetClient
from node_stub.reference import StubModel, reference_tokens
from tests.clients.toolchains import ROOT
from tests.ports import quiet_port

MODEL = StubModel(name="demo")
PROMPT = [5, 6, 7, 11]
DECODE_RATE = 80
PATIENCE_S = 60.0
"""Longest wait for anything; a bound that tells a hang, not a speed."""

_RESET = struct.pack("ii", 1, 0)


def expected(count: int) -> list[int]:
    """The exact answer to PROMPT."""
    return reference_tokens(MODEL, 0, PROMPT, count)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for something that no event tells of."""
    give_up = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < give_up, f"did not happen within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.02)


def _quiet_address() -> str:
    return f"127.0.0.1:{quiet_port()}"


@dataclass
class Fleet:
    """Stub nodes and a head; `client` is what the test itself asks with."""

    children: Children
    data: Path
    """Where the head keeps what it has."""
    nodes: dict[str, Child] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    head: Child | None = None
    callers: str = field(default_factory=_quiet_address)
    admin: str = field(default_factory=_quiet_address)

    async def start_node(self, name: str) -> None:
        """Start a node, or start it again where it was."""
        address = self.addresses.setdefault(name, _quiet_address())
        command = [command_of("fleet-node"), "--listen", address, "--identity", name, "--model", MODEL.name]
        command += ["--decode-rate", str(DECODE_RATE), "--grace", "0"]
        self.nodes[name], _ = await self.children.start(name, command, f"fleet-node: {name} on ")

    async def start_head(self, *flags: str) -> None:
        """Start the head, or start it again where it was."""
        command = [command_of("fleet"), "serve", "--listen", self.callers, "--admin-listen", self.admin]
        command += ["--data-dir", str(self.data), "--shutdown-grace", "0"]
        command += [f"--node={address}" for address in self.addresses.values()]
        self.head, _ = await self.children.start("head", [*command, *flags], "fleet: serving")

    async def end_head(self, how: signal.Signals) -> None:
        """SIGKILL: at once; SIGTERM: in order."""
        assert self.head is not None
        self.head.process.send_signal(how)
        async with asyncio.timeout(PATIENCE_S):
            await self.head.process.wait()

    def log(self) -> str:
        """What the head has said."""
        assert self.head is not None
        return self.head.log.read_text(encoding="utf-8")

    async def cordon(self, client: FleetClient) -> None:
        for name in self.nodes:
            await client.admin.CordonNode(admin.CordonNodeRequest(node=name))

    async def uncordon(self, client: FleetClient) -> None:
        for name in self.nodes:
            await client.admin.UncordonNode(admin.UncordonNodeRequest(node=name))

    async def until_up(self, client: FleetClient) -> None:
        """Until every node takes work."""

        async def up() -> bool:
            listed = await client.admin.ListNodes(admin.ListNodesRequest())
            states = [node.state for node in listed.nodes if not node.cordoned]
            return states == [admin.NODE_STATE_UP] * len(self.nodes)

        await until(up, "all nodes up")

    async def until_quiet(self, client: FleetClient) -> None:
        """Until nobody has a session or a place on a node, and the books balance."""

        async def quiet() -> bool:
            nodes = await client.admin.ListNodes(admin.ListNodesRequest())
            sessions = await client.fleet.ListSessions(pb.ListSessionsRequest())
            return (
                nodes.books_balance
                and not any(node.reservations for node in nodes.nodes)
                and not sessions.sessions
            )

        await until(quiet, "no session and no reservation left")


@dataclass(frozen=True)
class Ended:
    """What a client printed and its exit code."""

    code: int
    tokens: list[int]
    notes: str

    @property
    def went_on_at(self) -> list[int]:
        """The indexes at which it took the stream up again."""
        return [
            int(index)
            for index in re.findall(r"^connection lost, going on at (\d+)$", self.notes, re.MULTILINE)
        ]


class ClientRun:
    """A client at work; close it when the test ends."""

    def __init__(self, process: asyncio.subprocess.Process, notes: Path) -> None:
        self._process = process
        self._notes = notes
        self._tokens: list[int] = []

    @classmethod
    async def start(cls, command: Sequence[str], notes: Path) -> ClientRun:
        with notes.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if not name.startswith("FLEET_")},
            )
        return cls(process, notes)

    async def until_tokens(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self._tokens) < count:
                assert await self._line(), f"it ended after {len(self._tokens)} tokens:\n{self.notes}"

    async def end(self) -> Ended:
        async with asyncio.timeout(PATIENCE_S):
            while await self._line():
                pass
            return Ended(await self._process.wait(), self._tokens, self.notes)

    async def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdout is not None
        await self._process.stdout.read()
        await self._process.wait()

    @property
    def notes(self) -> str:
        return self._notes.read_text(encoding="utf-8")

    @property
    def node(self) -> str:
        """Where its answer began."""
        (name,) = re.findall(r"^started on (\S+)$", self.notes, re.MULTILINE)
        return str(name)

    async def _line(self) -> bool:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            self._tokens.append(int(line))
        return bool(line)


class Wire:
    """A way to a head, through which connections go until they are cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._server: asyncio.Server | None = None
        self._ends: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.address = ""

    async def start(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    def cut(self) -> None:
        """Reset every connection there is; new ones are taken."""
        for end in self._ends:
            if end.is_closing():
                continue
            connection: socket.socket = end.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.transport.abort()
        self._ends.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._ends.append(writer)
        onward_reader, onward = await asyncio.open_connection(self._host, int(self._port))
        self._ends.append(onward)
        for source, sink in ((reader, onward), (onward_reader, writer)):
            task = asyncio.create_task(_pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    sink.close()
