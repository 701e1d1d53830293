"""The example node in Go: built with Go's own tools, keeps every rule, and serves a head."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet_service.conformance.engine import Answer
from fleet_service.tls import ClientTls
from fleet_service.token import read_token
from tests.certificates import Authority
from tests.clients.toolchains import require_tool
from tests.conformance.support import broken, check, skipped, untried
from tests.conformance.test_stub import INLINE_RULES, LINK_RULES, RECONCILE_RULES, TOKEN_RULES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "go-node"
BUILD = ROOT / "build" / "go-node"
FEATURE_RULES = INLINE_RULES | LINK_RULES | RECONCILE_RULES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first use builds gRPC for Go


@pytest.fixture(scope="module")
def program() -> Path:
    """The node, built; Go's cache makes that short when nothing has changed."""
    for tool in ("go", "gofmt"):
        require_tool(tool)
    BUILD.mkdir(parents=True, exist_ok=True)
    made = BUILD / "go-node"
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in ("go generate", "go vet ./...", f"go build -o {made} ."):
            _run(*step.split())
    return made


def _run(*command: str) -> str:
    # buf comes with this interpreter's environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environ = os.environ | {"PATH": path}
    done = subprocess.run(command, cwd=SOURCE, env=environ, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}:\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


@asynccontextmanager
async def running(program: Path, *flags: str) -> AsyncIterator[str]:
    """A node of its own, and its address."""
    node = await asyncio.create_subprocess_exec(
        program, "--listen", "127.0.0.1:0", *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert node.stdout
        line = (await node.stdout.readline()).decode()
        assert line.startswith("go-node: "), line
        yield line.split()[-1]
        assert node.returncode is None
    finally:
        if node.returncode is None:
            node.terminate()
        await node.wait()


async def test_it_is_formatted_as_go_is(program: Path) -> None:
    assert _run("gofmt", "-l", ".") == ""


async def test_it_keeps_every_rule(program: Path) -> None:
    async with running(program) as address:
        verdict = await check(address)
    assert broken(verdict) == {}
    assert not untried(verdict)
    assert set(skipped(verdict)) == FEATURE_RULES | TOKEN_RULES
    assert verdict.engine == {"deterministic": Answer.YES, "continues": Answer.YES}


async def test_it_keeps_every_rule_with_a_token_over_tls(program: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("node")
    token_file = tmp_path / "token"
    token_file.write_text("ab" * 32)
    flags = ("--token-file", str(token_file), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    async with running(program, *flags) as address:
        verdict = await check(address, token=read_token(token_file), tls=ClientTls(authority.ca))
    assert broken(verdict) == {}
    assert set(skipped(verdict)) == FEATURE_RULES


async def test_a_head_is_served_by_it(program: Path) -> None:
    async with running(program) as address:
        command = (sys.executable, "-m", "fleet_service")
        listen = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
        head = await asyncio.create_subprocess_exec(
            *command, "serve", "--node", address, *listen, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert head.stdout
            words = (await head.stdout.readline()).decode().replace(",", "").split()
            callers = words[words.index("callers") + 2]
            ask = ("generate", "--address", callers, "--model", "toy", "--tokens", "1,2,3", "--max-new", "20")
            answers = []
            for _ in range(2):
                asked = await asyncio.create_subprocess_exec(*command, *ask, stdout=asyncio.subprocess.PIPE)
                out, _ = await asked.communicate()
                assert asked.returncode == 0
                answers.append(out.split())
        finally:
            head.terminate()
            await head.wait()
    assert len(answers[0]) >= 20
    assert answers[0][:20] == answers[1][:20]
