"""The command `fleet-node` as someone at a terminal meets it."""

import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.command import app
from tests.node_stub.support import PROMPT, collect, head_of, process, until


def fleet_node(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node_stub", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments,said",
    [
        ([], "--model"),
        (["--model", "m", "--listen", "nowhere"], "HOST:PORT, for example 127.0.0.1:8454"),
        (["--model", "m", "--listen", "9000"], "127.0.0.1:9000"),
        (["--model", "m:abc"], "'abc' in 'm:abc' is no window"),
        (["--model", "m:"], "is no window"),
        (["--model", ":4096"], "names no model"),
        (["--model", "m", "--model", "m:7"], "twice"),
        (["--model", "m", "--join", "nowhere"], "HOST:PORT"),
        (["--model", "m", "--join", "127.0.0.1:1", "--no-link"], "over a link"),
        (["--model", "m", "--label", "zone"], "KEY=VALUE"),
        (["--model", "m", "--fault", "never:die"], "after-tokens"),
        (["--model", "m", "--lie", "loud"], "silent"),
        (["--model", "m", "--lanes", "0"], "--lanes"),
        (["--model", "m", "--log-level", "chatty"], "log level"),
        (["--model", "m", "--otlp-endpoint", "collector"], "for example 127.0.0.1:4317"),
        (
            ["--model", "m", "--otlp-endpoint", "ftp://collector:4317"],
            "'ftp://collector:4317' is no endpoint",
        ),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_help_shows_examples_and_how_to_write_a_fault() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert "fleet-node --model demo" in done.stdout
    assert "POINT[=TOKENS]:ACTION" in done.stdout


def test_a_port_in_use_ends_with_1_and_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = fleet_node("--model", "m", "--listen", address, "--insecure-no-auth")
    assert done.returncode == 1
    assert done.stderr == (
        f"fleet-node: cannot listen on {address}: the port is in use; choose another with --listen\n"
    )
    assert done.stdout == ""


@pytest.mark.parametrize(
    "address,why",
    [
        ("203.0.113.1:1", "the address is none of this machine's"),
        ("no-such-host.invalid:1", "no-such-host.invalid is the name of no host"),
    ],
)
def test_an_address_that_is_not_ours_ends_with_1_and_says_why(address: str, why: str) -> None:
    done = fleet_node("--model", "m", "--listen", address, "--insecure-no-auth")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"fleet-node: cannot listen on {address}: {why};" in done.stderr


def test_grpc_is_told_to_keep_quiet_before_it_is_imported() -> None:
    code = (
        "import os, sys; os.environ.pop('GRPC_VERBOSITY', None); sys.argv = ['fleet-node', '--help']\n"
        "from node_stub.cli import main\n"
        "assert 'grpc' not in sys.modules\n"
        "try: main()\n"
        "except SystemExit: print('verbosity', os.environ['GRPC_VERBOSITY'], 'grpc' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("verbosity ERROR True\n")


async def test_flags_make_the_node() -> None:
    flags = ["--identity", "n7", "--label", "zone=a", "--label", "gpu=none", "--model", "other:tag:128"]
    flags += [
        "--lanes",
        "3",
        "--window",
        "512",
        "--kv-blocks",
        "99",
        "--no-inline",
        "--no-link",
        "--no-reconcile",
        "--lie",
        "lanes-active=2",
    ]
    async with process(*flags) as (_, address), head_of(address) as head:
        hello = await head.stub.Handshake(pb.HandshakeRequest(min_version=1, max_version=1))
        assert (hello.identity, dict(hello.labels)) == ("n7", {"zone": "a", "gpu": "none"})
        assert {m.name: m.max_context_tokens for m in hello.models} == {"stub": 512, "other:tag": 128}
        report = hello.report
        assert (report.max_lanes, report.kv_blocks_total, report.lanes_active) == (3, 99, 2)
        assert list(hello.features) == []


async def test_sigterm_lets_a_running_generation_end() -> None:
    async with process("--decode-rate", "50") as (node, address), head_of(address) as head:
        await head.bind()
        call = head.generate(PROMPT, 30)
        stream = await until(call, lambda s: len(s.tokens) >= 1)
        node.send_signal(signal.SIGTERM)
        assert (await collect(call, stream)).finish == types_pb2.FINISH_REASON_LENGTH
        assert await node.wait() == 0


async def test_a_second_sigterm_ends_it_at_once() -> None:
    flags = ("--decode-rate", "10", "--grace", "600")
    async with process(*flags) as (node, address), head_of(address) as head:
        await head.bind()
        watch = head.stub.WatchStatus(pb.WatchStatusRequest(period_ms=60_000))
        await watch.read()
        await until(head.generate(PROMPT, 100_000), lambda s: len(s.tokens) >= 1)
        node.send_signal(signal.SIGTERM)
        await collect(watch)  # it has ended, so the first signal has been seen
        node.send_signal(signal.SIGTERM)
        assert await node.wait() == 0
