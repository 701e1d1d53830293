"""The loads that are put on a head, the processes that takes, and how they are measured."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from examples.processes import Child, Children, command_of
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

MODEL = "bench"
NODES = 2
LANES = 64
"""Of each node: all streams of every load run at once."""
LOAD_TIMEOUT_S = 300.0
"""A load that takes longer has come to a stop."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` callers, each asking `rounds` times for `tokens` tokens; nodes decode `rate` a second."""

    name: str
    streams: int
    rounds: int
    tokens: int
    rate: float


PACED = Load("128 streams, paced 50/s", 128, 1, 400, 50.0)
FULL_SPEED = Load("32 streams, full speed", 32, 4, 400, 0.0)
ONE_TOKEN = Load("one-token requests, 64 at once", 64, 30, 1, 0.0)
LOADS = (PACED, FULL_SPEED, ONE_TOKEN)


@dataclass(frozen=True, slots=True)
class Driven:
    """What callers got of a load, and how long each of their requests took."""

    requests: int
    tokens: int
    wall_s: float
    took_s: Sequence[float]


def cpu_s(pid: int) -> float:
    """CPU time a process has used, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent are not above."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def warm_up(load: Load) -> Load:
    """A short load at the same pace, so that what happens once is not measured."""
    return Load("warm-up", 8, 2, 8, load.rate)


async def drive(address: str, load: Load) -> Driven:
    """Put a load on whoever serves there. Raises RuntimeError for an answer that is too short."""
    took_s: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LOAD_TIMEOUT_S):
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)

        async def caller(salt: int) -> int:
            got = 0
            for _ in range(load.rounds):
                began = time.monotonic()
                got += await _one(fleet, load, salt)
                took_s.append(time.monotonic() - began)
            return got

        began = time.monotonic()
        got = await asyncio.gather(*map(caller, range(load.streams)))
        return Driven(load.streams * load.rounds, sum(got), time.monotonic() - began, took_s)


async def _one(fleet: FleetServiceAsyncStub, load: Load, salt: int) -> int:
    got = 0
    async for response in fleet.Complete(request_of(load, salt)):
        got += len(response.event.tokens.token_ids)
    if got != load.tokens:
        raise RuntimeError(f"asked for {load.tokens} tokens, got {got}")
    return got


def request_of(load: Load, salt: int, generation_id: str = "") -> pb.CompleteRequest:
    """What a caller asks for; `salt` makes its prompt another's."""
    return pb.CompleteRequest(
        session=pb.SessionSpec(model=MODEL),
        token_ids=[3 + salt, 5, 7, 11],
        spec=pb.GenerationSpec(max_new_tokens=load.tokens),
        generation_id=generation_id,
    )


async def node_processes(children: Children, load: Load) -> list[str]:
    """Stub nodes as processes of their own; their addresses."""
    return [await _node(children, f"n{number}", load) for number in range(NODES)]


async def _node(children: Children, name: str, load: Load) -> str:
    flags = ["--model", MODEL, "--identity", name, "--listen", "127.0.0.1:0", "--lanes", str(LANES)]
    rates = ["--decode-rate", str(load.rate), "--prefill-rate", "0", "--log-level", "warning"]
    _, line = await children.start(name, [command_of("fleet-node"), *flags, *rates], "fleet-node:")
    return line.rpartition(" on ")[2].strip()


def head_command(nodes: Sequence[str], *flags: str, multiplexed: bool = True) -> list[str]:
    """`fleet serve` on free ports, with those nodes."""
    serve = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    more = ["--log-level", "warning", "--set", f"links.multiplexed={multiplexed}", *flags]
    return serve + more + [flag for node in nodes for flag in ("--node", node)]


def callers_address(line: str) -> str:
    """Of the line that says the head serves."""
    return line.split()[4].rstrip(",")


async def head_process(
    children: Children, nodes: Sequence[str], *flags: str, multiplexed: bool = True
) -> tuple[Child, str]:
    """A head with those nodes, and where it serves callers."""
    command = head_command(nodes, *flags, multiplexed=multiplexed)
    head, line = await children.start("head", command, "fleet: serving")
    return head, callers_address(line)
