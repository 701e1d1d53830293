"""What the head's own code costs, apart from gRPC: a servicer, a head and multiplexed links in one process.

`python -m benchmarks.own [--profile FILE]`. Callers call the servicer, nodes answer frames; what the nodes
of this benchmark need themselves is timed and taken off. `--profile` writes a cProfile of the one-token
requests, for `python -m pstats FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import logging
import random
import time
from collections.abc import Coroutine
from statistics import median
from typing import Any

import structlog

from fleet.v1 import fleet_service_pb2, link_pb2, types_pb2
from fleet_service.api.connection import ConnectParts
from fleet_service.api.errors import ErrorTranslator
from fleet_service.api.fleet_servicer import FleetServicer
from fleet_service.api.interceptors import NullRpcObserver
from fleet_service.api.validate import Limits
from fleet_service.app import loop_factory
from fleet_service.domain.access import ANYBODY
from fleet_service.domain.commands import Introduction
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.garbage import looked_for_in_pieces
from fleet_service.links.mux import MuxLink
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import LinkListener
from fleet_service.runtime.settings import HeadSettings
from fleet_service.token import Way

MODEL = "bench"
NODES = 2
LANES = 64
VOCABULARY = 32_000
RUNS = 3
ONE_TOKEN = (64, 100, 1)
"""Callers at once, requests of each, tokens of each."""
FULL_SPEED = (128, 2, 256)


class Clock:
    """Time that is not the head's: of the nodes and callers here."""

    def __init__(self) -> None:
        self.taken_s = 0.0
        self._since_s = 0.0

    def __enter__(self) -> None:
        self._since_s = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.taken_s += time.process_time() - self._since_s


class NodeStream:
    """A FrameStream to a node that gives each run one token a step, in one frame for all runs."""

    encrypted = False
    way: Way = "link"

    def __init__(self, others: Clock) -> None:
        self._others = others
        self._replies: list[link_pb2.NodeReply] = []
        self._runs: dict[int, list[int]] = {}  # handle -> next index, tokens still to come
        self._last_handle = 0
        self._news = asyncio.Event()

    async def send(self, frame: link_pb2.HeadFrame) -> None:
        with self._others:
            for command in link_pb2.HeadFrame.FromString(frame.SerializeToString()).commands:
                self._replies.append(self._answer(command))
            self._news.set()

    def _answer(self, command: link_pb2.HeadCommand) -> link_pb2.NodeReply:
        reply = link_pb2.NodeReply(call_id=command.call_id)
        kind = command.WhichOneof("command")
        if kind == "generate":
            self._last_handle += 1
            reply.generate.handle, reply.generate.epoch = self._last_handle, command.generate.epoch
            self._runs[self._last_handle] = [0, command.generate.max_new_tokens]
        elif kind is not None:
            getattr(reply, kind).SetInParent()
        return reply

    async def receive(self) -> link_pb2.NodeFrame | None:
        if not self._runs:
            await self._news.wait()
        else:
            await asyncio.sleep(0)
        with self._others:
            self._news.clear()
            return link_pb2.NodeFrame.FromString(self._next_frame().SerializeToString())

    def _next_frame(self) -> link_pb2.NodeFrame:
        frame = link_pb2.NodeFrame(type=link_pb2.FRAME_TYPE_NEWS, replies=self._replies)
        self._replies.clear()
        steps = frame.steps
        for handle, run in list(self._runs.items()):
            index, left = run
            steps.handles.append(handle)
            steps.counts.append(1)
            steps.first_indexes.append(index)
            steps.token_ids.append(3 + (handle * 7 + index) % (VOCABULARY - 3))
            run[:] = index + 1, left - 1
            if left == 1:
                del self._runs[handle]
                frame.events.add(handle=handle, finish=types_pb2.FINISH_REASON_LENGTH, next_index=index + 1)
        return frame

    async def close(self) -> None:
        return


class NodeDialer:
    """A Dialer of such nodes."""

    def __init__(self, others: Clock) -> None:
        self._others = others

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> MuxLink:
        said = await self.probe(address, introduction)
        return MuxLink(NodeStream(self._others), address, introduction, said, LinkSettings(), listener)

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        return NodeHello(
            address,
            incarnation="run-1",
            models=(ModelInfo(MODEL, vocab_size=VOCABULARY, eos_token_ids=frozenset({2})),),
            features=frozenset({Feature.INLINE_BIND, Feature.LINK, Feature.RESUME}),
            report=Report(max_lanes=LANES),
        )


class CallerCall:
    """A Call that counts the tokens written to it."""

    trace = None
    caller = ANYBODY

    def __init__(self) -> None:
        self.tokens = 0

    async def write(self, message: Any) -> None:
        self.tokens += len(message.event.tokens.token_ids)


class Connection:
    """A DuplexCall of a caller that keeps so many answers running on one connection."""

    trace = None
    caller = ANYBODY
    request_id = "bench"

    def __init__(
        self, others: Clock, request: fleet_service_pb2.CompleteRequest, at_once: int, total: int
    ) -> None:
        self.tokens = 0
        self._others = others
        self._request = request
        self._to_ask = at_once
        self._asked = 0
        self._open = 0
        self._total = total
        self._news = asyncio.Event()
        self._news.set()

    async def read(self) -> tuple[Any, None] | None:
        await self._news.wait()
        self._news.clear()
        with self._others:
            if self._asked == self._total:
                return None
            message = fleet_service_pb2.ConnectRequest()
            for _ in range(min(self._to_ask, self._total - self._asked)):
                self._asked += 1
                self._open += 1
                message.calls.add(call_id=self._asked, complete=self._request)
            self._to_ask = 0
            data = message.SerializeToString()
        return fleet_service_pb2.ConnectRequest.FromString(data), None

    async def write(self, message: fleet_service_pb2.ConnectResponse) -> None:
        data = message.SerializeToString()  # as gRPC would
        with self._others:
            message = fleet_service_pb2.ConnectResponse.FromString(data)
            self.tokens += len(message.tokens.token_ids)
            if message.replies:
                self._to_ask += len(message.replies)
                self._news.set()


class Bench:
    """A head with its nodes, and callers at its servicer."""

    def __init__(self) -> None:
        self.others = Clock()
        settings = HeadSettings(max_lanes_per_node=LANES)
        self.head = Head(settings, dialer=NodeDialer(self.others), rng=random.Random(1), wall_clock=time.time)
        log = structlog.get_logger()
        connecting = ConnectParts(ErrorTranslator(random.Random(1)), NullRpcObserver(), log, 1024, 1 << 24)
        self._servicer = FleetServicer(self.head, Limits(), connecting)

    async def us_each(
        self, callers: int, rounds: int, tokens: int, *, per_token: bool, connected: bool = False
    ) -> float:
        request = fleet_service_pb2.CompleteRequest(
            session=fleet_service_pb2.SessionSpec(model=MODEL),
            token_ids=[3, 5, 7, 11],
            spec=fleet_service_pb2.GenerationSpec(max_new_tokens=tokens),
        )

        async def all_on_one() -> None:
            call = Connection(self.others, request, callers, callers * rounds)
            await self._servicer.Connect(None, call)
            if call.tokens != tokens * callers * rounds:
                raise RuntimeError(f"asked for {tokens * callers * rounds} tokens, got {call.tokens}")

        async def caller() -> None:
            for _ in range(rounds):
                call = CallerCall()
                await self._servicer.Complete(request, call)
                if call.tokens != tokens:
                    raise RuntimeError(f"asked for {tokens} tokens, got {call.tokens}")

        others_s, began_s = self.others.taken_s, time.process_time()
        if connected:
            await all_on_one()
        else:
            await asyncio.gather(*(caller() for _ in range(callers)))
        for node in self.head.fleet.nodes:
            await node.outbox_empty.wait()
        own_s = time.process_time() - began_s - (self.others.taken_s - others_s)
        return own_s * 1e6 / (callers * rounds * (tokens if per_token else 1))


async def measure(profile: str, *, connected: bool) -> None:
    bench = Bench()
    await bench.head.start([f"node-{number}" for number in range(NODES)])
    await bench.us_each(8, 10, 8, per_token=False)  # what happens once is not measured
    if profile:
        with cProfile.Profile() as profiler:
            await bench.us_each(*ONE_TOKEN, per_token=False, connected=connected)
        profiler.dump_stats(profile)
        return
    for by, over in (("a stream each", False), ("one connection", True)):
        requests = [await bench.us_each(*ONE_TOKEN, per_token=False, connected=over) for _ in range(RUNS)]
        tokens = [await bench.us_each(*FULL_SPEED, per_token=True, connected=over) for _ in range(RUNS)]
        print(f"{by:15} one-token request {median(requests):8.1f} µs, token {median(tokens):6.2f} µs")
    await bench.head.stop(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="", metavar="FILE")
    parser.add_argument("--connected", action="store_true", help="profile requests on one connection")
    told = parser.parse_args()
    work: Coroutine[Any, Any, None] = measure(told.profile, connected=told.connected)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    in_pieces = looked_for_in_pieces(lambda: False)  # as in a head's process
    with in_pieces, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
