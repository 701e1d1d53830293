"""The head is told to stop: it says so, takes nothing new, lets answers end, and leaves nodes empty."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet_service.app import Addresses, StopRequest, serve
from fleet_service.config import FleetConfig, ListenConfig, LogConfig, StoreConfig
from tests.e2e.callers import Reading, read_all
from tests.e2e.harness import MODEL, PATIENCE_S, NodeProcess, World, expected, prompt
from tests.e2e.refused import refusal_of

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SPEC = pb.SessionSpec(model=MODEL.name)
# Otherwise what has not ended stays on its node, for the head's next run: test_head_restart_answers.
NOTHING_KEPT = StoreConfig(durability="memory")
FLEET_SERVICE = "fleet.v1.FleetService"


@dataclass
class Served:
    """A head as `fleet serve` runs it, in this process."""

    channel: grpc.aio.Channel
    stop: StopRequest
    done: asyncio.Task[None]

    @property
    def fleet(self) -> FleetServiceAsyncStub:
        return FleetServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return HealthStub(self.channel)

    def ask(self, n: int, salt: int = 0, session_id: str = "") -> Reading:
        """An answer of n tokens, of the session or, without one, to prompt(10, salt)."""
        spec = pb.GenerationSpec(max_new_tokens=n)
        if session_id:
            return Reading(self.fleet.Generate(pb.GenerateRequest(session_id=session_id, spec=spec)))
        request = pb.CompleteRequest(session=SPEC, token_ids=prompt(10, salt), spec=spec)
        return Reading(self.fleet.Complete(request))

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.done


@asynccontextmanager
async def served(
    grace_s: float, *nodes: NodeProcess, store: StoreConfig | None = None
) -> AsyncIterator[Served]:
    config = FleetConfig(
        nodes=tuple(node.address for node in nodes),
        shutdown_grace_s=grace_s,
        listen=ListenConfig(callers="127.0.0.1:0", admin="127.0.0.1:0"),
        log=LogConfig(level="warning"),
        store=store or StoreConfig(),
    )
    stop = StopRequest()
    where: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    done = asyncio.create_task(serve(config, ready=where.set_result, stop=stop))
    waits: set[asyncio.Future[Any]] = {done, where}
    await asyncio.wait(waits, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    if done.done():
        done.result()
    channel = grpc.aio.insecure_channel(where.result().callers)
    try:
        yield Served(channel, stop, done)
    finally:
        await channel.close()
        if not done.done():
            done.cancel()
            await asyncio.wait({done})


async def holds_nothing(node: NodeProcess) -> None:
    """The node has nothing of the head: no session but fenced ones, which take no room, and no run."""
    held = await node.holdings()
    assert [holding.session_id for holding in held.holdings if not holding.fenced] == []
    assert (held.lanes_active, held.queue_depth, held.kv_blocks_used) == (0, 0, 0)


async def test_running_and_waiting_answers_end_and_new_work_is_refused(world: World) -> None:
    node = await world.node("node-1", "--lanes", "1", "--decode-rate", "50")
    async with served(20.0, node) as head:
        watch = head.health.Watch(health_pb2.HealthCheckRequest(service=FLEET_SERVICE))
        statuses = aiter(watch)
        assert (await anext(statuses)).status == SERVING
        resting = (await head.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC))).session.session_id
        parked = (await head.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC))).session.session_id
        await head.fleet.ParkSession(pb.ParkSessionRequest(session_id=parked))
        await head.ask(2, session_id=resting).end()
        running = head.ask(60)
        await running.until_tokens(3)
        waiting = head.ask(10, salt=1)
        await waiting.until(lambda answer: answer.events)

        head.stop.ask()
        assert (await anext(statuses)).status == NOT_SERVING
        for service in ("", FLEET_SERVICE):
            check = await head.health.Check(health_pb2.HealthCheckRequest(service=service))
            assert check.status == NOT_SERVING
        complete = pb.CompleteRequest(session=SPEC, token_ids=prompt(5))
        new_work = [
            head.fleet.CreateSession(pb.CreateSessionRequest(spec=SPEC)),
            head.fleet.Complete(complete),
            head.fleet.Generate(pb.GenerateRequest(session_id=resting)),
            head.fleet.ResumeSession(pb.ResumeSessionRequest(session_id=parked)),
        ]
        for call in new_work:
            refusal = await refusal_of(call)
            assert refusal.what == ("UNAVAILABLE", "HEAD_DRAINING")
            assert refusal.retry_after_s is not None
        # What is there can still be looked at, read and ended.
        generation_id = running.answer.generation_id
        second = head.fleet.AttachGeneration(pb.AttachGenerationRequest(generation_id=generation_id))
        attached = Reading(second)
        await head.fleet.FinishSession(pb.FinishSessionRequest(session_id=resting))

        answers = [await reading.end() for reading in (running, attached, waiting)]
        assert [answer.tokens for answer in answers[:2]] == [expected(prompt(10), 60)] * 2
        assert answers[2].tokens == expected(prompt(10, 1), 10)
        assert {answer.reason for answer in answers} == {"LENGTH"}
        await head.ended()
    await holds_nothing(node)


async def test_where_nothing_is_kept_answers_that_outlast_the_grace_are_cancelled_and_told_so(
    world: World,
) -> None:
    nodes = await world.start_nodes(2, "--decode-rate", "50")
    async with served(0.5, *nodes, store=NOTHING_KEPT) as head:
        long_ones = [head.ask(2000, salt) for salt in range(4)]
        for reading in long_ones:
            await reading.until_tokens(3)
        head.stop.ask()
        for salt, reading in enumerate(long_ones):
            answer = await reading.end()
            assert answer.reason == "CANCELLED"
            assert answer.tokens == expected(prompt(10, salt), len(answer.tokens))
            assert answer.finished.output_tokens == len(answer.tokens)
        await head.ended()
    for node in nodes:
        await holds_nothing(node)
        assert all(run.HasField("ended_ms") for run in await node.journal(kind="generate"))


async def test_asked_twice_it_stops_at_once(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "50")
    async with served(600.0, node, store=NOTHING_KEPT) as head:
        reading = head.ask(2000)
        await reading.until_tokens(3)
        head.stop.ask()
        head.stop.ask()
        await head.ended()
        await reading.leave()
    assert 3 <= len(reading.answer.tokens) < 2000
    await holds_nothing(node)


async def test_a_node_takes_up_work_for_the_next_head_after_one_has_stopped(world: World) -> None:
    node = await world.node("node-1")
    async with served(5.0, node) as head:
        assert (await head.ask(20).end()).tokens == expected(prompt(10), 20)
        head.stop.ask()
        await head.ended()
    server = await world.head(node)
    request = pb.CompleteRequest(
        session=SPEC, token_ids=prompt(10), spec=pb.GenerationSpec(max_new_tokens=20)
    )
    assert (await read_all(server.fleet.Complete(request))).tokens == expected(prompt(10), 20)


async def test_fleet_serve_ends_in_order_on_sigterm(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "50")
    command = ("-m", "fleet_service", "serve", "--node", node.address, "--log-level", "error")
    addresses = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *addresses, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
        assert line.startswith("fleet: serving callers on "), line
        address = line.removeprefix("fleet: serving callers on ").partition(",")[0]
        async with grpc.aio.insecure_channel(address) as channel:
            request = pb.CompleteRequest(
                session=SPEC, token_ids=prompt(10), spec=pb.GenerationSpec(max_new_tokens=60)
            )
            reading = Reading(FleetServiceStub(channel).Complete(request))
            await reading.until_tokens(3)
            process.send_signal(signal.SIGTERM)
            answer = await reading.end()
            assert (answer.tokens, answer.reason) == (expected(prompt(10), 60), "LENGTH")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await holds_nothing(node)
