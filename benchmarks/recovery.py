"""How soon a head is there again: by the sessions it keeps, and with generations that ran when it was killed.

The files were written moments ago, so they are in the memory of the machine: what a disk takes to read them
is not in the figures.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import grpc

from benchmarks.latency import local_nodes
from benchmarks.loads import Load, callers_address, head_command, request_of
from benchmarks.store import fill
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet_service.stores.sqlite_files import STORE_FILE

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

STARTS = 3
CONTEXTS_READ = 100
RUNNING = Load("running", 50, 1, 4_000, 50.0)
"""Generations that run while the head is killed; they are not read to their ends."""
_TOKENS_BEFORE = 50
"""How many of each have come when the head is killed."""
_GRACE_MS = 60_000
_STEP_TIMEOUT_S = 120.0
_BYTES_PER_SESSION = 10_000
_KB = 1024
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Started:
    """A start on so many sessions, each with a context; medians of STARTS, each after a SIGKILL."""

    sessions: int
    serving_s: float
    """From the start of the process until it says that it serves."""
    answered_s: float
    """Until the first GetSession with its token ids is answered; without sessions, that there is none."""
    rss_mb: float
    peak_mb: float
    rss_after_reading_mb: float
    """Once CONTEXTS_READ contexts have been read."""
    file_mb: float
    file_bytes_per_session: float
    rss_bytes_per_session: float
    """What the process has beyond one without sessions."""


@dataclass(frozen=True, slots=True)
class WentOn:
    """Generations of a killed head. Times from the start of the new process, in seconds."""

    generations: int
    serving_s: float
    first_token_p50_s: float
    """The first token that its reader did not have."""
    first_token_max_s: float


@dataclass(frozen=True, slots=True)
class Head:
    """A head that serves."""

    pid: int
    address: str
    started_s: float
    serving_s: float


@asynccontextmanager
async def started_head(data: Path, nodes: Sequence[str] = ()) -> AsyncIterator[Head]:
    """A head on that folder, killed when the block ends. Raises RuntimeError when it does not start."""
    command = head_command(nodes, "--data-dir", str(data), "--durability", "strict")
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        serving_s = time.monotonic() - began
        if not line.startswith("fleet: serving"):
            raise RuntimeError(f"the head did not start: {line!r}")
        yield Head(process.pid, callers_address(line), began, serving_s)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def check_room(folder: Path, sessions: int) -> None:
    """Raises RuntimeError where so many sessions, and as much again, find no room."""
    wanted, free = 2 * sessions * _BYTES_PER_SESSION, shutil.disk_usage(folder).free
    if free < wanted:
        raise RuntimeError(f"{folder} has {free / _MB:.0f} MB free, {wanted / _MB:.0f} MB are wanted")


async def starts(folder: Path, sessions: int, empty_rss_mb: float | None) -> Started:
    """On sessions kept in `folder`, which are deleted afterwards. `empty_rss_mb`: a head's without any."""
    check_room(folder, sessions)
    data = folder / f"sessions-{sessions}"
    try:
        await fill(data / STORE_FILE, sessions)
        size = (data / STORE_FILE).stat().st_size
        measured = [await _start(data, sessions) for _ in range(STARTS)]
    finally:
        shutil.rmtree(data, ignore_errors=True)
    serving_s, answered_s, rss_mb, peak_mb, read_mb = map(median, zip(*measured, strict=True))
    beyond_mb = rss_mb - (rss_mb if empty_rss_mb is None else empty_rss_mb)
    return Started(
        sessions=sessions,
        serving_s=serving_s,
        answered_s=answered_s,
        rss_mb=rss_mb,
        peak_mb=peak_mb,
        rss_after_reading_mb=read_mb,
        file_mb=size / _MB,
        file_bytes_per_session=size / sessions if sessions else 0.0,
        rss_bytes_per_session=beyond_mb * _MB / sessions if sessions else 0.0,
    )


async def _start(data: Path, sessions: int) -> tuple[float, float, float, float, float]:
    async with started_head(data) as head, grpc.aio.insecure_channel(head.address) as channel:
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)
        await _read(fleet, "s1", there=sessions > 0)
        answered_s = time.monotonic() - head.started_s
        rss_mb, peak_mb = _memory_mb(head.pid, "VmRSS"), _memory_mb(head.pid, "VmHWM")
        for number in range(1, sessions + 1, max(1, sessions // CONTEXTS_READ)):
            await _read(fleet, f"s{number}", there=True)
        return head.serving_s, answered_s, rss_mb, peak_mb, _memory_mb(head.pid, "VmRSS")


async def _read(fleet: FleetServiceAsyncStub, session_id: str, *, there: bool) -> None:
    request = pb.GetSessionRequest(session_id=session_id, include_token_ids=True)
    try:
        reply = await fleet.GetSession(request, timeout=_STEP_TIMEOUT_S)
        if not reply.token_ids:
            raise RuntimeError(f"session {session_id} has lost its context")
    except grpc.aio.AioRpcError as error:
        if there or error.code() is not grpc.StatusCode.NOT_FOUND:
            raise


def _memory_mb(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * _KB / _MB
    raise RuntimeError(f"/proc says nothing of {name}")


# Generations that run


async def going_on(folder: Path) -> WentOn:
    """Kill a head that has generations running, start it again, and read on at once where each was."""
    data = folder / "going-on"
    async with asyncio.timeout(_STEP_TIMEOUT_S), local_nodes(RUNNING.rate) as nodes:
        names = [f"running-{number}" for number in range(RUNNING.streams)]
        async with started_head(data, nodes.addresses) as head:
            have = await _begin(head.address, names)
        async with started_head(data, nodes.addresses) as head:
            async with grpc.aio.insecure_channel(head.address) as channel:
                fleet: FleetServiceAsyncStub = FleetServiceStub(channel)
                reads = (_first_new(fleet, name, have[name]) for name in names)
                came_s = [at - head.started_s for at in await asyncio.gather(*reads)]
            return WentOn(len(names), head.serving_s, median(came_s), max(came_s))


async def _begin(address: str, names: Sequence[str]) -> dict[str, int]:
    """Begin generations and read a while; how many tokens of each have come."""
    have = dict.fromkeys(names, 0)
    enough = asyncio.Event()

    async def read(fleet: FleetServiceAsyncStub, salt: int, name: str) -> None:
        request = request_of(RUNNING, salt, name)
        request.spec.disconnect_grace_ms = _GRACE_MS
        async for response in fleet.Complete(request):
            have[name] += len(response.event.tokens.token_ids)
            if min(have.values()) >= _TOKENS_BEFORE:
                enough.set()

    async with grpc.aio.insecure_channel(address) as channel:
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)
        readers = [asyncio.create_task(read(fleet, salt, name)) for salt, name in enumerate(names)]
        waiting = asyncio.create_task(enough.wait())
        await asyncio.wait({waiting, *readers}, return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, *readers):
            task.cancel()
        await asyncio.gather(waiting, *readers, return_exceptions=True)
    if not enough.is_set():
        raise RuntimeError("generations ended before the head was killed")
    return have


async def _first_new(fleet: FleetServiceAsyncStub, name: str, have: int) -> float:
    """When the first token came that was not there before."""
    call = fleet.AttachGeneration(pb.AttachGenerationRequest(generation_id=name, from_index=have))
    try:
        async for response in call:
            if response.event.tokens.token_ids:
                return time.monotonic()
    finally:
        call.cancel()
    raise RuntimeError(f"generation {name} ended without another token")
