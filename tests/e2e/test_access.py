"""Who calls and what it may do: tokens, certificates, roles, on real listeners; whose sessions are whose."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.access_file import Entry, add_entry, hash_of, new_token, remove_entry
from fleet_service.api.access import AccessGate, CertificateGate, Gate
from fleet_service.api.interceptors import NullRpcObserver
from fleet_service.api.server import EdgeParts, callers_listener, operators_listener
from fleet_service.client import CallError, FleetClient
from fleet_service.credentials import Credentials
from fleet_service.domain.access import Caller, Permission
from fleet_service.tls import ClientTls, ServerTls
from tests.certificates import Authority
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt
from tests.e2e.local_nodes import local_nodes

CALL, READ, OPERATE = Permission.CALL, Permission.READ, Permission.OPERATE


@dataclass
class Guarded:
    """A head whose listeners ask who calls, and clients of it."""

    world: World
    server: HeadServer
    folder: Path
    file: Path
    stack: AsyncExitStack
    now_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def let_in(self, name: str, *may: Permission, models: tuple[str, ...] = ()) -> Path:
        """Add one who may call; the file with its token."""
        token = new_token()
        add_entry(self.file, Entry(Caller(name, frozenset(may), frozenset(models)), hash_of(token)))
        path = self.folder / f"{name}.token"
        path.write_text(f"{token}\n")
        self.now_s += 2  # the head looks once a second
        return path

    async def listen(self, gate: Gate | None = None, tls: ServerTls | None = None) -> tuple[str, str]:
        rng = random.Random(5)
        parts = EdgeParts(
            log=structlog.get_logger("edge"),
            observer=NullRpcObserver(),
            rng=rng,
            new_request_id=lambda: f"req-{rng.getrandbits(64):016x}",
            gate=gate or AccessGate(self.file, self.clock),
        )
        head = self.server.head
        callers = callers_listener(head, parts, "127.0.0.1:0", tls)
        admin = operators_listener(head.operators, parts, "127.0.0.1:0", tls)
        for listener in (callers, admin):
            await listener.start()
            self.stack.push_async_callback(listener.stop, 0.0)
        return f"localhost:{callers.port}", f"localhost:{admin.port}"

    async def client(
        self, where: tuple[str, str], token: Path | None = None, tls: ClientTls | None = None
    ) -> FleetClient:
        return await self.stack.enter_async_context(FleetClient(*where, credentials=Credentials(token, tls)))


@pytest.fixture
async def guarded(world: World, tmp_path: Path) -> AsyncIterator[Guarded]:
    nodes = await local_nodes(world, 2)
    async with AsyncExitStack() as stack:
        server = await world.head(*nodes)
        file = tmp_path / "access.toml"
        add_entry(file, Entry(Caller("somebody", frozenset({READ})), hash_of(new_token())))
        yield Guarded(world, server, tmp_path, file, stack)


async def refused(call: Awaitable[Any]) -> tuple[str, str]:
    """Code and reason of a call that fails."""
    with pytest.raises(CallError) as error:
        await call
    return error.value.code.name, error.value.reason


def completion(n: int = 5, model: str = MODEL.name) -> pb.CompleteRequest:
    spec = pb.GenerationSpec(max_new_tokens=n)
    return pb.CompleteRequest(session=pb.SessionSpec(model=model), token_ids=prompt(8), spec=spec)


async def answer_of(client: FleetClient, request: pb.CompleteRequest) -> list[int]:
    return [token async for event in client.complete(request) for token in event.tokens.token_ids]


async def new_session(client: FleetClient, session_id: str = "") -> str:
    request = pb.CreateSessionRequest(
        session_id=session_id, spec=pb.SessionSpec(model=MODEL.name), token_ids=prompt(8)
    )
    return (await client.ask(client.fleet.CreateSession(request))).session.session_id


async def test_a_caller_without_the_right_token_is_told_so_and_gets_nothing(guarded: Guarded) -> None:
    guarded.let_in("frontend", CALL)
    where = await guarded.listen()
    wrong = guarded.folder / "wrong"
    wrong.write_text(new_token())
    for token in (None, wrong):
        client = await guarded.client(where, token)
        for call in (
            client.fleet.ListModels(pb.ListModelsRequest()),
            client.fleet.CreateSession(pb.CreateSessionRequest()),  # who calls comes before what is wrong
            client.admin.ListNodes(admin_pb.ListNodesRequest()),
        ):
            assert await refused(client.ask(call)) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")
        assert await refused(answer_of(client, completion())) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")
    assert guarded.server.head.list_sessions(10, "", None, "")[0] == []


async def test_tokens_may_do_what_their_entry_says(guarded: Guarded) -> None:
    where = await guarded.listen()
    caller = await guarded.client(where, guarded.let_in("frontend", CALL))
    reader = await guarded.client(where, guarded.let_in("dashboards", READ))
    operator = await guarded.client(where, guarded.let_in("oncall", OPERATE))
    denied = ("PERMISSION_DENIED", "PERMISSION_DENIED")

    assert await answer_of(caller, completion()) == expected(prompt(8), 5)
    for client in (reader, operator):
        assert await refused(answer_of(client, completion())) == denied
        assert len((await client.ask(client.admin.ListNodes(admin_pb.ListNodesRequest()))).nodes) == 2
    assert await refused(caller.ask(caller.admin.ListNodes(admin_pb.ListNodesRequest()))) == denied
    cordon = admin_pb.CordonNodeRequest(node="node-1")
    assert await refused(reader.ask(reader.admin.CordonNode(cordon))) == denied
    assert (await operator.ask(operator.admin.CordonNode(cordon))).node.cordoned


async def test_every_method_of_the_operators_service_is_open_to_the_right_role_only(guarded: Guarded) -> None:
    where = await guarded.listen()
    reader = await guarded.client(where, guarded.let_in("dashboards", READ))
    methods = admin_pb.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
    reads = {"ListNodes", "GetNode", "ProbeNodes", "ExplainPlacement", "WatchFleet"}
    assert reads < set(methods)
    for name in set(methods) - reads:
        request = getattr(admin_pb, f"{name}Request")()
        call = getattr(reader.admin, name)(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED, name


async def test_a_refusal_names_the_caller_and_what_it_lacks(guarded: Guarded) -> None:
    where = await guarded.listen()
    client = await guarded.client(where, guarded.let_in("narrow", CALL, models=("other-model",)))
    with pytest.raises(CallError) as model:
        await new_session(client)
    assert model.value.metadata == {"caller": "narrow", "model": MODEL.name}
    with pytest.raises(CallError) as permission:
        await client.ask(client.admin.ListNodes(admin_pb.ListNodesRequest()))
    assert permission.value.metadata == {"caller": "narrow", "permission": "read"}
    with pytest.raises(CallError) as nobody:
        await new_session(await guarded.client(where))
    assert (nobody.value.metadata, nobody.value.retry_after_s) == ({}, None)


async def test_a_caller_may_be_kept_to_some_models(guarded: Guarded) -> None:
    where = await guarded.listen()
    narrow = await guarded.client(where, guarded.let_in("narrow", CALL, models=("other-model",)))
    wide = await guarded.client(where, guarded.let_in("wide", CALL))
    assert await refused(answer_of(narrow, completion())) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    assert await refused(new_session(narrow)) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    assert list((await narrow.ask(narrow.fleet.ListModels(pb.ListModelsRequest()))).models) == []
    assert len((await wide.ask(wide.fleet.ListModels(pb.ListModelsRequest()))).models) == 1


async def test_sessions_and_generations_are_their_makers_alone(guarded: Guarded) -> None:
    where = await guarded.listen()
    ours = await guarded.client(where, guarded.let_in("ours", CALL))
    theirs = await guarded.client(where, guarded.let_in("theirs", CALL))
    await new_session(ours, "s-1")
    grace = pb.GenerationSpec(max_new_tokens=400, on_disconnect="ON_DISCONNECT_CONTINUE")
    running = ours.fleet.Generate(pb.GenerateRequest(session_id="s-1", generation_id="g-1", spec=grace))
    accepted = await running.read()
    assert isinstance(accepted, pb.GenerateResponse)
    assert accepted.event.accepted.generation_id == "g-1"

    fleet = theirs.fleet
    tries: list[Callable[[], Awaitable[Any]]] = [
        lambda: fleet.GetSession(pb.GetSessionRequest(session_id="s-1", include_token_ids=True)),
        lambda: fleet.AppendTokens(pb.AppendTokensRequest(session_id="s-1", token_ids=[1])),
        lambda: fleet.Generate(pb.GenerateRequest(session_id="s-1")).read(),
        lambda: fleet.GenerateAll(pb.GenerateAllRequest(session_id="s-1")),
        lambda: fleet.ParkSession(pb.ParkSessionRequest(session_id="s-1")),
        lambda: fleet.ResumeSession(pb.ResumeSessionRequest(session_id="s-1")),
        lambda: fleet.FinishSession(pb.FinishSessionRequest(session_id="s-1")),
    ]
    for attempt in tries:
        assert await refused(theirs.ask(attempt())) == ("NOT_FOUND", "SESSION_NOT_FOUND")
    attach = pb.AttachGenerationRequest(generation_id="g-1")
    cancel = pb.CancelGenerationRequest(generation_id="g-1")
    not_found = ("NOT_FOUND", "GENERATION_NOT_FOUND")
    assert await refused(theirs.ask(fleet.AttachGeneration(attach).read())) == not_found
    assert await refused(theirs.ask(fleet.CancelGeneration(cancel))) == not_found
    assert list((await theirs.ask(fleet.ListSessions(pb.ListSessionsRequest()))).sessions) == []

    listed = (await ours.ask(ours.fleet.ListSessions(pb.ListSessionsRequest()))).sessions
    assert [session.session_id for session in listed] == ["s-1"]
    answer: list[int] = []
    async for response in ours.fleet.AttachGeneration(attach):
        answer += response.event.tokens.token_ids
    assert answer == expected(prompt(8), 400)
    running.cancel()


async def test_ids_of_requests_and_cancels_ahead_are_each_callers_own(guarded: Guarded) -> None:
    where = await guarded.listen()
    ours = await guarded.client(where, guarded.let_in("ours", CALL))
    theirs = await guarded.client(where, guarded.let_in("theirs", CALL))
    spec = pb.SessionSpec(model=MODEL.name)
    request = pb.CreateSessionRequest(spec=spec, token_ids=prompt(8), request_id="r-1")
    first, again, other = [
        (await client.ask(client.fleet.CreateSession(request))).session.session_id
        for client in (ours, ours, theirs)
    ]
    assert first == again
    assert other != first
    # A cancel that waits for a generation waits for one of the same caller.
    await theirs.ask(theirs.fleet.CancelGeneration(pb.CancelGenerationRequest(generation_id="g-9")))
    generate = pb.GenerateAllRequest(
        session_id=first, generation_id="g-9", spec=pb.GenerationSpec(max_new_tokens=5)
    )
    assert list((await ours.ask(ours.fleet.GenerateAll(generate))).token_ids) == expected(prompt(8), 5)


async def test_the_file_is_read_again_while_the_head_runs_and_a_broken_one_changes_nothing(
    guarded: Guarded,
) -> None:
    where = await guarded.listen()
    client = await guarded.client(where, guarded.let_in("frontend", CALL))
    assert await answer_of(client, completion()) == expected(prompt(8), 5)
    good = guarded.file.read_text()
    guarded.file.write_text("[frontend]\nmay = [")
    guarded.now_s += 2
    assert await answer_of(client, completion()) == expected(prompt(8), 5)
    guarded.file.write_text(good)
    remove_entry(guarded.file, "frontend")
    guarded.now_s += 2
    assert await refused(answer_of(client, completion())) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")


async def test_a_connection_does_nothing_more_once_its_token_was_taken_back(guarded: Guarded) -> None:
    where = await guarded.listen()
    client = await guarded.client(where, guarded.let_in("frontend", CALL))
    call: Any = client.fleet.Connect()
    get = pb.ConnectCall(call_id=1, get_session=pb.GetSessionRequest(session_id="none"))
    await call.write(pb.ConnectRequest(calls=[get]))
    assert (await call.read()).HasField("limits")
    assert [reply.error.reason for reply in (await call.read()).replies] == ["SESSION_NOT_FOUND"]
    remove_entry(guarded.file, "frontend")
    guarded.now_s += 2
    await call.write(pb.ConnectRequest(calls=[get]))
    assert await refused(client.ask(call.read())) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")


async def test_a_file_that_could_not_be_read_for_a_while_is_read_when_it_can_be(guarded: Guarded) -> None:
    where = await guarded.listen()
    client = await guarded.client(where, guarded.let_in("frontend", CALL))
    assert await answer_of(client, completion()) == expected(prompt(8), 5)
    remove_entry(guarded.file, "frontend")
    kept = guarded.file.read_bytes()
    guarded.file.rename(guarded.folder / "away")
    guarded.now_s += 2
    assert await answer_of(client, completion()) == expected(prompt(8), 5)
    (guarded.folder / "away").rename(guarded.file)
    guarded.file.write_bytes(kept[: len(kept) // 2])  # cut off: who is missing in it is not locked out
    guarded.now_s += 2
    assert await answer_of(client, completion()) == expected(prompt(8), 5)
    guarded.file.write_bytes(kept)
    guarded.now_s += 2
    assert await refused(answer_of(client, completion())) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")


async def test_a_session_of_a_model_that_was_taken_from_its_owner_is_not_used_on(guarded: Guarded) -> None:
    where = await guarded.listen()
    client = await guarded.client(where, guarded.let_in("narrow", CALL))
    session_id = await new_session(client)
    text = guarded.file.read_text().replace('may = ["call"]', 'may = ["call"]\nmodels = ["other-model"]')
    guarded.file.write_text(text)
    guarded.now_s += 2
    generate = pb.GenerateAllRequest(session_id=session_id)
    denied = ("PERMISSION_DENIED", "PERMISSION_DENIED")
    assert await refused(client.ask(client.fleet.GenerateAll(generate))) == denied
    resume = pb.ResumeSessionRequest(session_id=session_id)
    assert await refused(client.ask(client.fleet.ResumeSession(resume))) == denied


async def test_callers_are_known_by_certificate_over_tls(guarded: Guarded) -> None:
    authority, stranger = Authority(guarded.folder), Authority(guarded.folder, "stranger")
    pair = authority.issue("head")
    tls = ServerTls(pair.cert, pair.key, authority.ca)
    gateway, other, foreign = (
        authority.issue("gateway", "gateway.example"),
        authority.issue("other", "other.example"),
        stranger.issue("foreign", "gateway.example"),
    )

    def shown(each: Any) -> ClientTls:
        return ClientTls(authority.ca, each.cert, each.key)

    # Any certificate of the CA will do where there is no file; sessions are by name.
    where = await guarded.listen(CertificateGate(), tls)
    ours = await guarded.client(where, tls=shown(gateway))
    theirs = await guarded.client(where, tls=shown(other))
    session_id = await new_session(ours)
    get = pb.GetSessionRequest(session_id=session_id)
    assert await refused(theirs.ask(theirs.fleet.GetSession(get))) == ("NOT_FOUND", "SESSION_NOT_FOUND")
    for wrong in (shown(foreign), ClientTls(authority.ca), None):
        client = await guarded.client(where, tls=wrong)
        assert (await refused(new_session(client)))[0] == "UNAVAILABLE"
    # With a file, those in it.
    add_entry(guarded.file, Entry(Caller("gw", frozenset({CALL})), certificate="gateway.example"))
    where = await guarded.listen(tls=tls)
    assert await answer_of(await guarded.client(where, tls=shown(gateway)), completion())
    client = await guarded.client(where, tls=shown(other))
    assert await refused(new_session(client)) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")


async def test_health_is_told_to_anybody(guarded: Guarded) -> None:
    client = await guarded.client(await guarded.listen())
    request = health_pb2.HealthCheckRequest(service="")
    reply = await client.ask(client.health.Check(request))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_metadata_a_token_may_come_in(guarded: Guarded) -> None:
    token = guarded.let_in("frontend", CALL).read_text().strip()
    where = await guarded.listen()
    client = await guarded.client(where)
    good: list[tuple[tuple[str, str], ...]] = [
        (("authorization", f"Bearer {token}"),),
        (("authorization", f"bearer {token}"),),
    ]
    bad: list[tuple[tuple[str, str], ...]] = [
        (("authorization", token),),
        (("authorization", "Bearer "),),
        (("authorization", f"Basic {token}"),),
        (("authorization", f"Bearer {token}x"),),
        (("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}")),
    ]
    for metadata in good:
        await client.fleet.ListModels(pb.ListModelsRequest(), metadata=metadata)
    for metadata in bad:
        call = client.fleet.ListModels(pb.ListModelsRequest(), metadata=metadata)
        assert await refused(client.ask(call)) == ("UNAUTHENTICATED", "CREDENTIALS_REFUSED")
