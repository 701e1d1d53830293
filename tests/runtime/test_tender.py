"""The tender's judgment of silence when the head itself stood still."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from tests.runtime.fakes import FakeNode, head_of, hello, simulate
from tests.sim.loop import SimLoop

SILENCE_S = 6.0


def test_a_sign_that_waits_to_be_read_counts_though_the_head_stood_still_when_it_came() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        node = FakeNode(hello("a"))
        head = await head_of({"a:1": node}, silence_s=SILENCE_S)
        with capture_logs() as logs:
            for round_ in range(10):
                node.mute = True
                await asyncio.sleep(0.1 * round_)  # between two ticks, wherever
                node.links[-1].sign()
                await asyncio.sleep(SILENCE_S - 0.05)
                loop.stand_still(10.0)
                loop.call_later(0.01, node.links[-1].sign)  # what came meanwhile takes a moment to be read
                await asyncio.sleep(0.5)
                node.mute = False
                await asyncio.sleep(2.0)
        assert [entry for entry in logs if entry["event"] == "node_silent"] == []
        assert any(entry["event"] == "head_stalled" for entry in logs)
        await head.stop(0)

    simulate(story)


def test_a_node_that_stays_silent_after_the_head_stood_still_is_suspected_all_the_same() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        node = FakeNode(hello("a"), mute=True)
        head = await head_of({"a:1": node}, silence_s=SILENCE_S)
        await asyncio.sleep(1.0)
        loop.stand_still(10.0)
        with capture_logs() as logs:
            await asyncio.sleep(SILENCE_S + 2.0)
        assert [entry["node"] for entry in logs if entry["event"] == "node_silent"] == ["a"]
        await head.stop(0)

    simulate(story)
