"""Where work goes: the three policies, what keeps a node out, and what the explanation says."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.reference import StubModel
from tests.e2e.callers import Reading, complete, cordon, generate, open_session, read_all, uncordon
from tests.e2e.harness import MODEL, HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.local_nodes import local_node, local_nodes
from tests.e2e.refused import refusal_of

OTHER = StubModel("other-model")
STALL = stub_pb.Fault(point=stub_pb.FAULT_POINT_AFTER_GENERATE, action=stub_pb.FAULT_ACTION_STALL)


async def node_of(server: HeadServer, session_id: str) -> str:
    return (await server.fleet.GetSession(pb.GetSessionRequest(session_id=session_id))).session.node


async def placed(server: HeadServer, count: int, model: str = MODEL.name, **spec: object) -> list[str]:
    """The nodes that so many new sessions go to, one after the other."""
    ids = [await open_session(server, prompt(10), model=model, **spec) for _ in range(count)]
    return [await node_of(server, session_id) for session_id in ids]


async def explain(
    server: HeadServer, prompt_tokens: int = 10, **spec: object
) -> admin_pb.ExplainPlacementResponse:
    request = admin_pb.ExplainPlacementRequest(
        spec=pb.SessionSpec(**({"model": MODEL.name} | spec)),  # type: ignore[arg-type]
        prompt_tokens=prompt_tokens,
    )
    return await server.admin.ExplainPlacement(request)


async def reported(server: HeadServer, node: NodeProcess, **lies: int) -> None:
    """Let `node` lie in its reports, and wait until the head has heard it."""
    await node.faults(reports=stub_pb.ReportFaults(**lies))  # type: ignore[arg-type]
    known = server.head.fleet.find(node.identity)
    assert known is not None

    def heard() -> bool:
        return known.report is not None and all(
            getattr(known.report, name) == value for name, value in lies.items()
        )

    await until(heard, f"{node.identity} reported {lies}")


async def wait_state(server: HeadServer, node: NodeProcess, state: str) -> None:
    known = server.head.fleet.find(node.identity)
    assert known is not None
    await until(lambda: known.state.value == state, f"{node.identity} is {state}")


async def test_least_loaded_gives_each_of_three_nodes_two_of_six_sessions(world: World) -> None:
    server = await world.head(*await local_nodes(world, 3), policy="least-loaded")
    where = Counter(await placed(server, 6))
    assert sorted(where.values()) == [2, 2, 2]


async def test_least_loaded_fills_up_the_node_that_was_emptied(world: World) -> None:
    server = await world.head(*await local_nodes(world, 2), policy="least-loaded")
    ids = [await open_session(server) for _ in range(4)]
    freed = [session_id for session_id in ids if await node_of(server, session_id) == "node-1"]
    for session_id in freed:
        await server.fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))
    assert await placed(server, 2) == ["node-1", "node-1"]


@pytest.mark.parametrize("why", ["down", "serving another model", "cordoned"])
async def test_round_robin_shares_evenly_while_one_node_is_out(world: World, why: str) -> None:
    nodes = await local_nodes(world, 2)
    odd = await local_node(world, "odd", models={(OTHER if "model" in why else MODEL).name: 4096})
    last = await local_node(world, "last")
    server = await world.head(*nodes, odd, last, policy="round-robin")
    if why == "down":
        await odd.kill()
        await wait_state(server, odd, "down")
    if why == "cordoned":
        await cordon(server, odd)
    where = Counter(await placed(server, 9))
    assert where == {"node-1": 3, "node-2": 3, "last": 3}


async def test_load_aware_spreads_a_burst_of_sessions_evenly(world: World) -> None:
    server = await world.head(*await local_nodes(world, 2))
    ids = await asyncio.gather(*(open_session(server, prompt(10, salt)) for salt in range(8)))
    where = Counter([await node_of(server, session_id) for session_id in ids])
    assert sorted(where.values()) == [4, 4]


async def test_load_aware_spreads_a_burst_of_requests_evenly(world: World) -> None:
    nodes = await local_nodes(world, 2, lanes=4)
    server = await world.head(*nodes)
    for node in nodes:
        await reported(server, node, decode_tokens_per_s=200, prefill_tokens_per_s=2000)
    readings = [Reading(complete(server, prompt(10, salt), 2000)) for salt in range(8)]
    for salt, reading in enumerate(readings):
        answer = await reading.until_tokens(8)
        assert answer.tokens == expected(prompt(10, salt), len(answer.tokens))
    assert [node.reservations for node in server.head.fleet.nodes] == [4, 4]
    assert [(await node.holdings()).lanes_active for node in nodes] == [4, 4]
    for reading in readings:
        await reading.leave()


async def test_a_faster_node_gets_the_work_until_it_is_no_longer_sooner_done(world: World) -> None:
    """ahead * out / decode + prompt / prefill + out / decode, in whole milliseconds."""
    quick, slow = await local_nodes(world, 2)
    server = await world.head(quick, slow)
    await reported(server, quick, decode_tokens_per_s=100, prefill_tokens_per_s=1000)
    await reported(server, slow, decode_tokens_per_s=40, prefill_tokens_per_s=500)
    answer = await explain(server, prompt_tokens=2000, expected_output_tokens=200)
    assert (answer.policy, answer.chosen) == ("load-aware", "node-1")
    assert [(v.node, v.eta_ms, v.ahead) for v in answer.verdicts] == [
        ("node-1", 2000 + 2000, 0),
        ("node-2", 4000 + 5000, 0),
    ]
    await reported(
        server, quick, decode_tokens_per_s=100, prefill_tokens_per_s=1000, lanes_active=2, queue_depth=1
    )
    answer = await explain(server, prompt_tokens=2000, expected_output_tokens=200)
    assert [(v.node, v.eta_ms, v.ahead) for v in answer.verdicts] == [
        ("node-2", 9000, 0),
        ("node-1", 3 * 2000 + 4000, 3),
    ]


async def test_a_rate_not_yet_reported_counts_as_the_mean_of_the_others(world: World) -> None:
    new, one, two = await local_nodes(world, 3)
    server = await world.head(new, one, two)
    answer = await explain(server, prompt_tokens=200, expected_output_tokens=20)
    assert {(v.decode_tokens_per_s, v.prefill_tokens_per_s, v.eta_ms) for v in answer.verdicts} == {
        (20, 200, 2000)
    }
    await reported(server, one, decode_tokens_per_s=10, prefill_tokens_per_s=100)
    await reported(server, two, decode_tokens_per_s=31, prefill_tokens_per_s=401)
    answer = await explain(server, prompt_tokens=200, expected_output_tokens=20)
    stands_in = {v.node: (v.decode_tokens_per_s, v.prefill_tokens_per_s) for v in answer.verdicts}
    assert stands_in == {"node-1": (20, 250), "node-2": (10, 100), "node-3": (31, 401)}


async def test_hot_nodes_are_avoided_unless_all_are_hot(world: World) -> None:
    hot, cool = await local_nodes(world, 2)
    server = await world.head(hot, cool)
    await reported(server, hot, kv_blocks_used=90, kv_blocks_total=100)
    assert await placed(server, 4) == ["node-2"] * 4
    (_, out) = (await explain(server)).verdicts
    assert (out.node, out.eligible, out.left_out, out.kv_used_pct) == ("node-1", False, "hot", 90)
    await reported(server, cool, kv_blocks_used=95, kv_blocks_total=100)
    assert "node-1" in await placed(server, 2)
    await reported(server, hot, kv_blocks_used=89, kv_blocks_total=100)
    assert await placed(server, 2) == ["node-1"] * 2


async def test_a_selector_takes_only_nodes_that_carry_all_its_labels(world: World) -> None:
    await local_node(world, "plain")
    await local_node(world, "eu", labels={"zone": "eu"})
    await local_node(world, "eu-gpu", labels={"zone": "eu", "gpu": "big"})
    server = await world.head(*world.nodes, policy="least-loaded")
    wanted = {"zone": "eu", "gpu": "big"}
    assert await placed(server, 3, node_selector=wanted) == ["eu-gpu"] * 3
    left_out = {v.node: v.left_out for v in (await explain(server, node_selector=wanted)).verdicts}
    assert left_out == {"plain": "label", "eu": "label", "eu-gpu": ""}
    spec = pb.SessionSpec(model=MODEL.name, node_selector={"zone": "moon"})
    error = await refusal_of(server.fleet.CreateSession(pb.CreateSessionRequest(spec=spec)))
    assert error.what == ("FAILED_PRECONDITION", "MODEL_UNPLACEABLE")
    assert error.metadata == {"model": MODEL.name, "knownNodes": "3", "nodeSelector": "zone=moon"}
    assert (await explain(server, node_selector={"zone": "moon"})).refusal_reason == "MODEL_UNPLACEABLE"


async def test_a_selector_holds_on_a_failover_as_well(world: World) -> None:
    first = await local_node(world, "first", labels={"zone": "eu"})
    await local_node(world, "plain")
    await local_node(world, "second", labels={"zone": "eu"})
    server = await world.head(*world.nodes, generation_stall_s=1.0)
    await cordon(server, world.nodes[2])
    session_id = await open_session(server, prompt(10), node_selector={"zone": "eu"})
    await uncordon(server, world.nodes[2])
    await first.faults(STALL)
    answer = await read_all(generate(server, session_id, 8))
    assert [move.to_node for move in answer.moves] == ["second"]
    assert answer.tokens == expected(prompt(10), 8)


async def test_a_session_stays_with_the_revision_it_began_on(world: World) -> None:
    old = await local_node(world, "old", revision="r1")
    new = await local_node(world, "new", revision="r2")
    server = await world.head(old, new)
    await cordon(server, new)
    session_id = await open_session(server, prompt(10))
    await uncordon(server, new)
    assert (await server.fleet.GetSession(pb.GetSessionRequest(session_id=session_id))).session.spec == (
        pb.SessionSpec(
            model=MODEL.name,
            model_revision="r1",
            sampling=types_pb2.SamplingParams(),
            qos_class=types_pb2.QOS_CLASS_INTERACTIVE,
            replay=types_pb2.REPLAY_MODE_ALLOWED,
        )
    )
    await old.kill()
    await wait_state(server, old, "down")
    error = await refusal_of(generate(server, session_id, 4))
    assert error.what == ("UNAVAILABLE", "NO_ELIGIBLE_NODE")
    assert (error.metadata["down"], error.metadata["revision"]) == ("1", "1")
    fresh = await open_session(server, prompt(10))
    answer = await read_all(generate(server, fresh, 4))
    assert answer.tokens == expected(prompt(10), 4, StubModel(MODEL.name, "r2"))


async def test_the_explanation_names_every_node_and_why_it_is_out(world: World) -> None:
    fine = await local_node(world, "a-fine")
    narrow = await local_node(world, "b-narrow", window_tokens=5)
    other = await local_node(world, "c-other", models={OTHER.name: 4096})
    cordoned = await local_node(world, "d-cordoned")
    down = await local_node(world, "e-down")
    server = await world.head(fine, narrow, other, cordoned, down)
    await cordon(server, cordoned)
    await down.kill()
    await wait_state(server, down, "down")
    held = await open_session(server, prompt(10))
    answer = await explain(server)
    assert (answer.chosen, answer.refusal_reason) == ("a-fine", "")
    assert {v.node: (v.eligible, v.left_out) for v in answer.verdicts} == {
        "a-fine": (True, ""),
        "b-narrow": (False, "context"),
        "c-other": (False, "model"),
        "d-cordoned": (False, "cordoned"),
        "e-down": (False, "down"),
    }
    first = answer.verdicts[0]
    assert (first.sessions, first.reservations, first.max_context_tokens) == (1, 0, 32_768)
    assert first.HasField("report_age_ms")
    same = await server.admin.ExplainPlacement(admin_pb.ExplainPlacementRequest(session_id=held))
    assert same.chosen == "a-fine"
    assert await node_of(server, held) == "a-fine"


async def test_an_explanation_changes_nothing(world: World) -> None:
    server = await world.head(*await local_nodes(world, 3), policy="round-robin")
    for _ in range(4):
        foretold = {(await explain(server)).chosen for _ in range(5)}
        assert foretold == set(await placed(server, 1))


async def test_a_cordoned_node_finishes_what_it_runs_and_takes_nothing_new(world: World) -> None:
    first, second = await local_nodes(world, 2)
    server = await world.head(first, second)
    await cordon(server, second)
    session_id = await open_session(server, prompt(10))
    reading = Reading(generate(server, session_id, 60))
    await reading.until_tokens(3)
    await cordon(server, first)
    error = await refusal_of(complete(server, prompt(10), 8))
    assert error.what == ("UNAVAILABLE", "NO_ELIGIBLE_NODE")
    assert error.metadata["cordoned"] == "2"
    answer = await reading.end()
    assert (answer.moves, answer.tokens) == ([], expected(prompt(10), 60))
    await uncordon(server, second)
    moved_on = await read_all(generate(server, session_id, 8))
    assert moved_on.started[0].node == "node-2"
    assert moved_on.tokens == expected(prompt(10), 8)


async def test_a_cordon_and_its_note_show_in_the_list_of_nodes(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node)
    note = "new cooling, back at noon"
    request = admin_pb.CordonNodeRequest(node=node.address, note=note)
    assert (await server.admin.CordonNode(request)).node.cordoned
    (shown,) = (await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes
    assert (shown.name, shown.cordoned, shown.cordon_note) == ("node-1", True, note)
    await uncordon(server, node)
    shown = (await server.admin.GetNode(admin_pb.GetNodeRequest(node="node-1"))).node
    assert (shown.cordoned, shown.cordon_note) == (False, "")


async def test_a_silent_reporter_is_marked_and_keeps_serving(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node, report_stale_s=1.0, silence_s=3.0)
    await node.faults(reports=stub_pb.ReportFaults(silent=True))
    reading = Reading(complete(server, prompt(10), 500))
    known = server.head.fleet.nodes[0]
    await until(lambda: known.reports_stale, "the reports count as stale")
    (shown,) = (await server.admin.ListNodes(admin_pb.ListNodesRequest())).nodes
    assert (shown.state, shown.reports_stale) == (admin_pb.NODE_STATE_UP, True)
    answer = await reading.end()
    assert (answer.moves, answer.tokens) == ([], expected(prompt(10), 500))
    await node.faults()
    await until(lambda: not known.reports_stale, "reports come again")


async def test_the_own_counts_spread_work_while_reports_are_missing(world: World) -> None:
    nodes = await local_nodes(world, 2)
    server = await world.head(*nodes, report_stale_s=0.5, silence_s=20.0)
    for node in nodes:
        await node.faults(STALL, reports=stub_pb.ReportFaults(silent=True))
    await until(lambda: all(node.reports_stale for node in server.head.fleet.nodes), "reports are stale")
    readings = [Reading(complete(server, prompt(10, salt), 8)) for salt in range(4)]
    for reading in readings:
        await reading.until(lambda answer: bool(answer.started))
    assert [len(node.running) for node in server.head.fleet.nodes] == [2, 2]
    for reading in readings:
        await reading.leave()
