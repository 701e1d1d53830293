"""A head that keeps what it has on disk, as a process to be killed and started again, with its nodes.

The nodes live in the test's own process unless a test has to kill one.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from examples.processes import Child, Children, command_of
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import FleetClient, decode_error
from fleet_service.credentials import Credentials
from node_stub.join import JoinSettings
from node_stub.reference import StubModel, reference_tokens
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.e2e.harness import NodeProcess
from tests.e2e.local_nodes import LocalNode
from tests.ports import quiet_port

MODEL = StubModel("demo")
SPEC = pb.SessionSpec(model=MODEL.name)
PATIENCE_S = 40.0


def expected(context: Sequence[int], n: int) -> list[int]:
    """The exact greedy answer to `context`."""
    return reference_tokens(MODEL, 0, context, n)


async def until_so(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait for what has to be asked for again and again."""
    give_up = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < give_up, f"did not happen within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.02)


@dataclass
class Durable:
    """A head that keeps what it has in `folder`, its nodes, and clients of it."""

    folder: Path
    children: Children
    stack: AsyncExitStack
    flags: list[str] = field(default_factory=list)
    """More arguments of `fleet serve`."""
    dialed: list[str] = field(default_factory=list)
    nodes: list[NodeProcess] = field(default_factory=list)
    callers: int = field(default_factory=quiet_port)
    admin: int = field(default_factory=quiet_port)
    join: int = field(default_factory=quiet_port)
    head: Child | None = None

    # Nodes

    async def node(
        self,
        name: str,
        *,
        joins: bool = False,
        link: bool = True,
        rate: float = 200.0,
        lanes: int = 64,
        eos_per_mille: int = 0,
        listed: bool = True,
    ) -> LocalNode:
        """A node of this process; `link` False: plain RPCs. The head dials it if it is `listed`."""
        settings = StubSettings(
            address=f"127.0.0.1:{quiet_port()}",
            identity=name,
            models=[(model_of(eos_per_mille), 4096)],
            engine=EngineSettings(lanes, rate, 0.0),
            link=link,
            join=JoinSettings(f"127.0.0.1:{self.join}") if joins else None,
        )
        node = await LocalNode(StubNode(settings)).start()
        self._know(node, dial=listed and not joins)
        return node

    async def node_process(self, name: str, *flags: str, rate: int = 200) -> NodeProcess:
        """A node as a process of its own."""
        more = ["--model", MODEL.name, "--decode-rate", str(rate), "--grace", "0", *flags]
        node = await NodeProcess(name, more).start(quiet_port())
        self._know(node, dial="--join" not in flags)
        return node

    def _know(self, node: NodeProcess, *, dial: bool) -> None:
        self.nodes.append(node)
        if dial:
            self.dialed.append(node.address)

    # The head

    async def start(self) -> Child:
        """Start the head; it serves once this returns."""
        self.head, _ = await self.children.start("head", self._command(), "fleet: serving")
        return self.head

    def _command(self) -> list[str]:
        command = [command_of("fleet"), "serve", "--data-dir", str(self.folder / "data")]
        command += ["--listen", f"127.0.0.1:{self.callers}", "--admin-listen", f"127.0.0.1:{self.admin}"]
        command += ["--join-listen", f"127.0.0.1:{self.join}", *self.flags]
        return command + [part for address in self.dialed for part in ("--node", address)]

    async def launch(self) -> asyncio.subprocess.Process:
        """Start the head and wait for nothing."""
        with (self.folder / "launched.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(*self._command(), stdout=output, stderr=output)

    async def kill(self) -> None:
        """SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM: the head ends in order."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        assert self.head is not None
        self.head.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            await self.head.process.wait()

    async def crash(self) -> None:
        """Killed, and started again."""
        await self.kill()
        await self.start()

    async def met_all(self) -> None:
        """Until the head has every node that lives."""
        client = await self.client()
        alive = {node.identity for node in self.nodes if node.alive}

        async def met() -> bool:
            reply = await client.ask(client.admin.ListNodes(admin_pb.ListNodesRequest()))
            up = {node.name for node in reply.nodes if node.state == admin_pb.NODE_STATE_UP}
            return alive <= up

        await until_so(met, "the head has all nodes")

    # Callers

    async def client(self, token: Path | None = None) -> FleetClient:
        """One with connections of its own, that comes back after the head was away."""
        made = FleetClient(
            f"127.0.0.1:{self.callers}",
            f"127.0.0.1:{self.admin}",
            reattach_s=PATIENCE_S,
            credentials=Credentials(token) if token else None,
        )
        return await self.stack.enter_async_context(made)

    async def rest(
        self, generation_id: str, from_index: int = 0, client: FleetClient | None = None
    ) -> tuple[list[int], list[pb.GenerationEvent]]:
        """Attach there; all tokens from the index on, and the other events."""
        client = client or await self.client()
        tokens: list[int] = []
        others = []
        async with asyncio.timeout(PATIENCE_S):
            async for event in client.attach(generation_id, from_index):
                if event.HasField("tokens"):
                    assert event.tokens.first_index == from_index + len(tokens)
                    tokens += event.tokens.token_ids
                else:
                    others.append(event)
        assert others[-1].HasField("finished")
        return tokens, others

    # The end

    async def holds_no_orphan(self, client: FleetClient | None = None) -> None:
        """Until each node holds the sessions that the head has there, and none besides."""
        client = client or await self.client()

        async def agreed() -> bool:
            sessions = await sessions_of(client)
            for node in (each for each in self.nodes if each.alive):
                held = await node.holdings()
                there = {(each.session_id, each.epoch) for each in held.holdings if not each.fenced}
                bound = {(each.session_id, each.epoch) for each in sessions if each.node == node.identity}
                if not there <= bound:
                    return False
            return True

        await until_so(agreed, "no node holds what the head does not have there")

    async def ends_quiet(self, client: FleetClient | None = None) -> None:
        """Finish all sessions, and see that nothing is left at the head or on a node."""
        client = client or await self.client()
        await self.holds_no_orphan(client)
        for session in await sessions_of(client):
            await client.ask(
                client.fleet.FinishSession(pb.FinishSessionRequest(session_id=session.session_id))
            )

        async def quiet() -> bool:
            reply = await client.ask(client.admin.ListNodes(admin_pb.ListNodesRequest()))
            assert reply.books_balance
            counts = [n.sessions + n.reservations + n.outbox for n in reply.nodes if n.state == _UP]
            held = [await node.holdings() for node in self.nodes if node.alive]
            left = [each for one in held for each in one.holdings if not each.fenced]
            return not sum(counts) and not left and not sum(h.lanes_active + h.queue_depth for h in held)

        await until_so(quiet, "nothing is left")


_UP = admin_pb.NODE_STATE_UP


def model_of(eos_per_mille: int) -> StubModel:
    """The stub's model, with that chance of EOS at each token."""
    return StubModel(MODEL.name, eos_per_mille=eos_per_mille) if eos_per_mille else MODEL


async def sessions_of(client: FleetClient) -> list[pb.Session]:
    """All of the caller's sessions."""
    sessions: list[pb.Session] = []
    page_token = ""
    while True:
        request = pb.ListSessionsRequest(page_size=1000, page_token=page_token)
        reply = await client.ask(client.fleet.ListSessions(request))
        sessions += reply.sessions
        page_token = reply.next_page_token
        if not page_token:
            return sessions


async def open_session(
    client: FleetClient, session_id: str, context: Sequence[int], spec: pb.SessionSpec = SPEC
) -> pb.Session:
    """A new session."""
    request = pb.CreateSessionRequest(session_id=session_id, spec=spec, token_ids=context)
    return (await client.ask(client.fleet.CreateSession(request))).session


async def session(client: FleetClient, session_id: str) -> tuple[pb.Session, list[int]]:
    """A session and its context."""
    request = pb.GetSessionRequest(session_id=session_id, include_token_ids=True)
    reply = await client.ask(client.fleet.GetSession(request))
    return reply.session, list(reply.token_ids)


def generation_spec(n: int, **more: object) -> pb.GenerationSpec:
    """So many tokens; it waits long for a reader, unless `more` says otherwise."""
    return pb.GenerationSpec(**({"max_new_tokens": n, "disconnect_grace_ms": 30_000} | more))  # type: ignore[arg-type]


async def first_tokens(call: Any) -> str:
    """Read a call until its first tokens; the generation's id."""
    generation_id = ""
    async with asyncio.timeout(PATIENCE_S):
        while not (event := (await call.read()).event).HasField("tokens"):
            generation_id = generation_id or event.accepted.generation_id
    return generation_id


class Stream:
    """A Generate call, read as far as a test wants."""

    def __init__(
        self, client: FleetClient, session_id: str, generation_id: str, spec: pb.GenerationSpec
    ) -> None:
        request = pb.GenerateRequest(session_id=session_id, generation_id=generation_id, spec=spec)
        self._call = client.fleet.Generate(request)
        self.generation_id = generation_id
        self.tokens: list[int] = []

    async def accepted(self) -> None:
        response = await self._call.read()
        assert isinstance(response, pb.GenerateResponse)
        assert response.event.accepted.generation_id == self.generation_id

    async def until_tokens(self, count: int) -> list[int]:
        """Read until at least so many tokens came."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.tokens) < count:
                response = await self._call.read()
                assert isinstance(response, pb.GenerateResponse)
                self.tokens += response.event.tokens.token_ids
        return self.tokens

    async def end_reason(self) -> str:
        """Read until the call fails; the reason it gives."""
        try:
            await self.until_tokens(sys.maxsize)
        except grpc.aio.AioRpcError as error:
            return decode_error(error).reason
        raise AssertionError("the call ended well")
