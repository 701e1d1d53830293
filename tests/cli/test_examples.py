"""Examples: programs that say what they take, and commands that can be pasted as they stand in a help."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys

import pytest

from fleet.v1 import fleet_service_pb2 as fleet_pb2
from tests.cli.ended import Ended
from tests.cli.scripted_head import Hang, ScriptedHead, accepted, tokens
from tests.commandlines import unknown_words


async def run(*arguments: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "80"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@pytest.mark.parametrize("program", ["demo", "demo_llm", "first_session", "python_client", "traced"])
async def test_an_example_says_what_it_takes_and_does_nothing_else(program: str) -> None:
    ended = await run(f"examples.{program}", "--help")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"usage: python -m examples.{program}")


async def test_the_client_ends_quietly_when_nobody_reads_its_tokens(head: ScriptedHead) -> None:
    created = fleet_pb2.Session(session_id="s1")
    head.replies["CreateSession"] = fleet_pb2.CreateSessionResponse(session=created)
    head.replies["FinishSession"] = fleet_pb2.FinishSessionResponse()
    head.streams = [[accepted(), tokens(0, *range(100_000)), Hang()]]
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", '"$@" | head -3; exit ${PIPESTATUS[0]}', "-"),
        *(sys.executable, "-m", "examples.python_client", "--address", head.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out.decode().split(), err.decode()) == (4, ["0", "1", "2"], "")
    # It leaves nothing behind it.
    assert head.requests("FinishSession")[0].session_id == "s1"


async def test_no_command_in_the_help_of_a_node_is_broken_in_two() -> None:
    shown = (await run("node_stub", "--help")).out.partition("Examples:")[2]
    commands = [line.strip() for line in shown.splitlines() if line.strip().startswith("fleet-node ")]
    assert len(commands) == 5
    assert [word for command in commands for word in unknown_words(shlex.split(command))] == []
    assert any(command.endswith("--fault after-tokens=5:die") for command in commands)
    assert not re.search(r"-$", shown, re.MULTILINE)
    about = shown.partition("A fault is")[2].split()
    for point_or_action in ("before-finish.", "after-tokens=N,", "skip-index,", "cut-link=MS."):
        assert point_or_action in about
