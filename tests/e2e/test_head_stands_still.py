"""The head itself stands still, or cannot tell whether it does: it moves nothing on that account."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.admin_service_pb2_grpc import AdminServiceStub
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from tests.e2e.callers import Reading, complete, read_all
from tests.e2e.harness import MODEL, PATIENCE_S, HeadServer, NodeProcess, World, expected, prompt, until
from tests.ports import quiet_port

STILL_S = 20.0
RATE = 20
N = 700
"""Tokens of an answer that lasts longer than the head stands still."""

SHORTER = 120

SILENCE_S = 1.5
STREAMS = 6


@dataclass
class HeadProcess:
    """`fleet serve` as a process, and a channel to each of its listeners."""

    process: asyncio.subprocess.Process
    callers: grpc.aio.Channel
    admin: grpc.aio.Channel

    def ask(self, salt: int, n: int) -> Reading:
        request = pb.CompleteRequest(
            session=pb.SessionSpec(model=MODEL.name),
            token_ids=prompt(20, salt),
            spec=pb.GenerationSpec(max_new_tokens=n),
        )
        return Reading(FleetServiceStub(self.callers).Complete(request))

    async def nodes(self) -> Sequence[admin_pb.Node]:
        return (await AdminServiceStub(self.admin).ListNodes(admin_pb.ListNodesRequest())).nodes

    async def all_up(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while [node.state for node in await self.nodes()].count(admin_pb.NODE_STATE_UP) < count:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def head_process(*flags: str) -> AsyncIterator[HeadProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleet_service", "serve", "--log-level", "error"),
        *("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode().strip()
        assert line.startswith("fleet: serving callers on "), line
        callers, admin, *_ = [part.rpartition(" on ")[2] for part in line.split(", ")]
        async with grpc.aio.insecure_channel(callers) as calls, grpc.aio.insecure_channel(admin) as operators:
            yield HeadProcess(process, calls, operators)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("world", ["link", "join"], indirect=True)
async def test_a_head_that_stands_still_for_20_s_moves_no_answer(world: World) -> None:
    flags = ("--decode-rate", str(RATE))
    if world.kind == "join":
        world.join_port = quiet_port()
    nodes = await world.start_nodes(3, *flags)
    where = [flag for node in nodes for flag in ("--node", node.address)]
    if world.kind == "join":
        where = ["--join-listen", f"127.0.0.1:{world.join_port}"]
    async with head_process(*where) as head:
        await head.all_up(len(nodes))
        readings = [head.ask(salt, N) for salt in range(STREAMS)]
        await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
        head.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STILL_S)  # that is what it stands still
        assert not any(reading.answer.finishes for reading in readings)
        head.process.send_signal(signal.SIGCONT)
        answers = [await reading.end() for reading in readings]
        for salt, answer in enumerate(answers):
            assert answer.tokens == expected(prompt(20, salt), N)
            assert answer.reason == "LENGTH"
        assert [answer.moves for answer in answers] == [[]] * STREAMS
        assert [answer.finished.attempts for answer in answers] == [1] * STREAMS
        assert [node.state for node in await head.nodes()] == [admin_pb.NODE_STATE_UP] * len(nodes)


async def frozen_together(server: HeadServer, nodes: Sequence[NodeProcess]) -> None:
    """Freeze them, and wait until the head suspects each."""
    for node in nodes:
        node.freeze()
    known = [server.head.fleet.named(node.identity) for node in nodes]
    await until(
        lambda: all(node is not None and node.state.value == "suspect" for node in known), "all are suspect"
    )


async def test_many_nodes_silent_at_once_move_nothing_and_go_on_when_they_are_back(
    world: World,
) -> None:
    nodes = await world.start_nodes(4, "--decode-rate", "50")
    server = await world.head(*nodes, silence_s=SILENCE_S)
    readings = [Reading(complete(server, prompt(20, salt), SHORTER)) for salt in range(8)]
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
    silent = nodes[:2]
    await frozen_together(server, silent)
    # They are given no new work while in doubt.
    later = await read_all(complete(server, prompt(9), 4))
    assert later.started[0].node not in {node.identity for node in silent}
    for node in silent:
        node.thaw()
    for salt, reading in enumerate(readings):
        answer = await reading.end()
        assert answer.tokens == expected(prompt(20, salt), SHORTER)
        assert (answer.moves, answer.finished.attempts) == ([], 1)


@pytest.mark.slow
async def test_what_ran_on_many_silent_nodes_goes_on_elsewhere_in_the_end(world: World) -> None:
    nodes = await world.start_nodes(4, "--decode-rate", "50")
    server = await world.head(*nodes, silence_s=SILENCE_S)
    readings = [Reading(complete(server, prompt(20, salt), SHORTER)) for salt in range(8)]
    await asyncio.gather(*(reading.until_tokens(10) for reading in readings))
    await frozen_together(server, nodes[:2])
    answers = [await reading.end() for reading in readings]
    moves = [move for answer in answers for move in answer.moves]
    assert [answer.tokens for answer in answers] == [expected(prompt(20, salt), SHORTER) for salt in range(8)]
    assert {move.cause for move in moves} == {pb.MOVE_CAUSE_NODE_SILENT}
    assert {move.from_node for move in moves} == {"node-1", "node-2"}
    # Longer than the silence of one node would have been borne.
    assert min(move.gap_ms for move in moves) > 2 * SILENCE_S * 1000
    for node in nodes[:2]:
        node.thaw()
