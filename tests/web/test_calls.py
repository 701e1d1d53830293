"""What the page is told: the same as AdminService tells, sessions of all callers, and their stories."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.web import calls
from fleet_service.web.convert import message_json
from tests.e2e.callers import Reading, complete, generate, open_session_on, read_all
from tests.e2e.harness import MODEL, PATIENCE_S, World, prompt, until
from tests.e2e.local_nodes import local_nodes
from tests.web.served import Feed, Served, served

EVER = 4000
MOVING = ("report_age_ms", "last_seen_time", "report")


def still(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node without what grows older by itself."""
    return {key: value for key, value in node.items() if key not in MOVING}


async def test_page_and_grpc_show_the_same_nodes(world: World) -> None:
    nodes = await local_nodes(world, 3, labels={"zone": "a"})
    async with served(world, *nodes) as page:
        await page.call("CordonNode", {"node": "node-2", "note": "new driver", "by": "alice"})
        async with page.feed() as feed:
            await feed.until(lambda feed: feed.messages)
        reply = await page.server.admin.ListNodes(admin.ListNodesRequest())
        assert feed.messages[0]["snapshot"] is True
        assert [still(feed.nodes[node.name]) for node in reply.nodes] == [
            still(MessageToDict(node, preserving_proto_field_name=True)) for node in reply.nodes
        ]
        assert feed.nodes["node-2"]["cordon_note"] == "new driver"
        assert feed.nodes["node-2"]["cordoned_by"] == "alice"


async def test_what_happens_comes_by_itself_and_the_story_tells_it(world: World) -> None:
    nodes = await local_nodes(world, 3, decode_rate=100.0)
    async with served(world, *nodes) as page, page.feed() as feed:
        session_id = await open_session_on(page.server, nodes[0], prompt(20), "chat-1")
        reading = Reading(generate(page.server, session_id, 120, "answer-1"))
        await reading.until_tokens(20)
        await nodes[0].kill()
        answer = await reading.end()
        await feed.until(lambda feed: any("ended" in turn for turn in feed.turns))
        assert feed.nodes["node-1"]["state"] == "NODE_STATE_DOWN"
        first, *between, last = [next(key for key in turn if key in KINDS) for turn in feed.turns]
        assert (first, set(between), last) == ("placed", {"moved"}, "ended")
        reply = (await page.call("GetStory", {"session_id": session_id})).json()
        (told,) = reply["generations"]

        def of_kind(kind: str) -> list[Any]:
            return [turn[kind] for turn in told["turns"] if kind in turn]

        # Before it moves, the node may be tried anew.
        assert of_kind("moved") == [message_json(move) for move in answer.moves]
        assert of_kind("finished") == [message_json(answer.finished)]
        verdicts = of_kind("placed")[0]["verdicts"]
        assert {verdict["node"] for verdict in verdicts} == {"node-1", "node-2", "node-3"}
        tried = [each["node"] for each in of_kind("tried")]
        assert (tried[0], tried[-1]) == ("node-1", answer.moves[-1].to_node)
        times = [turn["at_ms"] for turn in told["turns"]]
        assert times == sorted(times)
        assert told["accepted_ms"] <= times[0] <= times[-1] <= reply["now_ms"]
        assert reply == {**reply, **(await _by_generation(page, "answer-1"))}
        # A page that is opened now is told the same as one that watched.
        lately = (await page.call("ListEvents")).json()["events"]
        assert [{**turn, "time": ""} for turn in lately] == [{**turn, "time": ""} for turn in feed.turns]
        # Of tokens the page hears how many, never which.
        assert "token_ids" not in str(reply)


KINDS = ("placed", "moved", "ended")


async def _by_generation(page: Served, generation_id: str) -> dict[str, Any]:
    reply = (await page.call("GetStory", {"generation_id": generation_id})).json()
    return {"generations": reply["generations"], "left_out": reply["left_out"]}


async def test_a_session_for_one_answer_has_a_story_when_it_is_gone(world: World) -> None:
    async with served(world, *await local_nodes(world, 1)) as page:
        answer = await read_all(complete(page.server, prompt(5), 8))
        reply = await _by_generation(page, answer.generation_id)
        assert reply["generations"][0]["turns"][-1].keys() >= {"at_ms"}
        assert (await page.call("GetStory", {"session_id": "never"})).json()["generations"] == []
        assert (await page.call("GetStory", {})).status == 400


async def test_only_the_last_stories_of_a_session_are_sent_and_the_rest_is_counted(world: World) -> None:
    async with served(
        world, *await local_nodes(world, 1, decode_rate=0.0), kept=calls.MAX_STORIES + 3
    ) as page:
        session_id = (await _create(page, "chat-1")).session_id
        for number in range(calls.MAX_STORIES + 5):
            await read_all(generate(page.server, session_id, 1, f"g-{number}"))
        reply = (await page.call("GetStory", {"session_id": session_id})).json()
        told = [each["generation_id"] for each in reply["generations"]]
        assert told == [f"g-{number}" for number in range(5, calls.MAX_STORIES + 5)]
        assert reply["left_out"] == 3
        assert page.stories.remembered == calls.MAX_STORIES + 3


async def _create(page: Served, session_id: str, length: int = 3) -> pb.Session:
    request = pb.CreateSessionRequest(
        session_id=session_id, spec=pb.SessionSpec(model=MODEL.name), token_ids=prompt(length)
    )
    return (await page.server.fleet.CreateSession(request)).session


async def test_sessions_are_listed_the_last_used_first_and_can_be_looked_for(world: World) -> None:
    async with served(world, *await local_nodes(world, 2)) as page:
        for number in range(5):
            await _create(page, f"chat-{number}", 10 + number)
        await page.server.fleet.ParkSession(pb.ParkSessionRequest(session_id="chat-1"))

        async def found(**wanted: str) -> list[str]:
            reply = await page.call("ListSessions", wanted)
            return [session["session_id"] for session in reply.json()["sessions"]]

        assert await found() == ["chat-1", "chat-4", "chat-3", "chat-2", "chat-0"]
        assert await found(text="-3") == ["chat-3"]
        assert await found(text="stub", state="PARKED") == ["chat-1"]
        assert await found(text="nobody") == []
        view = page.server.head.get_session("chat-2")
        assert "chat-2" in await found(node=view.node)
        assert "chat-2" not in await found(node="node-9")
        session = (await page.call("ListSessions", {"text": "chat-2"})).json()["sessions"][0]
        grpc = await page.server.fleet.GetSession(pb.GetSessionRequest(session_id="chat-2"))
        assert ParseDict({k: v for k, v in session.items() if k != "owner"}, pb.Session()) == grpc.session
        assert session["context_length"] in (12, "12")


async def test_a_list_is_never_longer_than_it_may_be(world: World) -> None:
    async with served(world, *await local_nodes(world, 1)) as page:
        for number in range(calls.MAX_SESSIONS + 7):
            await _create(page, f"chat-{number}")
        assert len((await page.call("ListSessions")).json()["sessions"]) == calls.MAX_SESSIONS
        assert len((await page.call("ListSessions", {"text": "chat-0"})).json()["sessions"]) == 1


def drain_state(feed: Feed) -> str:
    return str(feed.nodes.get("node-1", {}).get("drain", {}).get("state"))


async def test_a_drain_is_begun_by_the_page_and_goes_on_without_it(world: World) -> None:
    nodes = await local_nodes(world, 2)
    async with served(world, *nodes) as page, page.feed() as feed:
        session_id = await open_session_on(page.server, nodes[0], prompt(8))
        reading = Reading(generate(page.server, session_id, EVER))
        await reading.until_tokens(3)
        reply = (await page.call("DrainNode", {"node": "node-1", "note": "new fan", "by": "alice"})).json()
        assert (reply["node"], reply["drain"]["by"]) == ("node-1", "alice")
        await feed.until(lambda feed: drain_state(feed) == "DRAIN_STATE_DRAINED")
        moves = (await reading.leave()).moves
        assert [(move.from_node, move.to_node) for move in moves] == [("node-1", "node-2")]
        await page.call("UncordonNode", {"node": "node-1"})
        await feed.until(lambda feed: not feed.nodes["node-1"].get("cordoned"))


async def test_what_the_head_refuses_is_said_with_its_reason(world: World) -> None:
    async with served(world) as page:
        reply = await page.call("CordonNode", {"node": "nobody"})
        assert (reply.status, reply.reason) == (404, "NODE_NOT_FOUND")
        reply = await page.call("CordonNode", {"node": ""})
        assert (reply.status, reply.reason) == (400, "INVALID_FIELD")
        reply = await page.call("ExplainPlacement", {"session_id": "nobody"})
        assert (reply.status, reply.reason) == (404, "SESSION_NOT_FOUND")
        explained = (await page.call("ExplainPlacement", {"spec": {"model": "m"}})).json()
        assert explained["refusal_reason"] == "MODEL_NOT_FOUND"


async def test_placement_is_explained_as_over_grpc(world: World) -> None:
    async with served(world, *await local_nodes(world, 2)) as page:
        body = {"spec": {"model": MODEL.name, "node_selector": {"zone": "a"}}, "prompt_tokens": 500}
        request = ParseDict(body, admin.ExplainPlacementRequest())
        expected = await page.server.admin.ExplainPlacement(request)
        reply = (await page.call("ExplainPlacement", body)).json()
        assert [each["left_out"] for each in reply["verdicts"]] == ["label", "label"]
        assert [each.left_out for each in expected.verdicts] == ["label", "label"]
        assert reply["refusal_reason"] == expected.refusal_reason


async def test_a_fault_of_the_head_is_told_without_what_is_inside(world: World) -> None:
    async with served(world) as page:

        def fail(ref: str) -> None:
            raise RuntimeError("secret")

        page.server.head.operators.uncordon_node = fail  # type: ignore[method-assign, assignment]
        reply = await page.call("UncordonNode", {"node": "node-1"})
        assert (reply.status, reply.reason) == (500, "INTERNAL")
        assert b"secret" not in reply.body


async def test_too_many_pages_are_sent_away_and_one_that_leaves_makes_room(
    world: World, monkeypatch: Any
) -> None:
    monkeypatch.setattr(calls, "MAX_STREAMS", 2)
    async with served(world, *await local_nodes(world, 1)) as page:
        async with page.feed(), page.feed():
            reply = await page.call("WatchFleet")
            assert (reply.status, reply.reason) == (429, "LIMIT_EXCEEDED")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with page.feed() as feed:
                        await feed.until(lambda feed: feed.messages)
                    break
                except AssertionError:
                    await asyncio.sleep(0.05)


async def test_a_page_that_leaves_leaves_nothing_behind(world: World) -> None:
    async with served(world) as page:  # without nodes nothing is sent, which would tell as well
        async with page.feed() as feed:
            await feed.until(lambda feed: feed.messages)
            assert page.server.head.fleet.turns.listener is not None
        await until(lambda: page.server.head.fleet.turns.listener is None, "the watcher was let go")
        names = {"page", calls.__name__}
        await until(
            lambda: not any(task.get_name() in names for task in asyncio.all_tasks()), "no task is left"
        )


async def test_the_stream_ends_with_the_head(world: World) -> None:
    async with served(world, *await local_nodes(world, 1)) as page, page.feed() as feed:
        await feed.until(lambda feed: feed.messages)
        await page.server.head.stop(0.0)
        await feed.end()
        assert page.server.head.fleet.turns.listener is None


async def test_many_nodes_come_in_pieces_so_that_the_head_is_not_held_up() -> None:
    nodes = [admin.Node(name=f"node-{number}") for number in range(calls._NODES_PER_EVENT * 2 + 1)]
    message = admin.WatchFleetResponse(snapshot=True, nodes=nodes, summary=admin.FleetSummary(generations=3))
    parts = [admin.WatchFleetResponse.FromString(part.SerializeToString()) for part in calls._parts(message)]
    assert [part.snapshot for part in parts] == [True, False, False]
    assert [part.HasField("summary") for part in parts] == [True, False, False]
    assert [node.name for part in parts for node in part.nodes] == [node.name for node in nodes]
