"""Connecting: who is there, who is not, and what an operator reads when it fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.domain.node_types import ModelInfo, Report
from fleet_service.links.plain import PlainDialer
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkLostError,
    LinkTimeoutError,
    NodeFaultError,
)
from tests.links.scripted_node import INTRODUCTION, RecordingListener, ScriptedNode, hello, serving

# Long enough to tell "at once" from "at the timeout" on any machine.
PATIENT = LinkSettings(connect_timeout_s=60.0, handshake_timeout_s=60.0)
BRIEF = LinkSettings(connect_timeout_s=0.2, handshake_timeout_s=0.4)


@asynccontextmanager
async def raw_server(greeting: bytes | None) -> AsyncIterator[str]:
    """A TCP server that says this to who connects first; b"": it hangs up; None: it never even looks."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        if greeting is None:
            yield address
            return
        accepting = asyncio.create_task(asyncio.get_running_loop().sock_accept(listening))
        accepting.add_done_callback(lambda done: _greet(done.result()[0], greeting))
        yield address
        connection, _ = await accepting
        connection.close()


def _greet(connection: socket.socket, greeting: bytes) -> None:
    if greeting:
        connection.sendall(greeting)
    else:
        connection.shutdown(socket.SHUT_RDWR)


def abort_with(code: grpc.StatusCode, text: str, reason: str = "") -> Callable[..., Any]:
    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        trailers: tuple[tuple[str, bytes], ...] = ()
        if reason:
            packed = AnyMessage()
            packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="fleet.v1"))
            status = status_pb2.Status(code=code.value[0], message=text, details=[packed])
            trailers = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(code, text, trailing_metadata=trailers)

    return answer


async def test_connect_shakes_hands_and_reports_start() -> None:
    node, listener = ScriptedNode(), RecordingListener()
    async with serving(node.handler()) as address:
        link = await PlainDialer(LinkSettings(report_period_s=0.5)).connect(address, INTRODUCTION, listener)
        assert (link.hello.identity, link.hello.incarnation) == ("node-a", "run-1")
        await listener.reported.wait()
        await link.close()
    assert listener.reports[0] == (Report(max_lanes=4), ())
    assert listener.signs >= 1
    assert listener.losses == [], "a link that was closed is not lost"
    (handshake,), (watch,) = node.received["Handshake"], node.received["WatchStatus"]
    assert (handshake.fleet_id, handshake.head_id, handshake.term) == ("fleet", "head-1", 7)
    assert (watch.period_ms, watch.head_id) == (500, "head-1")


async def test_reports_with_new_models_bring_them() -> None:
    async def two_reports(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(pb.WatchStatusResponse(report=types_pb2.CapacityReport(queue_depth=1)))
        await context.write(
            pb.WatchStatusResponse(
                report=types_pb2.CapacityReport(queue_depth=2), models=[types_pb2.Model(name="new")]
            )
        )

    node, listener = ScriptedNode(), RecordingListener()
    node.streams["WatchStatus"] = two_reports
    async with serving(node.handler()) as address:
        link = await PlainDialer(PATIENT).connect(address, INTRODUCTION, listener)
        await listener.lost.wait()
        await link.close()
    assert listener.reports == [(Report(queue_depth=1), ()), (Report(queue_depth=2), (ModelInfo("new"),))]


async def test_probe_only_shakes_hands() -> None:
    node = ScriptedNode()
    async with serving(node.handler()) as address:
        answer = await PlainDialer(PATIENT).probe(address, INTRODUCTION)
    assert answer.identity == "node-a"
    assert list(node.received) == ["Handshake"]


async def test_nobody_there_fails_at_once() -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{placeholder.getsockname()[1]}"
        async with asyncio.timeout(10):
            with pytest.raises(LinkLostError, match=f"^cannot connect to {address}: connection refused$"):
                await PlainDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


async def test_a_host_of_no_known_name_fails_with_its_name() -> None:
    with pytest.raises(LinkLostError, match=r"^cannot connect to no-such-host\.invalid:1: name not found$"):
        await PlainDialer(BRIEF).connect("no-such-host.invalid:1", INTRODUCTION, RecordingListener())


async def test_a_peer_that_never_speaks_fails_within_the_connect_timeout() -> None:
    settings = LinkSettings(connect_timeout_s=0.2, handshake_timeout_s=60.0)
    async with raw_server(None) as address, asyncio.timeout(20):
        with pytest.raises(LinkLostError, match=r": no answer within 0\.2 s$"):
            await PlainDialer(settings).connect(address, INTRODUCTION, RecordingListener())


async def test_a_black_hole_fails_within_the_connect_timeout() -> None:
    settings = LinkSettings(connect_timeout_s=0.2, handshake_timeout_s=60.0)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]  # its backlog is full: further SYNs are dropped
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        async with asyncio.timeout(20):
            with pytest.raises(LinkLostError, match=r": no answer within 0\.2 s$"):
                await PlainDialer(settings).connect(
                    f"127.0.0.1:{full.getsockname()[1]}", INTRODUCTION, RecordingListener()
                )
        for each in waiting:
            each.close()


async def test_a_node_that_never_answers_the_handshake_times_out() -> None:
    async def never(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await asyncio.Event().wait()

    node = ScriptedNode()
    node.answers["Handshake"] = never
    async with serving(node.handler()) as address:
        with pytest.raises(LinkTimeoutError, match="did not answer the handshake"):
            await PlainDialer(BRIEF).connect(address, INTRODUCTION, RecordingListener())


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"],
    ids=["web server", "ssh server"],
)
async def test_a_peer_of_another_protocol_is_refused_with_what_to_check(greeting: bytes) -> None:
    async with raw_server(greeting) as address:
        with pytest.raises(HandshakeRefusedError, match="does not speak gRPC: check address and port"):
            await PlainDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


async def test_a_peer_that_hangs_up_is_lost_with_a_hint_at_tls() -> None:
    async with raw_server(b"") as address:
        with pytest.raises(
            LinkLostError, match=r"the connection was closed at once, as a node with TLS does$"
        ):
            await PlainDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


async def test_another_grpc_service_is_no_node() -> None:
    async with serving() as address:
        with pytest.raises(HandshakeRefusedError, match=r"no fleet node.*check address and port"):
            await PlainDialer(PATIENT).probe(address, INTRODUCTION)


@pytest.mark.parametrize(
    "code, reason, advice",
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "FLEET_MISMATCH", "same fleet id"),
        (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_UNSUPPORTED", "upgrade the older"),
        (grpc.StatusCode.UNAUTHENTICATED, "", "token"),
        (grpc.StatusCode.PERMISSION_DENIED, "", "token"),
        (grpc.StatusCode.INTERNAL, "", "node's log"),
    ],
)
async def test_a_refused_handshake_says_what_to_do(code: grpc.StatusCode, reason: str, advice: str) -> None:
    node = ScriptedNode()
    node.answers["Handshake"] = abort_with(code, "the node's own words", reason)
    async with serving(node.handler()) as address:
        with pytest.raises(HandshakeRefusedError, match=f"{advice}.*the node's own words"):
            await PlainDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


@pytest.mark.parametrize(
    "answer, text",
    [
        (hello(version=2), "protocol version 2"),
        (hello(identity=""), "must name itself"),
        (hello(incarnation=""), "must name itself"),
        (b"\xff\xff\xff", "no HandshakeResponse"),
    ],
    ids=["newer version", "no identity", "no incarnation", "undecodable"],
)
async def test_an_answer_no_node_would_give_is_refused(answer: Any, text: str) -> None:
    node = ScriptedNode()
    node.answers["Handshake"] = answer
    async with serving(node.handler()) as address:
        with pytest.raises(HandshakeRefusedError, match=text):
            await PlainDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


async def test_every_connect_has_a_connection_of_its_own() -> None:
    peers: set[str] = set()

    async def note_peer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.HandshakeResponse:
        peers.add(context.peer())
        return hello()

    node = ScriptedNode()
    node.answers["Handshake"] = note_peer
    dialer = PlainDialer(PATIENT)
    async with serving(node.handler()) as address:
        first = await dialer.connect(address, INTRODUCTION, RecordingListener())
        second = await dialer.connect(address, INTRODUCTION, RecordingListener())
        assert len(peers) == 2
        await first.close()
        await second.close()


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    asked = asyncio.Event()
    left = asyncio.Event()

    async def hold(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    node = ScriptedNode()
    node.answers["Handshake"] = hold
    async with serving(node.handler()) as address:
        connecting = asyncio.create_task(
            PlainDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())
        )
        await asked.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await left.wait()


@pytest.mark.parametrize(
    "ending, kind",
    [
        (None, LinkLostError),
        (abort_with(grpc.StatusCode.UNAVAILABLE, "going"), LinkLostError),
        (abort_with(grpc.StatusCode.UNIMPLEMENTED, "no reports here"), NodeFaultError),
    ],
    ids=["ends", "unavailable", "unimplemented"],
)
async def test_a_node_that_ends_its_reports_is_lost_once(ending: Any, kind: type[Exception]) -> None:
    async def end(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if ending is not None:
            await ending(request, context)

    node, listener = ScriptedNode(), RecordingListener()
    node.streams["WatchStatus"] = end
    async with serving(node.handler()) as address:
        link = await PlainDialer(PATIENT).connect(address, INTRODUCTION, listener)
        await listener.lost.wait()
        with pytest.raises(LinkLostError, match="gone"):
            await link.renew_lease(60.0, INTRODUCTION.term)
        await link.close()
    assert [type(error) for error in listener.losses] == [kind]


async def test_undecodable_reports_end_the_link() -> None:
    async def garble(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(b"\xff\xff\xff")
        await asyncio.Event().wait()

    node, listener = ScriptedNode(), RecordingListener()
    node.streams["WatchStatus"] = garble
    async with serving(node.handler()) as address:
        link = await PlainDialer(PATIENT).connect(address, INTRODUCTION, listener)
        await listener.lost.wait()
        await link.close()
    assert [type(error) for error in listener.losses] == [NodeFaultError]
