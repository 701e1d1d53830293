"""The commands, the head's start and its end, with a real head and stub nodes as processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.processes import Child, Children, command_of
from fleet.v1 import fleet_service_pb2_grpc
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
from node_stub.reference import StubModel, reference_tokens
from tests.cli.conftest import Ended

ROOT = Path(__file__).parents[2]
SLOW_RATE = 40
MODEL = StubModel(name="demo")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def expected(prompt: list[int], count: int) -> list[int]:
    return reference_tokens(MODEL, 0, prompt, count)


@dataclass
class RealFleet:
    """Nodes "a" and "b", a head, and what is needed to talk to them."""

    children: Children
    nodes: dict[str, Child]
    head: Child
    callers: str
    admin: str

    async def fleet(self, *arguments: str) -> Ended:
        process = await self.start_fleet(*arguments)
        out, err = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

    async def start_fleet(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(command_of("fleet"), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                "FLEET_ADDRESS": self.callers,
                "FLEET_ADMIN_ADDRESS": self.admin,
                "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
            },
        )

    def client(self) -> FleetClient:
        return FleetClient(self.callers, self.admin)

    async def nodes_as_json(self) -> dict[str, dict[str, object]]:
        listed = json.loads((await self.fleet("nodes", "--json")).out)
        assert listed["books_balance"]
        return {node["name"]: node for node in listed["nodes"]}

    async def until_idle(self) -> None:
        while any(node["reservations"] for node in (await self.nodes_as_json()).values()):
            pass


async def start_node(children: Children, name: str) -> tuple[Child, str]:
    command = [command_of("fleet-node"), "--listen", "127.0.0.1:0", "--identity", name, "--model", MODEL.name]
    command += ["--decode-rate", str(SLOW_RATE), "--grace", "0"]
    child, line = await children.start(f"node-{name}", command, f"fleet-node: {name} on ")
    return child, line.rpartition(" ")[2]


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[RealFleet]:
    async with Children(tmp_path) as children:
        (a, a_address), (b, b_address) = await asyncio.gather(
            start_node(children, "a"), start_node(children, "b")
        )
        command = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        command += ["--node", a_address, "--node", b_address, "--log-format", "json"]
        head, line = await children.start("head", command, "fleet: serving")
        _, _, rest = line.partition("callers on ")
        callers, _, admin = rest.partition(", admin on ")
        yield RealFleet(children, {"a": a, "b": b}, head, callers, admin)


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


# -------------------------------------------------------------------------------------------- commands


async def test_generate_gives_exactly_the_models_answer(real: RealFleet) -> None:
    ended = await real.fleet("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "20")
    assert ended.code == 0
    assert [int(token) for token in ended.out.split()] == expected([1, 2, 3], 20)


async def test_a_session_goes_on_over_several_commands(real: RealFleet) -> None:
    arguments = ("generate", "--session", "s1", "--model", "demo", "--max-new", "5", "--extend")
    first = await real.fleet(*arguments, "--tokens", "1,2,3")
    second = await real.fleet(*arguments, "--tokens", "4")
    answer = expected([1, 2, 3], 5)
    assert [int(token) for token in first.out.split()] == answer
    assert [int(token) for token in second.out.split()] == expected([1, 2, 3, *answer, 4], 5)
    (session,) = json.loads((await real.fleet("sessions", "--json")).out)["sessions"]
    assert (session["session_id"], session["state"], session["context_length"]) == ("s1", "BOUND", 14)
    assert "s1" in (await real.fleet("sessions")).out
    explained = json.loads((await real.fleet("explain", "--session", "s1", "--json")).out)
    assert explained["chosen"] in {"a", "b"}
    assert [verdict["eligible"] for verdict in explained["verdicts"]] == [True, True]


async def test_generate_survives_the_death_of_its_node(real: RealFleet) -> None:
    process = await real.start_fleet(
        *("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "80", "--json")
    )
    assert process.stdout is not None
    events = []
    first_node = ""
    async for line in process.stdout:
        events.append(json.loads(line))
        if len(events) == 5:
            (first_node,) = [event["node"] for event in events if event["event"] == "started"]
            real.nodes[first_node].kill()
    assert await process.wait() == 0
    received = [token for event in events if event["event"] == "tokens" for token in event["token_ids"]]
    assert received == expected([1, 2, 3], 80)
    (moved,) = [event for event in events if event["event"] == "moved"]
    assert (moved["from_node"], moved["cause"]) == (first_node, "LINK_LOST")
    assert events[-1]["reason"] == "LENGTH"


async def test_ctrl_c_frees_the_node(real: RealFleet) -> None:
    process = await real.start_fleet("generate", "--model", "demo", "--tokens", "1", "--max-new", "4000")
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert b"cancelled after" in err
    await real.until_idle()


async def test_a_drained_node_gives_its_answer_away_while_watchers_look_on(real: RealFleet) -> None:
    await real.fleet("cordon", "b")
    asking = await real.start_fleet(
        *("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "240", "--json")
    )
    assert asking.stdout is not None
    while b'"tokens"' not in await asking.stdout.readline():
        pass
    await real.fleet("uncordon", "b")
    watching = await real.start_fleet("nodes", "--watch", "--json")
    assert watching.stdout is not None
    assert json.loads(await watching.stdout.readline())["snapshot"]
    drained = await real.fleet("drain", "a", "--note", "new driver", "--by", "olga", "--wait", "--json")
    last = json.loads(drained.out.splitlines()[-1])["drain"]
    assert (drained.code, last["state"], last["moved"], last["by"]) == (0, "DRAINED", 1, "olga")
    out, _ = await asking.communicate()
    events = [json.loads(line) for line in out.splitlines()]
    moves = [event for event in events if event["event"] == "moved"]
    assert [(move["from_node"], move["to_node"], move["cause"]) for move in moves] == [("a", "b", "DRAIN")]
    assert events[-1]["reason"] == "LENGTH"
    seen: list[dict[str, Any]] = []
    while not any("moved" in event for event in seen):
        seen += json.loads(await watching.stdout.readline())["events"]
    watching.send_signal(signal.SIGINT)
    await watching.communicate()
    assert watching.returncode == 0
    shown = (await real.nodes_as_json())["a"]
    assert (shown["cordoned_by"], shown["cordon_note"]) == ("olga", "new driver")
    assert "drained by olga" in (await real.fleet("doctor")).out


async def test_a_cordoned_node_is_explained_and_gets_no_work(real: RealFleet) -> None:
    cordoned = await real.fleet("cordon", "a", "--note", "new driver", "--json")
    assert json.loads(cordoned.out)["cordon_note"] == "new driver"
    explained = await real.fleet("explain", "--model", "demo", "--prompt-tokens", "3")
    assert "it would go to b" in explained.out
    assert "left out: cordoned" in explained.out
    await real.fleet("cordon", "b")
    refused = await real.fleet("generate", "--model", "demo", "--tokens", "1")
    assert (refused.code, refused.out) == (1, "")
    assert "[NO_ELIGIBLE_NODE]" in refused.err
    assert "try again in" in refused.err
    assert (await real.fleet("uncordon", "b")).code == 0
    assert (await real.fleet("generate", "--model", "demo", "--tokens", "1", "--max-new", "2")).code == 0


async def test_nodes_are_removed_added_and_probed(real: RealFleet) -> None:
    address = str((await real.nodes_as_json())["a"]["address"])
    assert (await real.fleet("nodes", "remove", "a")).code == 0
    assert set(await real.nodes_as_json()) == {"b"}
    again = await real.fleet("nodes", "add", address, "--json")
    assert json.loads(again.out)["state"] == "UP"
    twice = await real.fleet("nodes", "add", address)
    assert (twice.code, "[NODE_ALREADY_EXISTS]" in twice.err) == (1, True)
    assert (await real.fleet("nodes", "probe")).code == 0
    real.nodes["a"].kill()
    assert (await real.fleet("nodes", "probe", "a")).code == 1
    assert (await real.fleet("nodes", "remove", "c")).code == 1


async def run_python(*arguments: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def python_of(document: str) -> str:
    """The one block of Python in a document."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def printed_tokens(ended: Ended) -> list[int]:
    assert ended.code == 0, ended.err
    return [int(line.rpartition(" ")[2]) for line in ended.out.splitlines() if "token_ids:" in line]


async def test_the_first_session_of_the_readme_runs_and_is_the_example(real: RealFleet) -> None:
    block = python_of("README.md")
    ended = await run_python("-c", block.replace("127.0.0.1:8455", real.callers))
    assert printed_tokens(ended) == expected([1, 2, 3], 16)
    as_example = block.replace('"127.0.0.1:8455"', "address").replace('"demo"', "model")
    body = as_example.partition("as rpc\n\n")[2]
    assert textwrap.indent(body, "    ") in (ROOT / "examples/first_session.py").read_text(encoding="utf-8")
    ended = await run_python("-m", "examples.first_session", real.callers)
    assert printed_tokens(ended) == expected([1, 2, 3], 16)


async def test_the_first_session_says_what_is_wrong_when_no_node_is_up(real: RealFleet) -> None:
    for name, node in real.nodes.items():
        node.kill()
        assert (await real.fleet("nodes", "remove", name)).code == 0
    ended = await run_python("-m", "examples.first_session", real.callers)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("NOT_FOUND: no node serves model demo")
    ended = await run_python("-m", "examples.first_session", "127.0.0.1:1")
    assert (ended.code, ended.err.startswith("UNAVAILABLE: ")) == (1, True)


async def test_errors_are_read_as_the_document_says(real: RealFleet) -> None:
    found: dict[str, Any] = {}
    exec(python_of("docs/errors.md"), found)
    refusals = []
    with grpc.insecure_channel(real.callers) as channel, grpc.insecure_channel("127.0.0.1:1") as nowhere:
        request = CreateSessionRequest(spec=SessionSpec(model="other"))
        for each in (channel, nowhere):
            create: Any = fleet_service_pb2_grpc.FleetServiceStub(each).CreateSession
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(create, request)
            refusals.append(found["read_error"](caught.value))
        await real.fleet("cordon", "a")
        await real.fleet("cordon", "b")
        create = fleet_service_pb2_grpc.FleetServiceStub(channel).CreateSession
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(create, CreateSessionRequest(spec=SessionSpec(model=MODEL.name)))
    assert refusals == [("MODEL_NOT_FOUND", {"model": "other"}, None), ("", {}, None)]
    reason, metadata, retry_after_s = found["read_error"](caught.value)
    assert (reason, metadata) == ("NO_ELIGIBLE_NODE", {"model": MODEL.name, "cordoned": "2"})
    assert retry_after_s >= 1


# ------------------------------------------------------------------------------------ start and the end


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
