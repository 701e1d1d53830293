"""What `fleet doctor` finds: each fault told once, with what to do, and nothing where nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1.types_pb2 import CapacityReport, Model
from fleet_service.cli.findings import (
    Callers,
    Finding,
    HeadSeen,
    Severity,
    advised,
    findings,
    healthy,
)

WELL = HeadSeen(Callers.SERVING, "", books_balance=True)
DEMO = Model(name="demo", revision="r1", max_context_tokens=4096)


def node(name: str = "a", **changes: Any) -> admin.Node:
    fields: dict[str, Any] = {
        "name": name,
        "address": f"{name}:1",
        "incarnation": "run-1",
        "state": admin.NODE_STATE_UP,
        "models": [DEMO],
        "report": CapacityReport(max_lanes=8),
        "lanes": 8,
    }
    return admin.Node(**(fields | changes))


def answer(of: admin.Node, identity: str = "") -> admin.NodeProbe:
    return admin.NodeProbe(
        name=of.name, address=of.address, reachable=True, identity=identity or of.name, models=of.models
    )


def no_answer(of: admin.Node, detail: str) -> admin.NodeProbe:
    return admin.NodeProbe(name=of.name, address=of.address, detail=detail)


def examine(*nodes: admin.Node, head: HeadSeen = WELL, probe: admin.NodeProbe | None = None) -> list[Finding]:
    probes = {each.address: answer(each) for each in nodes}
    if probe is not None:
        probes[probe.address] = probe
    return findings(head, nodes, probes)


def only(found: list[Finding]) -> Finding:
    (one,) = found
    return one


def down(**changes: Any) -> admin.Node:
    return node("b", **({"state": admin.NODE_STATE_DOWN, "state_detail": "connection refused"} | changes))


def test_a_store_that_fails_is_told_instead_of_what_follows_from_it() -> None:
    full = HeadSeen(
        Callers.NOT_SERVING, "", books_balance=True, store_trouble="no space is left for /d/head.db"
    )
    one = only(examine(node(), head=full))
    assert one.severity is Severity.ERROR
    assert one.what.startswith(
        "nothing can be kept on disk: no space is left for /d/head.db; new work is refused"
    )
    assert "make room" in one.do
    # What else keeps callers out is told beside it.
    assert [each.what.split(":")[0] for each in examine(down(), head=full)][:2] == [
        "nothing can be kept on disk",
        "no node is up",
    ]


def test_a_fleet_that_is_well_has_no_findings() -> None:
    found = examine(node("a"), node("b"))
    assert found == []
    assert healthy(found)


def test_a_node_that_is_down_is_an_error_with_the_cause_and_what_to_do() -> None:
    lost = down()
    one = only(examine(node(), lost, probe=no_answer(lost, "cannot connect to b:1: connection refused")))
    assert (one.severity, one.node) == (Severity.ERROR, "b")
    assert one.what == "down: cannot connect to b:1: connection refused"
    assert one.do.startswith("start the node")
    assert not healthy([one])


@pytest.mark.parametrize(
    "detail,what,do",
    [
        (
            "b:1 refused the handshake: give both the same fleet token (UNAUTHENTICATED no)",
            "b:1 refused the handshake (UNAUTHENTICATED no)",
            "give both the same fleet token",
        ),
        ("cannot connect to b:1: no answer within 5 s", "no answer within 5 s", "firewall"),
        ("cannot connect to b:1: name not found", "name not found", "check the host name"),
        ("b:1 took the connection but did not answer the handshake in time", "handshake", "restart it"),
        (
            "b:1 does not speak gRPC: check address and port, and that the node serves without TLS",
            "b:1 does not speak gRPC",
            "check address and port, and that the node serves without TLS",
        ),
        (
            "the node reports epoch 9, of a term far in the future; compare the clocks of the heads",
            "the node reports epoch 9, of a term far in the future",
            "compare the clocks of the heads",
        ),
        ("something odd: the end", "something odd: the end", "see the node's log and the head's"),
    ],
)
def test_what_to_do_follows_from_the_head_s_account(detail: str, what: str, do: str) -> None:
    told, advice = advised(detail)
    assert what in told
    assert do in advice


def test_a_node_that_answers_and_is_down_is_told_with_the_head_s_reason() -> None:
    lost = down(state_detail="identity b is in use by a living node at x; give this one another")
    one = only(examine(node(), lost))
    assert one.what == "it answers a handshake, and yet is down: identity b is in use by a living node at x"
    assert one.do == "give this one another"


def test_a_node_that_has_just_come_back_is_not_said_to_want_a_start() -> None:
    one = only(examine(node(), down(state_detail="cannot connect to b:1: connection refused")))
    assert "it answers a handshake" in one.what
    assert one.do.startswith("look again")


def test_a_node_that_dials_in_is_not_held_to_answer_a_probe() -> None:
    joined = node("j", address="joined:j")
    assert examine(joined, probe=no_answer(joined, "it cannot be dialed")) == []
    gone = node("j", address="joined:j", state=admin.NODE_STATE_DOWN, state_detail="the link was closed")
    one = only(examine(node(), gone, probe=no_answer(gone, "it cannot be dialed")))
    assert one.what == "down: the link was closed"
    assert "dial this head" in one.do


@pytest.mark.parametrize(
    "changes,severity,what,do",
    [
        (
            {"state": admin.NODE_STATE_SUSPECT, "state_detail": "silent for 2 s"},
            Severity.WARNING,
            "silent for 2 s",
            "look again",
        ),
        ({"state": admin.NODE_STATE_CONNECTING}, Severity.WARNING, "first connection", "look again"),
        ({"reports_stale": True, "report_age_ms": 12_000}, Severity.WARNING, "12.0 s old", "its log"),
        ({"models": []}, Severity.ERROR, "serves no model", "start it with a model"),
        ({"cordoned": True, "cordon_note": "new driver"}, Severity.NOTE, "new driver", "fleet uncordon b"),
        ({"outbox": 2}, Severity.NOTE, "2 revokes owed", "revoke_refused"),
        (
            {"report": CapacityReport(max_lanes=200), "lanes": 64},
            Severity.NOTE,
            "it has 200 lanes; the head uses 64",
            "head.max_lanes_per_node",
        ),
        (
            {"report": CapacityReport(max_lanes=4), "lanes": 16},
            Severity.WARNING,
            "the head uses 16 lanes; it has only 4",
            "head.lanes_per_node",
        ),
        (
            {"report": CapacityReport(max_lanes=8, active_sessions=9, max_sessions=9)},
            Severity.NOTE,
            "9 sessions, of 9",
            "park",
        ),
    ],
)
def test_each_fault_of_a_node_is_told_once(
    changes: dict[str, Any], severity: Severity, what: str, do: str
) -> None:
    one = only(examine(node(), node("b", **changes)))
    assert (one.severity, one.node) == (severity, "b")
    assert what in one.what
    assert do in one.do
    assert healthy([one]) == (severity is Severity.NOTE)


def test_a_node_that_is_up_and_takes_no_new_connection_is_a_warning() -> None:
    one = only(examine(node(), probe=no_answer(node(), "cannot connect to a:1: connection refused")))
    assert (one.severity, one.node) == (Severity.WARNING, "a")
    assert "takes no new connection" in one.what


def test_another_node_at_an_address_is_told() -> None:
    one = only(examine(node(), probe=answer(node(), identity="stranger")))
    assert one.what == "another node answers at a:1: stranger"


def test_revisions_that_differ_are_told_with_the_nodes_of_each() -> None:
    one = only(examine(node("a"), node("b", models=[Model(name="demo", revision="r2")]), node("c")))
    assert (one.severity, one.node) == (Severity.WARNING, "")
    assert one.what == "model demo is served in 2 revisions: r1 on a, c; r2 on b"


def test_windows_that_differ_are_a_note() -> None:
    wider = Model(name="demo", revision="r1", max_context_tokens=8192)
    one = only(examine(node("a"), node("b", models=[wider])))
    assert one.severity is Severity.NOTE
    assert one.what.endswith("4096 on a; 8192 on b")


def test_a_head_without_nodes_is_told_how_to_get_one() -> None:
    one = only(examine(head=HeadSeen(Callers.NOT_SERVING, "", books_balance=True)))
    assert (one.severity, one.what) == (Severity.ERROR, "the head has no nodes")
    assert "fleet nodes add" in one.do


def test_no_node_up_and_all_cordoned_are_errors_of_the_whole_told_first() -> None:
    first, second = examine(down(), head=HeadSeen(Callers.NOT_SERVING, "", books_balance=True))
    assert "no node is up" in first.what
    assert second.node == "b"
    first, second = examine(node(cordoned=True))
    assert first.what.startswith("every node that is up is cordoned")
    assert (first.severity, second.severity) == (Severity.ERROR, Severity.NOTE)


@pytest.mark.parametrize(
    "head,what",
    [
        (HeadSeen(Callers.DRAINING, "", books_balance=True), "shutting down"),
        (HeadSeen(Callers.NOT_SERVING, "", books_balance=True), "NOT_SERVING though a node is up"),
        (HeadSeen(Callers.UNREACHABLE, "h:1: connection refused", books_balance=True), "h:1: connection"),
        (HeadSeen(Callers.SERVING, "", books_balance=False), "reservations do not equal the work"),
    ],
)
def test_each_fault_of_the_head_is_told_once(head: HeadSeen, what: str) -> None:
    one = only(examine(node(), head=head))
    assert what in one.what
    assert (one.node, bool(one.do)) == ("", True)
    assert not healthy([one])


def test_books_that_do_not_balance_name_the_nodes() -> None:
    odd = node("b", running=1, queued=1, reservations=3)
    one = only(examine(node(), odd, head=HeadSeen(Callers.SERVING, "", books_balance=False)))
    assert "(here: b)" in one.what
