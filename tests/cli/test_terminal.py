"""What a command prints into a terminal: nothing is broken in two, at 80 columns and at 120."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Sequence

import pytest
from google.rpc import code_pb2

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1.types_pb2 import CapacityReport, Model
from fleet_service.cli.output import Column, table_lines
from tests.cli.scripted_head import Refuse, ScriptedHead, accepted, finished, tokens

NODES = [
    admin.Node(
        name=f"gpu-rack-{number}",
        address=f"10.20.130.14{number}:8454",
        state=admin.NODE_STATE_DOWN if number == 2 else admin.NODE_STATE_UP,
        state_detail=f"cannot connect to 10.20.130.14{number}:8454: connection refused"
        if number == 2
        else "",
        cordoned=number == 1,
        models=[Model(name="SmolLM2-135M-Instruct")],
        report=CapacityReport(kv_blocks_used=25, kv_blocks_total=100),
        report_age_ms=1700,
        lanes=16,
        running=12,
        queued=113,
        sessions=1024,
        failures={"link_lost": 12, "node_silent": 3, "node_down": 4},
    )
    for number in range(3)
]
VERDICTS = [
    admin.NodeVerdict(
        node=node.name,
        eligible=not number,
        left_out=("", "queue_full", "connecting")[number],
        eta_ms=14_200,
        ahead=125,
        decode_tokens_per_s=1200,
        decode_reported=True,
        prefill_tokens_per_s=20_000,
        kv_used_pct=25,
        sessions=1024,
        reservations=125,
        max_context_tokens=32_768,
        report_age_ms=1700,
    )
    for number, node in enumerate(NODES)
]


async def in_terminal(head: ScriptedHead, columns: int, *arguments: str) -> list[str]:
    """The lines that `fleet ARGUMENTS` prints, output and error, into a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
    environ |= {"FLEET_ADDRESS": head.address, "FLEET_ADMIN_ADDRESS": head.admin_address}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleet_service", *arguments), stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    printed = await asyncio.to_thread(_read_all, ours)
    await process.wait()
    return printed.decode().replace("\r\n", "\n").splitlines()


def _read_all(terminal: int) -> bytes:
    parts = []
    try:
        while part := os.read(terminal, 65_536):
            parts.append(part)
    except OSError:  # what Linux says once the other side is closed
        pass
    os.close(terminal)
    return b"".join(parts)


def words_of(lines: Sequence[str]) -> set[str]:
    return {word for line in lines for word in line.split()}


@pytest.mark.parametrize("columns", [80, 120])
async def test_nodes_fit_a_terminal_with_every_address_whole(head: ScriptedHead, columns: int) -> None:
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=NODES, books_balance=True)
    lines = await in_terminal(head, columns, "nodes")
    assert max(map(len, lines)) <= columns
    words = words_of(lines)
    assert {node.address for node in NODES} <= words
    assert {"gpu-rack-0", "up,", "cordoned", "down", "link_lost;", "node_silent"} <= words
    assert any("left out for want of width" in line for line in lines) == (columns == 80)
    assert ("SmolLM2-135M-Instruct" in words) == (columns == 120)


@pytest.mark.parametrize("columns", [80, 120])
async def test_an_explanation_fits_a_terminal_with_its_terms(head: ScriptedHead, columns: int) -> None:
    head.replies["ExplainPlacement"] = admin.ExplainPlacementResponse(
        policy="load-aware", chosen="gpu-rack-0", verdicts=VERDICTS
    )
    lines = await in_terminal(head, columns, "explain", "--model", "demo")
    assert max(map(len, lines)) <= columns
    assert {"eligible", "queue_full", "connecting", "14.2", "125", "1200/s", "~20000/s"} <= words_of(lines)
    assert any("left out for want of width" in line for line in lines) == (columns == 80)


@pytest.mark.parametrize("columns", [80, 120])
async def test_generated_ids_are_never_broken_in_two(head: ScriptedHead, columns: int) -> None:
    ids = [10_000 + 37 * number for number in range(100)]
    batches = [tokens(first, *ids[first : first + 7]) for first in range(0, 100, 7)]
    head.streams = [[accepted(), *batches, finished(output_tokens=100)]]
    lines = await in_terminal(head, columns, "generate", "--model", "demo", "--tokens", "1")
    *answer, summary = lines
    assert summary.startswith("finished: LENGTH")
    assert max(map(len, lines)) <= columns
    assert [int(each) for line in answer for each in line.split()] == ids
    assert len(answer) > 1


async def test_a_long_refusal_is_broken_between_words(head: ScriptedHead) -> None:
    message = (
        "model demo is served by 3 nodes, none with the labels zone=eu-central-1, gpu=h100; change something"
    )
    head.streams = [[Refuse(code_pb2.FAILED_PRECONDITION, message, reason="MODEL_UNPLACEABLE")]]
    lines = await in_terminal(head, 80, "generate", "--model", "demo", "--tokens", "1")
    assert max(map(len, lines)) < 80
    assert {"zone=eu-central-1,", "gpu=h100", "[MODEL_UNPLACEABLE]"} <= words_of(lines)


# --------------------------------------------------------------------------------------------- tables alone

COLUMNS = (
    Column("NAME"),
    Column("MODELS", shorten=True, drop=1),
    Column("COUNT", right=True, drop=2),
    Column("AGE", drop=3),
)
ROWS = [("node-a", "a-model-with-a-long-name", "7", "1.2 s"), ("b", "-", "1234", "-")]


def test_a_table_for_a_pipe_has_everything_and_no_rule() -> None:
    assert table_lines(COLUMNS, ROWS, None) == (
        [
            "NAME    MODELS                    COUNT  AGE",
            "node-a  a-model-with-a-long-name      7  1.2 s",
            "b       -                          1234  -",
        ],
        [],
    )


def test_a_table_is_shortened_first_and_loses_columns_then() -> None:
    lines, dropped = table_lines(COLUMNS, ROWS, 40)
    assert (max(map(len, lines)), dropped) == (40, [])
    assert "a-model-with-a-lo…" in lines[2]
    lines, dropped = table_lines(COLUMNS, ROWS, 22)
    assert (max(map(len, lines)) <= 22, dropped) == (True, ["AGE", "COUNT"])
    lines, dropped = table_lines(COLUMNS, ROWS, 3)
    assert (lines[0], lines[2:], dropped) == ("NAME", ["node-a", "b"], ["AGE", "COUNT", "MODELS"])
