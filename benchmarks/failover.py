"""What callers see when a node is killed (SIGKILL) or frozen (SIGSTOP) under 100 streams.

And how soon a node that was killed is used again once it is there.
Nodes are `fleet-node` processes; of peers, sources and mock workers. Each is one of four, so that a quarter
of the streams are its own. The gap of a stream is the longest time without a token.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks.grpc_way import request_of
from benchmarks.loads import percentile
from benchmarks.peers import LITELLM, SGLANG, VLLM, Proxy, start_worker
from benchmarks.plan import Outcome, Plan
from benchmarks.pool import Drivers
from benchmarks.processes import python
from benchmarks.targets import Head, Nodes, Running, SkippedError, Target, start_node
from examples.processes import Child, ChildFailedError, Children
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

STREAMS = 100
SILENCE_S = 2.0
"""Of the head here: after so long without a word of a node, what it ran goes on elsewhere."""
_SETTINGS = ("--set", f"head.silence_s={SILENCE_S}", "--set", "links.report_period_s=0.5")
_NODES = Nodes(rate=50.0, lanes=STREAMS, number=4, timed=False)
_ANSWERS_S = 6.0
"""How long an answer takes."""
_RATES = {LITELLM.name: 4.0}
"""Of those that cannot carry 100 streams at 50 tokens a second."""
_HURT_AFTER_S = 2.5
_UNTIL_S = 14.0
_AGAIN_WITHIN_S = 20.0
_ASKING = 32
_ASKED_TOKENS = 10
_FIRST = re.compile(r"first call at ([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Lost:
    """What came of one node's end under STREAMS streams."""

    target: str
    how: str
    """killed or frozen."""
    touched: int
    """Streams that moved, were cut, or stood still until the end."""
    cut: int
    """Of those: streams that ended without all of their tokens."""
    stuck: int
    """Of those: streams that had not ended long after they should have."""
    gap_p50_ms: float | None
    """Of those that moved."""
    gap_p99_ms: float | None
    again_s: float | None
    """From the time a node that was killed serves again to its first call; None = not within 20 s, or not
    asked.
    """
    failure: str = ""


def targets(*, quick: bool) -> Sequence[Target]:
    connect = Head("connect", more=_SETTINGS)
    if quick:
        return [connect]
    complete = Head("complete", more=_SETTINGS)
    strict = Head("complete", durability="strict", more=_SETTINGS)
    return [complete, connect, strict, Proxy("haproxy"), Proxy("nginx"), SGLANG, VLLM, LITELLM]


async def measure_all(
    drivers: Drivers, folder: Path, say: Callable[[str], None], *, quick: bool
) -> list[Lost]:
    found: list[Lost] = []
    for target in targets(quick=quick):
        for how in ("killed", "frozen"):
            try:
                found.append(await one(drivers, folder, target, how))
                say(f"failover: {found[-1]}")
            except (SkippedError, ChildFailedError, RuntimeError, OSError, grpc.RpcError) as error:
                say(f"skipped: failover, {target.name}, {how}: {str(error) or type(error).__name__}")
    return found


async def one(drivers: Drivers, folder: Path, target: Target, how: str) -> Lost:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        async with Children(Path(own)) as children:
            nodes = replace(_NODES, rate=_RATES.get(target.name, _NODES.rate))
            running = await target.start(children, nodes)
            tokens = round(nodes.rate * _ANSWERS_S)
            plan = Plan(target.shape, running.address, STREAMS, tokens, 4, 0.0, _UNTIL_S, once=True)
            begun = await drivers.prepare(plan)
            begin_s = await begun.go()
            await asyncio.sleep(max(begin_s + _HURT_AFTER_S - time.monotonic(), 0))
            victim = running.nodes[0]
            if how == "killed":
                victim.kill()
            else:
                victim.freeze()
            outcome = await begun.outcome()
            again_s = None
            if how == "killed":
                if isinstance(target, Head):
                    again_s = await _head_again(children, running, victim)
                else:
                    again_s = await _peer_again(children, target, running, victim)
            return lost_of(target.name, how, outcome, again_s)


def lost_of(name: str, how: str, outcome: Outcome, again_s: float | None) -> Lost:
    gaps = outcome.gaps_ms
    moved = bool(gaps) and not outcome.lost and not outcome.unfinished
    return Lost(
        name,
        how,
        len(gaps),
        outcome.lost,
        outcome.unfinished,
        percentile(gaps, 50) if moved else None,
        percentile(gaps, 99) if moved else None,
        again_s,
        outcome.failure,
    )


async def _head_again(children: Children, running: Running, victim: Child) -> float | None:
    """Callers go on asking until one is given the node that came back."""
    command = list(victim.command)
    name = command[command.index("--identity") + 1]
    address = re.search(r"on (\S+:\d+)", victim.log.read_text(encoding="utf-8"))
    if not address:
        raise RuntimeError("a node did not say where it serves")
    async with grpc.aio.insecure_channel(running.address) as channel:
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)
        await start_node(children, _NODES, name, listen=address[1])
        served_s = time.monotonic()

        async def ask_on() -> None:
            while True:
                async for response in fleet.Complete(request_of(_ASKED_TOKENS, 0)):
                    if response.event.started.node == name:
                        return

        asking = [asyncio.ensure_future(ask_on()) for _ in range(_ASKING)]
        done, _ = await asyncio.wait(asking, timeout=_AGAIN_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        again_s = time.monotonic() - served_s
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return again_s if done else None


async def _peer_again(children: Children, target: Target, running: Running, victim: Child) -> float | None:
    """Callers go on asking; the source or worker that came back says when it is first asked."""
    plan = Plan(target.shape, running.address, 8, 1, 4, 0.0, _AGAIN_WITHIN_S + 5.0, arrivals_per_s=40.0)
    async with Drivers(1) as drivers:
        await (await drivers.prepare(plan)).go()
        return await _until_asked(await _start_again(children, victim))


async def _start_again(children: Children, victim: Child) -> Child:
    text = victim.log.read_text(encoding="utf-8")
    ports = [port for line in text.splitlines()[:1] for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]
    if len(ports) == 1:
        return (await start_worker(children, _NODES.rate, 0, int(ports[0])))[1]
    command = python("source", "--rate", str(_NODES.rate), "--ports", *ports)
    return (await children.start("source-again", command, "source:"))[0]


async def _until_asked(child: Child) -> float | None:
    served_s = time.monotonic()
    while time.monotonic() < served_s + _AGAIN_WITHIN_S:
        if found := _FIRST.search(child.log.read_text(encoding="utf-8")):
            return max(float(found[1]) - served_s, 0.0)
        await asyncio.sleep(0.05)
    return None
