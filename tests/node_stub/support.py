"""A head's side of a node's contract, as plain as it gets, for tests of the node."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.stub.v1 import stub_service_pb2_grpc as stub_grpc
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import node_service_pb2_grpc as pb_grpc
from fleet.v1 import types_pb2
from node_stub.rules import context_crc32

TERM = 9
E1, E2, E3 = (TERM << 32 | n for n in (1, 2, 3))
PROMPT = [11, 22, 33, 44]

Reply = pb.NodeServiceGenerateResponse
GenerateCall = Any


class Head:
    """Speaks to one node; command ids rise by themselves."""

    def __init__(self, channel: grpc.aio.Channel, model: str = "stub") -> None:
        self.channel = channel
        self.stub: Any = pb_grpc.NodeServiceStub(channel)
        self.control: Any = stub_grpc.StubServiceStub(channel)
        self.model = model
        self.command_id = 0

    def next_id(self) -> int:
        self.command_id += 1
        return self.command_id

    def assign_request(self, session: str = "s", epoch: int = E1, **fields: Any) -> pb.AssignRequest:
        about: dict[str, Any] = {
            "session_id": session,
            "epoch": epoch,
            "fleet_id": "fleet",
            "head_id": "head",
            "model": self.model,
            "lease_ms": 60_000,
        }
        about.update(fields)
        about.setdefault("command_id", self.next_id())
        return pb.AssignRequest(**about)

    def append_request(
        self, tokens: Sequence[int], base: int = 0, session: str = "s", epoch: int = E1, **fields: Any
    ) -> pb.AppendRequest:
        fields.setdefault("command_id", self.next_id())
        return pb.AppendRequest(session_id=session, epoch=epoch, base_length=base, token_ids=tokens, **fields)

    def generate_request(
        self,
        context: Sequence[int],
        n: int,
        generation: str = "g",
        session: str = "s",
        epoch: int = E1,
        **fields: Any,
    ) -> pb.NodeServiceGenerateRequest:
        fields.setdefault("command_id", self.next_id())
        return pb.NodeServiceGenerateRequest(
            session_id=session,
            epoch=epoch,
            generation_id=generation,
            context_length=len(context),
            context_crc32=context_crc32(context),
            max_new_tokens=n,
            **fields,
        )

    async def assign(self, session: str = "s", epoch: int = E1, **fields: Any) -> pb.Refusal:
        reply = await self.stub.Assign(self.assign_request(session, epoch, **fields))
        refusal: pb.Refusal = reply.refusal
        return refusal

    async def append(
        self, tokens: Sequence[int], base: int = 0, session: str = "s", epoch: int = E1, **fields: Any
    ) -> pb.AppendResponse:
        request = self.append_request(tokens, base, session, epoch, **fields)
        reply: pb.AppendResponse = await self.stub.Append(request)
        return reply

    async def bind(self, context: Sequence[int] = PROMPT, session: str = "s", epoch: int = E1) -> None:
        assert (await self.assign(session, epoch)).code == pb.REFUSAL_CODE_UNSPECIFIED
        reply = await self.append(context, session=session, epoch=epoch)
        assert reply.refusal.code == pb.REFUSAL_CODE_UNSPECIFIED

    def generate(self, context: Sequence[int], n: int, generation: str = "g", **fields: Any) -> GenerateCall:
        return self.stub.Generate(self.generate_request(context, n, generation, **fields))

    async def set_faults(self, *faults: stub_pb.Fault, **fields: Any) -> None:
        await self.control.SetFaults(stub_pb.SetFaultsRequest(faults=faults, **fields))

    async def journal(self, kind: str = "generate", session: str = "") -> list[stub_pb.JournalEntry]:
        reply = await self.control.GetJournal(stub_pb.GetJournalRequest(session_id=session))
        return [entry for entry in reply.entries if entry.kind == kind]

    async def holdings(self) -> stub_pb.GetHoldingsResponse:
        reply: stub_pb.GetHoldingsResponse = await self.control.GetHoldings(stub_pb.GetHoldingsRequest())
        return reply


class Stream:
    """What came of a Generate, in order."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    @property
    def tokens(self) -> list[int]:
        return [token for reply in self.replies for token in reply.token_ids]

    @property
    def indexes(self) -> list[int]:
        """The index of every token, as the messages have it."""
        return [reply.first_index + n for reply in self.replies for n in range(len(reply.token_ids))]

    @property
    def phases(self) -> list[int]:
        return [reply.phase for reply in self.replies if reply.phase]

    @property
    def finish(self) -> int:
        return self.replies[-1].finish

    @property
    def refusal(self) -> pb.Refusal:
        return self.replies[-1].refusal


async def collect(call: GenerateCall, stream: Stream | None = None) -> Stream:
    """All messages to the end. Raises AioRpcError when the call breaks; `stream` has what came before."""
    stream = stream or Stream()
    while (reply := await call.read()) is not grpc.aio.EOF:
        stream.replies.append(reply)
    return stream


async def until(call: GenerateCall, done: Callable[[Stream], bool], stream: Stream | None = None) -> Stream:
    """Messages up to the one that makes `done` true."""
    stream = stream or Stream()
    while not done(stream):
        reply = await call.read()
        assert reply is not grpc.aio.EOF, "the stream ended too early"
        stream.replies.append(reply)
    return stream


async def eventually(check: Callable[[], bool]) -> None:
    """Return once `check` is true; the test's own timeout bounds it."""
    while not check():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def head_of(address: str, model: str = "stub") -> AsyncIterator[Head]:
    # A pool of its own: a test's connection is not another test's.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Head(channel, model)


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A `fleet-node` of its own, ready, and its address; killed at the end if it still runs."""
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node_stub", "--listen", "127.0.0.1:0", "--model", "stub", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert node.stdout
        line = (await node.stdout.readline()).decode()
        assert line.startswith("fleet-node: "), line
        yield node, line.split()[-1]
    finally:
        if node.returncode is None:
            node.kill()
        await node.wait()


def sampled(seed: int) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(temperature=0.8, seed=seed)
