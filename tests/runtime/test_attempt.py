"""What an attempt leaves on its node when its generation ends while the link is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fleet_service.domain.commands import Revoke, Run, RunFinish
from fleet_service.domain.node_types import Feature
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import RunSink
from tests.runtime.fakes import MODEL, FakeNode, head_of, hello, simulate


async def _one_token(command: Run, sink: RunSink) -> None:
    """A run that gives a token and goes on in silence."""
    sink.on_step(command.epoch, command.first_index, [7], None, None, None)
    await asyncio.Event().wait()


async def _whole_answer(command: Run, sink: RunSink) -> None:
    """A run to its end."""
    await asyncio.sleep(0.1)
    sink.on_step(command.epoch, command.first_index, [7, 2], None, RunFinish.EOS, None)


async def _cancel(head: Head) -> None:
    await head.cancel_generation("g")


async def _run_out_of_time(_: Head) -> None:
    await asyncio.sleep(0.15)


@pytest.mark.parametrize("end", [_cancel, _run_out_of_time])
def test_a_run_whose_answer_was_decided_during_a_blip_is_stopped_on_the_node(
    end: Callable[[Head], asyncio.Future[None]],
) -> None:
    async def story() -> None:
        node = FakeNode(hello("a", features=frozenset({Feature.INLINE_BIND, Feature.RESUME})))
        node.speak = _one_token
        head = await head_of({"a:1": node})
        await head.create_session("s", SessionSpec(model=MODEL), [1, 2, 3], None)
        generation = await head.generate("s", "g", GenerationSpec(max_wall_s=0.5), None)
        while not generation.log.received:
            await asyncio.sleep(0.01)
        (session,) = [head.sessions.get("s")]
        assert session.binding is not None
        epoch = session.binding.epoch
        await asyncio.sleep(0.4 - generation.log.received * 0.01)
        node.answers_after_s = 0.2
        node.links[0].break_()
        await asyncio.sleep(0.02)
        await end(head)
        assert generation.finished is not None
        assert len(node.links) == 1
        await asyncio.sleep(1.0)
        assert node.revoked == [Revoke("s", epoch)]
        await head.stop(0)

    simulate(story)


@pytest.mark.parametrize("end", ["by itself", "by a cancel"])
def test_a_session_stays_on_its_node_when_its_answer_has_ended(end: str) -> None:
    async def story() -> None:
        node = FakeNode(hello("a", features=frozenset({Feature.INLINE_BIND, Feature.RESUME})))
        node.speak = _whole_answer if end == "by itself" else _one_token
        head = await head_of({"a:1": node})
        await head.create_session("s", SessionSpec(model=MODEL), [1, 2, 3], None)
        generation = await head.generate("s", "g", GenerationSpec(), None)
        while not generation.log.received:
            await asyncio.sleep(0.01)
        await head.cancel_generation("g")
        await head.sessions.get("s").settle()
        await asyncio.sleep(1.0)
        binding = head.sessions.get("s").binding
        assert binding is not None
        assert binding.usable
        assert binding.synced_tokens == 3
        assert node.revoked == []
        await head.stop(0)

    simulate(story)
