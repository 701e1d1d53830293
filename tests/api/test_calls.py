"""Every RPC answers what the head says, and passes on what the head refuses with the documented code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import types_pb2 as types
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import ErrorCause, FinishReason, MoveCause, Moved, Tokens
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import OnDisconnect, Qos, Replay, SamplingOverride
from fleet_service.runtime.views import CancelOutcome, CancelResult, Explanation
from tests.api.conftest import Edge
from tests.api.fakes import FINISHED, NAME, STORY, VERDICT, FakeReader, not_found, refusal_of

SPEC = fleet.SessionSpec(
    model="toy",
    model_revision="r1",
    sampling=types.SamplingParams(temperature=0.5, top_k=3, seed=9),
    qos_class=types.QOS_CLASS_AGENT,
    node_selector={"zone": "eu"},
    replay=types.REPLAY_MODE_NEVER,
    engine_options=b"{}",
)
GENERATION = fleet.GenerationSpec(
    max_new_tokens=0,
    max_wall_ms=2500,
    stop=[types.TokenSequence(token_ids=[1, 2])],
    extend_context=True,
    on_disconnect=fleet.ON_DISCONNECT_CONTINUE,
    orphan_timeout_ms=1500,
)


async def test_create_session_reaches_the_head_as_asked_and_shows_the_session(edge: Edge) -> None:
    reply = await edge.fleet.CreateSession(
        fleet.CreateSessionRequest(session_id="s1", spec=SPEC, token_ids=[1, 2**32 - 1], request_id="r-1")
    )
    session_id, spec, token_ids, key = edge.head.calls["create_session"]
    assert session_id == "s1"
    assert list(token_ids) == [1, 2**32 - 1]
    assert (spec.model, spec.model_revision, spec.qos, spec.replay) == ("toy", "r1", Qos.AGENT, Replay.NEVER)
    assert spec.sampling == SamplingOverride(temperature=0.5, top_k=3, seed=9)
    assert spec.node_selector == {"zone": "eu"}
    assert key.request_id == "r-1"
    assert len(key.fingerprint) == 32
    session = reply.session
    assert (session.session_id, session.state) == ("s1", fleet.SESSION_STATE_BOUND)
    assert (session.context_length, session.context_crc32) == (3, 0xDEADBEEF)
    assert session.create_time.ToMilliseconds() == 1_700_000_000_250
    assert not session.spec.sampling.HasField("temperature")


async def test_a_request_id_marks_the_request_and_its_method_but_not_itself(edge: Edge) -> None:
    async def fingerprint(**changes: Any) -> bytes:
        request = fleet.AppendTokensRequest(session_id="s1", token_ids=[1], request_id="r-1")
        request.MergeFrom(fleet.AppendTokensRequest(**changes))
        await edge.fleet.AppendTokens(request)
        print_: bytes = edge.head.calls["append_tokens"][-1].fingerprint
        return print_

    first = await fingerprint()
    assert await fingerprint(request_id="r-2") == first
    assert await fingerprint(token_ids=[2]) != first
    await edge.fleet.GenerateAll(fleet.GenerateAllRequest(session_id="s1", request_id="r-1"))
    whole = edge.head.calls["generate"][3].fingerprint
    edge.head.generation.reader = FakeReader([STORY])
    async for _ in edge.fleet.Generate(fleet.GenerateRequest(session_id="s1", request_id="r-1")):
        pass
    assert edge.head.calls["generate"][3].fingerprint != whole
    await edge.fleet.AppendTokens(fleet.AppendTokensRequest(session_id="s1", token_ids=[1]))
    assert edge.head.calls["append_tokens"][-1] is None


async def test_get_session_gives_the_context_only_where_asked(edge: Edge) -> None:
    assert not (await edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1"))).token_ids
    asked = await edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1", include_token_ids=True))
    assert list(asked.token_ids) == [5, 6, 7]


async def test_list_sessions_passes_its_filters_on_and_pages_by_100_unless_told(edge: Edge) -> None:
    reply = await edge.fleet.ListSessions(
        fleet.ListSessionsRequest(state=fleet.SESSION_STATE_PARKED, node="node-a", page_token="next")
    )
    asked = [edge.head.calls["list_sessions"]]
    assert reply.next_page_token == "more"
    await edge.fleet.ListSessions(fleet.ListSessionsRequest(page_size=7))
    asked.append(edge.head.calls["list_sessions"])
    assert asked == [(100, "next", SessionState.PARKED, "node-a"), (7, "", None, "")]


async def test_append_tells_absent_from_zero(edge: Edge) -> None:
    await edge.fleet.AppendTokens(fleet.AppendTokensRequest(session_id="s1", truncate_to=0))
    _, token_ids, expected_length, truncate_to, _ = edge.head.calls["append_tokens"]
    assert (list(token_ids), expected_length, truncate_to) == ([], None, 0)


async def test_park_resume_and_finish_show_the_session(edge: Edge) -> None:
    parked = await edge.fleet.ParkSession(fleet.ParkSessionRequest(session_id="s1"))
    resumed = await edge.fleet.ResumeSession(fleet.ResumeSessionRequest(session_id="s1"))
    finished = await edge.fleet.FinishSession(fleet.FinishSessionRequest(session_id="s1"))
    assert parked.session == resumed.session == finished.session
    assert {"park_session", "resume_session", "finish_session"} <= edge.head.calls.keys()


async def test_generate_streams_every_event_in_order_and_ends(edge: Edge) -> None:
    events = [
        reply.event
        async for reply in edge.fleet.Generate(fleet.GenerateRequest(session_id="s1", spec=GENERATION))
    ]
    assert [event.WhichOneof("event") for event in events] == [
        "accepted",
        "started",
        "tokens",
        "tokens",
        "finished",
    ]
    assert (events[0].accepted.generation_id, events[0].accepted.session_id) == ("gen-1", "s1")
    assert (events[1].started.node, events[1].started.epoch) == ("node-a", 7)
    assert (events[3].tokens.first_index, list(events[3].tokens.token_ids)) == (2, [12, 13])
    finished = events[4].finished
    assert (finished.reason, finished.output_tokens) == (types.FINISH_REASON_LENGTH, 4)
    assert not finished.HasField("stop_index")
    assert finished.timings.first_token_ms == 250
    spec = edge.head.calls["generate"][2]
    assert (spec.max_new_tokens, spec.max_wall_s, spec.stop) == (0, 2.5, ((1, 2),))
    assert (spec.on_disconnect, spec.orphan_timeout_s) == (OnDisconnect.CONTINUE, 1.5)
    assert (spec.disconnect_grace_s, spec.qos, spec.extend_context) == (None, None, True)
    assert edge.head.generation.reader.closed_times >= 1


async def test_complete_and_attach_stream_the_same_and_generate_all_gathers_it(edge: Edge) -> None:
    move = Moved("node-a", "node-b", MoveCause.LINK_LOST, 2, 0.125, 8)
    story = (*STORY[:3], move, *STORY[3:])

    def again() -> None:
        edge.head.generation.reader = FakeReader([story[:2], story[2:]])

    again()
    completed = [
        reply.event
        async for reply in edge.fleet.Complete(
            fleet.CompleteRequest(session=SPEC, token_ids=[3], spec=GENERATION, generation_id="mine")
        )
    ]
    assert edge.head.calls["complete"][3] == "mine"
    again()
    attached = [
        reply.event
        async for reply in edge.fleet.AttachGeneration(
            fleet.AttachGenerationRequest(generation_id="gen-1", from_index=0)
        )
    ]
    assert completed == attached
    again()
    whole = await edge.fleet.GenerateAll(fleet.GenerateAllRequest(session_id="s1"))
    assert list(whole.token_ids) == [10, 11, 12, 13]
    assert whole.finished == completed[-1].finished
    assert [moved.gap_ms for moved in whole.moves] == [125]
    assert whole.moves[0] == completed[3].moved


async def test_attach_starts_where_asked(edge: Edge) -> None:
    request = fleet.AttachGenerationRequest(generation_id="gen-1", from_index=2)
    async for _ in edge.fleet.AttachGeneration(request):
        pass
    assert edge.head.generation.attached_at == 2


@pytest.mark.parametrize("branch", [0, 3])
async def test_every_event_carries_the_branch_and_attach_passes_on_the_reader_s(
    edge: Edge, branch: int
) -> None:
    edge.head.generation.reader.branch = branch
    request = fleet.AttachGenerationRequest(generation_id="gen-1", branch=2)
    events = [reply.event async for reply in edge.fleet.AttachGeneration(request)]
    assert {event.branch for event in events} == {branch}
    assert edge.head.generation.attached_branch == 2


async def test_more_tokens_than_a_message_should_hold_come_in_several(edge: Edge) -> None:
    ids = list(range(150_000))
    edge.head.generation.reader = FakeReader([[STORY[0], Tokens(5, ids), FINISHED]])
    got: list[int] = []
    async for reply in edge.fleet.AttachGeneration(fleet.AttachGenerationRequest(generation_id="gen-1")):
        if reply.event.HasField("tokens"):
            assert reply.event.tokens.first_index == 5 + len(got)
            got.extend(reply.event.tokens.token_ids)
    assert got == ids


@pytest.mark.parametrize(
    "result, outcome",
    [
        (CancelResult(CancelOutcome.HELD, None), fleet.CancelGenerationResponse.OUTCOME_HELD),
        (CancelResult(CancelOutcome.CANCELLED, FINISHED), fleet.CancelGenerationResponse.OUTCOME_CANCELLED),
        (
            CancelResult(CancelOutcome.ALREADY_FINISHED, FINISHED),
            fleet.CancelGenerationResponse.OUTCOME_ALREADY_FINISHED,
        ),
    ],
)
async def test_cancel_says_what_it_did(edge: Edge, result: CancelResult, outcome: int) -> None:
    edge.head.cancel_result = result
    reply = await edge.fleet.CancelGeneration(fleet.CancelGenerationRequest(generation_id="mine"))
    assert reply.outcome == outcome
    assert reply.HasField("finished") == (result.finished is not None)


async def test_list_models_shows_who_serves_what(edge: Edge) -> None:
    (summary,) = (await edge.fleet.ListModels(fleet.ListModelsRequest())).models
    assert (summary.model.name, summary.nodes_up, summary.nodes_known) == ("toy", 1, 2)
    assert list(summary.model.eos_token_ids) == [1, 2]


async def test_operators_see_and_steer_nodes(edge: Edge) -> None:
    listed = await edge.admin.ListNodes(admin.ListNodesRequest())
    assert listed.books_balance
    (node,) = listed.nodes
    assert (node.name, node.state, node.cordon_note) == ("node-a", admin.NODE_STATE_UP, "disk")
    assert (node.report.kv_blocks_used, node.report_age_ms, node.reservations) == (3, 500, 2)
    assert dict(node.failures) == {"LINK_LOST": 2}
    assert list(node.features) == [admin.NODE_FEATURE_INLINE_BIND]
    assert node.last_seen_time.seconds == 1_700_000_002
    assert (await edge.admin.GetNode(admin.GetNodeRequest(node="node-a"))).node == node
    added = await edge.admin.AddNode(admin.AddNodeRequest(address="[::1]:8454"))
    removed = await edge.admin.RemoveNode(admin.RemoveNodeRequest(node="node-a"))
    cordoned = await edge.admin.CordonNode(admin.CordonNodeRequest(node="node-a", note="disk", by="ops"))
    uncordoned = await edge.admin.UncordonNode(admin.UncordonNodeRequest(node="node-a"))
    assert added.node == removed.node == cordoned.node == uncordoned.node == node
    assert edge.head.calls["cordon_node"] == ("node-a", "disk", "ops")
    assert (node.found_by, node.unlisted) == (NAME.entry, True)
    (probe,) = (await edge.admin.ProbeNodes(admin.ProbeNodesRequest())).probes
    assert (probe.reachable, probe.latency_ms) == (True, 12)


async def test_operators_see_and_steer_names(edge: Edge) -> None:
    (name,) = (await edge.admin.ListNodes(admin.ListNodesRequest())).names
    assert (name.name, list(name.addresses)) == (NAME.entry, list(NAME.addresses))
    assert (list(name.other_ways), list(name.removed)) == (list(NAME.other_ways), list(NAME.removed))
    assert (name.left_out, name.failure) == (3, "name not found")
    assert name.resolved_time.ToMilliseconds() == 1_700_000_002_500
    added = await edge.admin.AddNode(admin.AddNodeRequest(address="dns:///Nodes.Example"))
    removed = await edge.admin.RemoveNode(admin.RemoveNodeRequest(node="dns:///nodes.example"))
    assert added == admin.AddNodeResponse(name=name)
    assert removed == admin.RemoveNodeResponse(name=name)
    assert edge.head.calls["add_name"] == edge.head.calls["remove_name"] == (NAME.entry,)


async def test_explain_placement_shows_terms_or_the_refusal(edge: Edge) -> None:
    chosen = await edge.admin.ExplainPlacement(admin.ExplainPlacementRequest(spec=SPEC, prompt_tokens=30))
    assert (chosen.policy, chosen.chosen, chosen.verdicts[0].eta_ms) == ("load-aware", "node-a", 812)
    assert edge.head.calls["explain_placement"][1].model == "toy"
    refusal = FleetError(Reason.FLEET_SATURATED, "full")
    edge.head.explanation = Explanation("load-aware", "", refusal, [VERDICT])
    refused = await edge.admin.ExplainPlacement(admin.ExplainPlacementRequest(session_id="s1"))
    assert (refused.refusal_reason, refused.refusal_message) == ("FLEET_SATURATED", "full")
    assert edge.head.calls["explain_placement"][1] is None


async def test_a_finish_with_a_cause_or_a_stop_says_so(edge: Edge) -> None:
    cause = ErrorCause(Reason.POISON_REQUEST, "two nodes were lost", {"nextIndex": "4"})
    edge.head.generation.reader = FakeReader([[replace(FINISHED, reason=FinishReason.ERROR, error=cause)]])
    failed = (await edge.fleet.GenerateAll(fleet.GenerateAllRequest(session_id="s1"))).finished
    assert (failed.reason, failed.error.reason) == (types.FINISH_REASON_ERROR, "POISON_REQUEST")
    assert failed.error.metadata["nextIndex"] == "4"
    edge.head.generation.reader = FakeReader([[replace(FINISHED, reason=FinishReason.STOP, stop_index=0)]])
    stopped = (await edge.fleet.GenerateAll(fleet.GenerateAllRequest(session_id="s1"))).finished
    assert stopped.HasField("stop_index")


# What the head refuses

Refusal = tuple[str, Callable[[Edge], Any]]
FLEET_CALLS: list[Refusal] = [
    ("create_session", lambda e: e.fleet.CreateSession(fleet.CreateSessionRequest(spec=SPEC))),
    ("get_session", lambda e: e.fleet.GetSession(fleet.GetSessionRequest(session_id="s1"))),
    ("list_sessions", lambda e: e.fleet.ListSessions(fleet.ListSessionsRequest())),
    (
        "append_tokens",
        lambda e: e.fleet.AppendTokens(fleet.AppendTokensRequest(session_id="s1", token_ids=[1])),
    ),
    ("generate", lambda e: e.fleet.Generate(fleet.GenerateRequest(session_id="s1"))),
    ("generate", lambda e: e.fleet.GenerateAll(fleet.GenerateAllRequest(session_id="s1"))),
    ("complete", lambda e: e.fleet.Complete(fleet.CompleteRequest(session=SPEC))),
    (
        "find_generation",
        lambda e: e.fleet.AttachGeneration(fleet.AttachGenerationRequest(generation_id="g")),
    ),
    (
        "cancel_generation",
        lambda e: e.fleet.CancelGeneration(fleet.CancelGenerationRequest(generation_id="g")),
    ),
    ("park_session", lambda e: e.fleet.ParkSession(fleet.ParkSessionRequest(session_id="s1"))),
    ("resume_session", lambda e: e.fleet.ResumeSession(fleet.ResumeSessionRequest(session_id="s1"))),
    ("finish_session", lambda e: e.fleet.FinishSession(fleet.FinishSessionRequest(session_id="s1"))),
    ("list_models", lambda e: e.fleet.ListModels(fleet.ListModelsRequest())),
]
ADMIN_CALLS: list[Refusal] = [
    ("all_nodes", lambda e: e.admin.ListNodes(admin.ListNodesRequest())),
    ("get_node", lambda e: e.admin.GetNode(admin.GetNodeRequest(node="n"))),
    ("probe_nodes", lambda e: e.admin.ProbeNodes(admin.ProbeNodesRequest(nodes=["n"]))),
    ("add_node", lambda e: e.admin.AddNode(admin.AddNodeRequest(address="h:1"))),
    ("remove_node", lambda e: e.admin.RemoveNode(admin.RemoveNodeRequest(node="n"))),
    ("add_name", lambda e: e.admin.AddNode(admin.AddNodeRequest(address="dns:///n"))),
    ("remove_name", lambda e: e.admin.RemoveNode(admin.RemoveNodeRequest(node="dns:///n"))),
    ("cordon_node", lambda e: e.admin.CordonNode(admin.CordonNodeRequest(node="n"))),
    ("uncordon_node", lambda e: e.admin.UncordonNode(admin.UncordonNodeRequest(node="n"))),
    ("drain_node", lambda e: e.admin.DrainNode(admin.DrainNodeRequest(node="n"))),
    ("watch_fleet", lambda e: e.admin.WatchFleet(admin.WatchFleetRequest())),
    (
        "explain_placement",
        lambda e: e.admin.ExplainPlacement(admin.ExplainPlacementRequest(session_id="s1")),
    ),
]
EVERY_CALL = [
    pytest.param(method, call, id=f"{number}-{method}")
    for number, (method, call) in enumerate([*FLEET_CALLS, *ADMIN_CALLS])
]


@pytest.mark.parametrize("method, call", EVERY_CALL)
async def test_what_the_head_refuses_reaches_the_caller_typed(
    edge: Edge, method: str, call: Callable[[Edge], Any]
) -> None:
    edge.head.errors[method] = not_found()
    caught = await refusal_of(call(edge))
    assert (caught.code, caught.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
    assert caught.details["ResourceInfo"].resource_name == "sessions/s1"
    assert caught.text == "no session s1"


@pytest.mark.parametrize("method, call", EVERY_CALL)
async def test_a_fault_of_the_head_gives_an_id_and_nothing_else_away(
    edge: Edge, method: str, call: Callable[[Edge], Any]
) -> None:
    edge.head.errors[method] = RuntimeError("secret /path/to/db")
    caught = await refusal_of(call(edge))
    assert (caught.code, caught.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    request_id = caught.details["RequestInfo"].request_id
    assert request_id in caught.text
    assert caught.trailers["x-request-id"] == request_id
    assert "secret" not in str(caught.trailers) + caught.text + str(caught.status)
    (logged,) = [call for call in edge.log.calls if call.method_name == "error"]
    assert logged.kwargs["request_id"] == request_id
    assert str(logged.kwargs["exc_info"]) == "secret /path/to/db"
