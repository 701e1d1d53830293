"""No caller is told of what may yet be lost: neither by a read, nor by a refusal, nor while the head ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleet_service.domain.commands import Run
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import FinishReason
from fleet_service.domain.node_types import ModelInfo
from fleet_service.domain.specs import GenerationSpec, OnDisconnect, SessionSpec
from fleet_service.runtime.head import Head
from fleet_service.runtime.journal import Durability, StoreJournal
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.protocols import RunSink
from fleet_service.runtime.records import SessionGone
from fleet_service.runtime.settings import HeadSettings
from tests.runtime.fakes import UNIX_S, FakeDialer, FakeNode, hello, simulate
from tests.runtime.test_journal import FULL, SteeredStore
from tests.runtime.test_recovery import CONTEXT, KnownContext, finished_of, restarted, saved

ADDRESS = "127.0.0.1:1"
SPEC = SessionSpec(model="m")


class Told:
    """A head on a store that keeps a batch when the test lets it."""

    def __init__(self, head: Head, store: SteeredStore) -> None:
        self.head = head
        self.store = store

    async def seen_once_kept(self, *asked: asyncio.Future[Any]) -> None:
        """None of these is answered while the store is held, all are afterwards."""
        await self.store.until_asked(1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert [each.done() for each in asked] == [False] * len(asked)
        await self.store.let()
        await asyncio.wait(asked)


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    store = SteeredStore()
    journal = StoreJournal(store, Durability.STRICT, broken=lambda _: None)
    journal.start()
    loop = asyncio.get_running_loop()
    head = Head(
        HeadSettings(),
        dialer=FakeDialer({ADDRESS: FakeNode(hello("a", models=(ModelInfo("m"),)))}),
        rng=random.Random(3),
        wall_clock=lambda: UNIX_S + loop.time(),
        kept=Kept(journal),
    )
    await head.start([ADDRESS])
    store.held = True
    yield Told(head, store)
    store.always = None
    await store.let()
    await head.stop(0.0)
    await journal.stop()


async def says_nothing(_command: Run, _sink: RunSink) -> None:
    await asyncio.Event().wait()


def refused(answer: asyncio.Future[Any]) -> Reason:
    error = answer.exception()
    assert isinstance(error, FleetError)
    return error.reason


async def test_a_session_is_seen_once_it_is_kept(told: Told) -> None:
    head = told.head
    made = asyncio.ensure_future(head.create_session("s", SPEC, [1, 2], None))
    await told.store.until_asked(1)
    read = asyncio.ensure_future(head.told(lambda: head.get_session("s")))
    listed = asyncio.ensure_future(head.told(lambda: head.list_sessions(10, "", None, "")))
    context = asyncio.ensure_future(head.context_of("s"))
    again = asyncio.ensure_future(head.create_session("s", SPEC, [1, 2], None))
    await told.seen_once_kept(made, read, listed, context, again)
    assert (read.result().context_length, len(listed.result()[0])) == (2, 1)
    assert refused(again) is Reason.SESSION_ALREADY_EXISTS


async def test_that_a_session_is_over_is_told_once_it_is_kept(told: Told) -> None:
    head = told.head
    await told.store.let()
    await head.create_session("s", SPEC, [1, 2], None)
    told.store.held, told.store.asked = True, 0
    over = asyncio.ensure_future(head.finish_session("s"))
    await told.store.until_asked(1)
    read = asyncio.ensure_future(head.told(lambda: head.get_session("s")))
    again = asyncio.ensure_future(head.finish_session("s"))
    await told.seen_once_kept(over, read, again)
    assert (refused(read), refused(again)) == (Reason.SESSION_NOT_FOUND, Reason.SESSION_NOT_FOUND)


async def test_when_nothing_can_be_kept_a_read_says_so_also_one_that_waits(told: Told) -> None:
    head = told.head
    told.store.always = FULL
    made = asyncio.ensure_future(head.create_session("s", SPEC, [1, 2], None))
    await told.store.until_asked(1)
    waits = asyncio.ensure_future(head.told(lambda: head.get_session("s")))
    await told.store.let()
    with pytest.raises(FleetError) as refusal:
        await waits
    assert refusal.value.reason is Reason.STORE_UNAVAILABLE
    with pytest.raises(FleetError) as refusal:
        await head.told(lambda: head.get_session("s"))
    assert refusal.value.reason is Reason.STORE_UNAVAILABLE
    told.store.always = None
    assert (await made).session_id == "s"


def test_what_is_left_to_the_next_run_is_neither_cancelled_nor_finished_by_this_one() -> None:
    async def story() -> None:
        head = await restarted(KnownContext(CONTEXT), saved(), placement_wait_s=60.0)
        head.find_generation("g").leave()
        for ask in (head.cancel_generation("g"), head.finish_session("s")):
            with pytest.raises(FleetError) as refusal:
                await ask
            assert refusal.value.reason is Reason.HEAD_DRAINING
        assert head.get_session("s").generation_id == "g"
        await head.stop(0.0)

    simulate(story)


def test_an_answer_whose_session_was_finished_is_cancelled() -> None:
    async def story() -> None:
        left = saved()
        del left.sessions["s"]
        journal = KnownContext(CONTEXT)
        head = await restarted(journal, left)
        assert finished_of(head).reason is FinishReason.CANCELLED
        assert not [each for each in journal.records if isinstance(each, SessionGone)]
        await head.stop(0.0)

    simulate(story)


def test_readers_have_their_time_from_when_the_head_serves() -> None:
    async def story() -> None:
        left = saved()
        started = left.generations["g"].started
        spec = GenerationSpec(100, on_disconnect=OnDisconnect.CONTINUE, orphan_timeout_s=1.5)
        object.__setattr__(started, "spec", spec)
        loop = asyncio.get_running_loop()
        node = FakeNode(hello("a", models=(ModelInfo("m"),)), answers_after_s=3.0)
        head = Head(
            HeadSettings(placement_wait_s=60.0),
            dialer=FakeDialer({ADDRESS: node}),
            rng=random.Random(3),
            wall_clock=lambda: UNIX_S + loop.time(),
            kept=Kept(KnownContext(CONTEXT), left),
        )
        await asyncio.sleep(5.0)
        assert head.find_generation("g").finished is None
        await head.start([])
        await asyncio.sleep(1.0)
        assert head.find_generation("g").finished is None
        await asyncio.sleep(1.0)
        assert finished_of(head).reason is FinishReason.CANCELLED
        await head.stop(0.0)

    simulate(story)


def test_an_answer_waits_for_the_node_that_it_needs_and_that_is_not_known_again_yet() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        narrow = FakeNode(hello("narrow", models=(ModelInfo("m", max_context_tokens=3),)), speak=says_nothing)
        wide = FakeNode(hello("wide", models=(ModelInfo("m", max_context_tokens=900),)), answers_after_s=8.0)
        wide.speak = says_nothing
        other = FakeNode(hello("other", models=(ModelInfo("another"),)))
        nodes = {"127.0.0.1:1": narrow, "127.0.0.1:2": wide, "127.0.0.1:3": other}
        head = Head(
            HeadSettings(),
            dialer=FakeDialer(nodes),
            rng=random.Random(3),
            wall_clock=lambda: UNIX_S + loop.time(),
            kept=Kept(KnownContext(CONTEXT), saved()),
        )
        starting = asyncio.ensure_future(head.start(list(nodes)))
        await asyncio.sleep(7.0)
        assert head.find_generation("g").finished is None
        await asyncio.sleep(5.0)
        assert head.find_generation("g").node == "wide"
        await starting
        await head.stop(0.0)

    simulate(story)
