"""`fleet doctor` as a process: what it asks, prints and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.rpc import code_pb2

from examples.processes import Children, command_of
from fleet.v1 import admin_service_pb2 as admin
from fleet.v1.types_pb2 import CapacityReport, Model
from tests.cli.conftest import Fleet
from tests.cli.scripted_head import Hang, Refuse, ScriptedHead
from tests.cli.test_terminal import in_terminal

UP = admin.Node(
    name="gpu-rack-0",
    address="10.20.130.140:8454",
    incarnation="run-1",
    state=admin.NODE_STATE_UP,
    models=[Model(name="SmolLM2-135M-Instruct", revision="12fd25f77366", max_context_tokens=8192)],
    features=[
        admin.NODE_FEATURE_INLINE_BIND,
        admin.NODE_FEATURE_LINK,
        admin.NODE_FEATURE_RESUME,
        admin.NODE_FEATURE_RECONCILE,
    ],
    report=CapacityReport(max_lanes=16),
    report_age_ms=700,
    lanes=16,
    running=12,
    queued=113,
    reservations=125,
    failures={"link_lost": 12, "node_silent": 3},
)
DOWN = admin.Node(
    name="10.20.130.141:8454",
    address="10.20.130.141:8454",
    state=admin.NODE_STATE_DOWN,
    state_detail="cannot connect to 10.20.130.141:8454: connection refused",
)
ANSWER = admin.NodeProbe(
    name=UP.name, address=UP.address, reachable=True, identity=UP.name, models=UP.models, latency_ms=4
)
NO_ANSWER = admin.NodeProbe(name=DOWN.name, address=DOWN.address, detail=DOWN.state_detail)


def has(head: ScriptedHead, *pairs: tuple[admin.Node, admin.NodeProbe]) -> None:
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[node for node, _ in pairs], books_balance=True)
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse(probes=[probe for _, probe in pairs])


def says(head: ScriptedHead, **summary: object) -> None:
    """What the head says of itself."""
    told = admin.FleetSummary(books_balance=True, **summary)  # type: ignore[arg-type]
    head.told["WatchFleet"] = [admin.WatchFleetResponse(snapshot=True, nodes=[UP], summary=told), Hang()]


async def test_a_fleet_that_is_well_is_shown_and_exits_with_0(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER))
    says(head, durability=admin.DURABILITY_STRICT)
    ended = await fleet("doctor")
    assert (ended.code, ended.err) == (0, "")
    assert [line.rstrip() for line in ended.out.splitlines()] == [
        "head",
        "  callers   serving",
        "  books     balance",
        "  kept      on disk, strict",
        "",
        "gpu-rack-0 at 10.20.130.140:8454",
        "  state     up",
        "  handshake accepted in 4 ms",
        "  report    700 ms old",
        "  lanes     12 of 16 in use, 113 queued; it has 16",
        "  model     SmolLM2-135M-Instruct revision 12fd25f77366, window 8192",
        "  features  inline_bind, link, resume, reconcile",
        "  books     125 reservations, balanced; 0 revokes owed",
        "  failures  12 x link_lost, 3 x node_silent",
        "",
        "all is well with the head and 1 node",
    ]


async def test_what_is_wrong_comes_with_what_to_do_and_exits_with_1(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER), (DOWN, NO_ANSWER))
    ended = await fleet("doctor")
    assert ended.code == 1
    *_, what, advice, summary = ended.out.splitlines()
    assert what == f"error: {DOWN.name}: down: {DOWN.state_detail}"
    assert advice == "  what to do: start the node, or check its address and port"
    assert summary == "1 error"


async def test_notes_alone_are_not_wrong(head: ScriptedHead, fleet: Fleet) -> None:
    cordoned = admin.Node(name="b", address="b:1", state=admin.NODE_STATE_UP, cordoned=True)
    cordoned.models.extend(UP.models)
    has(head, (UP, ANSWER), (cordoned, admin.NodeProbe(name="b", address="b:1", reachable=True)))
    ended = await fleet("doctor")
    assert ended.code == 0
    assert "note: b: cordoned" in ended.out
    assert ended.out.endswith("all is well with the head and 2 nodes (1 note)\n")


async def test_as_json_it_is_one_object_with_the_findings(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER), (DOWN, NO_ANSWER))
    head.serving["fleet.v1.FleetService"] = False
    ended = await fleet("doctor", "--json")
    assert ended.code == 1
    told = json.loads(ended.out)
    assert told["healthy"] is False
    assert told["head"] == {
        "callers": "not_serving",
        "callers_detail": "",
        "books_balance": True,
        "durability": "unspecified",
        "store_trouble": "",
    }
    assert [each["handshake"] for each in told["nodes"]] == ["accepted", "none"]
    assert told["nodes"][0]["node"]["lanes"] == 16
    assert told["nodes"][1]["probe"]["detail"] == DOWN.state_detail
    error, warning = told["findings"]
    assert (error["severity"], error["node"]) == ("error", DOWN.name)
    assert set(error) == {"severity", "node", "what", "do"}
    assert "NOT_SERVING" in warning["what"]


async def test_a_store_that_fails_is_an_error_and_no_riddle(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER))
    head.serving["fleet.v1.FleetService"] = False
    says(head, durability=admin.DURABILITY_RELAXED, store_trouble="no space is left for /d/head.db")
    ended = await fleet("doctor")
    assert ended.code == 1
    assert "  kept      on disk, relaxed\n" in ended.out
    *_, what, advice, summary = ended.out.splitlines()
    assert what == (
        "error: nothing can be kept on disk: no space is left for /d/head.db;"
        " new work is refused and streams wait"
    )
    assert advice.startswith("  what to do: make room there")
    assert summary == "1 error"
    told = json.loads((await fleet("doctor", "--json")).out)["head"]
    assert (told["durability"], told["store_trouble"]) == ("relaxed", "no space is left for /d/head.db")


async def test_a_head_that_keeps_nothing_says_so(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER))
    says(head, durability=admin.DURABILITY_MEMORY)
    assert "  kept      in memory only: sessions end with the head\n" in (await fleet("doctor")).out


async def test_a_head_that_may_not_be_watched_is_examined_all_the_same(
    head: ScriptedHead, fleet: Fleet
) -> None:
    has(head, (UP, ANSWER))
    head.told["WatchFleet"] = [Refuse(code_pb2.RESOURCE_EXHAUSTED, "64 streams", reason="LIMIT_EXCEEDED")]
    ended = await fleet("doctor")
    assert (ended.code, "kept" in ended.out) == (0, False)


async def test_a_token_that_is_refused_is_told_as_such(head: ScriptedHead, fleet: Fleet) -> None:
    detail = "10.20.130.141:8454 refused the handshake: give both the same fleet token (UNAUTHENTICATED no)"
    refused = admin.NodeProbe(name=DOWN.name, address=DOWN.address, detail=detail)
    has(head, (UP, ANSWER), (DOWN, refused))
    out = (await fleet("doctor")).out
    assert "  handshake refused\n" in out
    assert "  what to do: give both the same fleet token\n" in out


async def test_a_head_that_shuts_down_is_told(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER))
    head.serving = {"": False, "fleet.v1.FleetService": False}
    ended = await fleet("doctor")
    assert ended.code == 1
    assert "error: the head is shutting down" in ended.out


async def test_callers_that_cannot_reach_the_head_are_a_finding(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER))
    ended = await fleet("doctor", "--address", "127.0.0.1:1")
    assert ended.code == 1
    assert (
        "error: callers cannot reach the head: no head listens at 127.0.0.1:1 (connection refused)"
        in ended.out
    )


async def test_a_refusal_of_the_head_ends_it(head: ScriptedHead, fleet: Fleet) -> None:
    has(head, (UP, ANSWER))
    head.replies["ProbeNodes"] = Refuse(code_pb2.INTERNAL, "it broke", reason="INTERNAL")
    ended = await fleet("doctor")
    assert (ended.code, ended.out) == (1, "")
    assert "it broke" in ended.err


@pytest.mark.parametrize("columns", [80, 120])
async def test_it_fits_a_terminal(head: ScriptedHead, columns: int) -> None:
    has(head, (UP, ANSWER), (DOWN, NO_ANSWER))
    lines = await in_terminal(head, columns, "doctor")
    assert max(map(len, lines)) <= columns
    assert any(UP.address in line for line in lines)


async def test_a_real_head_is_examined_with_a_node_up_and_one_that_is_not_there(
    tmp_path: Path, fleet: Fleet
) -> None:
    async with Children(tmp_path) as children:
        command = [command_of("fleet-node"), "--listen", "127.0.0.1:0", "--identity", "a", "--model", "demo"]
        _, line = await children.start("node", command, "fleet-node: a on ")
        command = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        command += ["--node", line.rpartition(" ")[2], "--node", "127.0.0.1:1"]
        _, line = await children.start("head", command, "fleet: serving")
        callers, _, operators = line.partition("callers on ")[2].partition(", admin on ")
        where = ("--address", callers, "--admin-address", operators)
        told = json.loads((await fleet("doctor", *where, "--json")).out)
        assert [each["handshake"] for each in told["nodes"]] == ["none", "accepted"]
        assert [each["node"] for each in told["findings"]] == ["127.0.0.1:1"]
        assert "connection refused" in told["findings"][0]["what"]
        await fleet("nodes", "remove", "127.0.0.1:1", "--admin-address", operators)
        ended = await fleet("doctor", *where)
        assert ended.out.endswith("all is well with the head and 1 node\n")
        assert "  kept      on disk, strict\n" in ended.out
        assert ended.code == 0
