"""`fleet nodes --watch`: live in a terminal, a line per change for a pipe, an object each for programs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import sys
import time
from contextlib import suppress

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2
from rich.console import Console

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1.fleet_service_pb2 import MOVE_CAUSE_LINK_LOST, Finished, Moved
from fleet.v1.types_pb2 import FINISH_REASON_LENGTH, CapacityReport
from fleet_service.cli.watch import Screen, bar
from tests.cli.conftest import Fleet, start_fleet
from tests.cli.scripted_head import Hang, Refuse, ScriptedHead

AT = Timestamp(seconds=1_750_000_000)


def node(name: str, **fields: object) -> admin.Node:
    defaults: dict[str, object] = {"state": admin.NODE_STATE_UP, "lanes": 8, "running": 2, "sessions": 3}
    return admin.Node(name=name, address=f"{name}:8454", **(defaults | fields))  # type: ignore[arg-type]


SNAPSHOT = admin.WatchFleetResponse(
    snapshot=True,
    nodes=[
        node("node-a", report=CapacityReport(kv_blocks_used=95, kv_blocks_total=100), report_age_ms=300),
        node("node-b", state=admin.NODE_STATE_DOWN, state_detail="connection refused"),
    ],
    summary=admin.FleetSummary(sessions_generating=2, sessions_bound=1, generations=2, books_balance=True),
)
EVENTS = [
    admin.FleetEvent(time=AT, generation_id="g1", placed=admin.GenerationPlaced(node="node-a")),
    admin.FleetEvent(
        time=AT,
        generation_id="g1",
        moved=Moved(
            from_node="node-a", to_node="node-c", cause=MOVE_CAUSE_LINK_LOST, next_index=17, gap_ms=120
        ),
    ),
    admin.FleetEvent(
        time=AT,
        generation_id="g1",
        ended=admin.GenerationEnded(
            node="node-c", finished=Finished(reason=FINISH_REASON_LENGTH, output_tokens=40)
        ),
    ),
]
CHANGES = [
    SNAPSHOT,
    # Only older: nothing to tell of.
    admin.WatchFleetResponse(nodes=[node("node-a", report_age_ms=800)]),
    admin.WatchFleetResponse(nodes=[node("node-a", running=8, queued=2, sessions=10)]),
    admin.WatchFleetResponse(removed_nodes=["node-b"], events=EVENTS, skipped_events=5),
]


async def test_a_pipe_gets_a_line_per_change(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["WatchFleet"] = CHANGES
    ended = await fleet("nodes", "--watch")
    assert ended.code == 0
    assert "the head has ended" in ended.err
    assert [line.split(" ", 1)[1] for line in ended.out.splitlines()] == [
        "node-a: up, 2/8 lanes, 3 sessions",
        "node-b: down, 2/8 lanes, 3 sessions (connection refused)",
        "node-a: up, 8/8 lanes, 2 queued, 10 sessions",
        "5 events skipped",
        "g1: placed on node-a",
        "g1: node-a -> node-c at index 17 (LINK_LOST), gap 120 ms",
        "g1: LENGTH after 40 tokens on node-c",
        "node-b: gone",
    ]


FULL = admin.WatchFleetResponse(
    summary=admin.FleetSummary(books_balance=True, store_trouble="no space is left for /d/head.db")
)
NOTHING_KEPT = (
    "nothing can be kept on disk: no space is left for /d/head.db; new work is refused and streams wait"
)


async def test_a_pipe_is_told_once_that_the_store_fails_and_once_that_it_works(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.told["WatchFleet"] = [SNAPSHOT, FULL, FULL, SNAPSHOT]
    ended = await fleet("nodes", "--watch")
    assert [line.split(" ", 1)[1] for line in ended.out.splitlines()][2:] == [
        NOTHING_KEPT,
        "what the head has is kept on disk again",
    ]


def test_a_terminal_shows_that_the_store_fails_while_it_does() -> None:
    screen = Screen()
    for message, shown in ((SNAPSHOT, False), (FULL, True), (SNAPSHOT, False)):
        screen.seen.take(message)
        console = Console(width=120, file=io.StringIO(), color_system=None)
        console.print(screen)
        assert isinstance(console.file, io.StringIO)
        assert (NOTHING_KEPT in console.file.getvalue()) == shown


async def test_programs_get_an_object_per_message(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["WatchFleet"] = CHANGES
    ended = await fleet("nodes", "--watch", "--json")
    first, *_, last = map(json.loads, ended.out.splitlines())
    assert first["snapshot"]
    assert [each["name"] for each in first["nodes"]] == ["node-a", "node-b"]
    assert first["summary"]["sessions_generating"] == 2
    assert (last["removed_nodes"], last["skipped_events"]) == (["node-b"], 5)
    assert last["events"][1]["moved"]["cause"] == "LINK_LOST"
    assert "summary" not in last


async def test_what_a_pipe_gets_comes_at_once_and_ctrl_c_ends_it_well(head: ScriptedHead) -> None:
    head.told["WatchFleet"] = [SNAPSHOT, Hang()]
    process = await start_fleet(head, "nodes", "--watch")
    assert process.stdout is not None
    assert b"node-a: up" in await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")


async def test_a_terminal_shows_the_fleet_until_ctrl_c(head: ScriptedHead) -> None:
    head.told["WatchFleet"] = [*CHANGES[:1], CHANGES[3], Hang()]
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
    environ |= {"FLEET_ADMIN_ADDRESS": head.admin_address, "COLUMNS": "110", "LINES": "40", "TERM": "xterm"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleet_service", "nodes", "--watch"),
        stdout=theirs,
        stderr=theirs,
        env=environ,
    )
    os.close(theirs)
    text = b""
    async with asyncio.timeout(30):
        while b"LINK_LOST" not in text:
            text += await asyncio.to_thread(os.read, ours, 65_536)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # what Linux says once the other side is closed
        while part := await asyncio.to_thread(os.read, ours, 65_536):
            text += part
    os.close(ours)
    assert await process.wait() == 0
    shown = text.decode()
    for word in ("NODE", "node-a", "2/8", "95/100", "█", "3 sessions (2 generating, 1 bound)"):
        assert word in shown
    for word in ("node-a -> node-c at index 17", "5 events skipped", "Ctrl-C ends"):
        assert word in shown
    assert "\x1b[?25h" in shown, "the cursor is shown again"
    assert "Traceback" not in shown


async def test_a_refusal_says_what_to_do_and_a_lost_head_is_told_of(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["WatchFleet"] = [
        SNAPSHOT,
        Refuse(code_pb2.RESOURCE_EXHAUSTED, "64 streams watch the fleet; end one", reason="LIMIT_EXCEEDED"),
    ]
    ended = await fleet("nodes", "--watch")
    assert ended.code == 1
    assert "[LIMIT_EXCEEDED]" in ended.err
    head.told["WatchFleet"] = [SNAPSHOT, Refuse(code_pb2.UNAVAILABLE, "Socket closed")]
    ended = await fleet("nodes", "--watch", "--json")
    assert ended.code == 1
    assert json.loads(ended.err)["error"]["reason"] == "UNREACHABLE"


async def test_times_in_a_pipe_never_go_back_though_the_heads_clock_is_ahead(
    head: ScriptedHead, fleet: Fleet
) -> None:
    ahead = admin.FleetEvent(
        time=Timestamp(seconds=int(time.time()) + 5),
        generation_id="g1",
        placed=admin.GenerationPlaced(node="node-a"),
    )
    later = admin.WatchFleetResponse(nodes=[node("node-a", running=3)], events=[ahead])
    head.told["WatchFleet"] = [SNAPSHOT, later]
    lines = (await fleet("nodes", "--watch")).out.splitlines()
    assert [line.split()[1] for line in lines] == ["node-a:", "node-b:", "g1:", "node-a:"]
    assert lines[2].split()[0] == lines[3].split()[0]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_terminal_gets_fewer_columns_and_every_line_whole(width: int) -> None:
    screen = Screen()
    screen.seen.take(SNAPSHOT)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    table = [line for line in console.file.getvalue().splitlines() if "node-a" in line or "NODE" in line]
    assert max(map(len, table)) <= width
    assert "…" not in "".join(table)
    assert ("KV" in table[0], "LANES" in table[0]) == (width >= 60, True)


@pytest.mark.parametrize(
    "part,whole,shown",
    [
        (0, 8, "░░░░░░░░ 0/8"),
        (4, 16_384, "░░░░░░░░ 4/16384"),
        (3, 8, "███░░░░░ 3/8"),
        (1, 16, "▌░░░░░░░ 1/16"),
    ],
)
def test_a_bar_is_as_long_as_its_numbers_say(part: int, whole: int, shown: str) -> None:
    assert bar(part, whole).plain == shown
