"""Memory of the process in the middle: of idle sessions and of their tokens, and of open streams.

What is resident is read before and after, and divided; the head keeps nothing on disk (`--durability
memory`).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks.grpc_way import MODEL
from benchmarks.peers import SGLANG, VLLM, Proxy
from benchmarks.plan import Plan
from benchmarks.pool import Drivers
from benchmarks.processes import all_rss_bytes
from benchmarks.targets import Head, Nodes, SkippedError, Target
from examples.processes import ChildFailedError, Children
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

SESSIONS = 10_000
STREAMS = 10_000
PEERS_STREAMS = 2_000
"""HTTP/1.1 takes two connections for each stream, and files are bounded."""
CONTEXT_TOKENS = 1_000
_AT_ONCE = 64
_WARM_UP = 200
_MOST_LANES = 4_096
"""That a head believes a node to have."""
_STREAMS_RATE = 0.5
_COUNTED_S = 4.0
"""Two tokens of each stream."""
_OPEN_S = 25.0
_PEERS_OPEN_S = 8.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What one of something takes, in bytes."""

    target: str
    what: str
    number: int
    bytes_each: float
    rss_mb: float
    """In the end."""


async def measure_all(
    drivers: Drivers, folder: Path, say: Callable[[str], None], *, quick: bool
) -> list[Memory]:
    found: list[Memory] = []
    number = SESSIONS // 10 if quick else SESSIONS
    try:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            found += await sessions(Path(own), number)
    except (ChildFailedError, OSError, grpc.RpcError) as error:
        say(f"skipped: memory of sessions: {str(error) or type(error).__name__}")
    for target, streams in _targets(quick=quick):
        try:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                found.append(await open_streams(drivers, Path(own), target, streams))
        except (SkippedError, ChildFailedError, RuntimeError, OSError, grpc.RpcError) as error:
            say(f"skipped: memory, {target.name}: {str(error) or type(error).__name__}")
    for each in found:
        say(f"memory: {each}")
    return found


def _targets(*, quick: bool) -> Sequence[tuple[Target, int]]:
    if quick:
        return [(Head("connect"), STREAMS // 10)]
    heads: list[Target] = [Head("complete"), Head("connect")]
    peers: list[Target] = [Proxy("haproxy"), Proxy("nginx"), SGLANG, VLLM]
    return [*((head, STREAMS) for head in heads), *((peer, PEERS_STREAMS) for peer in peers)]


async def sessions(folder: Path, number: int) -> list[Memory]:
    """Idle sessions with one token each, and then with CONTEXT_TOKENS more."""
    head = Head("complete")
    async with Children(folder) as children:
        nodes = Nodes(0.0, 64, timed=False, more=2 * number)
        running = await head.start(children, nodes)
        async with grpc.aio.insecure_channel(running.address) as channel:
            fleet: FleetServiceAsyncStub = FleetServiceStub(channel)
            await _each(_WARM_UP, lambda i: _create(fleet, f"warm-{i}"))
            sizes = [all_rss_bytes(running.pids)]
            await _each(number, lambda i: _create(fleet, f"s-{i}"))
            sizes.append(all_rss_bytes(running.pids))
            await _each(number, lambda i: _append(fleet, f"s-{i}"))
            sizes.append(all_rss_bytes(running.pids))
    return [
        Memory(head.name, "idle session", number, (sizes[1] - sizes[0]) / number, sizes[1] / 1e6),
        Memory(
            head.name,
            "token of a context",
            number * CONTEXT_TOKENS,
            (sizes[2] - sizes[1]) / number / CONTEXT_TOKENS,
            sizes[2] / 1e6,
        ),
    ]


async def _create(fleet: FleetServiceAsyncStub, name: str) -> None:
    spec = pb.SessionSpec(model=MODEL)
    await fleet.CreateSession(pb.CreateSessionRequest(session_id=name, spec=spec, token_ids=[5]))


async def _append(fleet: FleetServiceAsyncStub, name: str) -> None:
    token_ids = range(3, 3 + CONTEXT_TOKENS)
    await fleet.AppendTokens(pb.AppendTokensRequest(session_id=name, token_ids=token_ids))


async def _each(number: int, call: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(number))

    async def worker() -> None:
        for i in numbers:
            await call(i)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


async def open_streams(drivers: Drivers, folder: Path, target: Target, streams: int) -> Memory:
    """Streams that all get tokens, slowly."""
    async with Children(folder) as children:
        nodes = Nodes(_STREAMS_RATE, min(streams, _MOST_LANES), number=4)
        if isinstance(target, Head):
            target = replace(target, more=("--set", f"head.queue_limit_per_node={streams}"))
        running = await target.start(children, nodes)
        warm_up = Plan(target.shape, running.address, _WARM_UP, 1, 4, 0.0, 3.0)
        begun = await drivers.prepare(warm_up)
        await begun.go()
        await begun.outcome()
        before = all_rss_bytes(running.pids)
        open_s = _OPEN_S if streams == STREAMS else _PEERS_OPEN_S
        plan = Plan(target.shape, running.address, streams, 1_000, 50, open_s - _COUNTED_S, open_s)
        begun = await drivers.prepare(plan)
        begin_s = await begun.go()
        await asyncio.sleep(max(begin_s + open_s - 0.2 - time.monotonic(), 0))
        after = all_rss_bytes(running.pids)
        outcome = await begun.outcome()
        # Each had its tokens of that time, or was not open.
        opened = min(round(outcome.tokens / _STREAMS_RATE / _COUNTED_S), streams)
        if opened < streams * 0.8:
            raise RuntimeError(f"only {opened} of {streams} streams were open: {outcome.failure}")
    return Memory(target.name, "open stream", opened, (after - before) / opened, after / 1e6)
