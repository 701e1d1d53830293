"""A head's end of a multiplexed link, for the checks: one frame at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from fleet.v1 import link_pb2, link_service_pb2, link_service_pb2_grpc
from fleet.v1 import node_service_pb2 as pb
from fleet_service.conformance.head import PROTOCOL_VERSION, TERM, Connection, Head, status_text
from fleet_service.conformance.verdicts import Broken

NEWS = link_pb2.FRAME_TYPE_NEWS
REPORT_PERIOD_MS = 100


@dataclass(slots=True)
class LinkRun:
    """A run as the link tells it."""

    handle: int
    epoch: int
    resumed: bool
    tokens: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    end: link_pb2.RunEvent | None = None


class LinkClient:
    """An open link, greeted. What comes of runs is gathered as frames are read."""

    def __init__(self, call: Any, hello: pb.HandshakeResponse) -> None:
        self.hello = hello
        self.runs: dict[int, LinkRun] = {}
        self.reports = 0
        self._call = call
        self._replies: dict[int, link_pb2.NodeReply] = {}
        self._last_call_id = 0

    async def send(self, frame: link_pb2.HeadFrame) -> None:
        """Raises Broken."""
        try:
            await self._call.write(link_service_pb2.LinkRequest(frame=frame))
        except grpc.aio.AioRpcError as error:
            raise Broken(f"the link ended with {status_text(error)}") from error

    async def read(self) -> None:
        """Take in one frame. Raises Broken where the link ends or a frame breaks its rules."""
        frame = await _frame(self._call)
        if frame.type != NEWS:
            raise Broken(f"a frame of type {frame.type} came after the hello")
        for reply in frame.replies:
            if not 0 < reply.call_id <= self._last_call_id:
                raise Broken(f"a reply carries call id {reply.call_id}, which was never sent")
            self._replies[reply.call_id] = reply
            if reply.HasField("generate") and not reply.generate.HasField("refusal"):
                self._accept(reply.generate)
        self._take_steps(frame.steps)
        for event in frame.events:
            run = self._run(event.handle)
            if event.phase:
                run.phases.append(event.phase)
            if event.finish or event.HasField("refusal"):
                run.end = event
        self.reports += frame.HasField("report")

    async def command(self, kind: str, request: Any) -> Any:
        """The reply to one command. Raises Broken."""
        call_id = await self.post(kind, request)
        while call_id not in self._replies:
            await self.read()
        reply = self._replies[call_id]
        if reply.WhichOneof("reply") != kind:
            raise Broken(f"{kind} was answered with {reply.WhichOneof('reply')}")
        return getattr(reply, kind)

    async def post(self, kind: str, request: Any) -> int:
        """Send one command, and give its call id."""
        self._last_call_id += 1
        command = link_pb2.HeadCommand(call_id=self._last_call_id, **{kind: request})
        await self.send(link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_COMMANDS, commands=[command]))
        return self._last_call_id

    async def to_end(self, run: LinkRun) -> LinkRun:
        while run.end is None:
            await self.read()
        return run

    def run_of(self, accepted: link_pb2.RunAccepted) -> LinkRun:
        return self.runs[accepted.handle]

    def close(self) -> None:
        """Drop the link without a word."""
        self._call.cancel()

    def _accept(self, accepted: link_pb2.RunAccepted) -> None:
        if not accepted.handle or accepted.handle in self.runs:
            raise Broken(f"handle {accepted.handle} was given to a run; it is 0 or was given before")
        self.runs[accepted.handle] = LinkRun(accepted.handle, accepted.epoch, accepted.resumed)

    def _take_steps(self, steps: link_pb2.StepColumns) -> None:
        if len({len(steps.handles), len(steps.counts), len(steps.first_indexes)}) != 1:
            raise Broken("the columns of a step are of different lengths")
        if sum(steps.counts) != len(steps.token_ids):
            raise Broken(f"a step counts {sum(steps.counts)} tokens and carries {len(steps.token_ids)}")
        at = 0
        for handle, count, first in zip(steps.handles, steps.counts, steps.first_indexes, strict=True):
            run = self._run(handle)
            run.tokens += steps.token_ids[at : at + count]
            run.indexes += range(first, first + count)
            at += count

    def _run(self, handle: int) -> LinkRun:
        if handle not in self.runs:
            raise Broken(f"a frame names handle {handle}, which no run was given")
        if self.runs[handle].end is not None:
            raise Broken(f"a frame names handle {handle}, whose run has ended")
        return self.runs[handle]


@asynccontextmanager
async def link_of(head: Head, connection: Connection | None = None) -> AsyncIterator[LinkClient]:
    """A link, hellos and proofs exchanged; dropped at the end. Raises Broken."""
    connection = connection or head.connection
    head.doing = "waiting for a frame of the link"
    call: Any = link_service_pb2_grpc.LinkServiceStub(connection.channel).Link()
    try:
        yield await _greeted(call, head, connection)
    finally:
        call.cancel()


async def _greeted(call: Any, head: Head, connection: Connection) -> LinkClient:
    token = connection.token
    hello = pb.HandshakeRequest(
        min_version=PROTOCOL_VERSION,
        max_version=PROTOCOL_VERSION,
        fleet_id=connection.fleet_id,
        head_id=head.name,
        term=TERM,
        report_period_ms=REPORT_PERIOD_MS,
        nonce=token.new_nonce() if token else b"",
    )
    client = LinkClient(call, pb.HandshakeResponse())
    await client.send(link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_HELLO, hello=hello))
    frame = await _frame(call)
    if frame.type != link_pb2.FRAME_TYPE_HELLO or not frame.HasField("hello"):
        raise Broken(f"the first frame is of type {frame.type}, not a hello")
    client.hello = frame.hello
    if token:
        if not token.accepts("link", frame.hello.proof, hello.nonce, frame.hello.nonce):
            raise Broken("the node's proof of the fleet token is wrong on the link")
        proof = token.proof("link", hello.nonce, frame.hello.nonce)
        await client.send(link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_PROOF, proof=proof))
    return client


async def _frame(call: Any) -> link_pb2.NodeFrame:
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise Broken(f"the link ended with {status_text(error)}") from error
    if not isinstance(response, link_service_pb2.LinkResponse):
        raise Broken("the link ended by itself")
    return response.frame
