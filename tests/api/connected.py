"""One connection of Connect as its caller sees it, for the tests of the edge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.domain.events import MoveCause, Moved
from tests.api.logged import LogGeneration
from tests.e2e.refused import taken_apart

if TYPE_CHECKING:
    from tests.api.conftest import Edge

PATIENCE_S = 10.0
MOVED = Moved("node-a", "node-b", MoveCause.LINK_LOST, 2, 0.1, 9)
COMPLETE = pb.CompleteRequest(session=pb.SessionSpec(model="toy"), token_ids=[5])
GET = pb.GetSessionRequest(session_id="s1")


@dataclass
class Connected:
    """One connection as its caller sees it."""

    edge: Edge
    call: grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]

    async def send(self, **request: Any) -> None:
        await self.call.write(pb.ConnectRequest(**request))

    async def ask(self, call_id: int, **call: Any) -> None:
        await self.send(calls=[pb.ConnectCall(call_id=call_id, **call)])

    async def read(self) -> pb.ConnectResponse:
        async with asyncio.timeout(PATIENCE_S):
            response = await self.call.read()
        assert isinstance(response, pb.ConnectResponse), response
        return response

    async def reply(self) -> pb.ConnectReply:
        """The only thing that the next message says."""
        response = await self.read()
        (reply,) = response.replies
        assert not response.events
        assert not response.HasField("tokens")
        return reply

    async def refused(self) -> tuple[str, str]:
        """Code and reason of the connection's own end."""
        try:
            while True:
                await self.read()
        except grpc.aio.AioRpcError as error:
            return taken_apart(error).what

    def generation(self) -> LogGeneration:
        """What the next stream reads."""
        made = LogGeneration()
        self.edge.head.generation = made  # type: ignore[assignment]
        return made


def tokens_of(response: pb.ConnectResponse) -> dict[int, tuple[int, list[int]]]:
    """By call: index of the first token, and the tokens."""
    columns, start, found = response.tokens, 0, {}
    for call_id, count, first in zip(columns.call_ids, columns.counts, columns.first_indexes, strict=True):
        assert call_id not in found
        found[call_id] = (first, list(columns.token_ids[start : start + count]))
        start += count
    assert start == len(columns.token_ids)
    return found
