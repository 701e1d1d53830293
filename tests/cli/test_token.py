"""The fleet token and TLS, with real commands and processes: made, used, refused, and never shown."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from examples.processes import Child, Children, command_of
from node_stub.reference import StubModel, reference_tokens
from tests.certificates import Authority
from tests.cli.ended import Ended
from tests.ports import quiet_port

MODEL = "demo"


async def run(*command: str, **environ: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        command_of(command[0]),
        *command[1:],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("FLEET_")} | environ,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def said(ended: Ended) -> str:
    """What it told on standard error, without the line breaks and frames of a terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", ended.err).split())


async def test_a_token_is_made_once_for_its_owners_eyes_only(tmp_path: Path) -> None:
    file = tmp_path / "secrets" / "token"
    first = await run("fleet", "token", "--file", str(file))
    assert first.code == 0
    text = file.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", text)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = await run("fleet", "token", "--json", FLEET_TOKEN_FILE=str(file))
    assert json.loads(again.out) == {"file": str(file), "made": False}
    assert file.read_text() == text
    assert text.strip() not in first.out + first.err + again.out + again.err
    assert list(file.parent.iterdir()) == [file]


async def test_many_that_make_the_token_at_once_agree_on_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    ended = await asyncio.gather(*(run("fleet", "token", "--file", str(file), "--json") for _ in range(4)))
    assert [each.code for each in ended] == [0] * 4
    assert sum(json.loads(each.out)["made"] for each in ended) == 1
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())


async def test_a_token_that_others_can_read_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("ab" * 32)
    file.chmod(0o644)
    ended = await run("fleet", "token", "--file", str(file))
    assert ended.code == 0
    assert f"chmod 600 {file}" in said(ended)


@pytest.mark.parametrize(
    "content,told",
    [
        (None, "cannot be read from {}: No such file or directory"),
        ("", "{} holds no fleet token: one is 64 hexadecimal characters, here are 0 characters"),
        ("ab" * 31, "{} holds no fleet token: one is 64 hexadecimal characters, here are 62 characters"),
        ("xy" * 32, "{} holds no fleet token"),
    ],
    ids=["missing", "empty", "truncated", "not hexadecimal"],
)
async def test_a_token_that_is_none_stops_head_and_node_and_is_not_shown(
    tmp_path: Path, content: str | None, told: str
) -> None:
    file = tmp_path / "t"
    if content is not None:
        file.write_text(content)
    head, node, variable = await asyncio.gather(
        run("fleet", "serve", "--token-file", str(file), "--listen", "127.0.0.1:0"),
        run("fleet-node", "--model", MODEL, "--token-file", str(file), "--listen", "127.0.0.1:0"),
        run("fleet-node", "--model", MODEL, "--listen", "127.0.0.1:0", FLEET_TOKEN_FILE=str(file)),
    )
    for ended in (head, node, variable):
        assert ended.code == 2
        assert told.format(file) in said(ended)
        assert not content or content not in ended.err


async def test_beyond_this_machine_nobody_listens_without_a_token_unless_told_to(tmp_path: Path) -> None:
    model = tmp_path / "absent.gguf"
    node = ["fleet-node", "--listen", "0.0.0.0:0", "--engine", "llama", "--model-file", str(model)]
    refused = await asyncio.gather(
        run("fleet", "serve", "--listen", "0.0.0.0:0"),
        run("fleet", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "[::]:0"),
        run("fleet", "serve", "--listen", "127.0.0.1:0", "--join-listen", "0.0.0.0:0"),
        run(*node),
    )
    access = "without asking who calls: set access_file (`fleet access` makes one)"
    token = "without a fleet token: set token_file (`fleet token` makes one)"
    at_node = "without a fleet token: give --token-file FILE (`fleet token` makes one)"
    for ended, told in zip(refused, (access, access, token, at_node), strict=True):
        assert ended.code == 2
        assert told in said(ended)
        assert "insecure" in said(ended)
    assert "absent.gguf" not in said(refused[-1])  # not even looked for
    assert (await run(*node, "--insecure-no-auth")).code == 3  # now it is: there is no such model


async def test_told_to_a_head_listens_beyond_this_machine_without_a_token(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        listen = ["--listen", "0.0.0.0:0", "--admin-listen", "127.0.0.1:0", "--insecure-no-auth"]
        _, line = await children.start("head", [command_of("fleet"), "serve", *listen], "fleet: serving")
        assert line.startswith("fleet: serving callers on 0.0.0.0:")


@dataclass
class TraceSink(otlp_grpc.TraceServiceServicer):
    """An OTLP collector that keeps the bytes it is sent."""

    received: list[bytes] = field(default_factory=list)
    address: str = ""

    async def Export(
        self, request: otlp.ExportTraceServiceRequest, context: object
    ) -> otlp.ExportTraceServiceResponse:
        self.received.append(request.SerializeToString())
        return otlp.ExportTraceServiceResponse()


@pytest.fixture
async def traces() -> AsyncIterator[TraceSink]:
    server = grpc.aio.server()
    sink = TraceSink()
    otlp_grpc.add_TraceServiceServicer_to_server(sink, server)  # type: ignore[no-untyped-call]
    sink.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield sink
    await server.stop(0)


@dataclass
class Secured:
    """A head with a token and TLS on every link; a node it dials and one that joined."""

    token: Path
    authority: Authority
    children: Children
    head: Child
    callers: str
    admin: str
    join: str
    others: list[Child]

    async def fleet(self, *arguments: str) -> Ended:
        return await run("fleet", *arguments, FLEET_ADDRESS=self.callers, FLEET_ADMIN_ADDRESS=self.admin)

    def node_flags(self, name: str) -> list[str]:
        return ["--identity", name, "--model", MODEL, "--grace", "0", "--token-file", str(self.token)]


@pytest.fixture
async def secured(tmp_path: Path, traces: TraceSink) -> AsyncIterator[Secured]:
    authority, token = Authority(tmp_path), tmp_path / "token"
    assert (await run("fleet", "token", "--file", str(token))).code == 0
    head_pair, node_pair = authority.issue("head"), authority.issue("node")
    node_tls = ["--tls-cert", str(node_pair.cert), "--tls-key", str(node_pair.key)]
    join = f"127.0.0.1:{quiet_port()}"
    async with Children(tmp_path) as children:
        flags = ["--identity", "dialed", "--model", MODEL, "--grace", "0", "--token-file", str(token)]
        flags += [*node_tls, "--listen", "127.0.0.1:0", "--log-level", "debug"]
        dialed, line = await children.start(
            "dialed", [command_of("fleet-node"), *flags], "fleet-node: dialed on "
        )
        settings = {
            "join_tls.cert_file": head_pair.cert,
            "join_tls.key_file": head_pair.key,
            "node_tls.enabled": "true",
            "node_tls.ca_file": authority.ca,
            "log.level": "debug",
            "telemetry.otlp_endpoint": f"http://{traces.address}",
        }
        command = [
            command_of("fleet"),
            "serve",
            "--node",
            line.rpartition(" ")[2],
            "--token-file",
            str(token),
        ]
        command += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--join-listen", join]
        command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        head, line = await children.start("head", command, "fleet: serving")
        found = re.search(r"callers on (\S+), admin on (\S+), joining", line)
        assert found
        made = Secured(token, authority, children, head, found[1], found[2], join, [dialed])
        flags = [*made.node_flags("joined"), "--join", join, "--tls-ca", str(authority.ca)]
        joined, _ = await children.start(
            "joined", [command_of("fleet-node"), *flags, "--log-level", "debug"], "fleet-node: joined "
        )
        made.others.append(joined)
        while (await made.fleet("nodes", "--json")).out.count("incarnation") < 2:
            pass
        yield made


async def test_a_fleet_with_token_and_tls_works_and_says_so_and_never_shows_the_token(
    secured: Secured, traces: TraceSink
) -> None:
    expected = reference_tokens(StubModel(MODEL), 0, [1, 2, 3], 20)
    answers = await asyncio.gather(
        *(
            secured.fleet("generate", "--model", MODEL, "--tokens", "1,2,3", "--max-new", "20")
            for _ in range(4)
        )
    )
    assert [[int(token) for token in each.out.split()] for each in answers] == [expected] * 4
    nodes = await secured.fleet("nodes", "--json")
    listed = {node["name"]: node for node in json.loads(nodes.out)["nodes"]}
    assert {name: (node["authenticated"], node["encrypted"]) for name, node in listed.items()} == {
        "dialed": (True, True),
        "joined": (True, True),
    }
    doctor = await secured.fleet("doctor")
    assert doctor.code == 0
    assert doctor.out.count("token     proven by both") == 2
    assert doctor.out.count("link      TLS") == 2
    assert doctor.out.count("protocol  version 1") == 2

    config = await run("fleet", "config", "--set", f"token_file={secured.token}")
    secret = secured.token.read_text().strip()
    shown = [each.out + each.err for each in (*answers, nodes, doctor, config)]
    for child in (secured.head, *secured.others):
        process = Path(f"/proc/{child.process.pid}")
        shown += [child.log.read_text(), (process / "cmdline").read_text(), (process / "environ").read_text()]
    assert str(secured.token) in "".join(shown)
    assert not any(secret in text for text in shown)
    while not traces.received:
        await secured.fleet("generate", "--model", MODEL, "--tokens", "1")
    assert not any(bytes.fromhex(secret) in each or secret.encode() in each for each in traces.received)


async def test_a_joining_node_with_another_token_ends_with_2_and_the_head_works_on(
    secured: Secured, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    assert (await run("fleet", "token", "--file", str(other))).code == 0
    tls = ["--tls-ca", str(secured.authority.ca)]
    for token in (["--token-file", str(other)], []):
        flags = ["--identity", "stranger", "--model", MODEL, *token]
        ended = await run("fleet-node", *flags, "--join", secured.join, *tls)
        assert ended.code == 2
        assert "refuses this node (FLEET_TOKEN_REFUSED)" in ended.err
        assert "with --token-file" in ended.err
        assert other.read_text().strip() not in ended.err
    answer = await secured.fleet("generate", "--model", MODEL, "--tokens", "1,2,3", "--max-new", "5")
    assert [int(token) for token in answer.out.split()] == reference_tokens(StubModel(MODEL), 0, [1, 2, 3], 5)
    assert "stranger" not in (await secured.fleet("nodes")).out


async def test_the_doctor_says_what_to_do_about_a_token_that_differs(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for file in (here, there):
        assert (await run("fleet", "token", "--file", str(file))).code == 0
    async with Children(tmp_path) as children:
        command = [command_of("fleet-node"), "--identity", "a", "--model", MODEL, "--listen", "127.0.0.1:0"]
        _, line = await children.start("a", [*command, "--token-file", str(there)], "fleet-node: a on ")
        address = line.rpartition(" ")[2]
        command = [command_of("fleet"), "serve", "--node", address, "--token-file", str(here)]
        command += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        _, line = await children.start("head", command, "fleet: serving")
        found = re.search(r"callers on (\S+), admin on (\S+)", line)
        assert found
        places = {"FLEET_ADDRESS": found[1], "FLEET_ADMIN_ADDRESS": found[2]}
        doctor = await run("fleet", "doctor", **places)
        assert doctor.code == 1
        assert f"{address} was refused the handshake (it has another)" in doctor.out
        assert "what to do: give both the same fleet token" in doctor.out
        nodes = json.loads((await run("fleet", "nodes", "--json", **places)).out)["nodes"]
        assert nodes[0]["state"] == "DOWN"
        assert "give both the same fleet token (it has another)" in nodes[0]["state_detail"]
