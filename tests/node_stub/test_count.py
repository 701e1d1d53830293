"""`fleet-node --count`: many stub nodes in one process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from typer.testing import CliRunner

from fleet.v1 import node_service_pb2 as pb
from node_stub.command import app
from tests.node_stub.join_support import JoinHead
from tests.node_stub.support import head_of
from tests.ports import quiet_port


@asynccontextmanager
async def nodes(count: int, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """A process of so many, ready, and the line that each has printed."""
    command = (sys.executable, "-m", "node_stub", "--model", "stub", "--count", str(count), *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=asyncio.subprocess.DEVNULL)
    try:
        assert process.stdout
        yield process, [(await process.stdout.readline()).decode().rstrip() for _ in range(count)]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--count", "0"], "--count"),
        (["--count", "2", "--engine", "llama"], "goes without --engine llama"),
        (["--count", "2", "--otlp-endpoint", "127.0.0.1:4317"], "goes without --otlp-endpoint"),
        (["--count", "100", "--listen", "127.0.0.1:65500"], "have no room from port 65500"),
    ],
)
def test_what_makes_no_sense_with_many_is_told(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["--model", "m", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


async def test_each_node_has_a_name_a_run_and_a_port_of_its_own_and_all_end_together() -> None:
    async with nodes(3, "--listen", "127.0.0.1:0", "--label", "zone=a") as (process, lines):
        assert [line.split()[1] for line in lines] == ["node-1", "node-2", "node-3"]
        hellos = []
        async with AsyncExitStack() as heads:
            for line in lines:
                head = await heads.enter_async_context(head_of(line.split()[-1]))
                hellos.append(await head.stub.Handshake(pb.HandshakeRequest(min_version=1, max_version=1)))
        assert [hello.identity for hello in hellos] == ["node-1", "node-2", "node-3"]
        assert len({hello.incarnation for hello in hellos}) == 3
        assert {hello.labels["zone"] for hello in hellos} == {"a"}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_the_ports_follow_each_other_from_the_one_given() -> None:
    def free(first: int) -> bool:
        for port in (first, first + 1):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return False
        return first + 1 <= 65_535

    first = next(port for port in (quiet_port() for _ in range(50)) if free(port))
    async with nodes(2, "--identity", "rack", "--listen", f"127.0.0.1:{first}") as (_, lines):
        assert lines == [
            f"fleet-node: rack-1 on 127.0.0.1:{first}",
            f"fleet-node: rack-2 on 127.0.0.1:{first + 1}",
        ]


async def test_where_a_port_is_somebodys_none_serves_and_it_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = (sys.executable, "-m", "node_stub", "--model", "stub", "--count", "2")
        listen = ("--listen", f"127.0.0.1:{port - 1}")
        done = await asyncio.create_subprocess_exec(*command, *listen, stdout=-1, stderr=-1)
        _, said = await done.communicate()
    assert done.returncode == 1
    (line,) = said.decode().splitlines()
    assert line.startswith("fleet-node: cannot listen on 127.0.0.1:")
    assert line.endswith("the port is in use; choose another with --listen")


async def test_each_of_many_joins_the_head_by_itself() -> None:
    head = JoinHead()
    await head.start()
    try:
        async with nodes(3, "--join", head.address) as (_, lines):
            assert [line.split()[1:4] for line in lines] == [
                [f"node-{number}", "joins", f"{head.address},"] for number in (1, 2, 3)
            ]
            async with asyncio.timeout(20):
                links = [await head.links.get() for _ in range(3)]
            assert len(links) == 3
            for link in links:
                link.end()
    finally:
        await head.stop()
