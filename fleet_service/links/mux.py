"""One multiplexed link to a node: commands and their replies, runs, reports, over one stream of frames.

Two tasks per link, whatever runs on it: one reads, and passes everything on synchronously; one writes what
has gathered since its last frame, so that commands made in one turn of the loop leave together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from fleet.v1 import link_pb2, node_service_pb2
from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Refusal,
    Revoke,
    Run,
)
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.links import convert
from fleet_service.links.frames import FrameStream, ProtocolViolationError, is_news
from fleet_service.links.mux_runs import MuxRun, RunTable
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import (
    LinkError,
    LinkListener,
    LinkLostError,
    LinkTimeoutError,
    NodeFaultError,
    RunSink,
)

_log = structlog.get_logger(__name__)

MAX_UNANSWERED = 4096
"""Commands, and cancelled runs, that a node may owe the answer or end of; with more the link is given up."""

COMPANY_S = 0.01
"""How long a revoke may wait for a frame that leaves anyway."""

_ENVELOPE_BYTES = 64
"""What a frame needs at most beyond its commands and acknowledgements."""
_COMMAND_BYTES = 8
"""What a command needs at most within a frame beyond its own bytes."""

_Answer = (
    node_service_pb2.AssignResponse
    | node_service_pb2.AppendResponse
    | node_service_pb2.CancelResponse
    | node_service_pb2.RevokeResponse
)
_T = TypeVar("_T")
_Settle = Callable[[link_pb2.NodeReply | None], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A command whose reply is owed. `settle` gets it, or None when the link is gone."""

    kind: str
    settle: _Settle


class MuxLink:
    """An OfferedLink. It runs from the start; until a listener is attached its news are kept for it.

    Made in the running loop, once the handshake on `stream` is done.
    """

    def __init__(
        self,
        stream: FrameStream,
        peer: str,
        introduction: Introduction,
        hello: NodeHello,
        settings: LinkSettings,
        listener: LinkListener | None = None,
    ) -> None:
        self._stream = stream
        self._peer = peer
        self._introduction = introduction
        self._hello = hello
        self._timeout_s = settings.command_timeout_s
        self._max_bytes = min(settings.max_message_bytes, hello.max_message_bytes) - _ENVELOPE_BYTES
        self._resumes = Feature.RESUME in hello.features
        self._report = hello.report
        self._news = _KeptNews()
        self._listener: LinkListener = listener or self._news
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, _Asked] = {}
        self._outgoing: dict[int, link_pb2.HeadCommand] = {}
        self._last_call_id = 0
        self._to_write = asyncio.Event()
        self._leaves: asyncio.TimerHandle | None = None  # of what waits for company
        self._runs = RunTable(acknowledges=self._resumes, ack_due=self._to_write.set)
        self._ended: asyncio.Future[LinkError | None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._read(), f"reader of {peer}")
        self._start(self._write(), f"writer to {peer}")

    @property
    def hello(self) -> NodeHello:
        """What the node said at the handshake."""
        return self._hello

    @property
    def introduction(self) -> Introduction:
        """What the head said of itself on this link."""
        return self._introduction

    @property
    def resumes(self) -> bool:
        """Whether the node keeps runs that the loss of this link broke."""
        return self._resumes

    def attach(self, listener: LinkListener) -> bool:
        """Listen from now on; the last report that came is told at once. False: the link is gone already."""
        if self._ended.done():
            return False
        self._listener = listener
        self._news.pass_on(listener)
        return True

    async def ended(self) -> LinkError | None:
        """Wait for the end: the error that ended the link, or None when it was closed here."""
        return await asyncio.shield(self._ended)

    # Commands

    async def assign(self, command: Assign) -> Refusal | None:
        request = link_pb2.HeadCommand(assign=convert.assign_request(command, self._introduction))
        return await self._ask("assign", request, lambda reply: _refusal(reply.assign))

    async def append(self, command: Append) -> Refusal | None:
        request = link_pb2.HeadCommand(append=convert.append_request(command))
        return await self._ask("append", request, lambda reply: _refusal(reply.append))

    async def cancel(self, command: CancelRun) -> Refusal | None:
        request = link_pb2.HeadCommand(cancel=convert.cancel_request(command))
        return await self._ask("cancel", request, lambda reply: _refusal(reply.cancel))

    def revoke(self, command: Revoke) -> asyncio.Future[Refusal | None]:
        """Leaves with the next frame, for which it waits a little: by itself it costs what a frame costs."""
        request = link_pb2.HeadCommand(revoke=convert.revoke_request(command))
        return self._ask("revoke", request, lambda reply: _refusal(reply.revoke), company_s=COMPANY_S)

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        request = link_pb2.HeadCommand(renew_lease=convert.renew_request(self._introduction, lease_s, term))
        return await self._ask("renew_lease", request, lambda reply: reply.renew_lease.renewed)

    async def reconcile(self) -> list[HeldSession]:
        request = link_pb2.HeadCommand(reconcile=convert.reconcile_request(self._introduction))
        return await self._ask("reconcile", request, lambda reply: convert.held_sessions(reply.reconcile))

    async def ping(self) -> None:
        await self._ask("cancel", link_pb2.HeadCommand(cancel=convert.ping_request()), lambda _reply: None)

    def run(self, command: Run, sink: RunSink) -> MuxRun:
        """Start a generation. Raises ValueError when a number of the command does not fit its wire type.

        The node's acceptance has no time limit: a run that it is silent about is for the sink's owner to
        judge and to close, as on a plain link.
        """
        request = link_pb2.HeadCommand()
        convert.write_generate(request.generate, command, self._introduction)
        if command.carrier:
            request.trace.update(command.carrier)
        run = MuxRun(command, sink, self._cancel_run)
        refused = self._cannot_post("generate", request)
        if refused is not None:
            run.ending = True
            self._loop.call_soon(run.break_, refused)
            return run
        run.call_id = self._post("generate", request, partial(self._answered, run))
        return run

    def _answered(self, run: MuxRun, reply: link_pb2.NodeReply | None) -> None:
        if reply is None:
            run.break_(self._gone("Generate"))
        else:
            self._runs.accept(run, reply.generate)

    def _cancel_run(self, run: MuxRun) -> None:
        """Nobody listens to a run any more. Its Generate is taken back, or a Cancel follows it."""
        if self._take_back(run.call_id):
            return
        self._runs.leave(run)
        request = link_pb2.HeadCommand(cancel=convert.cancel_request(run.cancel))
        if self._cannot_post("cancel", request) is None:
            self._post("cancel", request, _no_matter)
        if self._runs.left > MAX_UNANSWERED:
            self.lose(NodeFaultError(f"the node did not end {self._runs.left} runs that were cancelled"))

    # Asking

    def _ask(
        self,
        kind: str,
        request: link_pb2.HeadCommand,
        read: Callable[[link_pb2.NodeReply], _T],
        company_s: float = 0.0,
    ) -> asyncio.Future[_T]:
        """Send a command; what `read` makes of its reply, or a LinkError. Many cost no task each.

        `company_s`: how long it may wait for others to leave with.
        """
        answer: asyncio.Future[_T] = self._loop.create_future()
        refused = self._cannot_post(kind, request)
        if refused is not None:
            answer.set_exception(refused)
            return answer

        def settle(reply: link_pb2.NodeReply | None) -> None:
            if answer.done():
                return
            if reply is None:
                answer.set_exception(self._gone(kind))
            else:
                answer.set_result(read(reply))

        def expire() -> None:
            if not answer.done():
                text = f"{kind}: no answer within {self._timeout_s:g} s"
                answer.set_exception(LinkTimeoutError(text))

        def over(_answer: asyncio.Future[_T]) -> None:
            timer.cancel()
            self._take_back(call_id)

        call_id = self._post(kind, request, settle, company_s)
        timer = self._loop.call_later(self._timeout_s, expire)
        answer.add_done_callback(over)
        return answer

    def _cannot_post(self, kind: str, request: link_pb2.HeadCommand) -> LinkError | None:
        if self._ended.done():
            return self._gone(kind)
        if len(self._asked) >= MAX_UNANSWERED:
            self.lose(NodeFaultError(f"the node left {len(self._asked)} commands unanswered"))
            return self._gone(kind)
        size_bytes = request.ByteSize()
        if size_bytes > self._max_bytes:
            return NodeFaultError(
                f"{kind}: the command has {size_bytes} bytes, and the node takes at most {self._max_bytes}"
            )
        return None

    def _post(self, kind: str, request: link_pb2.HeadCommand, settle: _Settle, company_s: float = 0.0) -> int:
        """Put a command in line. `settle` is called once, unless the command is taken back."""
        self._last_call_id += 1
        request.call_id = self._last_call_id
        self._asked[request.call_id] = _Asked(kind, settle)
        self._outgoing[request.call_id] = request
        if not company_s:
            self._to_write.set()
        elif self._leaves is None:
            self._leaves = self._loop.call_later(company_s, self._to_write.set)
        return self._last_call_id

    def _take_back(self, call_id: int) -> bool:
        """True when the command had not been sent, and now never is."""
        if self._outgoing.pop(call_id, None) is None:
            return False
        del self._asked[call_id]
        return True

    def _gone(self, kind: str) -> LinkLostError:
        return LinkLostError(f"{kind}: the link to {self._peer} is gone")

    # The two tasks

    async def _write(self) -> None:
        """Send what has gathered, for as long as the link lives."""
        try:
            while True:
                await self._to_write.wait()
                self._to_write.clear()
                while (frame := self._gather()) is not None:
                    await self._stream.send(frame)
        except LinkError as error:
            self.lose(error)
        except Exception as failure:  # noqa: BLE001 - it ends the link, whatever it is
            _log.exception("writing a node's frames failed", peer=self._peer)
            self.lose(LinkLostError(f"writing a frame failed: {failure!r}"))

    def _gather(self) -> link_pb2.HeadFrame | None:
        """The next frame: commands in their order, as many as fit, and what is to be acknowledged."""
        if self._leaves is not None:
            self._leaves.cancel()
            self._leaves = None
        acks = self._runs.acks()
        if not self._outgoing and not acks:
            return None
        frame = link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_COMMANDS, acks=acks)
        room_bytes = self._max_bytes - frame.ByteSize()
        for call_id, command in list(self._outgoing.items()):
            room_bytes -= command.ByteSize() + _COMMAND_BYTES
            if room_bytes < 0 and (acks or frame.commands):
                break
            frame.commands.append(command)
            del self._outgoing[call_id]
        return frame

    async def _read(self) -> None:
        """Pass on everything that comes, until the end of the stream, which is that of the link."""
        error: LinkError
        try:
            while (frame := await self._stream.receive()) is not None:
                self._listener.on_sign()
                if is_news(frame):
                    self._take(frame)
            error = LinkLostError("the node ended the link")
        except LinkError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - it ends the link, whatever it is
            _log.exception("reading a node's frames failed", peer=self._peer)
            error = NodeFaultError(f"reading a frame failed: {failure!r}")
        self.lose(error)

    def _take(self, frame: link_pb2.NodeFrame) -> None:
        """Replies, then steps, then events. Raises ProtocolViolationError."""
        if frame.leaving:
            self._listener.on_leaving()
        for reply in frame.replies:
            self._take_reply(reply)
        if frame.events:
            self._runs.announce_ends(frame.events)
        if frame.HasField("steps"):
            self._runs.take_steps(frame.steps)
        for event in frame.events:
            self._runs.take_event(event)
        if frame.HasField("report"):
            self._report = convert.report(frame.report)
        if frame.HasField("report") or frame.models:
            self._listener.on_report(self._report, tuple(convert.model(each) for each in frame.models))

    def _take_reply(self, reply: link_pb2.NodeReply) -> None:
        asked = self._asked.get(reply.call_id)
        if asked is None or reply.call_id in self._outgoing:
            raise ProtocolViolationError(f"the node answered call {reply.call_id}, which was not open")
        kind = reply.WhichOneof("reply")
        if kind != asked.kind:
            raise ProtocolViolationError(f"the node answered a call of {asked.kind} with {kind}")
        del self._asked[reply.call_id]
        asked.settle(reply)

    # The end

    def lose(self, error: LinkError) -> None:
        """Give the link up: commands and runs break, the listener is told. Nothing once it has ended."""
        if not self._end(error):
            return
        try:
            self._listener.on_lost(error)
        except Exception:  # noqa: BLE001 - a fault of the head must not keep the link from ending
            _log.exception("a sink or listener raised")

    async def close(self) -> None:
        """Drop the connection; its runs break. Returns when nothing of the link is left."""
        self._end(None)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _end(self, error: LinkError | None) -> bool:
        """Let go of the stream and of all that is under way. False when that was done before."""
        if self._ended.done():
            return False
        self._ended.set_result(error)
        if self._leaves is not None:
            self._leaves.cancel()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._start(self._stream.close(), f"close {self._peer}")
        asked, self._asked = self._asked, {}
        self._outgoing.clear()
        for each in asked.values():
            each.settle(None)
        self._runs.break_all(self._gone("Generate"))
        return True

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of a link failed", task=task.get_name(), exc_info=error)


class _KeptNews:
    """A LinkListener in place of one that is yet to come: keeps the last report and models."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._models: tuple[ModelInfo, ...] = ()

    def on_sign(self) -> None:
        return

    def on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        self._report = report
        self._models = models or self._models

    def on_leaving(self) -> None:
        return

    def on_lost(self, error: LinkError) -> None:
        return

    def pass_on(self, listener: LinkListener) -> None:
        if self._report is not None:
            listener.on_report(self._report, self._models)


def _no_matter(reply: link_pb2.NodeReply | None) -> None:
    """For a command whose answer is of no use to anyone."""


def _refusal(answer: _Answer) -> Refusal | None:
    return convert.refusal(answer.refusal) if answer.HasField("refusal") else None
