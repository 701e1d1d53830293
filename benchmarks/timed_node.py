"""A stub node whose token ids are the time they were made (`benchmarks.stamps`), else as `fleet-node`: the
same server, links and engine. For loads that tell how long tokens are on their way.

`python -m benchmarks.timed_node --rate N --lanes N --identity NAME [--join HOST:PORT]`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from benchmarks.grpc_way import MODEL
from benchmarks.stamps import VOCAB_SIZE, now_us, stamp
from fleet_service.app import loop_factory
from node_stub.engine import Finish, Job, JobSink, Phase
from node_stub.join import JoinSettings
from node_stub.reference import StubModel
from node_stub.rules import Limits
from node_stub.stub_engine import EngineSettings, StubEngine
from node_stub.stub_node import StubNode, StubSettings

_WINDOW_TOKENS = 32_768


class StampingEngine(StubEngine):
    """The stub's engine, whose tokens are replaced by the time."""

    def submit(self, job: Job) -> None:
        job.sink = _StampingSink(job.sink)
        super().submit(job)


class _StampingSink:
    """Replaces tokens, and passes everything on."""

    def __init__(self, sink: JobSink) -> None:
        self._sink = sink

    def on_phase(self, phase: Phase) -> None:
        self._sink.on_phase(phase)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self._sink.on_tokens([stamp(now_us())] * len(token_ids))

    def on_end(self, finish: Finish, detail: str = "") -> None:
        self._sink.on_end(finish, detail)


async def _serve(identity: str, rate: float, lanes: int, join: str) -> None:
    models = [(StubModel(MODEL, vocab_size=VOCAB_SIZE), _WINDOW_TOKENS)]
    engine = StampingEngine(models, EngineSettings(lanes, rate, 0.0, 0), time.monotonic)
    settings = StubSettings(
        identity=identity,
        models=models,
        limits=Limits(max_sessions=100_000, max_runs=100_000, max_known_generations=100_000),
        join=JoinSettings(join) if join else None,
    )
    async with StubNode(settings, engine=engine) as node:
        print(f"timed-node: {identity} on {node.address}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--identity", default="node", help="the node's stable name")
    parser.add_argument(
        "--rate", type=float, default=50.0, help="tokens a second of each session; 0 = at once"
    )
    parser.add_argument("--lanes", type=int, default=64, help="generations at a time")
    parser.add_argument("--join", default="", help="HOST:PORT of a head to dial")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(given.identity, given.rate, given.lanes, given.join))


if __name__ == "__main__":
    main()
