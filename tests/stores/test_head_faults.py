"""A head whose store fails: it says so, waits or ends, and what readers get stays exact."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.processes import Child, Children, command_of
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import CallError, FleetClient
from node_stub.reference import StubModel, reference_tokens
from tests.ports import quiet_port
from tests.stores.hurt import Disk, in_small_disk, power

MODEL = StubModel("demo")
_PATIENCE_S = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Stage:
    """A node, and heads one after another on one folder."""

    folder: Path
    children: Children
    stack: AsyncExitStack
    node: str = ""
    callers: int = field(default_factory=quiet_port)
    operators: int = field(default_factory=quiet_port)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def command(self) -> list[str]:
        command = [command_of("fleet"), "serve", "--data-dir", str(self.data), "--node", self.node]
        command += ["--admin-listen", f"127.0.0.1:{self.operators}"]
        return [*command, "--listen", f"127.0.0.1:{self.callers}"]

    async def head(self, command: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Child:
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        command = ["env", *variables, *(command or self.command())]
        head, _ = await self.children.start("head", command, "fleet: serving")
        return head

    async def refused(self) -> str:
        """What a head says that does not start; it ends with 1."""
        head = await asyncio.create_subprocess_exec(*self.command(), stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(_PATIENCE_S):
            _, text = await head.communicate()
        assert head.returncode == 1, text.decode()
        return text.decode().splitlines()[-1]

    async def doctor(self) -> tuple[int | None, str]:
        """How `fleet doctor` ends, and what it prints."""
        where = ["--address", f"127.0.0.1:{self.callers}", "--admin-address", f"127.0.0.1:{self.operators}"]
        doctor = await asyncio.create_subprocess_exec(
            *(command_of("fleet"), "doctor", *where), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(_PATIENCE_S):
            text, _ = await doctor.communicate()
        return doctor.returncode, text.decode()

    async def client(self) -> FleetClient:
        return await self.stack.enter_async_context(FleetClient(f"127.0.0.1:{self.callers}", "127.0.0.1:1"))

    async def until_health(self, wanted: int) -> None:
        async with (
            asyncio.timeout(_PATIENCE_S),
            grpc.aio.insecure_channel(f"127.0.0.1:{self.callers}") as way,
        ):
            # Its published types know only blocking channels.
            stub: Any = health_pb2_grpc.HealthStub(way)
            async for reply in stub.Watch(health_pb2.HealthCheckRequest(service="fleet.v1.FleetService")):
                if reply.status == wanted:
                    return


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with Children(tmp_path) as children, AsyncExitStack() as stack:
        made = Stage(tmp_path, children, stack)
        made.data.mkdir()
        made.node = f"127.0.0.1:{quiet_port()}"
        command = [command_of("fleet-node"), "--model", MODEL.name, "--decode-rate", "100", "--grace", "0"]
        await children.start("node", [*command, "--listen", made.node, "--identity", "a"], "fleet-node: a ")
        yield made


async def open_session(client: FleetClient, session_id: str, context: Sequence[int]) -> None:
    spec = pb.SessionSpec(model=MODEL.name)
    request = pb.CreateSessionRequest(session_id=session_id, spec=spec, token_ids=context)
    async with asyncio.timeout(_PATIENCE_S):
        await client.ask(client.fleet.CreateSession(request))


class Stream:
    """An answer of `total` tokens, read in a task of its own."""

    def __init__(self, client: FleetClient, session_id: str, total: int) -> None:
        spec = pb.GenerationSpec(max_new_tokens=total, disconnect_grace_ms=20_000)
        request = pb.GenerateRequest(session_id=session_id, generation_id=f"g-{session_id}", spec=spec)
        self._call = client.fleet.Generate(request)
        self._more = asyncio.Condition()
        self.tokens: list[int] = []
        self.most_at_once = 0
        self.done = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            async with self._more:
                self.tokens += response.event.tokens.token_ids
                self.most_at_once = max(self.most_at_once, len(response.event.tokens.token_ids))
                self._more.notify_all()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(_PATIENCE_S), self._more:
            await self._more.wait_for(lambda: len(self.tokens) >= count)

    async def exact(self, context: Sequence[int], total: int) -> None:
        """It ends, with all its tokens."""
        async with asyncio.timeout(_PATIENCE_S):
            await self.done
        assert self.tokens == reference_tokens(MODEL, 0, context, total)


async def test_a_full_disk_makes_streams_wait_and_refuses_new_work_until_there_is_room(stage: Stage) -> None:
    head = await stage.head(in_small_disk(stage.data, "16m", stage.command()))
    client = await stage.client()
    await stage.until_health(SERVING)
    for name in ("one", "two"):
        await open_session(client, name, [1, 2, 3])
    stream = Stream(client, "one", 600)
    await stream.has(5)
    disk = Disk(head.process.pid, stage.data)
    disk.fill()
    await stage.until_health(NOT_SERVING)
    waiting = len(stream.tokens)
    with pytest.raises(CallError) as refused:
        await open_session(client, "three", [1])
    assert refused.value.reason == "STORE_UNAVAILABLE"
    late = Stream(client, "two", 5)
    with pytest.raises(grpc.aio.AioRpcError) as refused_stream:
        await late.done
    assert refused_stream.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not stream.done.done()
    code, told = await stage.doctor()
    assert (code, "NOT_SERVING" in told) == (1, False)
    full = f"nothing can be kept on disk: no space is left for {stage.data / 'head.db'}; new work is refused"
    assert f"error: {full}" in told
    disk.free()
    await stage.until_health(SERVING)
    code, told = await stage.doctor()
    assert (code, "kept      on disk, strict" in told) == (0, True)
    await stream.has(waiting + 1)
    await stream.exact([1, 2, 3], 600)
    await open_session(client, "three", [1])
    after = Stream(client, "three", 5)
    await after.exact([1], 5)


async def test_a_slow_disk_delays_tokens_and_changes_none(stage: Stage, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    await stage.head(env=power(tmp_path, SLOW=slow))
    client = await stage.client()
    await open_session(client, "s", [4, 5])
    slow.touch()
    stream = Stream(client, "s", 60)
    await stream.has(1)
    # What took the node 0.6 s is there after one or two more syncs, and the head is well.
    await stage.until_health(SERVING)
    await stream.exact([4, 5], 60)
    assert stream.most_at_once > 30
    slow.unlink()


async def test_a_second_head_on_the_folder_is_refused_and_the_first_goes_on(stage: Stage) -> None:
    await stage.head()
    client = await stage.client()
    await open_session(client, "s", [1])
    stream = Stream(client, "s", 200)
    await stream.has(1)
    assert "is in use by another head" in await stage.refused()
    await stream.exact([1], 200)


async def test_a_damaged_file_is_told_of_in_one_line(stage: Stage) -> None:
    (stage.data / "head.db").write_bytes(os.urandom(20_000))
    line = await stage.refused()
    assert f"{stage.data / 'head.db'} is damaged" in line
    assert "put a copy back, or move it away" in line


async def test_a_head_whose_folder_is_taken_away_ends_at_once_and_says_why(stage: Stage) -> None:
    head = await stage.head()
    client = await stage.client()
    await open_session(client, "s", [1])
    stream = Stream(client, "s", 3_000)
    await stream.has(5)
    shutil.rmtree(stage.data)
    async with asyncio.timeout(_PATIENCE_S):
        assert await head.process.wait() == 1
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.done
    assert stream.tokens == reference_tokens(MODEL, 0, [1], len(stream.tokens))
    assert "it was taken away while the head was running" in head.tail().splitlines()[-1]
