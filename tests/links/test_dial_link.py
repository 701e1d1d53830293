"""Dialing a node that serves a multiplexed link, and every way in which that can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from fleet.v1 import link_pb2, link_service_pb2
from fleet_service.domain.node_types import Feature
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.mux import MuxLink
from fleet_service.links.plain import PlainLink
from fleet_service.runtime.protocols import (
    HandshakeRefusedError,
    LinkError,
    LinkLostError,
    LinkTimeoutError,
)
from tests.links.scripted_link import PATIENT, hello_frame, link_handler, link_hello, news
from tests.links.scripted_node import INTRODUCTION, RecordingListener, ScriptedNode, serving

Context = grpc.aio.ServicerContext[Any, Any]
Serve = Callable[[Any, Context], Awaitable[None]]


def linking_node() -> ScriptedNode:
    node = ScriptedNode()
    node.answers["Handshake"] = link_hello()
    return node


def answers(*frames: link_pb2.NodeFrame, stays: bool = True) -> Serve:
    async def serve(_: object, context: Context) -> None:
        await context.read()
        for frame in frames:
            await context.write(link_service_pb2.LinkResponse(frame=frame).SerializeToString())
        if stays:
            await asyncio.Event().wait()

    return serve


async def test_a_node_that_announces_a_link_is_served_over_it_alone() -> None:
    node, listener = linking_node(), RecordingListener()
    async with serving(node.handler(), link_handler(answers(hello_frame()))) as address:
        link = await FleetDialer(PATIENT).connect(address, INTRODUCTION, listener)
        assert isinstance(link, MuxLink)
        assert Feature.LINK in link.hello.features
        await link.close()
    assert list(node.received) == ["Handshake"]
    assert listener.losses == []


async def test_links_can_be_turned_off() -> None:
    node, listener = linking_node(), RecordingListener()
    async with serving(node.handler(), link_handler(answers(hello_frame()))) as address:
        dialer = FleetDialer(replace(PATIENT, multiplexed=False))
        link = await dialer.connect(address, INTRODUCTION, listener)
        assert isinstance(link, PlainLink)
        await listener.reported.wait()
        assert not link.resumes
        await link.close()


async def test_a_node_that_announces_none_is_served_by_plain_calls() -> None:
    node, listener = ScriptedNode(), RecordingListener()
    async with serving(node.handler()) as address:
        link = await FleetDialer(PATIENT).connect(address, INTRODUCTION, listener)
        assert isinstance(link, PlainLink)
        await link.close()


async def test_probe_only_shakes_hands() -> None:
    node = linking_node()
    async with serving(node.handler()) as address:
        answer = await FleetDialer(PATIENT).probe(address, INTRODUCTION)
    assert answer.identity == "node-a"
    assert list(node.received) == ["Handshake"]


def refused(reason: str) -> link_pb2.NodeFrame:
    why = link_pb2.LinkRefusal(reason=reason, message="the node's own words")
    return link_pb2.NodeFrame(type=link_pb2.FRAME_TYPE_REFUSED, refused=why)


FAILURES: dict[str, tuple[Serve, type[LinkError], str]] = {
    "refused": (answers(refused("FLEET_MISMATCH")), HandshakeRefusedError, "same fleet id.*own words"),
    "refused for a token": (
        answers(refused("FLEET_TOKEN_REFUSED")),
        HandshakeRefusedError,
        "same fleet token",
    ),
    "refused for what is new": (answers(refused("NEW")), HandshakeRefusedError, "see the node's log"),
    "another run": (answers(hello_frame(incarnation="run-2")), LinkLostError, "another run"),
    "another version": (answers(hello_frame(version=2)), HandshakeRefusedError, "version 2"),
    "news first": (answers(news()), HandshakeRefusedError, "FRAME_TYPE_NEWS before its hello"),
    "endless frames": (
        answers(*[link_pb2.NodeFrame()] * 100),
        HandshakeRefusedError,
        "16 frames and no hello",
    ),
    "the end": (answers(stays=False), LinkLostError, "ended the link without a hello"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_link_that_does_not_come_about_says_why(name: str) -> None:
    serve, kind, text = FAILURES[name]
    async with serving(linking_node().handler(), link_handler(serve)) as address:
        with pytest.raises(kind, match=text):
            await FleetDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


async def test_a_link_that_is_announced_but_not_served_is_refused_with_what_to_do() -> None:
    async with serving(linking_node().handler()) as address:
        with pytest.raises(HandshakeRefusedError, match=r"links\.multiplexed to false"):
            await FleetDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())


async def test_a_node_that_opens_no_link_times_out() -> None:
    settings = replace(PATIENT, handshake_timeout_s=0.3)
    async with serving(linking_node().handler(), link_handler(answers())) as address:
        with pytest.raises(LinkTimeoutError, match="opened no link in time"):
            await FleetDialer(settings).connect(address, INTRODUCTION, RecordingListener())


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def hold(_: object, context: Context) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(linking_node().handler(), link_handler(hold)) as address:
        connecting = asyncio.create_task(
            FleetDialer(PATIENT).connect(address, INTRODUCTION, RecordingListener())
        )
        await asked.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await left.wait()


async def test_a_node_that_takes_no_more_calls_is_lost_though_its_link_is_open() -> None:
    listener = RecordingListener()
    stopping: list[asyncio.Task[None]] = []
    node = linking_node()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((node.handler(), link_handler(answers(hello_frame()))))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = await FleetDialer(PATIENT).connect(f"127.0.0.1:{port}", INTRODUCTION, listener)
    stopping.append(asyncio.create_task(server.stop(60.0)))
    await listener.lost.wait()
    with pytest.raises(LinkLostError, match="gone"):
        await link.renew_lease(60.0, INTRODUCTION.term)
    await link.close()
    await stopping[0]
    assert "takes no more calls" in str(listener.losses[0])
    assert len(listener.losses) == 1
