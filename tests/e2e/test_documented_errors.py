"""Wrong use of every call gives the code, reason, metadata and retry hint that docs/errors.md promises."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet_service.runtime.store import StoreError, StoreTrouble
from tests.e2e.callers import Reading, complete, cordon, generate, open_session, read_all
from tests.e2e.harness import MODEL, HeadServer, World, prompt
from tests.e2e.local_nodes import LocalNode, local_node
from tests.e2e.refused import Refused, refusal_of

DOCS = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
ID = "the-session"
GENERATION = "the-generation"
SPEC = pb.SessionSpec(model=MODEL.name)


@dataclass(frozen=True)
class Row:
    """One reason as documented."""

    codes: str
    keys: set[str]
    retry: str

    def check(self, error: Refused) -> None:
        assert re.search(rf"\b{error.code}\b", self.codes), error
        assert self.keys <= error.metadata.keys(), error
        if error.reason != "LIMIT_EXCEEDED":  # it depends on the limit
            assert (error.retry_after_s is not None) == (self.retry == "yes"), error
        for value in error.metadata.values():
            assert "Traceback" not in value
            assert "site-packages" not in value


def rows() -> dict[str, Row]:
    found = {}
    for line in DOCS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"[A-Z_]+", cells[0]):
            keys = {
                key
                for key in re.sub(r"\[.*?\]|and a count.*", "", cells[3]).replace(" ", "").split(",")
                if key
            }
            found[cells[0]] = Row(cells[1], keys, cells[4])
    return found


DOCUMENTED = rows()


@dataclass
class Stage:
    """A node, a head with small limits, a session and a finished generation of it."""

    world: World
    server: HeadServer
    node: LocalNode
    readings: list[Reading] = field(default_factory=list)

    @property
    def fleet(self) -> Any:
        return self.server.fleet

    @property
    def admin(self) -> Any:
        return self.server.admin

    async def running(self, generation_id: str = "", session_id: str = ID) -> Reading:
        stall = stub_pb.Fault(
            point=stub_pb.FAULT_POINT_AFTER_TOKENS, action=stub_pb.FAULT_ACTION_STALL, after_tokens=3
        )
        await self.node.faults(stall)
        reading = Reading(generate(self.server, session_id, 50, generation_id))
        self.readings.append(reading)
        await reading.until_tokens(3)
        return reading


@pytest.fixture
async def stage(world: World) -> Stage:
    node = await local_node(world, "node-1", window_tokens=256)
    server = await world.head(
        node,
        max_sessions=3,
        max_generations=2,
        max_nodes=2,
        max_readers_per_generation=2,
        max_context_tokens=200,
        max_held_cancels=1,
        max_watchers=1,
        queue_limit_per_node=1,
    )
    create = pb.CreateSessionRequest(session_id=ID, spec=SPEC, token_ids=prompt(10))
    await server.fleet.CreateSession(create)
    await read_all(generate(server, ID, 4, GENERATION))
    return Stage(world, server, node)


Use = Callable[[Stage], Awaitable[Refused]]
CASES: dict[str, tuple[str, Use]] = {}


def case(method: str, reason: str, what: str = "") -> Callable[[Use], Use]:
    """Register a wrong use of a method and the reason that it must be refused with."""

    def register(use: Use) -> Use:
        CASES[f"{method} {reason}{' ' if what else ''}{what}"] = (reason, use)
        return use

    return register


def asks(method: str, reason: str, request: Any, what: str = "") -> None:
    """A case that is one request, of a message that says which service it belongs to."""
    admin = type(request).DESCRIPTOR.file.name.endswith("admin_service.proto")

    async def use(stage: Stage) -> Refused:
        return await refusal_of(getattr(stage.admin if admin else stage.fleet, method)(request))

    case(method, reason, what)(use)


# FleetService

asks("CreateSession", "INVALID_FIELD", pb.CreateSessionRequest())
asks("CreateSession", "SESSION_ALREADY_EXISTS", pb.CreateSessionRequest(session_id=ID, spec=SPEC))
asks("CreateSession", "MODEL_NOT_FOUND", pb.CreateSessionRequest(spec=pb.SessionSpec(model="nope")))
asks(
    "CreateSession",
    "MODEL_UNPLACEABLE",
    pb.CreateSessionRequest(spec=pb.SessionSpec(model=MODEL.name, node_selector={"a": "b"})),
)
asks("CreateSession", "LIMIT_EXCEEDED", pb.CreateSessionRequest(spec=SPEC, token_ids=prompt(201)), "length")
asks("GetSession", "INVALID_FIELD", pb.GetSessionRequest())
asks("GetSession", "SESSION_NOT_FOUND", pb.GetSessionRequest(session_id="nobody"))
asks("ListSessions", "INVALID_FIELD", pb.ListSessionsRequest(page_size=1001), "page size")
asks("ListSessions", "INVALID_FIELD", pb.ListSessionsRequest(page_token="not one of mine"), "page token")
asks("ListSessions", "INVALID_FIELD", pb.ListSessionsRequest(state=99), "state")  # type: ignore[arg-type]
asks("AppendTokens", "INVALID_FIELD", pb.AppendTokensRequest(session_id=ID))
asks("AppendTokens", "SESSION_NOT_FOUND", pb.AppendTokensRequest(session_id="nobody", token_ids=[5]))
asks(
    "AppendTokens",
    "CONTEXT_CHANGED",
    pb.AppendTokensRequest(session_id=ID, token_ids=[5], expected_length=99),
)
asks("AppendTokens", "LIMIT_EXCEEDED", pb.AppendTokensRequest(session_id=ID, token_ids=prompt(195)))
asks("Generate", "INVALID_FIELD", pb.GenerateRequest())
asks("Generate", "SESSION_NOT_FOUND", pb.GenerateRequest(session_id="nobody"))
asks(
    "Generate",
    "GENERATION_ALREADY_EXISTS",
    pb.GenerateRequest(session_id=ID, generation_id=GENERATION),
)
asks("GenerateAll", "INVALID_FIELD", pb.GenerateAllRequest(session_id=ID, generation_id="gen-mine"))
asks("GenerateAll", "SESSION_NOT_FOUND", pb.GenerateAllRequest(session_id="nobody"))
asks("Complete", "INVALID_FIELD", pb.CompleteRequest(session=SPEC, spec=pb.GenerationSpec(max_wall_ms=0)))
asks("Complete", "MODEL_NOT_FOUND", pb.CompleteRequest(session=pb.SessionSpec(model="nope")))
asks("AttachGeneration", "INVALID_FIELD", pb.AttachGenerationRequest())
asks("AttachGeneration", "GENERATION_NOT_FOUND", pb.AttachGenerationRequest(generation_id="nothing"))
asks(
    "AttachGeneration",
    "INDEX_OUT_OF_RANGE",
    pb.AttachGenerationRequest(generation_id=GENERATION, from_index=5),
)
asks("CancelGeneration", "INVALID_FIELD", pb.CancelGenerationRequest())
asks("CancelGeneration", "GENERATION_NOT_FOUND", pb.CancelGenerationRequest(generation_id="gen-unknown"))
asks("ParkSession", "INVALID_FIELD", pb.ParkSessionRequest())
asks("ParkSession", "SESSION_NOT_FOUND", pb.ParkSessionRequest(session_id="nobody"))
asks("ResumeSession", "INVALID_FIELD", pb.ResumeSessionRequest())
asks("ResumeSession", "SESSION_NOT_FOUND", pb.ResumeSessionRequest(session_id="nobody"))
asks("ResumeSession", "SESSION_NOT_PARKED", pb.ResumeSessionRequest(session_id=ID))
asks("FinishSession", "INVALID_FIELD", pb.FinishSessionRequest())
asks("FinishSession", "SESSION_NOT_FOUND", pb.FinishSessionRequest(session_id="nobody"))

# AdminService

asks("GetNode", "INVALID_FIELD", admin_pb.GetNodeRequest())
asks("GetNode", "NODE_NOT_FOUND", admin_pb.GetNodeRequest(node="nobody"))
asks("ProbeNodes", "INVALID_FIELD", admin_pb.ProbeNodesRequest(nodes=["a b"]))
asks("ProbeNodes", "NODE_NOT_FOUND", admin_pb.ProbeNodesRequest(nodes=["node-1", "nobody"]))
asks("AddNode", "INVALID_FIELD", admin_pb.AddNodeRequest(address="no-port"))
asks("RemoveNode", "INVALID_FIELD", admin_pb.RemoveNodeRequest())
asks("RemoveNode", "NODE_NOT_FOUND", admin_pb.RemoveNodeRequest(node="nobody"))
asks("CordonNode", "INVALID_FIELD", admin_pb.CordonNodeRequest(node="node-1", note="x" * 513))
asks("CordonNode", "NODE_NOT_FOUND", admin_pb.CordonNodeRequest(node="nobody"))
asks("UncordonNode", "INVALID_FIELD", admin_pb.UncordonNodeRequest())
asks("UncordonNode", "NODE_NOT_FOUND", admin_pb.UncordonNodeRequest(node="nobody"))
asks("DrainNode", "INVALID_FIELD", admin_pb.DrainNodeRequest(node="node-1", by="x" * 129))
asks("DrainNode", "NODE_NOT_FOUND", admin_pb.DrainNodeRequest(node="nobody"))
asks("ExplainPlacement", "INVALID_FIELD", admin_pb.ExplainPlacementRequest())
asks("ExplainPlacement", "SESSION_NOT_FOUND", admin_pb.ExplainPlacementRequest(session_id="nobody"))


@case("AddNode", "NODE_ALREADY_EXISTS")
async def _add_twice(stage: Stage) -> Refused:
    return await refusal_of(stage.admin.AddNode(admin_pb.AddNodeRequest(address=stage.node.address)))


@case("AddNode", "LIMIT_EXCEEDED")
async def _add_too_many(stage: Stage) -> Refused:
    other = await local_node(stage.world, "node-2")
    await stage.admin.AddNode(admin_pb.AddNodeRequest(address=other.address))
    return await refusal_of(stage.admin.AddNode(admin_pb.AddNodeRequest(address="127.0.0.1:1")))


@case("DrainNode", "LIMIT_EXCEEDED")
async def _drain_while_too_many_look_on(stage: Stage) -> Refused:
    stage.server.head.operators.drain_places = 0
    async with watching(stage):
        return await refusal_of(stage.admin.DrainNode(admin_pb.DrainNodeRequest(node="node-1")))


@case("WatchFleet", "LIMIT_EXCEEDED")
async def _watch_while_another_does(stage: Stage) -> Refused:
    async with watching(stage):
        return await refusal_of(stage.admin.WatchFleet(admin_pb.WatchFleetRequest()))


@asynccontextmanager
async def watching(stage: Stage) -> AsyncIterator[None]:
    """With somebody who watches the fleet."""
    call = stage.admin.WatchFleet(admin_pb.WatchFleetRequest())
    await anext(aiter(call))
    yield
    call.cancel()


@case("CreateSession", "LIMIT_EXCEEDED", "number")
async def _too_many_sessions(stage: Stage) -> Refused:
    for _ in range(2):
        await open_session(stage.server)
    return await refusal_of(stage.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC)))


@case("CreateSession", "REQUEST_ID_REUSED")
async def _other_body(stage: Stage) -> Refused:
    first = pb.CreateSessionRequest(spec=SPEC, request_id="r-1")
    await stage.fleet.CreateSession(first)
    other = pb.CreateSessionRequest(spec=SPEC, token_ids=[5], request_id="r-1")
    return await refusal_of(stage.fleet.CreateSession(other))


@case("CreateSession", "NO_ELIGIBLE_NODE")
async def _all_cordoned(stage: Stage) -> Refused:
    await cordon(stage.server, stage.node)
    return await refusal_of(stage.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC)))


@case("CreateSession", "HEAD_DRAINING")
async def _drains(stage: Stage) -> Refused:
    stage.server.head.drain()
    return await refusal_of(stage.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC)))


@case("Generate", "HEAD_DRAINING")
async def _generate_drains(stage: Stage) -> Refused:
    stage.server.head.drain()
    return await refusal_of(generate(stage.server, ID, 4))


@case("Complete", "HEAD_DRAINING")
async def _complete_drains(stage: Stage) -> Refused:
    stage.server.head.drain()
    return await refusal_of(complete(stage.server, prompt(5), 4))


def cannot_keep(stage: Stage) -> None:
    """From now on nothing can be written to the head's disk."""
    full = StoreError(StoreTrouble.FULL, "no space is left")
    stage.server.head.journal.trouble = full  # type: ignore[misc]


@case("CreateSession", "STORE_UNAVAILABLE")
async def _create_on_a_full_disk(stage: Stage) -> Refused:
    cannot_keep(stage)
    return await refusal_of(stage.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC)))


@case("AppendTokens", "STORE_UNAVAILABLE")
async def _append_on_a_full_disk(stage: Stage) -> Refused:
    cannot_keep(stage)
    return await refusal_of(stage.fleet.AppendTokens(pb.AppendTokensRequest(session_id=ID, token_ids=[5])))


@case("Generate", "STORE_UNAVAILABLE")
async def _generate_on_a_full_disk(stage: Stage) -> Refused:
    cannot_keep(stage)
    return await refusal_of(generate(stage.server, ID, 4))


@case("GetSession", "CONTEXT_LOST")
async def _read_what_is_damaged(stage: Stage) -> Refused:
    # A head that keeps nothing has no place to read it back from, as one whose file is damaged.
    stage.server.head.sessions.get(ID).context.put_away()
    request = pb.GetSessionRequest(session_id=ID, include_token_ids=True)
    return await refusal_of(stage.fleet.GetSession(request))


@case("Generate", "SESSION_PARKED")
async def _generate_parked(stage: Stage) -> Refused:
    await stage.fleet.ParkSession(pb.ParkSessionRequest(session_id=ID))
    return await refusal_of(generate(stage.server, ID, 4))


@case("AppendTokens", "SESSION_PARKED")
async def _append_parked(stage: Stage) -> Refused:
    await stage.fleet.ParkSession(pb.ParkSessionRequest(session_id=ID))
    return await refusal_of(stage.fleet.AppendTokens(pb.AppendTokensRequest(session_id=ID, token_ids=[5])))


@case("ResumeSession", "NO_ELIGIBLE_NODE")
async def _resume_nowhere(stage: Stage) -> Refused:
    await stage.fleet.ParkSession(pb.ParkSessionRequest(session_id=ID))
    await cordon(stage.server, stage.node)
    return await refusal_of(stage.fleet.ResumeSession(pb.ResumeSessionRequest(session_id=ID)))


@case("Generate", "GENERATION_IN_PROGRESS")
async def _generate_twice(stage: Stage) -> Refused:
    await stage.running()
    return await refusal_of(generate(stage.server, ID, 4))


@case("AppendTokens", "GENERATION_IN_PROGRESS")
async def _append_meanwhile(stage: Stage) -> Refused:
    await stage.running()
    return await refusal_of(stage.fleet.AppendTokens(pb.AppendTokensRequest(session_id=ID, token_ids=[5])))


@case("ParkSession", "GENERATION_IN_PROGRESS")
async def _park_meanwhile(stage: Stage) -> Refused:
    await stage.running()
    return await refusal_of(stage.fleet.ParkSession(pb.ParkSessionRequest(session_id=ID)))


@case("Complete", "LIMIT_EXCEEDED")
async def _too_many_generations(stage: Stage) -> Refused:
    await stage.running()
    await stage.running(session_id=await open_session(stage.server, prompt(5)))
    return await refusal_of(complete(stage.server, prompt(5), 4))


@case("AttachGeneration", "LIMIT_EXCEEDED")
async def _too_many_readers(stage: Stage) -> Refused:
    await stage.running("watched")
    request = pb.AttachGenerationRequest(generation_id="watched")
    stage.readings.append(Reading(stage.fleet.AttachGeneration(request)))
    await stage.readings[-1].until_tokens(3)
    return await refusal_of(stage.fleet.AttachGeneration(request))


@case("AttachGeneration", "DATA_LOSS")
async def _has_what_the_head_lost(stage: Stage) -> Refused:
    log = stage.server.head.find_generation(GENERATION).log
    log.cut(1)
    request = pb.AttachGenerationRequest(generation_id=GENERATION, from_index=log.visible + 1)
    error = await refusal_of(stage.fleet.AttachGeneration(request))
    assert (error.metadata["nextIndex"], error.metadata["branch"]) == (str(log.visible), "1")
    there = pb.AttachGenerationRequest(generation_id=GENERATION, from_index=log.visible)
    assert {response.event.branch async for response in stage.fleet.AttachGeneration(there)} == {1}
    return error


@case("CancelGeneration", "LIMIT_EXCEEDED")
async def _too_many_cancels_ahead(stage: Stage) -> Refused:
    await stage.fleet.CancelGeneration(pb.CancelGenerationRequest(generation_id="later-1"))
    second = pb.CancelGenerationRequest(generation_id="later-2")
    return await refusal_of(stage.fleet.CancelGeneration(second))


@case("Complete", "CONTEXT_TOO_LONG")
async def _prompt_too_long(stage: Stage) -> Refused:
    narrow = await local_node(stage.world, "narrow", models={"narrow-model": 64})
    await stage.admin.AddNode(admin_pb.AddNodeRequest(address=narrow.address))
    return await refusal_of(complete(stage.server, prompt(65), 4, model="narrow-model"))


@case("AppendTokens", "CONTEXT_TOO_LONG")
async def _grown_too_long(stage: Stage) -> Refused:
    narrow = await local_node(stage.world, "narrow", models={"narrow-model": 64})
    await stage.admin.AddNode(admin_pb.AddNodeRequest(address=narrow.address))
    session_id = await open_session(stage.server, prompt(60), model="narrow-model")
    grow = pb.AppendTokensRequest(session_id=session_id, token_ids=prompt(5))
    error = await refusal_of(stage.fleet.AppendTokens(grow))
    assert error.code == "OUT_OF_RANGE"
    return error


@case("GetSession", "REQUEST_TOO_LARGE")
async def _too_large(stage: Stage) -> Refused:
    return await refusal_of(stage.fleet.GetSession(pb.GetSessionRequest(session_id="x" * (17 * 1024 * 1024))))


@case("Connect", "INVALID_FIELD", "an id twice")
async def _call_id_in_use(stage: Stage) -> Refused:
    call: Any = FleetServiceStub(stage.server.new_channel()).Connect()
    complete_call = pb.ConnectCall(call_id=1, complete=pb.CompleteRequest(session=SPEC, token_ids=prompt(5)))
    await call.write(pb.ConnectRequest(calls=[complete_call, complete_call]))
    return await refusal_of(call)


@case("GetSession", "INTERNAL")
async def _a_fault_of_the_head(stage: Stage) -> Refused:
    def broken(_session_id: str) -> None:
        raise RuntimeError("secret of the implementation")

    stage.server.head.get_session = broken  # type: ignore[method-assign,assignment]
    error = await refusal_of(stage.fleet.GetSession(pb.GetSessionRequest(session_id=ID)))
    assert "secret" not in error.message
    return error


@pytest.mark.parametrize("name", CASES)
async def test_wrong_use_is_refused_as_documented(stage: Stage, name: str) -> None:
    reason, use = CASES[name]
    error = await use(stage)
    assert error.reason == reason
    DOCUMENTED[reason].check(error)
    for reading in stage.readings:
        await reading.leave()
    assert stage.server.head.fleet.nodes[0].failures == {}


def test_every_method_has_a_wrong_use_and_every_documented_reason_a_case() -> None:
    nothing_to_get_wrong = {"ListModels", "ListNodes"}
    services = [
        pb.DESCRIPTOR.services_by_name["FleetService"],
        admin_pb.DESCRIPTOR.services_by_name["AdminService"],
    ]
    methods = {method.name for service in services for method in service.methods}
    assert {name.split()[0] for name in CASES} == methods - nothing_to_get_wrong
    # test_queue.py, test_error_causes.py, test_access.py
    elsewhere = {"FLEET_SATURATED", "OWNER_CHANGED", "CREDENTIALS_REFUSED", "PERMISSION_DENIED"}
    assert {reason for reason, _ in CASES.values()} == DOCUMENTED.keys() - elsewhere
