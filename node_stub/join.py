"""A node that dials its head, for where it cannot be dialed itself: over and over, for as long as it runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from fleet.v1 import join_service_pb2 as join_pb
from fleet.v1 import join_service_pb2_grpc as join_grpc
from fleet.v1 import link_pb2 as link_pb
from node_stub.calls import Call, Calls, LinkDropped
from node_stub.commands import MAX_MESSAGE_BYTES, TOKEN_REFUSED, Commands
from node_stub.dial_causes import dial_cause
from node_stub.link import LinkAuthError, LinkLimits, LinkProtocolError, LinkSession
from node_stub.tls import TlsError, TlsFiles, channel_credentials

log = logging.getLogger(__name__)

_GOODBYE_S = 1.0

_CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
]


class JoinRefusedError(Exception):
    """The head does not take this node in and never will, as it is; the text says what to change."""


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Where the head is and how long to wait before each further dial, all in seconds.

    The first wait is anything up to `first_s`. Each further one is twice as long, up to `again_cap_s` once
    the node has ever joined and `cap_s` before that, less a random part of up to a half. A head that has
    another node of this identity is asked again every `cap_s`, less the same.
    """

    address: str
    tls: TlsFiles | None = None
    """None = without TLS."""
    first_s: float = 0.1
    again_cap_s: float = 1.0
    cap_s: float = 30.0
    settled_s: float = 3.0
    """A link that has lasted so long counts as joined, though the head has sent no command."""


class Backoff:
    """How long to wait before the next dial (see JoinSettings)."""

    def __init__(self, settings: JoinSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._failed = 0
        self._ever_joined = False

    def joined(self) -> None:
        self._failed = 0
        self._ever_joined = True

    def next_s(self, *, identity_in_use: bool = False) -> float:
        """Seconds to wait now; counts a dial that did not lead to a join."""
        settings = self._settings
        cap_s = settings.again_cap_s if self._ever_joined else settings.cap_s
        if identity_in_use:
            return settings.cap_s * self._rng.uniform(0.5, 1.0)
        if self._failed == 0:
            wait_s = self._rng.uniform(0, settings.first_s)
        else:
            # 2**32 times the first wait is above every cap.
            wait_s = min(cap_s, settings.first_s * 2 ** min(self._failed, 32)) * self._rng.uniform(0.5, 1.0)
        self._failed += 1
        return wait_s


class Joiner:
    """Keeps a node joined. `say` gets a line for people at each change."""

    def __init__(
        self,
        commands: Commands,
        calls: Calls,
        settings: JoinSettings,
        rng: random.Random,
        say: Callable[[str], None],
        limits: LinkLimits | None = None,
    ) -> None:
        self._commands = commands
        self._calls = calls
        self._settings = settings
        self._say = say
        self._limits = limits or LinkLimits()
        self._backoff = Backoff(settings, rng)
        self._dials = 0
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()
        self._is_joined = False
        self._last_said = ""

    async def run(self) -> None:
        """Dial until told to stop. Raises JoinRefusedError."""
        self._over.clear()
        try:
            while not self._stopping.is_set():
                identity_in_use = await self._dial()
                wait_s = self._backoff.next_s(identity_in_use=identity_in_use)
                await self._pause(max(wait_s, self._calls.cut_left_s))
        finally:
            self._over.set()

    def stop(self) -> None:
        """Dial no more. The link that is open ends by its call (see Calls.end_all)."""
        self._stopping.set()

    async def over(self, timeout_s: float) -> None:
        """Return when no link is open and none will be; at most so much later."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)

    async def _dial(self) -> bool:
        """One link from its dial to its end; whether the head has another node of this identity."""
        self._dials += 1
        peer = f"join:{self._settings.address}#{self._dials}"
        try:
            opened = self._channel()
        except TlsError as error:
            self._tell("left", str(error))
            return False
        async with opened as channel:
            stub: Any = join_grpc.JoinServiceStub(channel)
            try:
                with self._calls.open(peer) as call:
                    return await self._serve(stub.Join(), call)
            except LinkDropped:
                self._tell("left", "the link was dropped")
                return False

    def _channel(self) -> grpc.aio.Channel:
        """A channel of its own for each dial, so that name and certificates are those of now."""
        address, tls = self._settings.address, self._settings.tls
        if tls is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, channel_credentials(tls), options=_CHANNEL_OPTIONS)

    async def _serve(self, rpc: Any, call: Call) -> bool:
        """Serve the head that answers. Raises LinkDropped, JoinRefusedError."""

        async def write(frame: link_pb.NodeFrame) -> None:
            await rpc.write(join_pb.JoinRequest(frame=frame))

        reader = _Reader(rpc)
        session = LinkSession(self._commands, call, write, self._limits, "join")
        watch = asyncio.create_task(self._note_joined(session), name="joined?")
        try:
            await session.serve(reader.frames())
            # The head reads what was last written before the call is over.
            await rpc.done_writing()
            await asyncio.wait([reader.task], timeout=_GOODBYE_S)
        except LinkAuthError as error:
            self._tell("left", str(error))
            return False
        except LinkProtocolError as error:
            self._tell("left", f"the head broke the contract of the link: {error}")
            return False
        except (grpc.RpcError, asyncio.InvalidStateError):
            # A write that failed; the call's status tells why.
            log.debug("writing to the head failed", exc_info=True)
        finally:
            watch.cancel()
            rpc.cancel()
            reader.task.cancel()  # it may hold a frame that nobody takes any more
            await asyncio.gather(watch, reader.task, return_exceptions=True)
        return await self._judge_end(rpc)

    async def _note_joined(self, session: LinkSession) -> None:
        await session.greeted.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(session.heard_commands.wait(), self._settings.settled_s)
        self._backoff.joined()
        head_id = session.hello.head_id if session.hello else ""
        self._tell("joined", f"head {head_id}")

    async def _judge_end(self, rpc: Any) -> bool:
        code, details = await rpc.code(), await rpc.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            reason = _reason_of(await rpc.trailing_metadata()) or code.name
            if reason == TOKEN_REFUSED:
                # The head's own words are for its operators.
                has = (
                    "another fleet token, or none"
                    if self._commands.token
                    else "a fleet token, and this node none"
                )
                details = f"it has {has}; give both the same with --token-file"
            raise JoinRefusedError(f"{self._settings.address} refuses this node ({reason}): {details}")
        if code is grpc.StatusCode.ALREADY_EXISTS:
            # A head says what to do about it after a semicolon: there is more than one cause.
            what, _, do = details.rpartition("; ")
            advice = do if what else "give this node another --identity or stop the other one"
            self._tell(
                "refused by", f"{what or details}; {advice}; asking again every {self._settings.cap_s:g} s"
            )
            return True
        # INTERNAL is what a write to a call that is over makes of its status.
        known = {grpc.StatusCode.OK: "the link ended", grpc.StatusCode.INTERNAL: "the link broke"}
        cause = dial_cause(details, with_tls=self._settings.tls is not None)
        self._tell("left", cause or known.get(code, f"{details} ({code.name})"))
        return False

    def _tell(self, what: str, why: str) -> None:
        """Tell people, once for each change: a head that stays away is not told of at every dial."""
        joined = what == "joined"
        if what == "left" and not self._is_joined:
            what, why = "cannot join", f"{why}; dialing on"
        line = f"{what} {self._settings.address}: {why}"
        self._is_joined = joined
        if line != self._last_said:
            self._last_said = line
            self._say(line)

    async def _pause(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), wait_s)


class _Reader:
    """Reads a call's frames in a task of its own: a read that is cancelled would cancel the call."""

    def __init__(self, rpc: Any) -> None:
        self._frames: asyncio.Queue[link_pb.HeadFrame | None] = asyncio.Queue(1)
        self.task = asyncio.create_task(self._read(rpc), name="join reader")

    async def frames(self) -> AsyncIterator[link_pb.HeadFrame]:
        """The head's frames, until the call ends, however it does."""
        while (frame := await self._frames.get()) is not None:
            yield frame

    async def _read(self, rpc: Any) -> None:
        try:
            while (response := await rpc.read()) is not grpc.aio.EOF:
                await self._frames.put(response.frame)
        except grpc.RpcError:
            log.debug("the call of the join ended", exc_info=True)
        await self._frames.put(None)


def _reason_of(trailers: Any) -> str:
    """Reason of the ErrorInfo among a status' details, or nothing."""
    for key, value in trailers or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason
    return ""
