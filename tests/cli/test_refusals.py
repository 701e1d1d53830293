"""What the commands say when a head refuses, is slow, is another service, or is not there."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet_pb2
from fleet.v1.types_pb2 import Model
from tests.cli.conftest import Fleet
from tests.cli.scripted_head import Hang, Refuse, ScriptedHead

NODE = admin.Node(name="node-a", address="10.0.0.7:8454", models=[Model(name="stub", revision="r1")])


async def test_a_refusal_is_told_with_reason_fields_values_and_when_to_retry(
    head: ScriptedHead, fleet: Fleet
) -> None:
    bad = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field="note", description="at most 512 characters")
        ]
    )
    head.replies["CordonNode"] = Refuse(
        code_pb2.UNAVAILABLE,
        "no node for now; retry shortly",
        reason="NO_ELIGIBLE_NODE",
        metadata={"down": "3"},
        details=(bad, error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2))),
    )
    ended = await fleet("cordon", "node-a")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines() == [
        "fleet: no node for now [NO_ELIGIBLE_NODE]",
        "  note: at most 512 characters",
        "  down: 3",
        "  try again in 2 s",
        "  what to do: see why with `fleet nodes` and `fleet explain`",
    ]
    as_json = await fleet("cordon", "node-a", "--json")
    error = json.loads(as_json.err)["error"]
    assert (as_json.code, as_json.out) == (1, "")
    assert (error["code"], error["reason"], error["retry_after_s"]) == ("UNAVAILABLE", "NO_ELIGIBLE_NODE", 2)
    assert error["violations"] == [{"field": "note", "description": "at most 512 characters"}]


@pytest.mark.parametrize(
    "arguments,where,variable",
    [
        (["nodes"], "--admin-address", "FLEET_ADMIN_ADDRESS"),
        (["explain", "--model", "demo"], "--admin-address", "FLEET_ADMIN_ADDRESS"),
        (["generate", "--model", "demo", "--tokens", "1"], "--address", "FLEET_ADDRESS"),
    ],
)
async def test_where_no_head_listens_it_says_how_to_start_one(
    fleet: Fleet, arguments: list[str], where: str, variable: str
) -> None:
    ended = await fleet(*arguments, where, "127.0.0.1:1")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines() == [
        "fleet: no head listens at 127.0.0.1:1 (connection refused)",
        "  start one:    fleet serve --node HOST:PORT",
        f"  or say where: {where} HOST:PORT, or {variable}",
    ]


async def test_a_host_of_no_known_name_is_told(fleet: Fleet) -> None:
    ended = await fleet("nodes", "--admin-address", "no-such-host.invalid")
    assert "no head listens at no-such-host.invalid:8456 (name not found)" in ended.err


async def test_what_does_not_speak_grpc_is_no_head(fleet: Fleet) -> None:
    async def web_server(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(web_server, "127.0.0.1", 0) as server:
        address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        ended = await fleet("sessions", "--address", address)
    assert ended.code == 1
    assert f"what listens at {address} is not this service of a head" in ended.err


async def test_the_wrong_one_of_the_two_listeners_is_told(head: ScriptedHead, fleet: Fleet) -> None:
    ended = await fleet("nodes", "--admin-address", head.address)
    assert ended.code == 1
    assert "is not this service of a head" in ended.err
    assert "say where: --admin-address HOST:PORT" in ended.err


async def test_a_head_that_does_not_answer_in_time_is_told(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["ListNodes"] = Hang()
    ended = await asyncio.wait_for(fleet("nodes", "--timeout", "0.5"), 60)
    assert ended.code == 1
    assert ended.err.splitlines() == [
        f"fleet: the head at {head.admin_address} did not answer in 0.5 s; it may be busy or far away",
        "  try again, or wait longer with --timeout SECONDS",
    ]
    as_json = await fleet("nodes", "--timeout", "0.5", "--json")
    assert json.loads(as_json.err)["error"]["reason"] == "NO_ANSWER"


async def test_an_address_that_takes_connections_and_says_nothing_is_slow_not_absent(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = await fleet("nodes", "--admin-address", address, "--timeout", "0.5")
    assert ended.code == 1
    assert f"fleet: the head at {address} did not answer in 0.5 s" in ended.err


async def test_a_model_that_nobody_serves_brings_the_one_that_was_meant(
    head: ScriptedHead, fleet: Fleet
) -> None:
    message = "no node serves model dmeo; list the models that are served and ask for one of them"
    unknown = Refuse(code_pb2.NOT_FOUND, message, reason="MODEL_NOT_FOUND", metadata={"model": "dmeo"})
    head.streams = [[unknown], [unknown], [unknown]]
    ask = ("generate", "--model", "dmeo", "--tokens", "1")
    head.replies["ListModels"] = fleet_pb2.ListModelsResponse(
        models=[fleet_pb2.ModelSummary(model=Model(name=name)) for name in ("other", "demo")]
    )
    ended = await fleet(*ask)
    assert (ended.code, ended.err.splitlines()) == (
        1,
        ["fleet: no node serves model dmeo [MODEL_NOT_FOUND]", "  what to do: did you mean demo?"],
    )
    head.replies["ListModels"] = fleet_pb2.ListModelsResponse(
        models=[fleet_pb2.ModelSummary(model=Model(name=name)) for name in ("llama", "phi")]
    )
    assert "what to do: ask for one that is served: llama, phi" in (await fleet(*ask)).err
    head.replies["ListModels"] = fleet_pb2.ListModelsResponse()
    assert "what to do: no node has been up yet: see `fleet nodes`" in (await fleet(*ask)).err


async def test_a_misspelt_model_is_told_even_while_a_node_that_may_serve_it_is_down(
    head: ScriptedHead, fleet: Fleet
) -> None:
    message = "no node can take model dmeo now (1 down); retry shortly"
    refused = Refuse(code_pb2.UNAVAILABLE, message, reason="NO_ELIGIBLE_NODE", metadata={"model": "dmeo"})
    head.streams = [[refused], [refused], [refused]]
    head.replies["ListModels"] = fleet_pb2.ListModelsResponse(
        models=[fleet_pb2.ModelSummary(model=Model(name="demo"))]
    )
    ended = await fleet("generate", "--model", "dmeo", "--tokens", "1")
    assert ended.err.splitlines()[-1] == "  what to do: did you mean demo?"
    ended = await fleet("generate", "--model", "demo", "--tokens", "1")
    assert ended.err.splitlines()[-1] == "  what to do: see why with `fleet nodes` and `fleet explain`"
    head.replies["ListModels"] = refused
    ended = await fleet("generate", "--model", "dmeo", "--tokens", "1")
    assert ended.err.splitlines()[-1] == "  what to do: see why with `fleet nodes` and `fleet explain`"


async def test_explain_brings_the_model_that_was_meant(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["ExplainPlacement"] = admin.ExplainPlacementResponse(
        policy="load-aware",
        refusal_reason="MODEL_NOT_FOUND",
        refusal_message="no node serves model stubb; list the models that are served and ask for one of them",
    )
    head.replies["ListNodes"] = admin.ListNodesResponse(nodes=[NODE])
    lines = (await fleet("explain", "--model", "stubb")).out.splitlines()
    assert lines[:2] == [
        "load-aware: it would go nowhere: no node serves model stubb [MODEL_NOT_FOUND]",
        "  what to do: did you mean stub?",
    ]


async def test_a_refusal_is_not_said_twice(head: ScriptedHead, fleet: Fleet) -> None:
    message = "the prompt has 99 tokens, but the widest window of model demo has 64; shorten it"
    violation = error_details_pb2.BadRequest.FieldViolation(field="token_ids", description=message)
    head.streams = [
        [
            Refuse(
                code_pb2.INVALID_ARGUMENT,
                message,
                reason="CONTEXT_TOO_LONG",
                metadata={"model": "demo", "promptTokens": "99", "maxContextTokens": "64"},
                details=(error_details_pb2.BadRequest(field_violations=[violation]),),
            )
        ]
    ]
    ended = await fleet("generate", "--model", "demo", "--tokens", "1")
    assert ended.err.splitlines() == [
        f"fleet: {message.removesuffix('; shorten it')} [CONTEXT_TOO_LONG]",
        "  what to do: shorten the prompt, or add a node with a wider window (`fleet explain` shows them)",
    ]


async def test_a_refused_caller_is_told_what_helps_with_or_without_a_token(
    head: ScriptedHead, fleet: Fleet, tmp_path: Path
) -> None:
    head.replies["ListSessions"] = Refuse(
        code_pb2.UNAUTHENTICATED, "not known here", reason="CREDENTIALS_REFUSED"
    )
    token = tmp_path / "my.token"
    token.write_text("fleet_x")
    without = await fleet("sessions")
    assert "give your token with --access-token-file FILE" in without.err
    given = await fleet("sessions", "--access-token-file", str(token))
    assert f"a new token: it does not take the one in {token}" in given.err
    assert "give your token" not in given.err


async def test_an_operator_who_asks_for_sessions_is_told_where_they_are(
    head: ScriptedHead, fleet: Fleet
) -> None:
    denied = Refuse(
        code_pb2.PERMISSION_DENIED,
        "oncall may not call here",
        reason="PERMISSION_DENIED",
        metadata={"caller": "oncall", "permission": "call"},
    )
    head.replies["ListSessions"] = denied
    assert (
        "the operators' page (listen.page) shows the sessions of all callers" in (await fleet("sessions")).err
    )
    head.replies["CordonNode"] = Refuse(
        code_pb2.PERMISSION_DENIED, "no", reason="PERMISSION_DENIED", metadata={"permission": "operate"}
    )
    assert "`fleet access list --file FILE`" in (await fleet("cordon", "node-a")).err
