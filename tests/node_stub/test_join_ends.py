"""A joined link ends while the head still sends: the node dials again, or stops when it is told to."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
from grpc.aio import InternalError, UsageError

from fleet.v1 import link_pb2 as link_pb
from node_stub.join import JoinSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.node_stub.join_support import JoinedLink, JoinHead
from tests.node_stub.link_support import PATIENCE_S


@pytest.fixture
async def head() -> AsyncIterator[JoinHead]:
    async with JoinHead() as head:
        yield head


async def sent_for_ever(link: JoinedLink) -> None:
    """Frames that the node need not understand, until it has ended the call."""
    with suppress(grpc.RpcError, asyncio.InvalidStateError, UsageError, InternalError):
        while True:
            await link.send(link_pb.HeadFrame(type=78))  # type: ignore[arg-type]


async def test_a_node_that_leaves_a_head_in_mid_sentence_dials_it_again(head: JoinHead) -> None:
    async with StubNode(StubSettings(join=JoinSettings(head.address))):
        link = await head.next_link()
        await link.send(link_pb.HeadFrame(type=77, must_understand=True))  # type: ignore[arg-type]
        sending = asyncio.create_task(sent_for_ever(link))
        again = await head.next_link()
        await again.bind()
        await sending
        assert (head.dials, again.over.is_set()) == (2, False)


async def test_a_node_told_to_stop_ends_though_its_head_still_sends(head: JoinHead) -> None:
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node_stub", "--model", "stub", "--join", head.address, "--grace", "0.2"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        link = await head.next_link()
        await link.bind()
        sending = asyncio.create_task(sent_for_ever(link))
        node.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(node.wait(), PATIENCE_S) == 0
        await sending
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
