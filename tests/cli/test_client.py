"""The client: errors taken apart, streams that go on when their connection does not."""

from __future__ import annotations

import asyncio
import random
import socket
from asyncio import timeout
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2

from fleet.v1.admin_service_pb2 import ListNodesRequest
from fleet.v1.fleet_service_pb2 import (
    CompleteRequest,
    GenerateRequest,
    GenerationEvent,
    GetSessionRequest,
)
from fleet_service.client import CallError, FleetClient, NoAnswerError, Reattached, UnreachableError
from tests.cli.scripted_head import (
    CONNECTION_LOST,
    DATA_LOSS,
    HEAD_DRAINING,
    Refuse,
    ScriptedHead,
    accepted,
    finished,
    on_branch,
    tokens,
)


@pytest.fixture
async def client(head: ScriptedHead) -> AsyncIterator[FleetClient]:
    async with FleetClient(head.address, head.admin_address, reattach_s=5, rng=random.Random(1)) as made:
        yield made


async def received(
    events: AsyncIterator[GenerationEvent], into: list[GenerationEvent] | None = None
) -> list[GenerationEvent]:
    got = [] if into is None else into
    async for event in events:
        got.append(event)
    return got


@asynccontextmanager
async def far_away(address: str, one_way_s: float) -> AsyncIterator[str]:
    """The same listener behind a line that takes this long each way."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(ConnectionError):
            while data := await loop.sock_recv(source, 65_536):
                await asyncio.sleep(one_way_s)
                await loop.sock_sendall(target, data)
            target.shutdown(socket.SHUT_WR)

    async def serve(near: socket.socket) -> None:
        far = sockets.enter_context(socket.socket())
        for each in (near, far):
            each.setblocking(False)
        await loop.sock_connect(far, (host, int(port)))
        await asyncio.gather(pump(near, far), pump(far, near))

    def accept(listening: socket.socket) -> None:
        # Not awaited: a wait that is cancelled may have taken a connection that nobody closes then.
        near = sockets.enter_context(listening.accept()[0])
        tasks.append(asyncio.create_task(serve(near)))

    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.setblocking(False)
        loop.add_reader(listening, accept, listening)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        loop.remove_reader(listening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ids(events: list[GenerationEvent]) -> list[int]:
    return [token for event in events for token in event.tokens.token_ids]


async def test_every_detail_of_a_refusal_is_there(head: ScriptedHead, client: FleetClient) -> None:
    head.replies["GetSession"] = Refuse(
        code_pb2.INVALID_ARGUMENT,
        "session_id: is required",
        reason="INVALID_FIELD",
        metadata={"field": "session_id"},
        details=(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field="session_id", description="is required")
                ]
            ),
            error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
            error_details_pb2.ResourceInfo(resource_type="fleet.v1.Session", resource_name="sessions/s1"),
            error_details_pb2.RequestInfo(request_id="req-1"),
        ),
    )
    with pytest.raises(CallError) as caught:
        await client.ask(client.fleet.GetSession(GetSessionRequest(), timeout=10))
    error = caught.value
    assert not isinstance(error, UnreachableError)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.message == "session_id: is required"
    assert error.metadata == {"field": "session_id"}
    assert error.violations == (("session_id", "is required"),)
    assert error.retry_after_s == 1.5
    assert error.resource == ("fleet.v1.Session", "sessions/s1")
    assert error.fault_id == "req-1"


async def test_where_nothing_listens_the_head_is_unreachable() -> None:
    async with FleetClient("127.0.0.1:1", "127.0.0.1:1") as client:
        with pytest.raises(UnreachableError):
            await client.ask(client.fleet.GetSession(GetSessionRequest(), timeout=10))
        with pytest.raises(UnreachableError):
            await received(client.complete(CompleteRequest()))


async def test_a_head_far_away_is_reached_and_one_that_is_too_slow_is_not_called_absent(
    head: ScriptedHead,
) -> None:
    async with far_away(head.admin_address, 0.15) as address:
        async with FleetClient(address, address) as client:
            await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=30))
        async with FleetClient(address, address, connect_timeout_s=0.05) as client:
            with pytest.raises(NoAnswerError):
                await client.ask(client.admin.ListNodes(ListNodesRequest(), timeout=30))


async def test_where_nothing_listens_a_long_timeout_is_not_waited_for() -> None:
    async with FleetClient("127.0.0.1:1", "127.0.0.1:1", connect_timeout_s=3600) as client, timeout(60):
        for _ in range(3):
            with pytest.raises(UnreachableError):
                await client.ask(client.fleet.GetSession(GetSessionRequest(), timeout=3600))


async def test_an_unavailable_with_a_reason_is_no_lost_connection(
    head: ScriptedHead, client: FleetClient
) -> None:
    head.streams = [[accepted(), Refuse(code_pb2.UNAVAILABLE, "down", reason="STORE_UNAVAILABLE")]]
    with pytest.raises(CallError, match="STORE_UNAVAILABLE") as caught:
        await received(client.generate(GenerateRequest()))
    assert not isinstance(caught.value, UnreachableError)
    assert not head.requests("AttachGeneration")


async def test_a_stream_goes_on_after_a_head_that_is_shut_down_and_comes_back(
    head: ScriptedHead, client: FleetClient
) -> None:
    head.streams = [
        [accepted("g7"), tokens(0, 10), HEAD_DRAINING],
        [HEAD_DRAINING],
        [CONNECTION_LOST],
        [accepted("g7"), tokens(1, 11), finished()],
    ]
    assert ids(await received(client.generate(GenerateRequest()))) == [10, 11]
    head.streams = [[HEAD_DRAINING]]  # before it was accepted, there is nothing to come back to
    with pytest.raises(CallError, match="HEAD_DRAINING"):
        await received(client.generate(GenerateRequest()))


async def test_attaching_waits_for_a_head_that_is_away(head: ScriptedHead, client: FleetClient) -> None:
    head.streams = [[HEAD_DRAINING], [CONNECTION_LOST], [accepted(), tokens(5, 15), finished()]]
    assert ids(await received(client.attach("g1", 5, branch=2))) == [15]
    attached = [(call.from_index, call.branch) for call in head.requests("AttachGeneration")]
    assert attached == [(5, 2), (5, 2), (5, 2)]


async def test_a_lost_stream_goes_on_at_the_next_index_and_nothing_shows_twice(
    head: ScriptedHead, client: FleetClient
) -> None:
    head.streams = [
        [accepted("g7"), tokens(0, 10, 11), tokens(2, 12), CONNECTION_LOST],
        [accepted("g7"), tokens(3, 13), CONNECTION_LOST],
        [CONNECTION_LOST],
        [accepted("g7"), tokens(4, 14), finished()],
    ]
    told: list[Reattached] = []
    events = await received(client.complete(CompleteRequest(), told.append))
    assert ids(events) == [10, 11, 12, 13, 14]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", "tokens", "tokens", "tokens", "tokens", "finished"]
    attached = [(call.generation_id, call.from_index) for call in head.requests("AttachGeneration")]
    assert attached == [("g7", 3), ("g7", 4), ("g7", 4)]
    assert [(each.generation_id, each.next_index) for each in told] == [("g7", 3), ("g7", 4)]


async def test_a_stream_that_ends_without_finished_is_taken_up_again(
    head: ScriptedHead, client: FleetClient
) -> None:
    head.streams = [[accepted(), tokens(0, 10)], [accepted(), tokens(1, 11), finished()]]
    assert ids(await received(client.generate(GenerateRequest()))) == [10, 11]


async def test_a_generation_the_head_no_longer_has_ends_the_stream(
    head: ScriptedHead, client: FleetClient
) -> None:
    gone = Refuse(code_pb2.NOT_FOUND, "no generation g1", reason="GENERATION_NOT_FOUND")
    head.streams = [[accepted(), tokens(0, 10), CONNECTION_LOST], [gone]]
    with pytest.raises(CallError, match="GENERATION_NOT_FOUND"):
        await received(client.generate(GenerateRequest()))


async def test_a_connection_that_stays_lost_ends_the_stream(head: ScriptedHead) -> None:
    head.streams = [[accepted(), tokens(0, 10), CONNECTION_LOST], *[[CONNECTION_LOST]] * 50]
    got: list[GenerationEvent] = []
    async with FleetClient(head.address, head.admin_address, reattach_s=0.3) as client:
        with pytest.raises(UnreachableError):
            await received(client.generate(GenerateRequest()), got)
    assert ids(got) == [10]


async def test_attaching_starts_at_the_index_asked_for(head: ScriptedHead, client: FleetClient) -> None:
    head.streams = [[accepted(), tokens(5, 15), finished()]]
    assert ids(await received(client.attach("g1", 5))) == [15]
    assert head.requests("AttachGeneration")[0].from_index == 5


async def test_the_branch_of_the_newest_event_is_sent_when_a_stream_is_taken_up_again(
    head: ScriptedHead, client: FleetClient
) -> None:
    head.streams = [
        [accepted(), tokens(0, 10), CONNECTION_LOST],
        [*on_branch(2, accepted()), CONNECTION_LOST],
        [*on_branch(3, accepted(), tokens(1, 11)), CONNECTION_LOST],
        on_branch(3, accepted(), tokens(2, 12), finished()),
        on_branch(3, accepted(), tokens(5, 15), finished()),
    ]
    assert ids(await received(client.generate(GenerateRequest()))) == [10, 11, 12]
    assert ids(await received(client.attach("g1", 5, branch=1))) == [15]
    attached = [(call.from_index, call.branch) for call in head.requests("AttachGeneration")]
    assert attached == [(1, 0), (1, 2), (2, 3), (5, 1)]


async def test_a_loss_of_tokens_is_told_with_the_index_up_to_which_they_are_right(
    head: ScriptedHead, client: FleetClient
) -> None:
    head.streams = [[accepted(), tokens(0, 10, 11, 12), CONNECTION_LOST], [DATA_LOSS]]
    got: list[GenerationEvent] = []
    with pytest.raises(CallError, match="DATA_LOSS") as caught:
        await received(client.generate(GenerateRequest()), got)
    assert ids(got) == [10, 11, 12]
    assert caught.value.metadata["nextIndex"] == "2"
    assert len(head.requests("AttachGeneration")) == 1
