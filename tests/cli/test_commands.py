"""The commands as processes against a head: what they ask, print and exit with."""

from __future__ import annotations

import json
import signal

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet_pb2
from fleet.v1.types_pb2 import CapacityReport, Model
from tests.cli.conftest import Fleet, start_fleet
from tests.cli.scripted_head import (
    CONNECTION_LOST,
    HEAD_DRAINING,
    Hang,
    Refuse,
    ScriptedHead,
    accepted,
    finished,
    on_branch,
    tokens,
)

NODE = admin.Node(
    name="node-a",
    address="10.0.0.7:8454",
    state=admin.NODE_STATE_UP,
    cordoned=True,
    cordon_note="new driver",
    models=[Model(name="stub", revision="r1")],
    report=CapacityReport(kv_blocks_used=25, kv_blocks_total=100),
    report_age_ms=700,
    lanes=8,
    running=3,
    queued=2,
    sessions=5,
    outbox=1,
    failures={"link_lost": 2},
)
MOVED = fleet_pb2.GenerationEvent(
    moved=fleet_pb2.Moved(
        from_node="node-a",
        to_node="node-b",
        cause=fleet_pb2.MOVE_CAUSE_LINK_LOST,
        next_index=2,
        gap_ms=312,
        epoch=(7 << 32) | 2,
    )
)
NOT_FOUND = Refuse(
    code_pb2.NOT_FOUND, "no session s9", reason="SESSION_NOT_FOUND", metadata={"sessionId": "s9"}
)
THERE = Refuse(
    code_pb2.ALREADY_EXISTS, "session s9 is there already; choose another", reason="SESSION_ALREADY_EXISTS"
)


def flowing(text: str) -> str:
    """What wrong use is told, without the box around it."""
    return " ".join(text.replace("│", " ").split())


# -------------------------------------------------------------------------------------------- generate


async def test_generate_prints_ids_as_one_line_and_moves_beside_them(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.streams = [
        [accepted(), tokens(0, 10, 11), MOVED, tokens(2, 12), finished(output_tokens=3, context_tokens=3)]
    ]
    ended = await fleet("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "3")
    assert ended.code == 0
    assert ended.out.split() == ["10", "11", "12"]
    assert "moved: node-a -> node-b at index 2 (LINK_LOST), gap 312 ms" in ended.err
    assert "finished: LENGTH, 3 tokens after 3, 1 attempt" in ended.err
    (asked,) = head.requests("Complete")
    assert list(asked.token_ids) == [1, 2, 3]
    assert (asked.session.model, asked.spec.max_new_tokens) == ("demo", 3)
    assert asked.spec.disconnect_grace_ms > 0


async def test_generate_says_when_the_window_ended_the_answer(head: ScriptedHead, fleet: Fleet) -> None:
    whole = [accepted(), tokens(0, 10), finished(output_tokens=1, context_tokens=3)]
    head.streams = [whole, whole]
    ask = ("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new")
    assert "finished: LENGTH (the window is full), 1 token after 3" in (await fleet(*ask, "5")).err
    assert "finished: LENGTH, 1 token after 3" in (await fleet(*ask, "1")).err


async def test_generate_prints_a_token_before_the_next_one_is_there(head: ScriptedHead) -> None:
    head.streams = [[accepted(), tokens(0, 10), Hang()]]
    process = await start_fleet(head, "generate", "--model", "demo", "--tokens", "1")
    assert process.stdout is not None
    assert await process.stdout.readexactly(2) == b"10"
    process.kill()
    await process.communicate()


async def test_generate_as_json_prints_one_event_per_line(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [[accepted(), tokens(0, 10, 11), MOVED, finished("STOP", stop_index=0, output_tokens=2)]]
    ended = await fleet("generate", "--model", "demo", "--tokens", "-", "--json", stdin="1 2\n3\n")
    assert ended.code == 0
    events = [json.loads(line) for line in ended.out.splitlines()]
    assert [event["event"] for event in events] == ["accepted", "tokens", "moved", "finished"]
    assert events[0] == {"event": "accepted", "generation_id": "g1", "session_id": "s1"}
    assert events[1] == {"event": "tokens", "first_index": 0, "token_ids": [10, 11]}
    assert events[2]["cause"] == "LINK_LOST"
    assert events[2]["epoch"] == (7 << 32) | 2
    assert (events[3]["reason"], events[3]["stop_index"], events[3]["output_tokens"]) == ("STOP", 0, 2)
    assert list(head.requests("Complete")[0].token_ids) == [1, 2, 3]


async def test_generate_passes_everything_that_was_asked(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [[accepted(), finished()]]
    await fleet(
        *("generate", "--model", "demo", "--tokens", "1", "--max-wall", "2.5", "--temperature", "0.5"),
        *("--top-k", "4", "--seed", "9", "--stop", "5,6", "--stop", "7", "--label", "zone=a", "--extend"),
    )
    asked = head.requests("Complete")[0]
    assert asked.spec.max_wall_ms == 2500
    assert [list(stop.token_ids) for stop in asked.spec.stop] == [[5, 6], [7]]
    assert asked.spec.extend_context
    assert dict(asked.session.node_selector) == {"zone": "a"}
    sampling = asked.session.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 4, 9)
    assert not sampling.HasField("top_p")


async def test_generate_in_a_session_appends_first(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [[accepted(), tokens(0, 10), finished()]]
    ended = await fleet("generate", "--session", "s1", "--tokens", "4,5")
    assert ended.code == 0
    assert [name for name, _ in head.calls] == ["GetSession", "AppendTokens", "Generate"]
    assert list(head.requests("AppendTokens")[0].token_ids) == [4, 5]
    assert head.requests("Generate")[0].session_id == "s1"


async def test_generate_makes_a_missing_session_when_a_model_is_named(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.streams = [[accepted(), finished()]]
    ended = await fleet("generate", "--session", "s9", "--model", "demo", "--tokens", "4,5")
    assert ended.code == 0
    # No call that a head has to refuse.
    assert [name for name, _ in head.calls] == ["CreateSession", "Generate"]
    (made,) = head.requests("CreateSession")
    assert (made.session_id, made.spec.model, list(made.token_ids)) == ("s9", "demo", [4, 5])


async def test_generate_goes_on_with_a_session_that_is_there_and_says_when_it_is_somebody_elses(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.replies["CreateSession"] = THERE
    spec = fleet_pb2.SessionSpec(model="demo")
    head.replies["GetSession"] = fleet_pb2.GetSessionResponse(session=fleet_pb2.Session(spec=spec))
    head.streams = [[accepted(), finished()]]
    asked = ("generate", "--session", "s9", "--model", "demo", "--tokens", "4,5")
    assert (await fleet(*asked)).code == 0
    assert list(head.requests("AppendTokens")[0].token_ids) == [4, 5]
    head.replies["GetSession"] = NOT_FOUND
    ended = await fleet(*asked)
    assert (ended.code, "[SESSION_ALREADY_EXISTS]" in ended.err) == (1, True)


async def test_generate_without_a_model_says_that_the_session_is_missing(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.replies["GetSession"] = NOT_FOUND
    ended = await fleet("generate", "--session", "s9")
    assert (ended.code, ended.out) == (1, "")
    assert "fleet: no session s9 [SESSION_NOT_FOUND]" in ended.err
    assert "`fleet sessions`" in ended.err


async def test_generate_exits_with_1_when_the_answer_is_not_whole(head: ScriptedHead, fleet: Fleet) -> None:
    cause = fleet_pb2.ErrorCause(reason="POISON_REQUEST", message="two nodes were lost on it")
    head.streams = [
        [accepted(), tokens(0, 10), finished("ERROR", error=cause)],
        [accepted(), finished("CANCELLED")],
    ]
    ended = await fleet("generate", "--model", "demo", "--tokens", "1")
    assert (ended.code, ended.out) == (1, "10\n")
    assert "finished: ERROR [POISON_REQUEST] two nodes were lost on it" in ended.err
    assert (await fleet("generate", "--model", "demo", "--tokens", "1")).code == 1


async def test_generate_takes_a_lost_connection_up_again(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [[accepted(), tokens(0, 10), CONNECTION_LOST], [accepted(), tokens(1, 11), finished()]]
    ended = await fleet("generate", "--model", "demo", "--tokens", "1")
    assert ended.code == 0
    assert ended.out.split() == ["10", "11"]
    assert "connection lost (Socket closed); going on at index 1" in ended.err


async def test_generate_goes_on_when_the_head_ends_and_comes_back_on_another_branch(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.streams = [
        [accepted(), tokens(0, 10), HEAD_DRAINING],
        [*on_branch(1, accepted(), tokens(1, 11)), CONNECTION_LOST],
        on_branch(1, accepted(), tokens(2, 12), finished()),
    ]
    ended = await fleet("generate", "--model", "demo", "--tokens", "1", "--json")
    assert ended.code == 0
    events = [json.loads(line) for line in ended.out.splitlines()]
    assert [event.get("branch") for event in events] == [None, None, 1, 1, 1]
    assert events[2] == {"event": "tokens", "branch": 1, "first_index": 1, "token_ids": [11]}
    assert "connection lost (the head is shutting down); going on at index 1" in ended.err
    assert [call.branch for call in head.requests("AttachGeneration")] == [0, 1]


async def test_ctrl_c_cancels_the_generation_and_exits_with_130(head: ScriptedHead) -> None:
    head.streams = [[accepted(), tokens(0, 10), Hang()]]
    process = await start_fleet(head, "generate", "--model", "demo", "--tokens", "1")
    assert process.stdout is not None
    assert await process.stdout.readexactly(2) == b"10"
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130
    assert b"cancelled after 1 token\n" in err
    (asked,) = head.requests("Complete")
    (cancelled,) = head.requests("CancelGeneration")
    assert cancelled.generation_id == asked.generation_id
    assert out == b"\n"


# ------------------------------------------------------------------------------------------------ nodes


async def test_nodes_shows_a_line_per_node(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[NODE], books_balance=True)
    ended = await fleet("nodes")
    assert ended.code == 0
    heading, line, note = ended.out.splitlines()
    assert heading.split() == [
        *("NODE", "ADDRESS", "STATE", "MODELS", "LANES", "QUEUED", "SESSIONS", "KV", "REPORT")
    ]
    for part in ("node-a", "10.0.0.7:8454", "up, cordoned", "stub", "3/8", "25 %", "700 ms"):
        assert part in line
    assert note == "node-a: cordoned: new driver; owed 1 revoke; 2 x link_lost"


async def test_nodes_as_json_has_every_field_with_numbers_as_numbers(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[NODE], books_balance=True)
    listed = json.loads((await fleet("nodes", "--json")).out)
    assert listed["books_balance"] is True
    (node,) = listed["nodes"]
    assert (node["name"], node["state"], node["cordoned"]) == ("node-a", "UP", True)
    assert node["failures"] == {"link_lost": 2}
    assert node["report"]["kv_blocks_total"] == 100
    assert node["models"][0]["max_context_tokens"] == 0
    assert "last_seen_time" not in node


async def test_nodes_says_how_to_add_the_first_one(fleet: Fleet) -> None:
    ended = await fleet("nodes")
    assert ended.code == 0
    assert "fleet nodes add HOST:PORT" in ended.err


async def test_books_that_do_not_balance_are_told(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[NODE])
    assert "warning: reservations do not equal" in (await fleet("nodes")).err


async def test_nodes_add_remove_cordon_and_uncordon_name_the_node(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies |= {
        "AddNode": admin.AddNodeResponse(node=NODE),
        "RemoveNode": admin.RemoveNodeResponse(node=NODE),
        "CordonNode": admin.CordonNodeResponse(node=NODE),
        "UncordonNode": admin.UncordonNodeResponse(node=NODE),
    }
    assert "node-a" in (await fleet("nodes", "add", "10.0.0.7:8454")).out
    assert (await fleet("nodes", "remove", "node-a")).out == "removed node-a (10.0.0.7:8454)\n"
    assert "node-a" in (await fleet("cordon", "node-a", "--note", "new driver")).out
    assert json.loads((await fleet("uncordon", "node-a", "--json")).out)["name"] == "node-a"
    assert head.requests("AddNode")[0].address == "10.0.0.7:8454"
    assert head.requests("RemoveNode")[0].node == "node-a"
    assert (head.requests("CordonNode")[0].node, head.requests("CordonNode")[0].note) == (
        "node-a",
        "new driver",
    )
    assert head.requests("UncordonNode")[0].node == "node-a"


async def test_a_probe_that_fails_exits_with_1_and_says_why(head: ScriptedHead, fleet: Fleet) -> None:
    probes = [
        admin.NodeProbe(name="node-a", address="a:1", reachable=True, identity="node-a", latency_ms=4),
        admin.NodeProbe(name="node-b", address="b:1", detail="connection refused: is it running?"),
    ]
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse(probes=probes)
    ended = await fleet("nodes", "probe", "node-a", "node-b")
    assert ended.code == 1
    assert "connection refused: is it running?" in ended.out
    assert list(head.requests("ProbeNodes")[0].nodes) == ["node-a", "node-b"]
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse(probes=probes[:1])
    assert (await fleet("nodes", "probe")).code == 0


# ------------------------------------------------------------------------------------ sessions, explain


async def test_sessions_follows_pages_and_filters(head: ScriptedHead, fleet: Fleet) -> None:
    session = fleet_pb2.Session(
        session_id="s1",
        spec=fleet_pb2.SessionSpec(model="stub"),
        state=fleet_pb2.SESSION_STATE_GENERATING,
        context_length=42,
        node="node-a",
        epoch=1 << 40,
        generation_id="g1",
        create_time=Timestamp(seconds=1_700_000_000),
        last_use_time=Timestamp(seconds=1_700_000_001, nanos=500_000_000),
    )
    head.replies["ListSessions"] = fleet_pb2.ListSessionsResponse(sessions=[session], next_page_token="p2")
    ended = await fleet("sessions", "--state", "generating", "--node", "node-a", "--limit", "2", "--json")
    listed = json.loads(ended.out)
    assert listed["more"] is True
    assert [each["session_id"] for each in listed["sessions"]] == ["s1", "s1"]
    assert listed["sessions"][0]["epoch"] == 1 << 40
    assert listed["sessions"][0]["last_use_time"] == "2023-11-14T22:13:21.500Z"
    first, second = head.requests("ListSessions")
    assert (first.state, first.node) == (fleet_pb2.SESSION_STATE_GENERATING, "node-a")
    assert second.page_token == "p2"
    shown = await fleet("sessions", "--limit", "1")
    assert shown.code == 0, shown.err
    for part in ("s1", "stub", "generating", "42", "node-a", "g1"):
        assert part in shown.out.splitlines()[1]
    assert "there are more than 1" in shown.err
    assert shown.out.splitlines()[1].split()[-2:] == ["g1", "-"], "what generates is not idle"
    session.generation_id = ""
    head.replies["ListSessions"] = fleet_pb2.ListSessionsResponse(sessions=[session])
    idle = await fleet("sessions", "--limit", "1")
    assert idle.out.splitlines()[1].split()[-1] != "-"


async def test_explain_shows_the_terms_or_why_not(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["ExplainPlacement"] = admin.ExplainPlacementResponse(
        policy="load-aware",
        chosen="node-a",
        verdicts=[
            admin.NodeVerdict(
                node="node-a",
                eligible=True,
                eta_ms=1500,
                decode_tokens_per_s=20,
                decode_reported=True,
                prefill_tokens_per_s=200,
            ),
            admin.NodeVerdict(node="node-b", left_out="down"),
        ],
    )
    arguments = ("explain", "--model", "demo", "--prompt-tokens", "9", "--label", "zone=a")
    ended = await fleet(*arguments)
    assert ended.code == 0
    assert "load-aware: it would go to node-a" in ended.out
    assert "1.5 s" in ended.out
    assert "20/s" in ended.out.replace("~20/s", "")
    assert "~200/s" in ended.out
    assert "~ a stand-in" in ended.out
    assert "left out: down" in ended.out
    asked = head.requests("ExplainPlacement")[0]
    assert (asked.spec.model, asked.prompt_tokens) == ("demo", 9)
    verdicts = json.loads((await fleet(*arguments, "--json")).out)["verdicts"]
    assert verdicts[0]["eta_ms"] == 1500
    assert "eta_ms" not in verdicts[1]


async def test_a_session_that_is_there_is_not_asked_for_another_model_or_other_labels(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.replies["CreateSession"] = THERE
    spec = fleet_pb2.SessionSpec(model="demo", node_selector={"zone": "a"})
    head.replies["GetSession"] = fleet_pb2.GetSessionResponse(
        session=fleet_pb2.Session(session_id="s1", spec=spec)
    )
    head.streams = [[accepted(), finished()]]
    asked = ("generate", "--session", "s1", "--tokens", "1")
    other = await fleet(*asked, "--model", "other")
    assert (other.code, "of model demo" in other.err) == (2, True)
    moved = await fleet(*asked, "--model", "demo", "--label", "zone=b")
    assert (moved.code, "with zone=a" in moved.err) == (2, True)
    assert not head.requests("AppendTokens")
    assert (await fleet(*asked, "--model", "demo", "--label", "zone=a")).code == 0


@pytest.mark.parametrize("where", [("--model", "demo"), ("--session", "s1")])
async def test_standard_input_without_token_ids_is_told(
    head: ScriptedHead, fleet: Fleet, where: tuple[str, str]
) -> None:
    ended = await fleet("generate", *where, "--tokens", "-", stdin=" \n")
    assert (ended.code, "standard input has none" in flowing(ended.err)) == (2, True)
    assert not head.calls


async def test_a_node_that_dialed_the_head_is_no_failure_of_a_probe(head: ScriptedHead, fleet: Fleet) -> None:
    joined = admin.NodeProbe(name="node-j", address="joined:node-j", detail="it joined; wait for it")
    up = admin.NodeProbe(name="node-a", address="a:1", reachable=True)
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse(probes=[joined, up])
    ended = await fleet("nodes", "probe")
    assert (ended.code, "not dialed" in ended.out) == (0, True)
    assert "wait for it" not in ended.out
