"""The fleet token: both ends of every link prove that they know it, and nobody else gets anything done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import grpc
import pytest

from fleet.stub.v1 import stub_service_pb2 as stub_pb
from fleet.stub.v1 import stub_service_pb2_grpc as stub_grpc
from fleet.v1 import link_pb2, link_service_pb2, link_service_pb2_grpc, node_service_pb2_grpc
from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.commands import Revoke
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.frames import HelloError
from fleet_service.links.mux import MuxLink
from fleet_service.links.plain import PlainLink
from fleet_service.runtime.protocols import HandshakeRefusedError
from fleet_service.token import FleetToken
from node_stub.gate import is_local
from node_stub.join import JoinRefusedError, JoinSettings
from node_stub.stub_node import StubNode, StubSettings
from node_stub.token import FleetToken as NodeToken
from tests.links.scripted_link import PATIENT, RecordingDesk, join_address, join_call
from tests.links.scripted_node import INTRODUCTION, RecordingListener, RecordingSink, a_run

LinkCall = grpc.aio.StreamStreamCall[link_service_pb2.LinkRequest, link_service_pb2.LinkResponse]

KEY, OTHER = b"k" * 32, b"o" * 32
WAYS = pytest.mark.parametrize("multiplexed", [True, False], ids=["link", "plain"])
LINKS = {True: MuxLink, False: PlainLink}


@asynccontextmanager
async def stub_node(key: bytes | None) -> AsyncIterator[StubNode]:
    async with StubNode(StubSettings(token=NodeToken(key) if key else None)) as node:
        yield node


async def dial(node: StubNode, key: bytes | None, *, multiplexed: bool) -> MuxLink | PlainLink:
    settings = replace(PATIENT, token=FleetToken(key) if key else None, multiplexed=multiplexed)
    return await FleetDialer(settings).connect(node.address, INTRODUCTION, RecordingListener())


@WAYS
async def test_head_and_node_that_share_a_token_work_together_and_both_know(multiplexed: bool) -> None:
    async with stub_node(KEY) as node:
        link = await dial(node, KEY, multiplexed=multiplexed)
        try:
            assert type(link) is LINKS[multiplexed]
            assert link.hello.authenticated
            refusal = await link.revoke(Revoke("never-seen", 1))
            assert refusal is not None
            sink = RecordingSink()
            link.run(a_run(), sink)
            await sink.ended.wait()
            assert sink.steps[-1].refusal is not None  # heard and answered: nothing is bound there
        finally:
            await link.close()


@WAYS
async def test_without_a_token_on_either_side_nothing_is_proven_and_it_shows(multiplexed: bool) -> None:
    async with stub_node(None) as node:
        link = await dial(node, None, multiplexed=multiplexed)
        assert not link.hello.authenticated
        await link.close()


@WAYS
@pytest.mark.parametrize(
    "at_node,at_head,told",
    [
        (KEY, OTHER, "give both the same fleet token (it has another)"),
        (None, KEY, "start it with the head's token file, --token-file (it has no fleet token)"),
        (
            KEY,
            None,
            "give both the same fleet token (UNAUTHENTICATED this node has a fleet token and the head",
        ),
    ],
    ids=["another", "none at the node", "none at the head"],
)
async def test_tokens_that_differ_are_refused_with_what_to_do(
    multiplexed: bool, at_node: bytes | None, at_head: bytes | None, told: str
) -> None:
    async with stub_node(at_node) as node:
        with pytest.raises(HandshakeRefusedError) as refused:
            await dial(node, at_head, multiplexed=multiplexed)
        assert told in str(refused.value)
        assert node.journal() == []


@pytest.mark.parametrize("proof", [None, b"", b"x", b"x" * 64, b"x" * 96], ids=repr)
async def test_every_plain_call_without_the_right_proof_is_refused(proof: bytes | None) -> None:
    metadata = () if proof is None else (("fleet-proof-bin", proof),)
    async with stub_node(KEY) as node, grpc.aio.insecure_channel(node.address) as channel:
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        unary: list[tuple[Any, Any]] = [
            (stub.Assign, pb.AssignRequest(session_id="s", epoch=1)),
            (stub.Append, pb.AppendRequest(session_id="s", epoch=1)),
            (stub.Cancel, pb.CancelRequest(session_id="s", epoch=1)),
            (stub.Revoke, pb.RevokeRequest(session_id="s", epoch=1)),
            (stub.RenewLease, pb.RenewLeaseRequest(fleet_id="fleet")),
            (stub.Reconcile, pb.ReconcileRequest(fleet_id="fleet")),
        ]
        streams: list[tuple[Any, Any]] = [
            (stub.Generate, pb.NodeServiceGenerateRequest(session_id="s", epoch=1)),
            (stub.WatchStatus, pb.WatchStatusRequest()),
        ]
        methods = pb.DESCRIPTOR.services_by_name["NodeService"].methods_by_name
        assert len(unary) + len(streams) == len(methods) - 1  # all but Handshake
        codes = []
        for method, request in unary:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(request, metadata=metadata)
            codes.append(error.value.code())
        for method, request in streams:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(request, metadata=metadata).read()
            codes.append(error.value.code())
        assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
        assert node.journal() == []


async def test_a_proof_of_another_run_of_the_node_opens_nothing() -> None:
    async with stub_node(KEY) as before, stub_node(KEY) as after:
        token = FleetToken(KEY)
        nonce = token.new_nonce()
        async with grpc.aio.insecure_channel(before.address) as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            hello = await stub.Handshake(pb.HandshakeRequest(min_version=1, max_version=1, nonce=nonce))
            proof = (("fleet-proof-bin", nonce + token.proof("plain", nonce, hello.nonce)),)
            await stub.RenewLease(pb.RenewLeaseRequest(fleet_id="fleet"), metadata=proof)
        async with grpc.aio.insecure_channel(after.address) as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.RenewLease(pb.RenewLeaseRequest(fleet_id="fleet"), metadata=proof)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def hello_of_head(nonce: bytes) -> link_pb2.HeadFrame:
    hello = pb.HandshakeRequest(min_version=1, max_version=1, fleet_id="fleet", head_id="h", nonce=nonce)
    return link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_HELLO, hello=hello)


async def frame_of(call: LinkCall) -> link_pb2.NodeFrame:
    response = await call.read()
    assert isinstance(response, link_service_pb2.LinkResponse)
    return response.frame


ASSIGN = link_pb2.HeadFrame(
    type=link_pb2.FRAME_TYPE_COMMANDS,
    commands=[
        link_pb2.HeadCommand(call_id=1, assign=pb.AssignRequest(session_id="s", epoch=1, model="stub"))
    ],
)


@pytest.mark.parametrize(
    "frame",
    [
        ASSIGN,
        link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_PROOF),
        link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_PROOF, proof=b"x" * 32),
        hello_of_head(b"x" * 32),
    ],
    ids=["commands at once", "an empty proof", "a wrong proof", "a second hello"],
)
async def test_a_link_takes_no_command_before_the_heads_proof(frame: link_pb2.HeadFrame) -> None:
    async with stub_node(KEY) as node, grpc.aio.insecure_channel(node.address) as channel:
        call = link_service_pb2_grpc.LinkServiceStub(channel).Link()
        await call.write(link_service_pb2.LinkRequest(frame=hello_of_head(b"n" * 32)))
        hello = (await frame_of(call)).hello
        assert NodeToken(KEY).proof("link", b"n" * 32, hello.nonce) == hello.proof
        for each in (frame, ASSIGN):
            if not call.done():
                await call.write(link_service_pb2.LinkRequest(frame=each))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert node.journal() == []


async def test_a_recorded_exchange_cannot_be_played_again_on_a_link() -> None:
    async with stub_node(KEY) as node, grpc.aio.insecure_channel(node.address) as channel:
        proofs = []
        for replay in (None, 0):
            call = link_service_pb2_grpc.LinkServiceStub(channel).Link()
            await call.write(link_service_pb2.LinkRequest(frame=hello_of_head(b"n" * 32)))
            hello = (await frame_of(call)).hello
            proofs.append(FleetToken(KEY).proof("link", b"n" * 32, hello.nonce))
            proof = proofs[-1] if replay is None else proofs[replay]
            frame = link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_PROOF, proof=proof)
            await call.write(link_service_pb2.LinkRequest(frame=frame))
            await call.write(link_service_pb2.LinkRequest(frame=ASSIGN))
            if replay is None:
                assert (await frame_of(call)).replies[0].call_id == 1
                call.cancel()
            else:
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_joining_node_proves_the_token_and_is_handed_in_as_proven() -> None:
    desk = RecordingDesk()
    async with join_address(desk, replace(PATIENT, token=FleetToken(KEY))) as address:
        settings = StubSettings(token=NodeToken(KEY), join=JoinSettings(address))
        async with StubNode(settings):
            hello, link = await desk.offers.get()
            assert hello.authenticated
            assert link.attach(RecordingListener())
            await link.ping()
            await link.close()


@pytest.mark.parametrize(
    "at_node,at_head",
    [(KEY, OTHER), (None, KEY), (KEY, None)],
    ids=["another", "none at the node", "none at the head"],
)
async def test_a_joining_node_whose_token_differs_stays_out_and_ends(
    at_node: bytes | None, at_head: bytes | None
) -> None:
    desk = RecordingDesk()
    async with join_address(
        desk, replace(PATIENT, token=FleetToken(at_head) if at_head else None)
    ) as address:
        settings = StubSettings(token=NodeToken(at_node) if at_node else None, join=JoinSettings(address))
        node = StubNode(settings)
        await node.start()
        with pytest.raises(JoinRefusedError, match="FLEET_TOKEN_REFUSED"):
            await node.join_ended()
        with pytest.raises(JoinRefusedError):
            await node.stop()
    assert desk.offers.empty()


async def test_the_stubs_control_is_for_callers_on_its_own_machine() -> None:
    peers = {"ipv4:127.0.0.1:5": True, "ipv6:[::1]:5": True, "ipv6:%5B::1%5D:5": True, "unix:": True}
    peers |= {"ipv4:10.1.2.3:5": False, "ipv6:[fe80::1]:5": False, "ipv4:128.0.0.1:9": False, "": False}
    assert {peer: is_local(peer) for peer in peers} == peers
    async with stub_node(KEY) as node, grpc.aio.insecure_channel(node.address) as channel:
        held = await stub_grpc.StubServiceStub(channel).GetHoldings(stub_pb.GetHoldingsRequest())
        assert not held.holdings


@pytest.mark.parametrize("token", [FleetToken(KEY), NodeToken(KEY)], ids=["head", "node"])
def test_a_token_does_not_show_when_it_is_printed(token: object) -> None:
    for shown in (repr(token), str(token), f"{token!r:>1}"):
        assert KEY.hex() not in shown
        assert "k" * 8 not in shown


def test_proofs_of_head_and_node_cannot_stand_for_each_other() -> None:
    head, node = FleetToken(KEY), NodeToken(KEY)
    a, b = b"a" * 32, b"b" * 32
    ways: tuple[Literal["plain", "link", "join"], ...] = ("plain", "link", "join")
    for way in ways:
        assert head.accepts(way, node.proof(way, a, b), a, b)
        assert node.accepts(way, head.proof(way, a, b), a, b)
        assert not head.accepts(way, head.proof(way, a, b), a, b)
        assert not node.accepts(way, node.proof(way, a, b), a, b)
        assert not head.accepts(way, node.proof(way, b, a), a, b)
        assert not node.accepts(way, head.proof(way, b, a), a, b)
        for other in ways:
            assert head.accepts(way, node.proof(other, a, b), a, b) == (way == other)
            assert node.accepts(way, head.proof(other, a, b), a, b) == (way == other)


async def test_a_stranger_between_a_head_and_a_node_cannot_pass_their_proofs_on() -> None:
    """It dials both, and gives each the other's words: neither takes it in."""
    desk = RecordingDesk()
    async with (
        stub_node(KEY) as node,
        join_address(desk, replace(PATIENT, token=FleetToken(KEY))) as address,
        join_call(address) as (end, call),
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        greeting = await end.frame()
        assert greeting is not None
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        hello = await stub.Handshake(greeting.hello)
        hello.identity = "stranger"
        await end.send(link_pb2.NodeFrame(type=link_pb2.FRAME_TYPE_HELLO, hello=hello))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert desk.offers.empty()


def test_a_refusal_of_the_token_is_a_refusal_of_the_handshake() -> None:
    assert issubclass(HelloError, HandshakeRefusedError)
