"""What a node's log says of heads that it refuses."""

from __future__ import annotations

import logging

import grpc
import pytest

from fleet.v1 import node_service_pb2 as pb
from node_stub.gate import RefusalLog
from node_stub.stub_node import StubNode, StubSettings
from node_stub.token import FleetToken
from tests.node_stub.support import TERM, head_of


async def test_a_head_without_the_nodes_token_is_told_of_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = pb.HandshakeRequest(min_version=1, max_version=1, fleet_id="fleet", head_id="head-7", term=TERM)
    async with (
        StubNode(StubSettings(token=FleetToken(b"k" * 32))) as node,
        head_of(node.address) as head,
    ):
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await head.stub.Handshake(request)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert told[0].startswith("refused head head-7 at ipv4:127.0.0.1:")
    assert told[0].endswith("the head none; give the head the node's token file")


def test_the_next_period_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    log = RefusalLog(lambda: now_s, period_s=30)
    for now_s in (100.0, 110.0, 129.9, 130.0, 159.0, 170.0):
        log.tell("h", "p", f"at {now_s}")
    told = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert told == ["100.0", "130.0", "170.0"]
