"""A head's join address, as plain as it gets, for tests of nodes that dial in."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fleet.v1 import join_service_pb2 as join_pb
from fleet.v1 import join_service_pb2_grpc as join_grpc
from tests.node_stub.link_support import PATIENCE_S, LinkHead
from tests.node_stub.support import Head
from tests.ports import quiet_port


class JoinedLink(LinkHead):
    """A link that a node dialed. It lasts until `end`, or until the node ends it."""

    def __init__(self, maker: Head, context: Any) -> None:
        self.over = asyncio.Event()
        super().__init__(maker, self._write, self._read)
        self._context = context

    def end(self) -> None:
        self.over.set()

    async def _write(self, frame: Any) -> None:
        await self._context.write(join_pb.JoinResponse(frame=frame))

    async def _read(self) -> Any:
        request = await self._context.read()
        return None if request is grpc.aio.EOF else request.frame


class JoinHead(join_grpc.JoinServiceServicer):
    """Takes in what dials; `refuse` refuses it instead, with that code and reason."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[JoinedLink] = asyncio.Queue()
        self.dials = 0
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.words = ""
        """What it says to whom it refuses; empty = `refused: REASON`."""
        self.address = ""
        # Its stubs are never used: it makes requests, nothing else.
        self.maker = Head(grpc.aio.insecure_channel("127.0.0.1:1"))
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen, again on the same port if it did before."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        join_grpc.add_JoinServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address or f"127.0.0.1:{quiet_port()}")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Be gone, with all connections."""
        assert self._server
        await self._server.stop(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.maker.channel.close()

    async def next_link(self, **hello: Any) -> JoinedLink:
        """The next node that dials in, hellos exchanged."""
        link = await asyncio.wait_for(self.links.get(), PATIENCE_S)
        await link.say_hello(**hello)
        return link

    async def Join(self, _: Any, context: Any) -> None:  # type: ignore[override] # reads and writes
        self.dials += 1
        if self.refuse:
            await _abort(context, *self.refuse, self.words)
        link = JoinedLink(self.maker, context)
        self.links.put_nowait(link)
        await link.over.wait()


async def _abort(context: Any, code: grpc.StatusCode, reason: str, words: str) -> None:
    status = status_pb2.Status(code=code.value[0], message=words or f"refused: {reason}")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="fleet.v1"))
    await context.abort_with_status(rpc_status.to_status(status))
