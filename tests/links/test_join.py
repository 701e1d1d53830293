"""Nodes that dial in: taken in, refused with a reason they can act on, and kept from doing harm."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from fleet.v1 import join_service_pb2, link_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.api.errors import STATUS_DETAILS_KEY
from fleet_service.api.join_servicer import MAX_HELLO_BYTES
from fleet_service.api.server import join_listener
from fleet_service.links import join
from fleet_service.links.join import MAX_HANDSHAKES, JoinDoor
from fleet_service.runtime.protocols import JoinRefusedError, LinkLostError
from tests.links.scripted_link import (
    PATIENT,
    JoinCall,
    NodeEnd,
    RecordingDesk,
    columns,
    edge_parts,
    hello_frame,
    join_address,
    join_call,
    news,
)
from tests.links.scripted_node import INTRODUCTION, RecordingListener, RecordingSink, a_run


async def greeted(end: NodeEnd) -> None:
    """The head has said hello; now the node is to speak."""
    frame = await end.frame()
    assert frame is not None
    assert frame.type == link_pb2.FRAME_TYPE_HELLO


async def refusal(call: JoinCall) -> tuple[grpc.StatusCode, str, str]:
    """The status a call ended with, its reason and text."""
    code = await call.code()
    details = [value for key, value in await call.trailing_metadata() or () if key == STATUS_DETAILS_KEY]
    info = error_details_pb2.ErrorInfo()
    if details:
        assert isinstance(details[0], bytes)
        assert status_pb2.Status.FromString(details[0]).details[0].Unpack(info)
        assert info.domain == "fleet.v1"
    return code, info.reason, str(await call.details())


async def test_a_node_that_dials_in_is_greeted_first_and_handed_to_the_desk() -> None:
    desk, listener = RecordingDesk(), RecordingListener()
    async with join_address(desk) as address, join_call(address) as (end, call):
        greeting = await end.frame()
        assert greeting is not None
        assert (greeting.hello.fleet_id, greeting.hello.head_id, greeting.hello.term) == (
            "fleet",
            "head-1",
            7,
        )
        await end.send(hello_frame(identity="behind-nat", incarnation="run-9"))
        hello, link = await desk.offers.get()
        assert (hello.identity, hello.incarnation) == ("behind-nat", "run-9")
        assert link.hello is hello
        assert link.introduction == INTRODUCTION
        assert link.attach(listener)
        sink = RecordingSink()
        link.run(a_run(), sink)
        await end.accept(1)
        await end.send(news(steps=columns((1, 0, [5, 6]))))
        await sink.stepped.wait()
        assert sink.token_ids == [5, 6]
        await link.close()
        await end.wait_for_end()
        assert (await call.code(), listener.losses) == (grpc.StatusCode.OK, [])


async def test_the_service_is_healthy_and_named() -> None:
    async with join_address(RecordingDesk()) as address, grpc.aio.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="fleet.v1.JoinService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "reason, code",
    [
        ("IDENTITY_IN_USE", grpc.StatusCode.ALREADY_EXISTS),
        ("FLEET_TOKEN_REFUSED", grpc.StatusCode.UNAUTHENTICATED),
        ("FLEET_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION),
        ("VERSION_UNSUPPORTED", grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_node_the_desk_refuses_reads_why(reason: str, code: grpc.StatusCode) -> None:
    desk = RecordingDesk(refusal=JoinRefusedError(reason, "give it another --identity"))
    async with join_address(desk) as address, join_call(address) as (end, call):
        await greeted(end)
        await end.send(hello_frame())
        assert await refusal(call) == (code, reason, "give it another --identity")


async def test_a_fault_of_the_head_is_told_without_its_text() -> None:
    desk = RecordingDesk(refusal=RuntimeError("secret path"))
    with capture_logs() as logs:
        async with join_address(desk) as address, join_call(address) as (end, call):
            await greeted(end)
            await end.send(hello_frame())
            code, reason, text = await refusal(call)
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in text
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["a join failed"]


HELLOS: dict[str, tuple[link_pb2.NodeFrame | bytes, str, str]] = {
    "garbage": (b"\xff\xff\xff", "LINK_PROTOCOL_VIOLATED", "could not be decoded"),
    "nothing": (b"", "LINK_PROTOCOL_VIOLATED", "16 frames and no hello"),
    "news first": (news(), "LINK_PROTOCOL_VIOLATED", "sent FRAME_TYPE_NEWS before its hello"),
    "a hello without a body": (
        link_pb2.NodeFrame(type=link_pb2.FRAME_TYPE_HELLO),
        "LINK_PROTOCOL_VIOLATED",
        "hello without a body",
    ),
    "another version": (hello_frame(version=2), "VERSION_UNSUPPORTED", "upgrade the older of the two"),
    "nobody": (hello_frame(identity=""), "LINK_PROTOCOL_VIOLATED", "must name itself"),
    "a frame that must be understood": (
        link_pb2.NodeFrame(type=99, must_understand=True),  # type: ignore[arg-type]
        "LINK_PROTOCOL_VIOLATED",
        "must be understood",
    ),
    "a refusal": (
        link_pb2.NodeFrame(
            type=link_pb2.FRAME_TYPE_REFUSED,
            refused=link_pb2.LinkRefusal(reason="FLEET_MISMATCH", message="mine is 'b'"),
        ),
        "FLEET_MISMATCH",
        "same fleet id",
    ),
}


@pytest.mark.parametrize("name", HELLOS)
async def test_a_hello_no_node_would_say_is_refused_with_a_clear_text(name: str) -> None:
    sent, reason, text = HELLOS[name]
    desk = RecordingDesk()
    async with join_address(desk) as address, join_call(address) as (end, call):
        await greeted(end)
        data = sent if isinstance(sent, bytes) else as_sent(sent)
        try:
            for _ in range(16 if name == "nothing" else 1):
                await end.send_bytes(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the head has ended the call already
        _, got, words = await refusal(call)
        assert got == reason
        assert text in words
        assert desk.offers.empty()


async def test_a_giant_hello_is_refused_before_it_is_read() -> None:
    desk = RecordingDesk()
    big = hello_frame(labels={"a": "x" * MAX_HELLO_BYTES})
    async with join_address(desk) as address, join_call(address) as (end, call):
        await greeted(end)
        await end.send(big)
        code, reason, text = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LINK_PROTOCOL_VIOLATED")
        assert f"the head takes {MAX_HELLO_BYTES} here" in text


async def test_frames_after_the_hello_may_be_large() -> None:
    desk, sink = RecordingDesk(), RecordingSink()
    async with join_address(desk) as address, join_call(address) as (end, _):
        await greeted(end)
        await end.send(hello_frame())
        _, link = await desk.offers.get()
        link.run(a_run(), sink)
        await end.accept(1)
        await end.send(news(steps=columns((1, 0, list(range(100_000))))))
        await sink.stepped.wait()
        assert len(sink.token_ids) == 100_000


async def test_a_node_that_never_says_hello_is_let_go_in_time() -> None:
    settings = replace(PATIENT, handshake_timeout_s=0.1)
    async with join_address(RecordingDesk(), settings) as address, join_call(address) as (end, call):
        await greeted(end)
        code, reason, text = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LINK_PROTOCOL_VIOLATED")
        assert "no hello came within 0.1 s" in text


async def test_a_few_silent_nodes_hold_the_others_up_only_until_they_are_gone() -> None:
    desk = RecordingDesk()
    async with join_address(desk) as address, AsyncExitStack() as dialed:
        silent = [await dialed.enter_async_context(join_call(address)) for _ in range(MAX_HANDSHAKES)]
        for end, _ in silent:
            await greeted(end)
        waiting, _ = await dialed.enter_async_context(join_call(address))
        greeting = asyncio.ensure_future(greeted(waiting))
        slow, _ = silent[0]
        await slow.send(hello_frame(identity="slow"))
        assert (await desk.offers.get())[0].identity == "slow"
        await greeting
        await waiting.send(hello_frame(identity="next"))
        assert (await desk.offers.get())[0].identity == "next"


async def test_no_more_handshakes_run_at_once_than_may() -> None:
    async with join_address(RecordingDesk()) as address, AsyncExitStack() as dialed:
        ends = [await dialed.enter_async_context(join_call(address)) for _ in range(MAX_HANDSHAKES + 4)]
        greetings = [asyncio.ensure_future(greeted(end)) for end, _ in ends]
        done: set[asyncio.Future[None]] = set()
        while len(done) < MAX_HANDSHAKES:
            done, _ = await asyncio.wait(greetings, return_when=asyncio.FIRST_COMPLETED)
        for (_, call), greeting in zip(ends, greetings, strict=True):
            if greeting in done:
                call.cancel()
                break
        while len(done) < MAX_HANDSHAKES + 1:
            done, _ = await asyncio.wait(set(greetings), timeout=0.01)
        assert len(done) == MAX_HANDSHAKES + 1
        for greeting in greetings:
            greeting.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)


async def test_beyond_a_limit_joining_nodes_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MAX_WAITING", 2)
    async with join_address(RecordingDesk()) as address, AsyncExitStack() as dialed:
        for _ in range(2):
            end, _ = await dialed.enter_async_context(join_call(address))
            await greeted(end)
        _, call = await dialed.enter_async_context(join_call(address))
        code, reason, text = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        assert "dial again later" in text


async def test_a_node_that_breaks_the_contract_is_told_what_it_did() -> None:
    desk, listener = RecordingDesk(), RecordingListener()
    with capture_logs() as logs:
        async with join_address(desk) as address, join_call(address) as (end, call):
            await greeted(end)
            await end.send(hello_frame())
            _, link = await desk.offers.get()
            assert link.attach(listener)
            await end.send(hello_frame())
            code, reason, text = await refusal(call)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LINK_PROTOCOL_VIOLATED")
    assert text == "the node sent FRAME_TYPE_HELLO where only NEWS may come"
    assert [str(error) for error in listener.losses] == [text]
    assert "joined node broke the contract" in [entry["event"] for entry in logs]


@pytest.mark.parametrize("how", ["cancelled", "half closed", "head stops"])
async def test_a_joined_node_that_goes_is_lost_once(how: str) -> None:
    desk, listener, sink = RecordingDesk(), RecordingListener(), RecordingSink()
    door = JoinDoor(desk, lambda: INTRODUCTION, PATIENT)
    serving = join_listener(door, edge_parts(), "127.0.0.1:0")
    await serving.start()
    async with join_call(f"127.0.0.1:{serving.port}") as (end, call):
        await greeted(end)
        await end.send(hello_frame())
        _, link = await desk.offers.get()
        assert link.attach(listener)
        link.run(a_run(), sink)
        await end.accept(1)
        await end.send(news(steps=columns((1, 0, [5]))))
        await sink.stepped.wait()
        if how == "cancelled":
            call.cancel()
        elif how == "half closed":
            await call.done_writing()
        else:
            await serving.stop(0.0)
        await listener.lost.wait()
        await sink.ended.wait()
        with pytest.raises(LinkLostError):
            await link.renew_lease(60.0, INTRODUCTION.term)
        await link.close()
    await serving.stop(0.0)
    assert [type(error) for error in listener.losses] == [LinkLostError]
    assert [type(error) for error in sink.broken] == [LinkLostError]


async def test_the_head_goes_on_after_every_kind_of_bad_guest() -> None:
    desk = RecordingDesk()
    guests: list[Any] = [as_sent(news()), b"\xff" * 10, as_sent(hello_frame(version=9)), bytes(1_000_000)]
    async with join_address(desk) as address:
        for _ in range(20):
            for guest in guests:
                async with join_call(address) as (end, call):
                    await greeted(end)
                    await end.send_bytes(guest)
                    assert await call.code() is not grpc.StatusCode.OK
        async with join_call(address) as (end, _):
            await greeted(end)
            await end.send(hello_frame())
            hello, link = await desk.offers.get()
            assert hello.identity == "node-a"
            report = news(report=types_pb2.CapacityReport(max_lanes=3))
            await end.send(report)
            pinged = asyncio.ensure_future(link.ping())
            command = await end.command()
            reply = link_pb2.NodeReply(call_id=command.call_id, cancel=pb.CancelResponse())
            await end.send(news(replies=[reply]))
            await pinged


def as_sent(frame: link_pb2.NodeFrame) -> bytes:
    return join_service_pb2.JoinRequest(frame=frame).SerializeToString()
