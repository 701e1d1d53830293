"""How a head starts and how it ends: as a process, and within another."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.processes import Children, command_of
from fleet.v1.fleet_service_pb2 import (
    CompleteRequest,
    CreateSessionRequest,
    GenerationEvent,
    GenerationSpec,
    SessionSpec,
)
from fleet.v1.types_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH
from fleet_service.app import Addresses, StartError, StopRequest, serve
from fleet_service.client import CallError, FleetClient, UnreachableError
from fleet_service.config import FleetConfig, ListenConfig, StoreConfig
from tests.cli.real_fleet import MODEL, SLOW_RATE, RealFleet, expected, start_node

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def watch_health(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # Its types know no Watch.
    return stub.Watch(health_pb2.HealthCheckRequest(service="fleet.v1.FleetService"))


def whole(seconds: float, prompt: list[int]) -> CompleteRequest:
    """A completion that takes about so long."""
    return CompleteRequest(
        session=SessionSpec(model=MODEL.name),
        token_ids=prompt,
        spec=GenerationSpec(max_new_tokens=round(seconds * SLOW_RATE)),
    )


async def test_a_port_in_use_ends_the_start_with_1_and_says_so(real: RealFleet) -> None:
    taken = ("--listen", real.callers, "--admin-listen", "127.0.0.1:0")
    ended = await real.fleet("serve", *taken, "--log-level", "error")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        f"fleet: cannot listen on {real.callers}: the port is in use; "
        "choose another with --listen (setting listen.callers)\n"
    )
    taken = ("--listen", "127.0.0.1:0", "--admin-listen", real.admin)
    ended = await real.fleet("serve", *taken, "--log-level", "error")
    assert f"cannot listen on {real.admin}: the port is in use" in ended.err
    assert "--admin-listen (setting listen.admin)" in ended.err


async def test_an_address_that_is_not_ours_ends_the_start_and_says_so(real: RealFleet) -> None:
    for address, why in (
        ("203.0.113.1:1", "the address is none of this machine's"),
        ("no-such-host.invalid:1", "no-such-host.invalid is the name of no host"),
    ):
        listen = ["--listen", address, "--admin-listen", "127.0.0.1:0"]
        ended = await real.fleet("serve", "--insecure-no-auth", *listen)
        assert (ended.code, f"cannot listen on {address}: {why};" in ended.err) == (1, True)


async def test_sigterm_lets_generations_end_refuses_new_ones_and_exits_with_0(real: RealFleet) -> None:
    async with real.client() as client, grpc.aio.insecure_channel(real.callers) as channel:
        watch = watch_health(channel)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        received: list[int] = []
        last = GenerationEvent()
        async with aclosing(client.complete(whole(2, [1, 2, 3]))) as events:
            async for last in events:
                if not received and last.tokens.token_ids:
                    real.head.process.send_signal(signal.SIGTERM)
                    assert (await watch.read()).status == NOT_SERVING
                    with pytest.raises(CallError, match="HEAD_DRAINING"):
                        await client.ask(
                            client.fleet.CreateSession(
                                CreateSessionRequest(spec=SessionSpec(model=MODEL.name)), timeout=10
                            )
                        )
                received += last.tokens.token_ids
        assert received == expected([1, 2, 3], 2 * SLOW_RATE)
        assert last.finished.reason == FINISH_REASON_LENGTH
    assert await real.head.process.wait() == 0


async def test_a_second_sigterm_ends_generations_at_once(real: RealFleet) -> None:
    async with real.client() as client, grpc.aio.insecure_channel(real.callers) as channel:
        watch = watch_health(channel)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        last = GenerationEvent()
        received: list[int] = []
        with_end = True
        async with aclosing(client.complete(whole(600, [1, 2, 3]))) as events:
            try:
                async for last in events:
                    if not received and last.tokens.token_ids:
                        real.head.process.send_signal(signal.SIGTERM)
                        # Two signals of a kind are one while the first has not been taken.
                        assert (await watch.read()).status == NOT_SERVING
                        real.head.process.send_signal(signal.SIGTERM)
                    received += last.tokens.token_ids
            except UnreachableError:
                with_end = False
        assert await asyncio.wait_for(real.head.process.wait(), 30) == 0
        assert received == expected([1, 2, 3], len(received))
        assert not with_end or last.finished.reason == FINISH_REASON_CANCELLED


async def test_logs_go_to_standard_error_as_json_and_the_ready_line_to_standard_output(
    tmp_path: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"),
        *("--log-format", "json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line.startswith(b"fleet: serving callers on 127.0.0.1:")
    assert b", admin on 127.0.0.1:" in line
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out) == (0, b"")
    events = [json.loads(each)["event"] for each in err.decode().splitlines()]
    assert events[:2] == ["keeping", "serving"]
    assert events[-1] == "stopped"


# ------------------------------------------------------------------------------------------ in-process


ANY_PORTS = FleetConfig(listen=ListenConfig(callers="127.0.0.1:0", admin="127.0.0.1:0"), shutdown_grace_s=0.2)


async def test_a_head_can_be_served_in_process_and_again() -> None:
    for _ in range(2):
        stop = StopRequest()
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(ANY_PORTS, ready=ready.set_result, stop=stop))
        where = await ready
        async with FleetClient(where.callers, where.admin) as client:
            with pytest.raises(CallError, match="MODEL_NOT_FOUND"):
                await anext(client.complete(whole(1, [1])))
        stop.ask()
        await serving


async def test_where_nothing_is_kept_a_generation_longer_than_the_grace_ends_as_cancelled(
    tmp_path: Path,
) -> None:
    async with Children(tmp_path) as children:
        _, address = await start_node(children, "a")
        stop = StopRequest()
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        nothing_kept = StoreConfig(durability="memory")
        config = ANY_PORTS.model_copy(update={"nodes": (address,), "store": nothing_kept})
        serving = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
        where = await ready
        received: list[int] = []
        last = GenerationEvent()
        async with FleetClient(where.callers, where.admin) as client:
            async with aclosing(client.complete(whole(600, [1, 2, 3]))) as events:
                async for last in events:
                    received += last.tokens.token_ids
                    if received:
                        # Asked once only: to ask again would be to end at once.
                        stop.asked.set()
            await serving
        assert last.finished.reason == FINISH_REASON_CANCELLED
        assert received == expected([1, 2, 3], len(received))


async def test_a_port_in_use_is_a_start_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = FleetConfig(listen=ListenConfig(callers=address, admin="127.0.0.1:0"))
        with pytest.raises(StartError, match="cannot listen on"):
            await serve(config, ready=lambda _: pytest.fail("it cannot be ready"), stop=StopRequest())
