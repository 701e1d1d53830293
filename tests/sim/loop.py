"""An asyncio event loop on virtual time that picks among ready callbacks by seed.

No sockets, threads or real waiting: when nothing is ready, time jumps to the next timer. The same seed and
the same program give the same order of everything; another seed gives another interleaving.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import io
import random
from asyncio import base_events, events
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_PURGE_TIMERS = 256
_READ_LATE_S = 0.02
_IS_NODE_SIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("is node side", default=False)


class SimulationError(Exception):
    """The program under simulation does not come to an end."""


class HangError(SimulationError):
    """Nothing is ready, no timer is set, and the program is not done. The text has every task's stack."""


class StepLimitError(SimulationError):
    """More callbacks ran than the bound allows: something spins."""


class TimeLimitError(SimulationError):
    """Virtual time passed the bound: something waits, with timers going on around it."""


class _NumberedTask(asyncio.Task[Any]):
    """Tasks have the same order in every set of theirs, wherever they are in memory."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimLoop(base_events.BaseEventLoop):
    """Virtual time in seconds from 0.

    `disorder` is the chance, in [0, 1], that the next callback is any of the ready ones, rather than the
    longest ready. `max_steps` bounds callbacks run, `max_time_s` virtual time.
    """

    def __init__(
        self, seed: int, *, disorder: float = 1.0, max_steps: int = 1_000_000, max_time_s: float = 100_000.0
    ) -> None:
        super().__init__()
        self._rng = random.Random(f"loop {seed}")
        self._now_s = 0.0
        self._disorder = disorder
        self._max_steps = max_steps
        self._max_time_s = max_time_s
        self.steps = 0
        self._tasks = 0
        self.unhandled: list[str] = []
        self.head_side = contextvars.Context()
        self.node_side = contextvars.Context()
        self.node_side.run(_IS_NODE_SIDE.set, True)
        self.head_stopped = False
        self._held: list[Any] = []  # the head's, while it is stopped
        # What the base class keeps; its handles have no public face.
        self._ready: list[Any] = []
        self._scheduled: list[Any]
        self._timer_cancelled_count: int
        self._stopping: bool
        self.set_exception_handler(_record_unhandled)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        self._tasks += 1
        _NumberedTask.number = self._tasks
        task = _NumberedTask(work, loop=loop, context=context)
        task.number = self._tasks
        return task

    def drive(self, main: Coroutine[Any, Any, T]) -> T:
        """Run to its end, cancel what is left, close the loop. Raises SimulationError besides main's own."""
        try:
            return self.run_until_complete(main)
        finally:
            self._end()

    def stand_still(self, duration_s: float) -> None:
        """Let `duration_s` pass in which nothing runs at all."""
        self._now_s += duration_s

    def stop_head(self, duration_s: float) -> None:
        """Nothing of the head's side runs for `duration_s`; then all that came due meanwhile does.

        What runs in the context `node_side`, and what that starts, goes on.
        """
        self.head_stopped = True
        self.call_later(duration_s, self._continue_head, context=self.node_side)

    def _continue_head(self) -> None:
        """Its timers are due at once; what came over the network may take another moment to be read."""
        self.head_stopped = False
        held, self._held = self._held, []
        if self._rng.random() < 0.5:
            self._ready += held
            return
        self._ready += [handle for handle in held if handle._context is not self.head_side]
        arrived = [handle for handle in held if handle._context is self.head_side]
        self.call_later(_READ_LATE_S, self._ready.extend, arrived, context=self.node_side)

    def stacks(self) -> str:
        """The stack of every task that is not done, for a report."""
        out = io.StringIO()
        for task in sorted(asyncio.all_tasks(self), key=lambda each: each.get_name()):
            task.print_stack(limit=6, file=out)
        return out.getvalue()

    def _end(self) -> None:
        """Cancel leftovers so that nothing is destroyed pending; their number was the caller's to check."""
        if self.head_stopped:
            self._continue_head()
        try:
            for _ in range(3):
                left = asyncio.all_tasks(self)
                if not left:
                    break
                for task in left:
                    task.cancel()
                self._max_steps = self.steps + 100_000
                self._max_time_s = self._now_s + 1_000.0
                self.run_until_complete(asyncio.wait(left, timeout=60.0))
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self._ready.clear()
            self._held.clear()
            self._scheduled.clear()
            self.close()

    def _run_once(self) -> None:
        ready = self._ready
        if not ready:
            self._jump()
        self._take_due()
        count = len(ready)
        if count > 1 and (self._disorder >= 1.0 or self._rng.random() < self._disorder):
            handle = ready.pop(int(self._rng.random() * count))
        else:
            handle = ready.pop(0)
        if handle._cancelled:
            return
        if self.head_stopped and not handle._context.get(_IS_NODE_SIDE):
            self._held.append(handle)
            return
        self.steps += 1
        if self.steps > self._max_steps:
            raise StepLimitError(f"{self.steps} steps at {self._now_s:.3f} s\n{self.stacks()}")
        handle._run()

    def _jump(self) -> None:
        """Set time to the next timer's."""
        if self._stopping:
            self._ready.append(events.Handle(_nothing, (), self))
            return
        timers = self._scheduled
        if len(timers) > _PURGE_TIMERS and self._timer_cancelled_count * 2 > len(timers):
            timers[:] = [timer for timer in timers if not timer._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if not timers:
            raise HangError(f"nothing to do at {self._now_s:.3f} s, and not done\n{self.stacks()}")
        self._now_s = max(self._now_s, timers[0].when())
        if self._now_s > self._max_time_s:
            raise TimeLimitError(f"not done after {self._max_time_s:.0f} s of virtual time\n{self.stacks()}")

    def _take_due(self) -> None:
        timers = self._scheduled
        while timers and timers[0]._when <= self._now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(timer)

    def _write_to_self(self) -> None:
        """No other thread ever wakes this loop."""

    def _process_events(self, event_list: list[Any]) -> None:
        raise NotImplementedError("a simulation does no I/O")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError("a simulation has no threads")


def _nothing() -> None:
    """Fill a step."""


def _record_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exceptions that nobody caught are findings; the world reads them from `unhandled`."""
    error = context.get("exception")
    text = f"{context.get('message')}: {error!r}"
    if isinstance(error, BaseException) and error.__traceback__ is not None:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        text += f" at {last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    assert isinstance(loop, SimLoop)
    loop.unhandled.append(text)
