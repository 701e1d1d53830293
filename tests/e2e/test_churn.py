"""Nodes come and go all the time: of many short sessions none hangs, none is lost, and nothing piles up."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import TypeVar

import grpc
import pytest

from fleet.v1 import fleet_service_pb2 as pb
from tests.e2e.callers import Answer, complete, generate, open_session, read_all
from tests.e2e.harness import HeadServer, NodeProcess, World, expected, prompt, until
from tests.e2e.local_nodes import local_nodes
from tests.e2e.refused import taken_apart

T = TypeVar("T")

TURN_S = 0.2
"""Between two changes: the next node in turn leaves, or comes back."""

ORDERLY_S = 1.0
"""How long a node that leaves in order lets its answers go on."""

CALLERS = 24
LEAVES = 3
"""How many leaves a round lasts at least: sessions are asked for until there were so many."""
RARE = 0.02
COUNTED = ("fleet_service.runtime.", "fleet_service.domain.", "fleet_service.links.")
FEW = 16
"""What one round may leave more than another: of caches and what is on its way."""

EITHER_WAY = pytest.mark.parametrize("world", ["join", "link", "plain"], indirect=True)


class Churn:
    """The nodes' comings and goings, each in its turn; with `deaths` every other leave is abrupt."""

    def __init__(self, nodes: Sequence[NodeProcess], *, deaths: bool) -> None:
        self._nodes = nodes
        self._changes: dict[NodeProcess, asyncio.Task[None]] = {}
        self._abrupt = cycle((True, False, False, True) if deaths else (False,))
        self.leaves = 0
        self.work = asyncio.create_task(self._run(), name="churn")

    async def _run(self) -> None:
        """Until cancelled. Every second node leaves first, so that a leave and a return take turns."""
        for node in self._nodes[1::2]:
            await self._change(node)
        for node in cycle(self._nodes):
            await asyncio.sleep(TURN_S)
            if node in self._changes:
                await asyncio.wait({self._changes[node]})
                self._changes[node].result()
            self._changes[node] = asyncio.create_task(self._change(node), name="churn")

    async def _change(self, node: NodeProcess) -> None:
        if not node.alive:
            await node.start()
            return
        self.leaves += 1
        if next(self._abrupt):
            await node.kill()
        else:
            await node.leave(ORDERLY_S)

    async def all_back(self) -> None:
        await asyncio.gather(*self._changes.values())
        await asyncio.gather(*(node.start() for node in self._nodes if not node.alive))


@asynccontextmanager
async def churning(server: HeadServer, nodes: Sequence[NodeProcess], *, deaths: bool) -> AsyncIterator[Churn]:
    """Nodes that come and go within the block; after it all are there."""
    churn = Churn(nodes, deaths=deaths)
    try:
        yield churn
    finally:
        churn.work.cancel()
        await asyncio.wait({churn.work})
        await churn.all_back()
    assert churn.work.cancelled(), "the churn failed"
    await until(lambda: all_usable(server, nodes), "all nodes are up")


def all_usable(server: HeadServer, nodes: Sequence[NodeProcess]) -> bool:
    known = [server.head.fleet.named(node.identity) for node in nodes]
    return all(node is not None and node.usable for node in known)


async def one_session(server: HeadServer, salt: int) -> int:
    """A short session of one of the two kinds, its answer checked; how often it was taken for poison before.

    Two nodes that die under a request at the same token look like its doing (POISON_REQUEST). That is rare,
    its caller is told so, and may ask again. Nodes that leave in order say so, and nobody is blamed.
    """
    context, n = prompt(4 + salt % 20, salt), 4 + salt % 13
    for poisoned in range(4):
        answer = await (completed if salt % 2 else generated)(server, context, n)
        assert answer.tokens == expected(context, n)[: len(answer.tokens)]
        if answer.reason == "LENGTH":
            assert len(answer.tokens) == n
            return poisoned
        assert answer.finished.error.reason == "POISON_REQUEST", answer.finished
    raise AssertionError(f"session {salt} was taken for poison again and again")


async def completed(server: HeadServer, context: Sequence[int], n: int) -> Answer:
    return await until_taken(lambda: read_all(complete(server, context, n)))


async def generated(server: HeadServer, context: Sequence[int], n: int) -> Answer:
    session_id = await until_taken(lambda: open_session(server, context))
    answer = await until_taken(lambda: read_all(generate(server, session_id, n)))
    await server.fleet.FinishSession(pb.FinishSessionRequest(session_id=session_id))
    return answer


async def until_taken(ask: Callable[[], Coroutine[object, object, T]]) -> T:
    """As a caller does that heeds the hint of a head which has no place just then."""
    while True:
        try:
            return await ask()
        except grpc.aio.AioRpcError as error:
            refused = taken_apart(error)
            assert refused.reason in ("NO_ELIGIBLE_NODE", "FLEET_SATURATED"), refused
            assert refused.retry_after_s is not None
            await asyncio.sleep(refused.retry_after_s)


async def sessions(server: HeadServer, salts: range) -> int:
    """All of them, so many callers asking at once; how many were taken for poison."""
    places = asyncio.Semaphore(CALLERS)

    async def one(salt: int) -> int:
        async with places:
            return await one_session(server, salt)

    async with asyncio.TaskGroup() as callers:
        asked = [callers.create_task(one(salt), name=f"caller {salt}") for salt in salts]
    return sum(each.result() for each in asked)


async def nothing_left(server: HeadServer, nodes: Sequence[NodeProcess]) -> None:
    """The head counts nothing any more and owes nothing, and no node holds anything."""
    head = server.head
    known = head.fleet.nodes
    assert sorted(node.name for node in known) == sorted(node.identity for node in nodes)
    await until(lambda: not any(node.outbox for node in known), "revokes were delivered")
    await until(lambda: not head.generations._by_id, "what has finished is forgotten")
    assert head.operators.books_balance
    assert [(node.reservations, len(node.queue), len(node.running), node.sessions) for node in known] == [
        (0, 0, 0, 0)
    ] * len(nodes)
    assert head.list_sessions(1, "", None, "")[0] == []
    assert list(head.generations.running) == []
    for node in nodes:
        held = await node.holdings()
        assert [each for each in held.holdings if not each.fenced] == [], node.identity
        assert (held.lanes_active, held.queue_depth) == (0, 0), node.identity


def alive() -> Counter[str]:
    """The head's objects that there are, by class, and the loop's tasks by the first word of their name."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    names = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    found = Counter({name: kinds[kind] for kind, name in names.items() if name.startswith(COUNTED)})
    # A task without a name of its own is called Task-N.
    found.update(f"task {task.get_name().split()[0].split('-')[0]}" for task in asyncio.all_tasks())
    return found


async def rounds_of_churn(
    world: World, nodes: Sequence[NodeProcess], count: int, *, deaths: bool
) -> tuple[int, dict[str, tuple[int, int]]]:
    """Two rounds of sessions, each answer checked: how many were taken for poison, and what has grown."""
    server = await world.head(
        *(nodes if world.kind != "join" else ()), finished_kept_s=0.2, placement_wait_s=20.0
    )
    await until(lambda: all_usable(server, nodes), "all nodes are up")
    left: list[Counter[str]] = []
    poisoned = 0
    for first in (0, count):
        async with churning(server, nodes, deaths=deaths) as churn:
            poisoned += await sessions(server, range(first, first + count))
            while churn.leaves < LEAVES and not churn.work.done():
                poisoned += await sessions(server, range(first, first + CALLERS))
        await nothing_left(server, nodes)
        left.append(alive())
    grown = {name: (left[0][name], now) for name, now in left[1].items() if now > left[0][name] + FEW}
    return poisoned, grown


@EITHER_WAY
async def test_short_sessions_are_exact_while_nodes_come_and_go(world: World) -> None:
    assert await rounds_of_churn(world, await local_nodes(world, 4), 100, deaths=False) == (0, {})


@pytest.mark.slow
@EITHER_WAY
async def test_1500_short_sessions_are_exact_while_nodes_come_and_go(world: World) -> None:
    assert await rounds_of_churn(world, await local_nodes(world, 4), 1500, deaths=False) == (0, {})


@pytest.mark.slow
@EITHER_WAY
async def test_1500_short_sessions_outlive_nodes_that_die_and_come_back(world: World) -> None:
    poisoned, grown = await rounds_of_churn(world, await local_nodes(world, 4), 1500, deaths=True)
    assert poisoned <= 2 * 1500 * RARE
    assert grown == {}
