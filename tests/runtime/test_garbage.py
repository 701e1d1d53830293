"""What a request leaves behind: nothing that has to be looked for, since looking holds every stream up."""

from __future__ import annotations

import asyncio
import gc

from fleet_service.domain.commands import Run, RunFinish
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.protocols import RunSink
from tests.runtime.fakes import MODEL, FakeNode, head_of, hello
from tests.sim.loop import SimLoop

REQUESTS = 50


async def one_token(command: Run, sink: RunSink) -> None:
    sink.on_step(command.epoch, 0, [7], None, None, None)
    sink.on_step(command.epoch, 1, [], None, RunFinish.LENGTH, None)


def test_a_request_that_was_answered_leaves_no_garbage() -> None:
    async def requests(number: int) -> int:
        head = await head_of({"a": FakeNode(hello("node-a"), speak=one_token)})
        for _ in range(number):
            generation = await head.complete(SessionSpec(MODEL), [3, 4, 5], GenerationSpec(1), "", None)
            reader = generation.attach()
            while generation.log.ended is None:
                await reader.read()
            reader.close()
        await asyncio.sleep(1)
        return gc.collect()

    def garbage_of(number: int) -> int:
        gc.collect()
        gc.disable()
        try:
            return SimLoop(1).drive(requests(number))
        finally:
            gc.enable()

    few, many = garbage_of(REQUESTS), garbage_of(2 * REQUESTS)
    assert many - few < REQUESTS
