"""A multiplexed link to one head, apart from what carries it: frames in, frames out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from fleet.v1 import link_pb2 as link_pb
from fleet.v1 import node_service_pb2 as pb
from node_stub import convert
from node_stub.calls import Call
from node_stub.commands import Commands, HelloRefusal, hello_of, period_s
from node_stub.lines import Lines
from node_stub.link_outbox import Outbox
from node_stub.link_runs import LinkRuns
from node_stub.rules import Code, Owner, Refusal
from node_stub.runs import Run
from node_stub.token import FleetToken, Way

log = logging.getLogger(__name__)

T = TypeVar("T")

_FROM_HEAD = {link_pb.FRAME_TYPE_HELLO, link_pb.FRAME_TYPE_PROOF, link_pb.FRAME_TYPE_COMMANDS}

WriteFrame = Callable[[link_pb.NodeFrame], Awaitable[object]]
"""Hands a frame to the transport; returns when it takes the next one."""


class LinkProtocolError(Exception):
    """The head broke the rules of a link, which is therefore closed; the text says how."""


class LinkAuthError(LinkProtocolError):
    """The head does not prove that it knows the fleet token."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """`max_waiting`: commands not yet executed and replies not yet sent, before no more frames are read."""

    hello_timeout_s: float = 10.0
    max_waiting: int = 1_024


class LinkSession:
    """Serves one head over one link.

    Commands are executed in the order of their coming, each session's by themselves: one that a fault makes
    wait holds up its own session's only. What the runs of a link make in one turn of the loop leaves in one
    frame. While the transport takes no frame, nothing is gathered: it waits in each run, whose buffer holds
    its engine back.
    """

    def __init__(
        self,
        commands: Commands,
        call: Call,
        write: WriteFrame,
        limits: LinkLimits | None = None,
        way: Way = "link",
    ) -> None:
        self._way = way
        self.hello: pb.HandshakeRequest | None = None
        """What the head said of itself, once it has and is served."""
        self.greeted = asyncio.Event()
        """Set once hellos, and proofs where there is a fleet token, have been exchanged."""
        self.heard_commands = asyncio.Event()
        """Set once the head, having seen the node's hello, goes on."""
        self._commands = commands
        self._node = commands.node
        self._call = call
        self._write = write
        self._limits = limits or LinkLimits()
        self._outbox = Outbox()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._runs = LinkRuns(commands, call, self._outbox, wake=self._news.set, on_error=self._fail)
        self._lines = Lines(self._fail)
        self._last_call_id = -1
        self._owner: Owner | None = None
        self._report_due = False
        self._stopping = False

    async def serve(self, frames: AsyncIterator[link_pb.HeadFrame]) -> None:
        """Serve until the head ends the link, or the call is to end and the runs have.

        Raises LinkProtocolError, LinkDropped, and what `frames` and the write raise.
        """
        hello = await self._until_ending(self._hello(frames))
        if hello is None:
            return
        self._failed = asyncio.get_running_loop().create_future()
        tasks = [
            asyncio.create_task(self._read_all(frames), name="link reader"),
            asyncio.create_task(self._write_all(), name="link writer"),
            asyncio.create_task(self._report_all(hello), name="link reports"),
            asyncio.create_task(self._end_with_call(), name="link end"),
        ]
        try:
            done, _ = await asyncio.wait([self._failed, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._failed.cancel()
            await self._lines.close()
            await self._runs.leave()
            await asyncio.gather(self._failed, *tasks, return_exceptions=True)
        for each in done:
            each.result()

    # ----------------------------------------------------------------------------------------- from the head

    async def _until_ending(self, hello: Coroutine[None, None, T]) -> T | None:
        """What `hello` returns, or None when the call is to end before. Raises LinkDropped."""
        greeting = asyncio.create_task(hello, name="hello")
        ending = asyncio.create_task(self._call.ending(), name="link end")
        try:
            await asyncio.wait([greeting, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            greeting.cancel()
            ending.cancel()
            await asyncio.gather(greeting, ending, return_exceptions=True)
        self._call.check()
        return None if greeting.cancelled() else greeting.result()

    async def _hello(self, frames: AsyncIterator[link_pb.HeadFrame]) -> pb.HandshakeRequest | None:
        """Exchange hellos; None = the link has ended, or the head was refused."""
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                request = await self._first_frame(frames)
        except TimeoutError:
            raise LinkProtocolError(f"no hello within {self._limits.hello_timeout_s:g} s") from None
        if request is None:
            return None
        token = self._commands.token
        nonce = token.new_nonce() if token else b""
        answer = hello_of(self._node, request, token, nonce, self._way)
        if isinstance(answer, HelloRefusal):
            self._commands.refusals.tell(request.head_id, self._call.peer, answer.message)
            refusal = link_pb.LinkRefusal(reason=answer.reason, message=answer.message)
            await self._write(link_pb.NodeFrame(type=link_pb.FRAME_TYPE_REFUSED, refused=refusal))
            return None
        await self._write(link_pb.NodeFrame(type=link_pb.FRAME_TYPE_HELLO, hello=answer))
        if token and not await self._proven(frames, token, request.nonce, nonce):
            return None
        self.hello, self._owner = request, convert.owner_from(request)
        log.info("link with head %s, term %d (%s)", request.head_id, request.term, self._call.peer)
        self.greeted.set()
        return request

    async def _proven(
        self, frames: AsyncIterator[link_pb.HeadFrame], token: FleetToken, head_nonce: bytes, nonce: bytes
    ) -> bool:
        """Whether the head has proven that it knows the token; False: the link has ended before."""
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                proof = await self._proof(frames)
        except TimeoutError:
            raise LinkAuthError(f"no proof within {self._limits.hello_timeout_s:g} s of the hello") from None
        if proof is None:
            return False
        if not token.accepts(self._way, proof, head_nonce, nonce):
            raise LinkAuthError("the head does not know this node's fleet token")
        return True

    async def _proof(self, frames: AsyncIterator[link_pb.HeadFrame]) -> bytes | None:
        async for frame in frames:
            if frame.type == link_pb.FRAME_TYPE_PROOF:
                return frame.proof
            if frame.type != link_pb.FRAME_TYPE_UNSPECIFIED and frame.type not in _FROM_HEAD:
                _skip(frame)
                continue
            raise LinkAuthError("the head did not prove that it knows this node's fleet token")
        return None

    async def _first_frame(self, frames: AsyncIterator[link_pb.HeadFrame]) -> pb.HandshakeRequest | None:
        async for frame in frames:
            match frame.type:
                case link_pb.FRAME_TYPE_HELLO if frame.HasField("hello"):
                    return frame.hello
                case link_pb.FRAME_TYPE_HELLO:
                    raise LinkProtocolError("a hello without its body")
                case link_pb.FRAME_TYPE_COMMANDS:
                    raise LinkProtocolError("commands came before the hello")
                case _:
                    _skip(frame)
        return None

    async def _read_all(self, frames: AsyncIterator[link_pb.HeadFrame]) -> None:
        async for frame in frames:
            match frame.type:
                case link_pb.FRAME_TYPE_COMMANDS:
                    self.heard_commands.set()
                    for command in frame.commands:
                        await self._take(command)
                    for ack in frame.acks:
                        if wrong := self._runs.acknowledge(ack):
                            raise LinkProtocolError(wrong)
                case link_pb.FRAME_TYPE_HELLO:
                    raise LinkProtocolError("a second hello")
                case _:
                    _skip(frame)

    async def _take(self, command: link_pb.HeadCommand) -> None:
        """Execute a command at once, or put it where its turn comes."""
        kind = command.WhichOneof("command")
        if kind is None:
            raise LinkProtocolError(f"command {command.call_id} says nothing this node knows")
        if command.call_id <= self._last_call_id:
            raise LinkProtocolError(
                f"call id {command.call_id} comes after {self._last_call_id}; they must rise"
            )
        self._last_call_id = command.call_id
        while self._outbox.reply_count + len(self._lines) >= self._limits.max_waiting:
            self._room.clear()
            await self._room.wait()
        # Only a fault makes a command wait, and those behind it.
        session_id = getattr(getattr(command, kind), "session_id", "")
        if self._node.faults.any_left or self._lines.is_busy(session_id):
            self._lines.add(session_id, self._execute(command, kind))
        else:
            await self._execute(command, kind)

    async def _execute(self, command: link_pb.HeadCommand, kind: str) -> None:
        commands, reply = self._commands, link_pb.NodeReply(call_id=command.call_id)
        match kind:
            case "assign":
                reply.assign.CopyFrom(await commands.assign(command.assign, self._call))
            case "append":
                reply.append.CopyFrom(await commands.append(command.append, self._call))
            case "generate":
                await self._generate(command)
                return
            case "cancel":
                reply.cancel.CopyFrom(commands.cancel(command.cancel))
            case "revoke":
                reply.revoke.CopyFrom(commands.revoke(command.revoke))
            case "renew_lease":
                reply.renew_lease.CopyFrom(commands.renew_lease(command.renew_lease))
            case "reconcile":
                if not self._node.settings.reconcile:
                    raise LinkProtocolError("reconcile was asked for; this node does not announce it")
                reply.reconcile.CopyFrom(commands.reconcile(command.reconcile))
        self._reply(reply)

    async def _generate(self, command: link_pb.HeadCommand) -> None:
        call_id, request = command.call_id, command.generate
        run: Run | Refusal | None = self._node.resume(convert.generate_from(request, inline=False))
        resumed = run is not None
        if run is None and self._stopping:
            run = Refusal(Code.BUSY, detail="the node is being stopped")
        if run is None:
            run = await self._commands.start(request, self._call, command.trace)
        if isinstance(run, Refusal):
            accepted = link_pb.RunAccepted(refusal=convert.refusal_to(run))
            self._reply(link_pb.NodeReply(call_id=call_id, generate=accepted))
            return
        self._runs.add(run, call_id, resumed=resumed)

    def _reply(self, reply: link_pb.NodeReply) -> None:
        self._outbox.add_reply(reply)
        self._news.set()

    def _fail(self, error: BaseException) -> None:
        if self._failed and not self._failed.done():
            self._failed.set_exception(error)

    # ------------------------------------------------------------------------------------------- to the head

    async def _write_all(self) -> None:
        while not (self._stopping and not self._runs and not self._lines and not self._outbox.leaving):
            await self._news.wait()
            self._news.clear()
            while frame := self._next_frame():
                await self._write(frame)
                self._room.set()

    def _next_frame(self) -> link_pb.NodeFrame | None:
        self._runs.gather()
        if self._report_due:
            self._report_due = False
            self._outbox.set_report(convert.report_to(self._node.report_told(self._owner)))
        return self._outbox.take()

    async def _report_all(self, hello: pb.HandshakeRequest) -> None:
        while True:
            await asyncio.sleep(period_s(hello.report_period_ms))
            if not self._node.faults.lies.silent:
                self._report_due = True
                self._news.set()

    async def _end_with_call(self) -> None:
        """Drop the link when its connection is dropped; wind it up when the node is stopped."""
        await self._call.ending()
        self._call.check()
        self._stopping = True
        if self._call.in_order:
            self._outbox.say_goodbye()
        self._news.set()
        await asyncio.Event().wait()


def _skip(frame: link_pb.HeadFrame) -> None:
    if frame.type == link_pb.FRAME_TYPE_UNSPECIFIED:
        raise LinkProtocolError("a frame without a type")
    if frame.must_understand:
        raise LinkProtocolError(
            f"a frame of type {frame.type} must be understood; this node does not know it"
        )
