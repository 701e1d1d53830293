"""Every cell of the session table, as callers see it: what may be done in each state and where it leads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import Reading, context_of, generate, open_session_on, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.local_nodes import LocalNode, local_node
from tests.e2e.refused import refusal_of

NARROW, WIDE = 64, 256
ID = "the-session"
STATES = ("UNBOUND", "BOUND", "GENERATING", "PARKED")
IN_PROGRESS = ("ABORTED", "GENERATION_IN_PROGRESS")
IS_PARKED = ("FAILED_PRECONDITION", "SESSION_PARKED")
NOT_PARKED = ("FAILED_PRECONDITION", "SESSION_NOT_PARKED")
GONE = ("NOT_FOUND", "SESSION_NOT_FOUND")
STALL = stub_pb.Fault(
    point=stub_pb.FAULT_POINT_AFTER_TOKENS,
    action=stub_pb.FAULT_ACTION_STALL,
    after_tokens=3,
    session_prefix=ID,
)


class Stage:
    """A session on a narrow node, with a wide one beside it, brought to any state of the table."""

    def __init__(self, world: World, server: HeadServer, narrow: LocalNode, wide: LocalNode) -> None:
        self.world = world
        self.server = server
        self.narrow = narrow
        self.wide = wide
        self.reading: Reading | None = None

    async def view(self) -> pb.Session:
        return (await self.server.fleet.GetSession(pb.GetSessionRequest(session_id=ID))).session

    async def state(self) -> str:
        return pb.SessionState.Name((await self.view()).state).removeprefix("SESSION_STATE_")

    async def in_state(self, state: str) -> None:
        """Its context of 40 tokens has been on the narrow node, whatever the state."""
        await open_session_on(self.server, self.narrow, prompt(40), ID)
        await read_all(generate(self.server, ID, 2))
        if state == "PARKED":
            await self.park()
        elif state == "UNBOUND":
            await self.append(30)  # too long for its node
            cut = pb.AppendTokensRequest(session_id=ID, truncate_to=40)
            await self.server.fleet.AppendTokens(cut)
        elif state == "GENERATING":
            await self.narrow.faults(STALL)
            self.reading = Reading(generate(self.server, ID, 8))
            await self.reading.until_tokens(3)
        assert await self.state() == state

    # What may be done

    async def append(self, tokens: int = 3) -> pb.Session:
        request = pb.AppendTokensRequest(session_id=ID, token_ids=prompt(tokens, salt=1))
        return (await self.server.fleet.AppendTokens(request)).session

    async def generate(self) -> object:
        return await read_all(generate(self.server, ID, 8))

    async def park(self) -> object:
        return await self.server.fleet.ParkSession(pb.ParkSessionRequest(session_id=ID))

    async def resume(self) -> object:
        return await self.server.fleet.ResumeSession(pb.ResumeSessionRequest(session_id=ID))

    async def finish(self) -> object:
        return await self.server.fleet.FinishSession(pb.FinishSessionRequest(session_id=ID))

    async def lose_node(self) -> None:
        """The session's node dies and is known to be down."""
        name = (await self.view()).node
        node = self.narrow if name == "narrow" else self.wide
        known = self.server.head.fleet.find(name)
        assert known is not None
        await node.kill()
        await until(lambda: not known.usable, f"{name} is down")

    async def held_by(self, node: LocalNode) -> list[str]:
        return [held.session_id for held in (await node.holdings()).holdings]

    async def let_go(self, node: LocalNode) -> None:
        """Until the node has been told to revoke, and has done it."""
        known = self.server.head.fleet.find(node.identity)
        assert known is not None
        await until(lambda: not known.outbox, "the revoke was answered")
        assert await self.held_by(node) == []
        assert [entry.outcome for entry in await node.journal(ID, "revoke")] == ["done"]


@pytest.fixture
async def stage(world: World) -> Stage:
    narrow = await local_node(world, "narrow", window_tokens=NARROW)
    wide = await local_node(world, "wide", window_tokens=WIDE)
    return Stage(world, await world.head(narrow, wide), narrow, wide)


Ask = Callable[[Stage], Awaitable[object]]
ASKS: dict[str, Ask] = {
    "append": Stage.append,
    "generate": Stage.generate,
    "park": Stage.park,
    "resume": Stage.resume,
    "finish": Stage.finish,
}
REFUSED = {
    ("UNBOUND", "resume"): NOT_PARKED,
    ("BOUND", "resume"): NOT_PARKED,
    ("GENERATING", "append"): IN_PROGRESS,
    ("GENERATING", "generate"): IN_PROGRESS,
    ("GENERATING", "park"): IN_PROGRESS,
    ("GENERATING", "resume"): NOT_PARKED,
    ("PARKED", "append"): IS_PARKED,
    ("PARKED", "generate"): IS_PARKED,
}
LEADS_TO = {
    ("UNBOUND", "append"): "UNBOUND",
    ("UNBOUND", "generate"): "BOUND",  # once the generation has ended
    ("UNBOUND", "park"): "PARKED",
    ("UNBOUND", "finish"): "",
    ("BOUND", "append"): "BOUND",
    ("BOUND", "generate"): "BOUND",
    ("BOUND", "park"): "PARKED",
    ("BOUND", "finish"): "",
    ("GENERATING", "finish"): "",
    ("PARKED", "park"): "PARKED",
    ("PARKED", "resume"): "BOUND",
    ("PARKED", "finish"): "",
}


def test_every_state_and_request_is_in_one_of_the_tables() -> None:
    assert REFUSED.keys() | LEADS_TO.keys() == {(state, ask) for state in STATES for ask in ASKS}
    assert not REFUSED.keys() & LEADS_TO.keys()


@pytest.mark.parametrize("state, ask", REFUSED, ids=" ".join)
async def test_what_a_state_forbids_is_refused_and_changes_nothing(
    stage: Stage, state: str, ask: str
) -> None:
    await stage.in_state(state)
    before = await stage.view()
    error = await refusal_of(ASKS[ask](stage))
    assert error.what == REFUSED[state, ask]
    assert error.metadata["sessionId"] == ID
    assert await stage.view() == before
    assert await context_of(stage.server, ID) == prompt(40)
    if stage.reading is not None:
        await stage.reading.leave()


@pytest.mark.parametrize("state, ask", LEADS_TO, ids=" ".join)
async def test_what_a_state_allows_leads_to_the_next_one(stage: Stage, state: str, ask: str) -> None:
    await stage.in_state(state)
    await ASKS[ask](stage)
    if LEADS_TO[state, ask]:
        assert await stage.state() == LEADS_TO[state, ask]
    else:
        assert (await refusal_of(stage.append())).what == GONE
    if state in ("BOUND", "GENERATING") and ask in ("park", "finish"):
        await stage.let_go(stage.narrow)
    if stage.reading is not None:
        answer = await stage.reading.end()
        assert (answer.reason, answer.tokens) == ("CANCELLED", expected(prompt(40), 3))


async def test_a_session_that_no_longer_fits_its_node_is_unbound_and_its_node_told(stage: Stage) -> None:
    await stage.in_state("BOUND")
    session = await stage.append(30)
    assert session.state == pb.SESSION_STATE_UNBOUND
    await stage.let_go(stage.narrow)


async def test_a_generation_shows_as_such_and_binds_an_unbound_session(stage: Stage) -> None:
    await stage.in_state("UNBOUND")
    for node in (stage.narrow, stage.wide):
        await node.faults(STALL)
    reading = Reading(generate(stage.server, ID, 8, "mine"))
    await reading.until_tokens(3)
    view = await stage.view()
    assert (view.state, view.node) == (pb.SESSION_STATE_GENERATING, reading.answer.started[0].node)
    assert view.generation_id == "mine"
    assert view.epoch == reading.answer.started[0].epoch
    await reading.leave()
    await until(lambda: not stage.server.head.get_session(ID).generation_id, "it was cancelled")
    assert await stage.state() == "BOUND"


@pytest.mark.parametrize("state", STATES)
async def test_a_lost_node_takes_no_session_with_it(stage: Stage, state: str) -> None:
    await stage.in_state(state)
    if state == "GENERATING":
        await stage.lose_node()
        assert stage.reading is not None
        assert await stage.state() == "GENERATING"
        answer = await stage.reading.end()
        assert answer.tokens == expected(prompt(40), 8)
        assert answer.finished.attempts == 2
        return
    if state == "BOUND":
        await stage.lose_node()
    else:
        await stage.wide.kill()
    after = {"BOUND": "UNBOUND"}.get(state, state)
    assert await stage.state() == after
    assert await context_of(stage.server, ID) == prompt(40)
    if state == "BOUND":
        answer = await read_all(generate(stage.server, ID, 8))
        assert (answer.started[0].node, answer.tokens) == ("wide", expected(prompt(40), 8))


@pytest.mark.parametrize("state", STATES)
async def test_an_idle_session_gives_its_nodes_room_back_and_keeps_its_context(
    world: World, state: str
) -> None:
    narrow = await local_node(world, "narrow", window_tokens=NARROW)
    wide = await local_node(world, "wide", window_tokens=WIDE)
    server = await world.head(narrow, wide, idle_unbind_s=1.0)
    stage = Stage(world, server, narrow, wide)
    await stage.in_state(state)
    # Another session, opened after it: when that one is unbound, the first has been idle for longer.
    spec = pb.SessionSpec(model=MODEL.name)
    create = pb.CreateSessionRequest(session_id="later", spec=spec, token_ids=prompt(5))
    await server.fleet.CreateSession(create)
    await until(lambda: server.head.get_session("later").node == "", "the later one is unbound")
    assert await stage.state() == {"BOUND": "UNBOUND"}.get(state, state)
    assert await context_of(server, ID) == prompt(40)
    if state == "BOUND":
        await stage.let_go(narrow)
        assert (await read_all(generate(server, ID, 8))).tokens == expected(prompt(40), 8)
    if stage.reading is not None:
        assert ID in await stage.held_by(narrow)
        await stage.reading.leave()


async def test_a_session_unused_for_its_whole_life_is_given_up(world: World) -> None:
    node = await local_node(world, "node-1")
    server = await world.head(node, session_expiry_s=1.0)
    request = pb.CreateSessionRequest(
        session_id=ID, spec=pb.SessionSpec(model=MODEL.name), token_ids=prompt(10)
    )
    await server.fleet.CreateSession(request)
    await read_all(generate(server, ID, 4))
    await until(lambda: len(server.head.sessions) == 0, "it expired")
    assert (await refusal_of(server.fleet.GetSession(pb.GetSessionRequest(session_id=ID)))).what == GONE
    known = server.head.fleet.nodes[0]
    await until(lambda: not known.outbox, "the revoke was answered")
    assert (await node.holdings()).holdings == []
