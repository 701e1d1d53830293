"""Links to stub nodes, plain and multiplexed, in this process and in ones that can be killed and frozen."""

from __future__ import annotations

import asyncio
import signal
import sys
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleet_service.domain.commands import RefusalCode, Run, RunFinish
from fleet_service.domain.node_types import Feature
from fleet_service.domain.specs import Sampling
from fleet_service.links.dialer import FleetDialer
from fleet_service.links.mux import MuxLink
from fleet_service.links.plain import PlainLink
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.protocols import HandshakeRefusedError, LinkLostError, LinkTimeoutError
from node_stub.reference import StubModel, reference_tokens
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.links.scripted_node import (
    INTRODUCTION,
    RecordingListener,
    RecordingSink,
    a_run,
    an_append,
    an_assign,
)
from tests.node_stub.support import eventually, process

MODEL = StubModel("stub")
PROMPT = [11, 22, 33]
SLOW = EngineSettings(decode_tokens_per_s=100, prefill_tokens_per_s=0)


def crc32(token_ids: Sequence[int]) -> int:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return zlib.crc32(words.tobytes())


def run_on(context: Sequence[int], **changes: Any) -> Run:
    fields = {"context_length": len(context), "context_crc32": crc32(context)} | changes
    return a_run(**fields)


async def bind(link: PlainLink | MuxLink, context: Sequence[int] = PROMPT) -> None:
    assert await link.assign(assign()) is None
    assert await link.append(an_append(context)) is None


def assign() -> Any:
    return an_assign(model="stub", model_revision=MODEL.revision, sampling=Sampling())


LinkTo = Callable[..., AbstractAsyncContextManager[PlainLink | MuxLink]]
"""(address, listener=None, **settings) -> a link of the way under test."""


@pytest.fixture(params=["plain", "link"])
def dialer(request: pytest.FixtureRequest) -> Callable[..., FleetDialer]:
    """Takes link settings."""
    return partial(_dialer, multiplexed=request.param == "link")


def _dialer(**settings: Any) -> FleetDialer:
    return FleetDialer(LinkSettings(**settings))


@pytest.fixture
def link_to(dialer: Callable[..., FleetDialer]) -> LinkTo:
    @asynccontextmanager
    async def connected(
        address: str, listener: RecordingListener | None = None, **settings: Any
    ) -> AsyncIterator[PlainLink | MuxLink]:
        link = await dialer(**settings).connect(address, INTRODUCTION, listener or RecordingListener())
        yield link
        await link.close()

    return connected


async def freeze(node: asyncio.subprocess.Process) -> None:
    """Stop a process; returns when each of its threads stands still."""
    node.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{node.pid}/task")
    await eventually(
        lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads.glob("*/stat"))
    )


# -------------------------------------------------------------------------------------- in this process


async def test_a_bound_session_generates_the_models_answer(link_to: LinkTo) -> None:
    listener, sink = RecordingListener(), RecordingSink()
    async with StubNode() as node, link_to(node.address, listener) as link:
        assert link.hello.identity == "stub"
        assert Feature.INLINE_BIND in link.hello.features
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=40), sink)
        await sink.ended.wait()
        await listener.reported.wait()
    assert sink.token_ids == reference_tokens(MODEL, 0, PROMPT, 40)
    assert sink.steps[-1].finish is RunFinish.LENGTH
    assert sink.broken == []


async def test_an_inline_bound_run_continues_from_its_prefix(link_to: LinkTo) -> None:
    sink = RecordingSink()
    whole = reference_tokens(MODEL, 0, PROMPT, 30)
    run = run_on(
        PROMPT,
        assign=assign(),
        append=an_append(PROMPT),
        prefix_token_ids=whole[:10],
        first_index=10,
        max_new_tokens=20,
    )
    async with StubNode() as node, link_to(node.address) as link:
        link.run(run, sink)
        await sink.ended.wait()
    assert sink.token_ids == whole[10:]


async def test_ten_thousand_tokens_of_a_node_arrive_in_order(link_to: LinkTo) -> None:
    sink = RecordingSink()
    async with StubNode() as node, link_to(node.address) as link:
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.ended.wait()
    assert sink.token_ids == reference_tokens(MODEL, 0, PROMPT, 10_000)
    indexes = [step.first_index + n for step in sink.steps for n in range(len(step.token_ids))]
    assert indexes == list(range(10_000))


async def test_a_million_tokens_of_context_are_appended_and_generated_on(link_to: LinkTo) -> None:
    sink = RecordingSink()
    context = [index % 32_000 for index in range(1_000_000)]
    settings = StubSettings(
        models=[(MODEL, 0)],
        engine=EngineSettings(decode_tokens_per_s=0, prefill_tokens_per_s=0, kv_blocks_total=0),
    )
    async with StubNode(settings) as node, link_to(node.address, command_timeout_s=60.0) as link:
        await bind(link, context)
        link.run(run_on(context, max_new_tokens=2), sink)
        await sink.ended.wait()
    assert sink.token_ids == reference_tokens(MODEL, 0, context, 2)


async def test_a_wrong_context_is_refused_with_the_nodes_length(link_to: LinkTo) -> None:
    sink = RecordingSink()
    async with StubNode() as node, link_to(node.address) as link:
        await bind(link)
        link.run(run_on([*PROMPT, 44]), sink)
        await sink.ended.wait()
    (step,) = sink.steps
    assert step.refusal is not None
    assert step.refusal.code is RefusalCode.CONTEXT_MISMATCH
    assert step.refusal.context_length == len(PROMPT)


async def test_closing_a_run_frees_its_lane_at_the_node(link_to: LinkTo) -> None:
    sink = RecordingSink()
    async with StubNode(StubSettings(engine=SLOW)) as node, link_to(node.address) as link:
        await bind(link)
        run = link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        run.close()
        (entry,) = node.journal(kind="generate")
        await eventually(lambda: entry.cancel_seen_ms is not None and entry.ended_ms is not None)
        steps = len(sink.steps)
    assert len(sink.steps) == steps
    assert sink.broken == []


async def test_closing_a_finished_run_is_not_taken_for_a_cancel(link_to: LinkTo) -> None:
    sink = RecordingSink()
    async with StubNode() as node, link_to(node.address) as link:
        await bind(link)
        run = link.run(run_on(PROMPT), sink)
        await sink.ended.wait()
        run.close()
        assert await link.renew_lease(60.0, INTRODUCTION.term)
        (entry,) = node.journal(kind="generate")
        assert (entry.outcome, entry.cancel_seen_ms) == ("LENGTH", None)


async def test_a_node_of_another_fleet_says_which_id_to_change(dialer: Callable[..., FleetDialer]) -> None:
    async with StubNode(StubSettings(fleet_id="other")) as node:
        with pytest.raises(HandshakeRefusedError, match=r"same fleet id.*'other'.*'fleet'"):
            await dialer().connect(node.address, INTRODUCTION, RecordingListener())


async def test_a_stopping_node_is_lost_at_once_whatever_grace_it_gives(link_to: LinkTo) -> None:
    listener, sink = RecordingListener(), RecordingSink()
    node = StubNode(StubSettings(engine=SLOW))
    await node.start()
    async with link_to(node.address, listener) as link:
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        stopping = asyncio.create_task(node.stop(grace_s=60.0))
        await listener.lost.wait()
        await sink.ended.wait()
        with pytest.raises(LinkLostError):
            await link.renew_lease(60.0, INTRODUCTION.term)
        await stopping
    assert [type(error) for error in sink.broken] == [LinkLostError]
    assert [type(error) for error in listener.losses] == [LinkLostError]


async def test_a_link_never_speaks_to_the_next_run_of_its_node(
    dialer: Callable[..., FleetDialer], link_to: LinkTo
) -> None:
    listener = RecordingListener()
    node = StubNode()
    await node.start()
    async with link_to(node.address, listener) as link:
        await node.stop()
        await node.start()
        with pytest.raises(LinkLostError):
            await link.assign(assign())
        await listener.lost.wait()
        assert node.journal() == []
        again = await dialer().probe(node.address, INTRODUCTION)
        assert again.incarnation != link.hello.incarnation
    await node.stop()
    assert len(listener.losses) == 1


# ------------------------------------------------------------------------------- processes of their own


async def test_a_killed_node_breaks_its_run_and_is_lost_once(
    dialer: Callable[..., FleetDialer], link_to: LinkTo
) -> None:
    listener, sink = RecordingListener(), RecordingSink()
    async with process("--decode-rate", "100") as (node, address), link_to(address, listener) as link:
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        node.kill()
        async with asyncio.timeout(10):
            await sink.ended.wait()
            await listener.lost.wait()
        with pytest.raises(LinkLostError):
            await link.assign(assign())
        await node.wait()
        with pytest.raises(LinkLostError, match="cannot connect"):
            await dialer().probe(address, INTRODUCTION)
    assert [type(error) for error in sink.broken] == [LinkLostError]
    assert [type(error) for error in listener.losses] == [LinkLostError]
    expected = reference_tokens(MODEL, 0, PROMPT, len(sink.token_ids))
    assert sink.token_ids == expected


async def test_a_frozen_node_gives_no_sign_and_goes_on_when_it_thaws(link_to: LinkTo) -> None:
    listener, sink = RecordingListener(), RecordingSink()
    async with (
        process("--decode-rate", "100") as (node, address),
        link_to(address, listener, command_timeout_s=0.3) as link,
    ):
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=100), sink)
        await sink.stepped.wait()
        await freeze(node)
        with pytest.raises(LinkTimeoutError):
            await link.renew_lease(60.0, INTRODUCTION.term)
        signs = listener.signs
        with pytest.raises(LinkTimeoutError):
            await link.renew_lease(60.0, INTRODUCTION.term)
        assert listener.signs == signs
        assert (sink.broken, listener.losses) == ([], [])
        node.send_signal(signal.SIGCONT)
        await sink.ended.wait()
    assert sink.token_ids == reference_tokens(MODEL, 0, PROMPT, 100)
    assert listener.losses == []


async def test_keepalive_notices_a_frozen_node(link_to: LinkTo) -> None:
    listener, sink = RecordingListener(), RecordingSink()
    async with (
        process("--decode-rate", "100") as (node, address),
        link_to(
            address,
            listener,
            keepalive_time_s=1.0,
            keepalive_timeout_s=0.5,
            ping_timeout_s=0.5,
            report_period_s=0.1,
        ) as link,
    ):
        await bind(link)
        link.run(run_on(PROMPT, max_new_tokens=10_000), sink)
        await sink.stepped.wait()
        await freeze(node)
        async with asyncio.timeout(30):
            await sink.ended.wait()
            await listener.lost.wait()
    assert [type(error) for error in sink.broken] == [LinkLostError]
    assert [type(error) for error in listener.losses] == [LinkLostError]


async def test_a_frozen_node_cannot_be_dialed_within_the_connect_timeout(
    dialer: Callable[..., FleetDialer],
) -> None:
    async with process() as (node, address), asyncio.timeout(30):
        await freeze(node)
        with pytest.raises(LinkLostError):
            await dialer(connect_timeout_s=0.2).probe(address, INTRODUCTION)


@pytest.mark.parametrize("link", [True, False], ids=["link", "plain"])
async def test_a_node_that_is_stopped_in_order_says_so_first(link: bool) -> None:
    listener = RecordingListener()
    node = StubNode(StubSettings(link=link))
    await node.start()
    made = await FleetDialer(LinkSettings()).connect(node.address, INTRODUCTION, listener)
    await made.ping()
    before = listener.leaving
    await node.stop(5.0)
    await listener.lost.wait()
    assert (before, listener.leaving) == (False, True)
    await made.close()
