"""Listening, health and reflection."""

import asyncio
import random
import socket
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fleet_service.api.health import SERVICE_UNKNOWN
from fleet_service.api.interceptors import NullRpcObserver
from fleet_service.api.server import ADMIN_SERVICE, FLEET_SERVICE, EdgeParts, ListenError, callers_listener
from tests.api.conftest import Edge
from tests.api.fakes import FakeHead

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_stub(channel: grpc.aio.Channel) -> Any:
    """The type stubs know neither these methods nor asyncio."""
    return health_pb2_grpc.HealthStub(channel)


def reflect(channel: grpc.aio.Channel, *requests: reflection_pb2.ServerReflectionRequest) -> Any:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub
    return stub(channel).ServerReflectionInfo(iter(requests))


async def check(channel: grpc.aio.Channel, service: str) -> int:
    reply = await health_stub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_the_process_is_healthy_at_once_the_service_once_a_node_is_up(edge: Edge) -> None:
    assert await check(edge.channel, "") == SERVING
    assert await check(edge.channel, FLEET_SERVICE) == NOT_SERVING
    edge.callers.set_serving(True)
    assert await check(edge.channel, FLEET_SERVICE) == SERVING
    edge.callers.set_serving(False)
    assert await check(edge.channel, FLEET_SERVICE) == NOT_SERVING
    assert await check(edge.channel, "") == SERVING
    assert await check(edge.admin_channel, ADMIN_SERVICE) == SERVING


async def test_a_draining_head_says_not_serving_and_stays_so(edge: Edge) -> None:
    edge.callers.set_serving(True)
    edge.callers.drain()
    edge.callers.set_serving(True)
    assert await check(edge.channel, FLEET_SERVICE) == NOT_SERVING
    assert await check(edge.channel, "") == NOT_SERVING


async def test_health_lists_its_services_and_knows_no_others(edge: Edge) -> None:
    stub = health_stub(edge.channel)
    listed = await stub.List(health_pb2.HealthListRequest())  # type: ignore[attr-defined]
    assert {name: item.status for name, item in listed.statuses.items()} == {
        "": SERVING,
        FLEET_SERVICE: NOT_SERVING,
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(edge.channel, "nobody.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_health_watch_follows_every_change_and_ends_with_the_server(edge: Edge) -> None:
    stub = health_stub(edge.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=FLEET_SERVICE))
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody.v1.Nothing"))
    assert (await watch.read()).status == NOT_SERVING
    assert (await unknown.read()).status == SERVICE_UNKNOWN
    edge.callers.set_serving(True)
    assert (await watch.read()).status == SERVING
    # Far longer than the test may take: the watches do not hold the server up.
    await asyncio.wait_for(edge.callers.stop(600.0), 30)
    assert (await watch.read()).status == NOT_SERVING
    assert await watch.read() is grpc.aio.EOF
    assert await unknown.read() is grpc.aio.EOF


async def test_reflection_names_the_services_and_gives_their_contract(edge: Edge) -> None:
    call = reflect(
        edge.channel,
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=FLEET_SERVICE),
    )
    listing, contract = [reply async for reply in call]
    names = {service.name for service in listing.list_services_response.service}
    assert names == {FLEET_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    file = FileDescriptorProto.FromString(contract.file_descriptor_response.file_descriptor_proto[0])
    assert "FleetService" in [service.name for service in file.service]


def parts(*, reflection: bool = True) -> EdgeParts:
    return EdgeParts(
        log=structlog.get_logger(),
        observer=NullRpcObserver(),
        rng=random.Random(1),
        new_request_id=lambda: "req-1",
        reflection=reflection,
    )


async def test_reflection_can_be_left_out() -> None:
    listener = callers_listener(FakeHead(), parts(reflection=False), "127.0.0.1:0")
    await listener.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
        call = reflect(channel, reflection_pb2.ServerReflectionRequest(list_services=""))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await listener.stop(0.0)


async def test_a_second_head_on_the_same_port_is_told_so() -> None:
    first = callers_listener(FakeHead(), parts(), "127.0.0.1:0")
    with pytest.raises(ListenError, match=rf"127.0.0.1:{first.port}.*in use"):
        callers_listener(FakeHead(), parts(), f"127.0.0.1:{first.port}")
    await first.start()
    await first.stop(0.0)


async def test_a_port_that_another_program_has_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError):
            callers_listener(FakeHead(), parts(), f"127.0.0.1:{taken.getsockname()[1]}")
