"""Jobs for the llama engine, and what becomes of them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from node_stub.engine import Finish, Job, Load, Phase
from node_stub.llama import LlamaEngine
from node_stub.rules import Admission, Owner, Sampling

OWNER = Owner("fleet", "head", 1)


class Sink:
    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.tokens: list[int] = []
        self.end: tuple[Finish, str] | None = None
        self.over = asyncio.Event()
        self.said = asyncio.Event()

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        assert self.end is None
        self.tokens += token_ids
        self.said.set()

    def on_end(self, finish: Finish, detail: str = "") -> None:
        assert self.end is None
        self.end = (finish, detail)
        self.over.set()


def job_of(
    engine: LlamaEngine,
    context: Sequence[int],
    n: int,
    prefix: Sequence[int] = (),
    sampling: Sampling | None = None,
    qos: int = 1,
) -> tuple[Job, Sink]:
    sink = Sink()
    prompt = array("I", [*context, *prefix])
    admission = Admission(
        "s",
        1,
        "g",
        engine.models[0],
        prompt,
        len(prefix),
        n,
        0,
        sampling or Sampling(),
        qos,
        b"",
        len(context),
    )
    return Job(admission, OWNER, sink), sink


async def answer(engine: LlamaEngine, context: Sequence[int], n: int, **more: Any) -> Sink:
    job, sink = job_of(engine, context, n, **more)
    engine.submit(job)
    await sink.over.wait()
    return sink


def idle(load: Load) -> bool:
    return load.lanes_active == load.queue_depth == load.own_lanes_active == load.own_queue_depth == 0
