"""The processes of the load driver, as the suite uses them: kept for all runs, given one plan at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from benchmarks.plan import Outcome, Plan, outcome_of, shared_out, to_line, together
from benchmarks.processes import python

PROCESSES = 2
_SALT = 10_000
_LEAD_S = 0.05
_TIMEOUT_S = 120.0
_LINE_BYTES = 1 << 26


class Drivers:
    """`async with Drivers() as drivers`."""

    def __init__(self, number: int = PROCESSES) -> None:
        self._number = number
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        for _ in range(self._number):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    *python("driver"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES,
                    start_new_session=True,
                )
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def prepare(self, plan: Plan) -> Begun:
        """Share a plan out among the processes, and let them make their connections."""
        plans = parts_of(plan, self._number)
        used = self._processes[: len(plans)]
        for process, part in zip(used, plans, strict=True):
            await _say(process, to_line(part))
        for process in used:
            if await _hear(process) != "ready":
                raise RuntimeError("a process of the load driver is not ready")
        return Begun(used)


class Begun:
    """A plan that is ready to begin."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def go(self) -> float:
        """Begin; the time, in seconds of CLOCK_MONOTONIC, from which the plan's times count."""
        begin_s = time.monotonic() + _LEAD_S
        for process in self._processes:
            await _say(process, f"go {begin_s!r}")
        return begin_s

    async def outcome(self) -> Outcome:
        return together([outcome_of(await _hear(process)) for process in self._processes])


def parts_of(plan: Plan, number: int) -> list[Plan]:
    """One for each process, of at most so many; each has at least one call and one connection."""
    number = min(number, plan.slots, plan.connections)
    slots, connections = shared_out(plan.slots, number), shared_out(plan.connections, number)
    return [
        replace(
            plan,
            slots=slots[i],
            connections=connections[i],
            arrivals_per_s=plan.arrivals_per_s / number,
            salt=plan.salt + i * _SALT,
        )
        for i in range(number)
    ]


async def _say(process: asyncio.subprocess.Process, line: str) -> None:
    if process.stdin is None:
        raise RuntimeError("a process of the load driver has no input")
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()


async def _hear(process: asyncio.subprocess.Process) -> str:
    if process.stdout is None:
        raise RuntimeError("a process of the load driver has no output")
    async with asyncio.timeout(_TIMEOUT_S):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the load driver has ended")
    return line.decode().strip()
