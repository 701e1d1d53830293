"""Multiplexed links to stub nodes, dialed and joined: runs that outlive their link, and many on one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from fleet_service.domain.commands import CancelRun, RefusalCode, RunFinish
from fleet_service.domain.node_types import Feature
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.mux import MuxLink
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import LinkLostError
from node_stub.join import JoinSettings
from node_stub.reference import reference_tokens
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.links.scripted_link import RecordingDesk, join_address
from tests.links.scripted_node import EPOCH, INTRODUCTION, RecordingListener, RecordingSink, an_append
from tests.links.test_stub_node import MODEL, PROMPT, assign, bind, run_on
from tests.node_stub.support import eventually

PACED = EngineSettings(decode_tokens_per_s=400, prefill_tokens_per_s=0)
WHOLE = reference_tokens(MODEL, 0, PROMPT, 20_000)


@dataclass
class Site:
    """A node, and a way to get a link to it, as often as one is wanted."""

    node: StubNode
    connect: Callable[[], Awaitable[MuxLink]]


@asynccontextmanager
async def dialed(settings: StubSettings) -> AsyncIterator[Site]:
    async with StubNode(settings) as node:

        async def connect() -> MuxLink:
            dialer = FleetDialer(LinkSettings())
            link = await dialer.connect(node.address, INTRODUCTION, RecordingListener())
            assert isinstance(link, MuxLink)
            return link

        yield Site(node, connect)


@asynccontextmanager
async def joined(settings: StubSettings) -> AsyncIterator[Site]:
    desk = RecordingDesk()
    async with (
        join_address(desk, LinkSettings()) as address,
        StubNode(replace(settings, join=JoinSettings(address))) as node,
    ):

        async def connect() -> MuxLink:
            _, link = await desk.offers.get()
            assert isinstance(link, MuxLink)
            assert link.attach(RecordingListener())
            return link

        yield Site(node, connect)


both_ways = pytest.mark.parametrize("site", [dialed, joined])
MakeSite = Callable[[StubSettings], AbstractAsyncContextManager[Site]]


@both_ways
async def test_a_node_is_asked_what_it_holds_and_whether_it_lives(site: MakeSite) -> None:
    async with site(StubSettings(engine=PACED)) as there:
        link = await there.connect()
        assert {Feature.LINK, Feature.RESUME, Feature.RECONCILE} <= link.hello.features
        await link.ping()
        await bind(link)
        sink = RecordingSink()
        link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        (held,) = await link.reconcile()
        assert (held.session_id, held.epoch, held.head_id) == ("s-1", EPOCH, "head-1")
        assert (held.context_length, held.fenced, held.generation_ids) == (len(PROMPT), False, ("g-1",))
        await link.close()


@both_ways
async def test_sixty_four_runs_on_one_link_are_each_exact(site: MakeSite) -> None:
    sinks = [RecordingSink() for _ in range(64)]
    async with site(StubSettings(engine=replace(PACED, lanes=64))) as there:
        link = await there.connect()
        for number, sink in enumerate(sinks):
            session_id = f"s-{number}"
            bound = {
                "assign": replace(assign(), session_id=session_id),
                "append": an_append(PROMPT, session_id=session_id),
            }
            command = run_on(PROMPT, session_id=session_id, max_new_tokens=100, **bound)
            link.run(replace(command, generation_id=f"g-{number}"), sink)
        await asyncio.gather(*(sink.ended.wait() for sink in sinks))
        await link.close()
    assert all(sink.token_ids == WHOLE[:100] for sink in sinks)


@both_ways
async def test_a_run_outlives_its_link_and_goes_on_without_a_gap(site: MakeSite) -> None:
    first, second = RecordingSink(), RecordingSink()
    async with site(StubSettings(engine=PACED)) as there:
        link = await there.connect()
        assert link.resumes
        await bind(link)
        command = run_on(PROMPT, max_new_tokens=600)
        link.run(command, first)
        await first.stepped.wait()
        await link.close()
        assert [type(error) for error in first.broken] == [LinkLostError]
        have = first.token_ids
        again = await there.connect()
        assert again.hello.incarnation == link.hello.incarnation
        rest = replace(command, first_index=len(have), prefix_token_ids=have)
        again.run(replace(rest, max_new_tokens=600 - len(have)), second)
        await second.ended.wait()
        assert have + second.token_ids == WHOLE[:600]
        assert second.steps[0].first_index == len(have)
        assert second.steps[-1].finish is RunFinish.LENGTH
        generates = there.node.journal(kind="generate")
        assert [entry.resumes for entry in generates] == [1], "it was never run a second time"
        await again.close()


@both_ways
async def test_a_finish_that_was_lost_with_the_link_is_told_on_the_next(site: MakeSite) -> None:
    first, second = RecordingSink(), RecordingSink()
    async with site(StubSettings(engine=PACED)) as there:
        link = await there.connect()
        await bind(link)
        command = run_on(PROMPT, max_new_tokens=50)
        link.run(command, first)
        await first.stepped.wait()
        await link.close()
        (entry,) = there.node.journal(kind="generate")
        await eventually(lambda: entry.ended_ms is not None)
        again = await there.connect()
        have = first.token_ids
        again.run(replace(command, first_index=len(have), prefix_token_ids=have), second)
        await second.ended.wait()
        assert have + second.token_ids == WHOLE[:50]
        assert second.steps[-1].finish is RunFinish.LENGTH
        await again.close()


@both_ways
async def test_an_index_that_was_acknowledged_is_gone(site: MakeSite) -> None:
    first, second = RecordingSink(), RecordingSink()
    async with site(StubSettings()) as there:
        link = await there.connect()
        await bind(link)
        command = run_on(PROMPT, max_new_tokens=20_000)
        link.run(command, first)
        await first.ended.wait()
        assert first.token_ids == WHOLE, "acknowledged in time, the node's buffer holds nothing up"
        await link.close()
        again = await there.connect()
        again.run(command, second)
        await second.ended.wait()
        assert [step.refusal.code for step in second.steps if step.refusal] == [RefusalCode.REPLAYED]
        await again.close()


@both_ways
async def test_closing_a_run_cancels_it_though_it_would_outlive_the_link(site: MakeSite) -> None:
    sink = RecordingSink()
    async with site(StubSettings(engine=PACED)) as there:
        link = await there.connect()
        await bind(link)
        run = link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        run.close()
        (entry,) = there.node.journal(kind="generate")
        await eventually(lambda: entry.cancel_seen_ms is not None and entry.ended_ms is not None)
        assert entry.outcome == "CANCELLED"
        assert await link.renew_lease(60.0, INTRODUCTION.term)
        assert not link._runs._runs
        await link.close()


@both_ways
async def test_a_cancel_command_ends_a_run_with_a_finish(site: MakeSite) -> None:
    sink = RecordingSink()
    async with site(StubSettings(engine=PACED)) as there:
        link = await there.connect()
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        assert await link.cancel(CancelRun("s-1", EPOCH, "g-1")) is None
        await sink.ended.wait()
        await link.close()
    assert sink.steps[-1].finish is RunFinish.CANCELLED
    assert sink.broken == []
