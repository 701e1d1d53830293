"""A head's side of a multiplexed link, as plain as it gets, for tests of the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from fleet.v1 import link_pb2 as link_pb
from fleet.v1 import link_service_pb2 as service_pb
from fleet.v1 import link_service_pb2_grpc as service_grpc
from fleet.v1 import node_service_pb2 as pb
from tests.node_stub.support import E1, PROMPT, TERM, Head

PATIENCE_S = 20.0


def hello_frame(**fields: Any) -> link_pb.HeadFrame:
    about: dict[str, Any] = {"min_version": 1, "max_version": 1, "fleet_id": "fleet", "head_id": "head"}
    about.update({"term": TERM, "report_period_ms": 60_000, **fields})
    return link_pb.HeadFrame(type=link_pb.FRAME_TYPE_HELLO, hello=pb.HandshakeRequest(**about))


@dataclass
class RunSeen:
    """What came of one run, in order; it checks that nothing comes twice or out of turn."""

    tokens: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    finish: int = 0
    next_index: int = 0
    refusal: pb.Refusal | None = None

    @property
    def over(self) -> bool:
        return bool(self.finish) or self.refusal is not None


class LinkHead:
    """Speaks over one link. `send` and `receive` carry frames; requests are made as `maker` makes them."""

    def __init__(
        self,
        maker: Head,
        send: Callable[[link_pb.HeadFrame], Any],
        receive: Callable[[], Any],
    ) -> None:
        self.maker = maker
        self.frames: list[link_pb.NodeFrame] = []
        self.replies: dict[int, link_pb.NodeReply] = {}
        self.runs: dict[int, RunSeen] = {}
        self.hello: pb.HandshakeResponse | None = None
        self._send = send
        self._receive = receive
        self._call_id = 0

    async def send(self, frame: link_pb.HeadFrame) -> None:
        await self._send(frame)

    async def say_hello(self, **fields: Any) -> pb.HandshakeResponse:
        await self.send(hello_frame(**fields))
        frame = await self.next_frame()
        assert frame.type == link_pb.FRAME_TYPE_HELLO, frame
        self.hello = frame.hello
        return frame.hello

    async def next_frame(self) -> link_pb.NodeFrame:
        """The next frame, taken note of. Raises what ended the link."""
        frame: link_pb.NodeFrame | None = await asyncio.wait_for(self._receive(), PATIENCE_S)
        assert frame is not None, "the link ended"
        self.frames.append(frame)
        for reply in frame.replies:
            assert reply.call_id not in self.replies
            self.replies[reply.call_id] = reply
            if reply.generate.handle:
                assert reply.generate.handle not in self.runs
                self.runs[reply.generate.handle] = RunSeen()
        self._take_steps(frame.steps)
        for event in frame.events:
            self._take_event(event)
        return frame

    async def until(self, done: Callable[[], object]) -> None:
        while not done():
            await self.next_frame()

    async def command(self, **command: Any) -> int:
        """Send one command; its call id."""
        (call_id,) = await self.commands(command)
        return call_id

    async def commands(self, *commands: dict[str, Any], acks: Sequence[link_pb.RunAck] = ()) -> list[int]:
        """Send commands in one frame; their call ids."""
        sent = []
        for command in commands:
            self._call_id += 1
            sent.append(link_pb.HeadCommand(call_id=self._call_id, **command))
        await self.send(link_pb.HeadFrame(type=link_pb.FRAME_TYPE_COMMANDS, commands=sent, acks=acks))
        return [each.call_id for each in sent]

    async def ask(self, **command: Any) -> link_pb.NodeReply:
        """Send one command and wait for its reply."""
        call_id = await self.command(**command)
        await self.until(lambda: call_id in self.replies)
        return self.replies[call_id]

    async def ack(self, handle: int, next_index: int) -> None:
        await self.commands(acks=[link_pb.RunAck(handle=handle, next_index=next_index)])

    async def bind(
        self, context: Sequence[int] = PROMPT, session: str = "s", epoch: int = E1, **fields: Any
    ) -> None:
        """Assign a session and append its context; `fields` are the Assign's."""
        ids = await self.commands(
            {"assign": self.maker.assign_request(session, epoch, **fields)},
            {"append": self.maker.append_request(context, session=session, epoch=epoch)},
        )
        await self.until(lambda: all(each in self.replies for each in ids))
        assert not self.replies[ids[0]].assign.HasField("refusal")
        assert not self.replies[ids[1]].append.HasField("refusal")

    async def start(
        self,
        n: int,
        generation: str = "g",
        session: str = "s",
        context: Sequence[int] = PROMPT,
        **fields: Any,
    ) -> link_pb.RunAccepted:
        """Send a Generate; its answer."""
        request = self.maker.generate_request(context, n, generation, session=session, **fields)
        return (await self.ask(generate=request)).generate

    async def run(self, n: int, generation: str = "g", **fields: Any) -> RunSeen:
        """A generation from its start to its end."""
        accepted = await self.start(n, generation, **fields)
        assert accepted.handle, accepted
        return await self.finished(accepted.handle)

    async def finished(self, handle: int) -> RunSeen:
        await self.until(lambda: handle in self.runs and self.runs[handle].over)
        return self.runs[handle]

    async def tokens(self, handle: int, count: int) -> RunSeen:
        await self.until(lambda: len(self.runs[handle].tokens) >= count)
        return self.runs[handle]

    def _take_steps(self, steps: link_pb.StepColumns) -> None:
        assert len(steps.handles) == len(steps.counts) == len(steps.first_indexes)
        at = 0
        for handle, count, first in zip(steps.handles, steps.counts, steps.first_indexes, strict=True):
            run = self.runs[handle]
            assert not run.over
            run.tokens += steps.token_ids[at : at + count]
            run.indexes += range(first, first + count)
            at += count
        assert at == len(steps.token_ids)

    def _take_event(self, event: link_pb.RunEvent) -> None:
        run = self.runs[event.handle]
        assert not run.over
        if event.phase:
            run.phases.append(event.phase)
        if event.finish:
            run.finish, run.next_index = event.finish, event.next_index
        if event.HasField("refusal"):
            run.refusal = event.refusal


class DialedLink(LinkHead):
    """A link that the head dials."""

    def __init__(self, maker: Head, channel: grpc.aio.Channel) -> None:
        stub: Any = service_grpc.LinkServiceStub(channel)
        self.call: Any = stub.Link()
        super().__init__(maker, self._write, self._read)

    async def _write(self, frame: link_pb.HeadFrame) -> None:
        await self.call.write(service_pb.LinkRequest(frame=frame))

    async def _read(self) -> link_pb.NodeFrame | None:
        response = await self.call.read()
        return None if response is grpc.aio.EOF else response.frame

    async def lose(self) -> None:
        """Break the link off."""
        self.call.cancel()
        await asyncio.wait([asyncio.ensure_future(self.call.code())])

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the link ended, whatever came before."""
        async with asyncio.timeout(PATIENCE_S):
            with suppress(grpc.RpcError):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            return await self.call.code(), await self.call.details() or ""


@asynccontextmanager
async def link_of(address: str, maker: Head | None = None, **hello: Any) -> AsyncIterator[DialedLink]:
    """A link to the node at `address`, hellos exchanged."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        link = DialedLink(maker or Head(channel), channel)
        await link.say_hello(**hello)
        try:
            yield link
        finally:
            link.call.cancel()
