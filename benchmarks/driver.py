"""One process of the load driver.

It reads plans (`benchmarks.plan.Plan`) from its standard input, a line of JSON each, and says for each
`ready`, waits for the line `go TIME` (CLOCK_MONOTONIC, when to begin), and answers with what it saw
(`Outcome`).

It must not be what limits a load: it measures the CPU time it takes and by how much its own timers are late,
and both are shown with every result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
import time

from benchmarks.calls import Call, Way
from benchmarks.grpc_way import GrpcWay
from benchmarks.node_way import NodeWay
from benchmarks.plan import Outcome, Plan, count, due_s, plan_of, to_line
from benchmarks.sse_way import SseWay
from benchmarks.stamps import now_us
from fleet_service.app import loop_factory

_LAG_PERIOD_S = 0.005
_AGAIN_S = 0.05
"""Before the call that follows one that was lost, so that a server that refuses is not stormed."""
_SPREAD_S = 0.5
"""In which the first calls of all slots begin, one after another."""


class Run:
    """One plan, carried out. `begin_s` is when, in seconds of CLOCK_MONOTONIC."""

    def __init__(self, plan: Plan, way: Way, outcome: Outcome, begin_s: float) -> None:
        self._plan = plan
        self._way = way
        self._outcome = outcome
        self._begin_s = begin_s
        self._from_us = int((begin_s + plan.from_s) * 1e6)
        self._until_us = int((begin_s + plan.until_s) * 1e6)
        self._made = 0
        self._ended = 0
        self._calls: set[Call] = set()
        self._all_ended = asyncio.Event()
        self._over = False
        self._flush_due = False

    async def run(self) -> None:
        """Until the plan's end."""
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(self._arrive() if self._plan.arrivals_per_s else self._fill())
        lag = asyncio.ensure_future(self._watch_lag())
        cpu_at = loop.call_later(max(self._begin_s + self._plan.from_s - time.monotonic(), 0), self._note_cpu)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._all_ended.wait(), self._begin_s + self._plan.until_s - time.monotonic()
            )
        self._over = True
        self._note_cpu()
        cpu_at.cancel()
        for task in (work, lag):
            task.cancel()
        await asyncio.gather(work, lag, return_exceptions=True)
        if self._plan.once:
            self._count_unfinished()

    def _note_cpu(self) -> None:
        now_s = time.process_time()
        self._outcome.cpu_s = [now_s - self._outcome.cpu_s[0] if self._over else now_s]

    def _tally(self) -> bool:
        return not self._over and (self._plan.once or self._from_us <= now_us() < self._until_us)

    async def _fill(self) -> None:
        """Begin the first call of each slot, one after another."""
        for slot in range(self._plan.slots):
            await self._until(self._begin_s + slot * _SPREAD_S / self._plan.slots)
            self._begin(now_us())

    async def _arrive(self) -> None:
        """Begin calls at their times, whatever became of those before."""
        number = 0
        while True:
            due = self._begin_s + due_s(number, self._plan.arrivals_per_s)
            await self._until(due)
            self._begin(int(due * 1e6))
            number += 1

    @staticmethod
    async def _until(due_s: float) -> None:
        wait_s = due_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _begin(self, began_us: int) -> None:
        if self._over:
            return
        self._made += 1
        call = Call(self._plan.tokens, began_us, self._outcome, self._tally, self._then)
        self._calls.add(call)
        self._way.start(call, self._plan.salt + self._made)
        if not self._flush_due:
            # What begins in one turn leaves together.
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._way.flush()

    def _then(self, call: Call, good: bool, failure: str) -> None:  # noqa: FBT001 - called with both
        self._calls.discard(call)
        if self._over:
            return
        if self._plan.once:
            self._ended += 1
            self._note_gap(call, good=good)
            if self._ended == self._plan.slots:
                self._all_ended.set()
        elif not self._plan.arrivals_per_s:
            if good:
                asyncio.get_running_loop().call_soon(self._begin, now_us())
            else:
                asyncio.get_running_loop().call_later(_AGAIN_S, self._begin, now_us())

    def _note_gap(self, call: Call, *, good: bool) -> None:
        (self._outcome.gaps_ms if call.moved or not good else self._outcome.quiet_ms).append(
            call.gap_us / 1e3
        )

    def _count_unfinished(self) -> None:
        now = now_us()
        for call in self._calls:
            self._outcome.unfinished += 1
            call.gap_us = max(call.gap_us, now - call.last_us)
            self._note_gap(call, good=False)

    async def _watch_lag(self) -> None:
        due_s = self._begin_s
        while True:
            due_s += _LAG_PERIOD_S
            await self._until(due_s)
            late_us = int((time.monotonic() - due_s) * 1e6)
            if self._tally():
                count(self._outcome.lag_us, late_us)


def way_of(plan: Plan, outcome: Outcome) -> Way:
    if plan.shape == "sse":
        return SseWay(plan.address, plan.slots)
    if plan.shape == "link":
        return NodeWay(plan.address)
    return GrpcWay(plan.address, plan.connections, outcome, connected=plan.shape == "connect")


async def carry_out(plan: Plan, begin_s: float | None = None) -> Outcome:
    """Carry out one plan, beginning at once where no time is given."""
    outcome = Outcome(cpu_s=[time.process_time()])
    way = way_of(plan, outcome)
    await way.connect()
    if begin_s is None:
        begin_s = await _go()
    await Run(plan, way, outcome, begin_s).run()
    way.close()
    await asyncio.sleep(0)
    return outcome


async def _go() -> float:
    print("ready", flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    return float(line.split()[1])


async def _serve() -> None:
    # Garbage is collected between plans, not in the middle of one.
    gc.disable()
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            outcome = await carry_out(plan_of(line))
        except OSError as error:
            print("ready", flush=True)
            outcome = Outcome(lost=1, failure=f"no connection: {error}", cpu_s=[0.0])
            await asyncio.to_thread(sys.stdin.readline)
        print(to_line(outcome), flush=True)
        gc.collect()


def main() -> None:
    """Carry out plans until the input ends."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner, contextlib.suppress(EOFError):
        runner.run(_serve())


if __name__ == "__main__":
    main()
