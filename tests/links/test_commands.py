"""Commands over a plain link: answers, refusals, and what the head learns when there is neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.commands import CancelRun, HeldSession, Refusal, RefusalCode, Revoke
from fleet_service.links.plain import PlainDialer, PlainLink
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import LinkError, LinkLostError, LinkTimeoutError, NodeFaultError
from tests.links.scripted_node import (
    EPOCH,
    INTRODUCTION,
    RecordingListener,
    ScriptedNode,
    an_append,
    an_assign,
    serving,
)


@asynccontextmanager
async def linked(
    node: ScriptedNode, listener: RecordingListener | None = None, settings: LinkSettings | None = None
) -> AsyncIterator[PlainLink]:
    dialer = PlainDialer(settings or LinkSettings())
    async with serving(node.handler()) as address:
        link = await dialer.connect(address, INTRODUCTION, listener or RecordingListener())
        yield link
        await link.close()


COMMANDS: dict[str, Callable[[PlainLink], Awaitable[Refusal | None]]] = {
    "Assign": lambda link: link.assign(an_assign()),
    "Append": lambda link: link.append(an_append([1, 2, 3])),
    "Cancel": lambda link: link.cancel(CancelRun("s-1", EPOCH, "g-1")),
    "Revoke": lambda link: link.revoke(Revoke("s-1", EPOCH)),
}
every_command = pytest.mark.parametrize("name", COMMANDS)


async def hang(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await asyncio.Event().wait()


@every_command
async def test_a_command_that_is_done_is_no_refusal_and_a_sign_of_life(name: str) -> None:
    node, listener = ScriptedNode(), RecordingListener()
    async with linked(node, listener) as link:
        await listener.reported.wait()
        signs_before = listener.signs
        assert await COMMANDS[name](link) is None
        assert listener.signs == signs_before + 1
    (request,) = node.received[name]
    assert (request.session_id, request.epoch) == ("s-1", EPOCH)


@every_command
async def test_a_refused_command_says_why(name: str) -> None:
    node = ScriptedNode()
    node.answers[name] = type(node.answers[name])(
        refusal=pb.Refusal(code=pb.REFUSAL_CODE_STALE_EPOCH, current_epoch=9, detail="newer owner")
    )
    async with linked(node) as link:
        assert await COMMANDS[name](link) == Refusal(
            RefusalCode.STALE_EPOCH, current_epoch=9, detail="newer owner"
        )


@pytest.mark.parametrize("renewed", [True, False])
async def test_a_lease_is_renewed_or_had_run_out(renewed: bool) -> None:
    node = ScriptedNode()
    node.answers["RenewLease"] = pb.RenewLeaseResponse(renewed=renewed)
    async with linked(node) as link:
        assert await link.renew_lease(60.0, INTRODUCTION.term) is renewed
    (request,) = node.received["RenewLease"]
    assert (request.lease_ms, request.term) == (60_000, INTRODUCTION.term)


async def test_reconcile_lists_what_the_node_holds() -> None:
    node = ScriptedNode()
    node.answers["Reconcile"] = pb.ReconcileResponse(
        sessions=[pb.HeldSession(session_id="s-1", epoch=5, head_id="h", generation_ids=["g"])]
    )
    async with linked(node) as link:
        assert await link.reconcile() == [HeldSession("s-1", 5, "h", generation_ids=("g",))]
    (request,) = node.received["Reconcile"]
    assert (request.fleet_id, request.head_id) == ("fleet", "head-1")


@pytest.mark.parametrize("answer", ["done", "refused", "failed"])
async def test_any_answer_to_a_ping_proves_life(answer: str) -> None:
    async def fail(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "what is that")

    answers: dict[str, Any] = {
        "done": pb.CancelResponse(),
        "refused": pb.CancelResponse(refusal=pb.Refusal(code=pb.REFUSAL_CODE_UNKNOWN_SESSION)),
        "failed": fail,
    }
    node = ScriptedNode()
    node.answers["Cancel"] = answers[answer]
    async with linked(node) as link:
        await link.ping()
    assert [request.epoch for request in node.received["Cancel"]] == [0], "a run of that epoch cannot be"


async def test_a_node_that_does_not_answer_a_ping_is_told_from_one_that_does() -> None:
    node = ScriptedNode()
    node.answers["Cancel"] = hang
    async with linked(node, settings=LinkSettings(command_timeout_s=0.05)) as link:
        with pytest.raises(LinkTimeoutError):
            await link.ping()


async def test_a_run_never_outlives_a_plain_link() -> None:
    async with linked(ScriptedNode()) as link:
        assert not link.resumes


@every_command
@pytest.mark.parametrize(
    "code, kind",
    [
        (grpc.StatusCode.UNAVAILABLE, LinkLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, LinkTimeoutError),
        (grpc.StatusCode.INTERNAL, NodeFaultError),
        (grpc.StatusCode.NOT_FOUND, NodeFaultError),
        (grpc.StatusCode.CANCELLED, NodeFaultError),
        (grpc.StatusCode.UNIMPLEMENTED, NodeFaultError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NodeFaultError),
    ],
)
async def test_a_failed_call_is_told_by_its_status(
    name: str, code: grpc.StatusCode, kind: type[LinkError]
) -> None:
    async def fail(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, "in the node's words")

    node = ScriptedNode()
    node.answers[name] = fail
    async with linked(node) as link:
        with pytest.raises(kind, match=f"{name}: {code.name} in the node's words") as failure:
            await COMMANDS[name](link)
    assert type(failure.value) is kind


@every_command
async def test_an_undecodable_answer_is_the_nodes_fault(name: str) -> None:
    node = ScriptedNode()
    node.answers[name] = b"\xff\xff\xff"
    async with linked(node) as link:
        with pytest.raises(NodeFaultError, match="could not be decoded"):
            await COMMANDS[name](link)


@every_command
async def test_a_command_without_an_answer_times_out(name: str) -> None:
    node = ScriptedNode()
    node.answers[name] = hang
    async with linked(node, settings=LinkSettings(command_timeout_s=0.05)) as link:
        with pytest.raises(LinkTimeoutError):
            await COMMANDS[name](link)


@every_command
async def test_closing_the_link_ends_a_command_under_way_as_lost(name: str) -> None:
    asked = asyncio.Event()

    async def ask_and_hang(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        asked.set()
        await asyncio.Event().wait()

    node = ScriptedNode()
    node.answers[name] = ask_and_hang
    async with linked(node) as link:
        command = asyncio.ensure_future(COMMANDS[name](link))
        await asked.wait()
        await link.close()
        with pytest.raises(LinkLostError):
            await command
        with pytest.raises(LinkLostError, match="gone"):
            await COMMANDS[name](link)


async def test_a_cancelled_command_is_cancelled_at_the_node_and_not_an_error() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def hold(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    node = ScriptedNode()
    node.answers["Assign"] = hold
    async with linked(node) as link:
        command = asyncio.ensure_future(link.assign(an_assign()))
        await asked.wait()
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        await left.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await link.assign(an_assign())


async def test_a_million_tokens_go_in_one_append() -> None:
    node = ScriptedNode()
    token_ids = list(range(0, 3_000_000, 3))
    async with linked(node) as link:
        assert await link.append(an_append(token_ids)) is None
    assert list(node.received["Append"][0].token_ids) == token_ids


async def test_an_append_beyond_the_message_limit_fails_and_the_link_stays() -> None:
    node = ScriptedNode()
    async with linked(node, settings=LinkSettings(max_message_bytes=10_000)) as link:
        with pytest.raises(NodeFaultError, match="RESOURCE_EXHAUSTED"):
            await link.append(an_append([2**31] * 5_000))
        assert await link.append(an_append([2**31] * 500)) is None


async def test_close_twice_is_close_once() -> None:
    async with linked(ScriptedNode()) as link:
        await link.close()
        await link.close()
        with pytest.raises(LinkLostError):
            await link.ping()
