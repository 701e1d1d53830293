"""How long a token is on its way from the node's engine to its caller, through a head.

Nodes and callers are in this one process, the head in its own, so that both times are of one clock
(CLOCK_MONOTONIC). A token's time begins when the stub's engine hands it to the node, which puts it into the
link's next frame in the same turn or the next; it ends when the caller's stream yields the message with its
index. So the time also has what the node and the caller themselves take, mostly the wait behind messages of
other streams that came in the same moment. That is the same whatever the head keeps: the difference between
two heads is what they add. Tokens of each answer's first second are left out: all callers begin at once, and
what that takes is not what a token takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from benchmarks.loads import LANES, LOAD_TIMEOUT_S, MODEL, NODES, Driven, Load, request_of
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from node_stub.engine import Finish, Job, JobSink, Phase
from node_stub.reference import StubModel
from node_stub.stub_engine import EngineSettings, StubEngine
from node_stub.stub_node import StubNode, StubSettings

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

_WINDOW_TOKENS = 32_768
_LEFT_OUT_S = 1.0


class TimedEngine(StubEngine):
    """The stub's engine, which notes in `made_s` when it made each token of each generation."""

    def __init__(self, rate: float, made_s: dict[str, list[float]]) -> None:
        self.served = [(StubModel(MODEL), _WINDOW_TOKENS)]
        super().__init__(self.served, EngineSettings(LANES, rate, 0.0), time.monotonic)
        self._made_s = made_s

    def submit(self, job: Job) -> None:
        job.sink = _TimedSink(job.sink, self._made_s.setdefault(job.admission.generation_id, []))
        super().submit(job)


class _TimedSink:
    """Notes the time of each token, and passes everything on."""

    def __init__(self, sink: JobSink, made_s: list[float]) -> None:
        self._sink = sink
        self._made_s = made_s

    def on_phase(self, phase: Phase) -> None:
        self._sink.on_phase(phase)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self._made_s += [time.monotonic()] * len(token_ids)
        self._sink.on_tokens(token_ids)

    def on_end(self, finish: Finish, detail: str = "") -> None:
        self._sink.on_end(finish, detail)


class LocalNodes:
    """Stub nodes of this process."""

    def __init__(self, nodes: Sequence[StubNode], made_s: dict[str, list[float]]) -> None:
        self.addresses = [node.address for node in nodes]
        self.made_s = made_s
        """By generation, when each of its tokens was made."""


@asynccontextmanager
async def local_nodes(rate: float) -> AsyncIterator[LocalNodes]:
    """Nodes that decode `rate` a second, until the block ends."""
    made_s: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        nodes = []
        for number in range(NODES):
            engine = TimedEngine(rate, made_s)
            settings = StubSettings(identity=f"n{number}", models=engine.served)
            nodes.append(await stack.enter_async_context(StubNode(settings, engine=engine)))
        yield LocalNodes(nodes, made_s)


async def drive_timed(address: str, load: Load, nodes: LocalNodes) -> tuple[Driven, list[float]]:
    """Put a load on the head there; what callers got, and how long each token was on its way, in seconds.

    Raises RuntimeError for an answer that is too short, or was made more than once.
    """
    under_way_s: list[float] = []
    took_s: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LOAD_TIMEOUT_S):
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)

        async def caller(salt: int) -> int:
            got = 0
            for number in range(load.rounds):
                generation_id = f"{load.name.split()[0]}-{salt}-{number}"
                began = time.monotonic()
                come_s = await _one(fleet, load, salt, generation_id)
                took_s.append(time.monotonic() - began)
                made_s = nodes.made_s.pop(generation_id)
                if not len(come_s) == len(made_s) == load.tokens:
                    raise RuntimeError(f"{len(made_s)} tokens were made, {len(come_s)} came")
                way_s = [come - made for come, made in zip(come_s, made_s, strict=True)]
                under_way_s.extend(way_s[int(load.rate * _LEFT_OUT_S) :])
                got += len(come_s)
            return got

        began = time.monotonic()
        got = await asyncio.gather(*map(caller, range(load.streams)))
        wall_s = time.monotonic() - began
    return Driven(load.streams * load.rounds, sum(got), wall_s, took_s), under_way_s


async def _one(fleet: FleetServiceAsyncStub, load: Load, salt: int, generation_id: str) -> list[float]:
    """When each token came, by its index."""
    come_s: list[float] = []
    async for response in fleet.Complete(request_of(load, salt, generation_id)):
        now = time.monotonic()
        tokens = response.event.tokens
        if tokens.first_index != len(come_s) and tokens.token_ids:
            raise RuntimeError(f"token {tokens.first_index} came after {len(come_s)}")
        come_s += [now] * len(tokens.token_ids)
    return come_s
