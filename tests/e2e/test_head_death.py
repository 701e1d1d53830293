"""The head is killed at any moment and started again: sessions and answers under way go on, to the token."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from examples.processes import Child, Children, command_of
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import CallError, FleetClient
from node_stub.reference import StubModel, reference_tokens
from tests.ports import quiet_port

MODEL = StubModel("demo")
TOKENS = 40
PATIENCE_S = 30.0


def expected(context: Sequence[int], n: int) -> list[int]:
    return reference_tokens(MODEL, 0, context, n)


@dataclass
class Durable:
    """A head that keeps what it has in `folder`, its nodes, and clients of it."""

    folder: Path
    children: Children
    stack: AsyncExitStack
    callers: int = field(default_factory=quiet_port)
    admin: int = field(default_factory=quiet_port)
    join: int = field(default_factory=quiet_port)
    nodes: list[str] = field(default_factory=list)
    head: Child | None = None
    more: list[str] = field(default_factory=list)

    async def node(self, name: str, *flags: str, joins: bool = False, rate: int = 200) -> Child:
        port = quiet_port()
        command = [command_of("fleet-node"), "--identity", name, "--model", MODEL.name, "--grace", "0"]
        command += ["--decode-rate", str(rate), *flags]
        command += ["--join", f"127.0.0.1:{self.join}"] if joins else ["--listen", f"127.0.0.1:{port}"]
        child, _ = await self.children.start(name, command, f"fleet-node: {name} ")
        if not joins:
            self.nodes.append(f"127.0.0.1:{port}")
        return child

    async def start(self) -> Child:
        command = [command_of("fleet"), "serve", "--data-dir", str(self.folder / "data")]
        command += ["--listen", f"127.0.0.1:{self.callers}", "--admin-listen", f"127.0.0.1:{self.admin}"]
        command += ["--join-listen", f"127.0.0.1:{self.join}", *self.more]
        command += [part for node in self.nodes for part in ("--node", node)]
        self.head, _ = await self.children.start("head", command, "fleet: serving")
        return self.head

    async def kill(self) -> None:
        assert self.head is not None
        self.head.process.send_signal(signal.SIGKILL)
        await self.head.process.wait()

    async def client(self) -> FleetClient:
        """One with connections of its own."""
        made = FleetClient(f"127.0.0.1:{self.callers}", f"127.0.0.1:{self.admin}")
        return await self.stack.enter_async_context(made)

    async def rest(self, generation_id: str, from_index: int) -> tuple[list[int], list[pb.GenerationEvent]]:
        """Attach there; all tokens from the index on, and the other events."""
        client = await self.client()
        tokens: list[int] = []
        others = []
        async with asyncio.timeout(PATIENCE_S):
            async for event in client.attach(generation_id, from_index):
                if event.HasField("tokens"):
                    assert event.tokens.first_index == from_index + len(tokens)
                    tokens += event.tokens.token_ids
                else:
                    others.append(event)
        return tokens, others


@pytest.fixture
async def durable(tmp_path: Path) -> AsyncIterator[Durable]:
    async with Children(tmp_path) as children, AsyncExitStack() as stack:
        yield Durable(tmp_path, children, stack)


def spec(n: int = TOKENS, *, extend: bool = False) -> pb.GenerationSpec:
    return pb.GenerationSpec(max_new_tokens=n, extend_context=extend, disconnect_grace_ms=20_000)


async def open_session(client: FleetClient, session_id: str, context: Sequence[int]) -> None:
    request = pb.CreateSessionRequest(
        session_id=session_id, spec=pb.SessionSpec(model=MODEL.name), token_ids=context
    )
    await client.ask(client.fleet.CreateSession(request))


async def read_until(call: object, count: int) -> list[int]:
    """Tokens of a stream, until at least so many came."""
    assert isinstance(call, grpc.aio.UnaryStreamCall)
    tokens: list[int] = []
    while len(tokens) < count:
        response = await call.read()
        assert isinstance(response, pb.GenerateResponse)
        tokens += response.event.tokens.token_ids
    return tokens


async def test_an_answer_goes_on_exactly_after_the_head_was_killed_behind_any_token(durable: Durable) -> None:
    await durable.node("a", "--lanes", "64", rate=100)
    await durable.node("b", "--lanes", "64", rate=100)
    await durable.start()
    client = await durable.client()
    cuts = range(0, TOKENS + 1, 4)
    contexts = {k: [k, 7, 9, k + 1] for k in cuts}
    for k in cuts:
        await open_session(client, f"s-{k}", contexts[k])
    got: dict[int, list[int]] = {}

    async def read(k: int) -> None:
        request = pb.GenerateRequest(session_id=f"s-{k}", generation_id=f"g-{k}", spec=spec(extend=True))
        call = client.fleet.Generate(request)
        assert (await call.read()) is not None  # accepted
        got[k] = await read_until(call, k)

    await asyncio.gather(*(read(k) for k in cuts))
    await durable.kill()
    await durable.start()
    answers = await asyncio.gather(*(durable.rest(f"g-{k}", len(got[k])) for k in cuts))
    for k, (tokens, others) in zip(cuts, answers, strict=True):
        assert got[k] + tokens == expected(contexts[k], TOKENS), k
        assert others[-1].finished.output_tokens == TOKENS
    client = await durable.client()
    for k in cuts:
        reply = await client.ask(
            client.fleet.GetSession(pb.GetSessionRequest(session_id=f"s-{k}", include_token_ids=True))
        )
        assert list(reply.token_ids) == [*contexts[k], *expected(contexts[k], TOKENS)]


async def test_a_node_that_kept_the_answer_goes_on_with_it_and_prefills_nothing(durable: Durable) -> None:
    await durable.node("a", rate=50)
    await durable.node("b", rate=50)
    await durable.start()
    client = await durable.client()
    await open_session(client, "s", [1, 2, 3])
    call = client.fleet.Generate(pb.GenerateRequest(session_id="s", generation_id="g", spec=spec(100)))
    got = await read_until(call, 10)
    before = (await client.ask(client.fleet.GetSession(pb.GetSessionRequest(session_id="s")))).session
    await durable.kill()
    await durable.start()
    tokens, others = await durable.rest("g", len(got))
    assert got + tokens == expected([1, 2, 3], 100)
    assert not [each for each in others if each.HasField("moved")]
    assert others[-1].finished.attempts == 2
    client = await durable.client()
    after = (await client.ask(client.fleet.GetSession(pb.GetSessionRequest(session_id="s")))).session
    assert (after.node, after.epoch) == (before.node, before.epoch)
