"""`fleet drain` and what the other commands say of a drain: who, when, why, and how far it is."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1.types_pb2 import Model
from tests.cli.conftest import Fleet, start_fleet
from tests.cli.scripted_head import Hang, Refuse, ScriptedHead
from tests.cli.test_terminal import in_terminal

START = Timestamp(seconds=1_750_000_000)


def drain(state: admin.DrainState = admin.DRAIN_STATE_DRAINING, **fields: Any) -> admin.Drain:
    return admin.Drain(state=state, by="olga@desk", note="new driver", start_time=START, **fields)


def told(state: admin.DrainState = admin.DRAIN_STATE_DRAINING, **fields: Any) -> admin.DrainNodeResponse:
    return admin.DrainNodeResponse(node="node-a", drain=drain(state, **fields))


def draining_node(state: admin.DrainState = admin.DRAIN_STATE_DRAINING, **fields: Any) -> admin.Node:
    return admin.Node(
        name="node-a",
        address="10.0.0.7:8454",
        state=admin.NODE_STATE_UP,
        models=[Model(name="demo")],
        cordoned=True,
        cordon_note="new driver",
        cordoned_by="olga@desk",
        cordon_time=START,
        lanes=8,
        drain=drain(state, **fields),
    )


async def test_drain_says_how_it_stands_and_leaves_the_head_to_it(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [told(sessions=5, generations=3, staying=1), Hang()]
    ended = await fleet("drain", "node-a", "--note", "new driver")
    assert ended.code == 0
    assert "node-a: 5 sessions left, 3 generations (1 to end there" in ended.out
    (asked,) = head.requests("DrainNode")
    assert (asked.node, asked.note) == ("node-a", "new driver")
    assert re.fullmatch(r"\S+@\S+|\S+", asked.by)


async def test_drain_names_who_orders_it(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [told(admin.DRAIN_STATE_DRAINED)]
    await fleet("drain", "node-a", "--by", "olga")
    head.replies["CordonNode"] = admin.CordonNodeResponse(node=draining_node())
    await fleet("cordon", "node-a", "--by", "ivan")
    assert head.requests("DrainNode")[0].by == "olga"
    assert head.requests("CordonNode")[0].by == "ivan"


async def test_drain_waits_until_the_node_is_empty(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [
        told(sessions=5, generations=3, waiting=3),
        told(sessions=5, generations=3, waiting=3),
        told(sessions=1, moved=3, unbound=1),
        told(owed=2, moved=3, unbound=2),
        told(admin.DRAIN_STATE_DRAINED, moved=3, unbound=2),
    ]
    ended = await fleet("drain", "node-a", "--wait")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "node-a: 5 sessions left, 3 generations (3 waiting for a lane elsewhere); 0 moved, 0 unbound",
        "node-a: 1 session left; 3 moved, 1 unbound",
        "node-a: 0 sessions left, 2 revokes on the way; 3 moved, 2 unbound",
        "node-a: empty, it can be stopped; 3 moved, 2 unbound",
    ]


@pytest.mark.parametrize(
    "state, text",
    [(admin.DRAIN_STATE_ENDED, "ended with 2 sessions"), (admin.DRAIN_STATE_NODE_REMOVED, "node removed")],
)
async def test_a_drain_that_ends_otherwise_is_a_failure(
    head: ScriptedHead, fleet: Fleet, state: admin.DrainState, text: str
) -> None:
    head.told["DrainNode"] = [told(sessions=2), told(state, sessions=2)]
    ended = await fleet("drain", "node-a", "--wait")
    assert ended.code == 1
    assert text in ended.out


async def test_drain_as_json_is_an_object_per_message(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [told(sessions=2), told(admin.DRAIN_STATE_DRAINED, moved=2)]
    ended = await fleet("drain", "node-a", "--wait", "--json")
    first, last = map(json.loads, ended.out.splitlines())
    assert (first["node"], first["drain"]["state"], first["drain"]["sessions"]) == ("node-a", "DRAINING", 2)
    assert (first["drain"]["by"], first["drain"]["note"]) == ("olga@desk", "new driver")
    assert (last["drain"]["state"], last["drain"]["moved"]) == ("DRAINED", 2)


async def test_a_refused_drain_says_what_to_do(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [Refuse(code_pb2.NOT_FOUND, "no node node-x", reason="NODE_NOT_FOUND")]
    ended = await fleet("drain", "node-x")
    assert ended.code == 1
    assert "no node node-x [NODE_NOT_FOUND]" in ended.err
    assert "fleet nodes" in ended.err


async def test_a_head_that_does_not_answer_a_drain_is_told_of(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [Hang()]
    ended = await fleet("drain", "node-a", "--timeout", "0.3")
    assert ended.code == 1
    assert "did not answer in 0.3 s" in ended.err


async def test_ctrl_c_ends_the_waiting_and_not_the_drain(head: ScriptedHead) -> None:
    head.told["DrainNode"] = [told(sessions=2), Hang()]
    process = await start_fleet(head, "drain", "node-a", "--wait")
    assert process.stdout is not None
    assert b"2 sessions left" in await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "the drain of node-a goes on" in err.decode()
    assert "fleet uncordon node-a" in err.decode()
    assert not head.requests("UncordonNode")


async def test_a_terminal_shows_a_bar(head: ScriptedHead) -> None:
    head.told["DrainNode"] = [told(sessions=4), told(admin.DRAIN_STATE_DRAINED, moved=3, unbound=1)]
    text = "\n".join(await in_terminal(head, 100, "drain", "node-a", "--wait"))
    assert "4/4 sessions" in text
    assert "━" in text
    assert "node-a: empty, it can be stopped; 3 moved, 1 unbound" in text


async def test_nodes_tell_who_drains_since_when_why_and_how_far(head: ScriptedHead, fleet: Fleet) -> None:
    node = draining_node(sessions=2, generations=1, staying=1)
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[node], books_balance=True)
    out = (await fleet("nodes")).out
    assert "up, draining" in out
    assert "drained by olga@desk at 2025-06-15T15:06:40.000Z: new driver; 2 sessions left" in out
    node.ClearField("drain")
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[node], books_balance=True)
    out = (await fleet("nodes")).out
    assert "up, cordoned" in out
    assert "cordoned by olga@desk at 2025-06-15T15:06:40.000Z: new driver" in out


@pytest.mark.parametrize(
    "state, text, advice",
    [
        (admin.DRAIN_STATE_DRAINING, "2 sessions left", "fleet drain node-a --wait"),
        (admin.DRAIN_STATE_DRAINED, "empty, it can be stopped", "fleet nodes remove node-a"),
    ],
)
async def test_the_doctor_notes_a_drain(
    head: ScriptedHead, fleet: Fleet, state: admin.DrainState, text: str, advice: str
) -> None:
    node = draining_node(state, sessions=2 * (state == admin.DRAIN_STATE_DRAINING))
    other = admin.Node(name="b", address="b:1", state=admin.NODE_STATE_UP, models=node.models, lanes=8)
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[node, other], books_balance=True)
    probes = [admin.NodeProbe(name=n.name, address=n.address, reachable=True) for n in (node, other)]
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse(probes=probes)
    ended = await fleet("doctor")
    assert ended.code == 0
    assert f"note: node-a: drained by olga@desk at 2025-06-15T15:06:40.000Z: new driver; {text}" in ended.out
    assert advice in ended.out
    assert "fleet uncordon node-a" in ended.out


async def test_draining_or_cordoning_the_last_node_that_takes_work_is_warned_of(
    head: ScriptedHead, fleet: Fleet
) -> None:
    node = admin.Node(name="node-a", address="node-a.example:8454", state=admin.NODE_STATE_UP)
    gone = admin.Node(name="node-b", address="b:1", state=admin.NODE_STATE_UP, cordoned=True)
    head.replies["CordonNode"] = admin.CordonNodeResponse(node=node)
    head.told["DrainNode"] = [told(admin.DRAIN_STATE_DRAINED)]
    for others, warned in (([gone], True), ([admin.Node(name="c", state=admin.NODE_STATE_UP)], False)):
        head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[node, *others])
        for command in ("drain", "cordon"):
            ended = await fleet(command, "node-a")
            assert (ended.code, "the last node that takes new work" in ended.err) == (0, warned), command


async def test_a_node_that_was_empty_is_told_empty_without_waiting(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [told(), told(admin.DRAIN_STATE_DRAINED)]
    ended = await fleet("drain", "node-a")
    assert (ended.code, ended.out) == (0, "node-a: empty, it can be stopped; 0 moved, 0 unbound\n")


async def test_the_bar_of_a_node_that_was_empty_is_full(head: ScriptedHead) -> None:
    head.told["DrainNode"] = [told(), told(admin.DRAIN_STATE_DRAINED)]
    lines = await in_terminal(head, 100, "drain", "node-a", "--wait")
    assert any("0/0 sessions" in line and "━" * 40 in line for line in lines)


async def test_a_wait_that_takes_too_long_ends_and_not_the_drain(head: ScriptedHead, fleet: Fleet) -> None:
    head.told["DrainNode"] = [told(sessions=2), Hang()]
    ended = await fleet("drain", "node-a", "--wait", "--timeout", "0.5")
    assert ended.code == 1
    assert "not empty after 0.5 s; the drain of node-a goes on" in ended.err


async def test_explain_tells_a_drained_node_from_a_cordoned_one(head: ScriptedHead, fleet: Fleet) -> None:
    nodes = [draining_node(admin.DRAIN_STATE_DRAINED), admin.Node(name="node-b", cordoned=True)]
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=nodes)
    verdicts = [admin.NodeVerdict(node=node.name, left_out="cordoned") for node in nodes]
    head.replies["ExplainPlacement"] = admin.ExplainPlacementResponse(verdicts=verdicts)
    out = (await fleet("explain", "--model", "demo")).out
    assert re.search(r"node-a +left out: drained", out)
    assert re.search(r"node-b +left out: cordoned", out)


async def test_a_node_that_was_drained_and_stopped_is_no_error(head: ScriptedHead, fleet: Fleet) -> None:
    stopped = draining_node(admin.DRAIN_STATE_DRAINED)
    stopped.state, stopped.state_detail = admin.NODE_STATE_DOWN, "it was stopped"
    other = admin.Node(name="b", address="b:1", state=admin.NODE_STATE_UP, models=stopped.models, lanes=8)
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[stopped, other], books_balance=True)
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse(
        probes=[admin.NodeProbe(name="b", address="b:1", reachable=True)]
    )
    ended = await fleet("doctor")
    assert ended.code == 0
    assert "note: node-a: down, after it was drained: it was stopped" in ended.out
    other.CopyFrom(draining_node(admin.DRAIN_STATE_DRAINED))
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[other], books_balance=True)
    assert "every node that is up is drained: new work is refused" in (await fleet("doctor")).out
