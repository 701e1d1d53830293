"""A node's end of a multiplexed link, frame by frame, whichever side dialed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from fleet.v1 import admin_service_pb2, join_service_pb2, link_pb2, link_service_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.api.interceptors import NullRpcObserver
from fleet_service.api.server import EdgeParts, join_listener
from fleet_service.domain.node_types import NodeHello
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.join import JoinDoor
from fleet_service.links.mux import MuxLink
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import JoinRefusedError, OfferedLink
from fleet_service.tls import ServerTls
from tests.links.scripted_node import EPOCH, INTRODUCTION, RecordingListener, ScriptedNode, hello, serving

FEATURES = [
    admin_service_pb2.NODE_FEATURE_LINK,
    admin_service_pb2.NODE_FEATURE_RESUME,
    admin_service_pb2.NODE_FEATURE_RECONCILE,
]
PATIENT = LinkSettings(connect_timeout_s=60.0, handshake_timeout_s=60.0, command_timeout_s=60.0)

WAYS = ["dialed", "joined"]


def link_hello(**changes: Any) -> pb.HandshakeResponse:
    return hello(**({"features": FEATURES} | changes))


def hello_frame(**changes: Any) -> link_pb2.NodeFrame:
    return link_pb2.NodeFrame(type=link_pb2.FRAME_TYPE_HELLO, hello=link_hello(**changes))


def news(**fields: Any) -> link_pb2.NodeFrame:
    return link_pb2.NodeFrame(type=link_pb2.FRAME_TYPE_NEWS, **fields)


def columns(*entries: tuple[int, int, Sequence[int]]) -> link_pb2.StepColumns:
    """(handle, first index, ids) of each run."""
    return link_pb2.StepColumns(
        handles=[handle for handle, _, _ in entries],
        counts=[len(ids) for _, _, ids in entries],
        first_indexes=[first_index for _, first_index, _ in entries],
        token_ids=[token_id for _, _, ids in entries for token_id in ids],
    )


def accepted(call_id: int, handle: int, **changes: Any) -> link_pb2.NodeReply:
    fields = {"handle": handle, "epoch": EPOCH} | changes
    return link_pb2.NodeReply(call_id=call_id, generate=link_pb2.RunAccepted(**fields))


class NodeEnd:
    """The node's end of one link. Frames are read as they are asked for; bytes go out as they are."""

    def __init__(self, read: Callable[[], Awaitable[Any]], write: Callable[[bytes], Awaitable[Any]]) -> None:
        self._read = read
        self._write = write
        self._commands: list[link_pb2.HeadCommand] = []
        self.frames = 0
        self.largest_bytes = 0
        self.acks: list[tuple[int, int]] = []

    async def frame(self) -> link_pb2.HeadFrame | None:
        """The head's next frame; None at the end of the link."""
        data = await self._read()
        if data is grpc.aio.EOF:
            return None
        self.frames += 1
        self.largest_bytes = max(self.largest_bytes, len(data))
        # Both kinds of message have the frame as their first field.
        return link_service_pb2.LinkRequest.FromString(data).frame

    async def command(self) -> link_pb2.HeadCommand:
        """The head's next command."""
        while not self._commands:
            await self.take_frame()
        return self._commands.pop(0)

    async def take_frame(self) -> None:
        frame = await self.frame()
        assert frame is not None, "the head ended the link"
        assert frame.type == link_pb2.FRAME_TYPE_COMMANDS
        self._commands += frame.commands
        self.acks += [(ack.handle, ack.next_index) for ack in frame.acks]

    async def accept(self, handle: int) -> link_pb2.HeadCommand:
        """Accept the run that the head's next command asks for."""
        command = await self.command()
        assert command.WhichOneof("command") == "generate"
        await self.send(news(replies=[accepted(command.call_id, handle)]))
        return command

    async def send(self, frame: link_pb2.NodeFrame) -> None:
        await self._write(link_service_pb2.LinkResponse(frame=frame).SerializeToString())

    async def send_bytes(self, data: bytes) -> None:
        await self._write(data)

    async def wait_for_end(self) -> None:
        """Until the head has ended the link."""
        try:
            while await self.frame() is not None:
                pass
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, grpc.aio.UsageError):
            return


@dataclass
class Linked:
    """Both ends of a link. `peer_gone` drops the node's end as a lost connection would."""

    link: MuxLink
    node: NodeEnd
    listener: RecordingListener
    drop: Callable[[], Awaitable[None]]
    greeting: link_pb2.HeadFrame


@dataclass
class RecordingDesk:
    """Takes every node in, or refuses it with `refusal`."""

    refusal: JoinRefusedError | Exception | None = None
    offers: asyncio.Queue[tuple[NodeHello, OfferedLink]] = field(default_factory=asyncio.Queue)

    async def offer(self, hello: NodeHello, link: OfferedLink) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.offers.put_nowait((hello, link))


def edge_parts(**changes: Any) -> EdgeParts:
    fields: dict[str, Any] = {
        "log": structlog.get_logger(),
        "observer": NullRpcObserver(),
        "rng": random.Random(1),
        "new_request_id": lambda: "req-1",
    }
    return EdgeParts(**(fields | changes))


@asynccontextmanager
async def join_address(
    desk: RecordingDesk, settings: LinkSettings = PATIENT, tls: ServerTls | None = None
) -> AsyncIterator[str]:
    """A head that takes joining nodes in; yields where."""
    door = JoinDoor(desk, lambda: INTRODUCTION, settings)
    listener = join_listener(door, edge_parts(), "127.0.0.1:0", tls)
    await listener.start()
    try:
        yield f"127.0.0.1:{listener.port}"
    finally:
        await listener.stop(0.0)


JoinCall = grpc.aio.StreamStreamCall[bytes, bytes]


@asynccontextmanager
async def join_call(address: str) -> AsyncIterator[tuple[NodeEnd, JoinCall]]:
    """A node dials in. What it sends is up to the test."""
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        method = join_service_pb2.DESCRIPTOR.services_by_name["JoinService"].methods_by_name["Join"]
        path = f"/{method.containing_service.full_name}/{method.name}"
        call: JoinCall = channel.stream_stream(path)()
        yield NodeEnd(call.read, call.write), call
        call.cancel()


@asynccontextmanager
async def linked(
    way: str, *, settings: LinkSettings = PATIENT, attach: bool = True, **hello_changes: Any
) -> AsyncIterator[Linked]:
    """A link that has been greeted, over real gRPC, dialed by either side."""
    make = _dialed if way == "dialed" else _joined
    async with make(settings, attach, hello_changes) as both:
        yield both
        await both.link.close()


@asynccontextmanager
async def _dialed(
    settings: LinkSettings, attach: bool, hello_changes: dict[str, Any]
) -> AsyncIterator[Linked]:
    ends: asyncio.Queue[tuple[NodeEnd, link_pb2.HeadFrame]] = asyncio.Queue()
    dropped = asyncio.Event()

    async def serve(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        end = NodeEnd(context.read, context.write)
        greeting = await end.frame()
        assert greeting is not None
        await end.send(hello_frame(**hello_changes))
        ends.put_nowait((end, greeting))
        await dropped.wait()

    async def drop() -> None:
        dropped.set()

    node = ScriptedNode()
    node.answers["Handshake"] = link_hello(**hello_changes)
    listener = RecordingListener()
    async with serving(node.handler(), link_handler(serve)) as address:
        link = await FleetDialer(settings).connect(address, INTRODUCTION, listener)
        assert isinstance(link, MuxLink)
        end, greeting = await ends.get()
        yield Linked(link, end, listener, drop, greeting)
        dropped.set()


def link_handler(serve: Callable[[Any, Any], Awaitable[None]]) -> grpc.GenericRpcHandler:
    """LinkService, served by `serve`, which reads and writes bytes."""
    method: Any = serve
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(method)
    return grpc.method_handlers_generic_handler("fleet.v1.LinkService", {"Link": handler})


@asynccontextmanager
async def _joined(
    settings: LinkSettings, attach: bool, hello_changes: dict[str, Any]
) -> AsyncIterator[Linked]:
    desk, listener = RecordingDesk(), RecordingListener()
    async with join_address(desk, settings) as address, join_call(address) as (end, call):
        greeting = await end.frame()
        assert greeting is not None
        await end.send(hello_frame(**hello_changes))
        _, link = await desk.offers.get()
        assert isinstance(link, MuxLink)
        if attach:
            assert link.attach(listener)

        async def drop() -> None:
            await call.done_writing()

        yield Linked(link, end, listener, drop, greeting)
