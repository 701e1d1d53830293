"""When the interpreter looks for reference cycles, so that a head of very many sessions never stands still.

Left to itself it goes through everything there is, now and then, and nothing else runs meanwhile: 200 ms with
100,000 sessions. Nearly all of that stays, and what goes is freed without it, since what the head itself
makes leaves no cycles behind. So it looks often, through what is new, and sets aside what it has looked
through. What was set aside and is a cycle's by now is found when the head has nothing to do, once there is
twice as much of everything as when all was looked through, and at most once an hour.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

LOOK_S = 0.25
"""Between two looks; a head that makes 1,000 sessions a second makes some 2,000 objects in it."""

SET_ASIDE_ABOVE = 2_000
"""Objects that are new and stay; fewer are looked through again, which takes half a millisecond."""

ALL_AGAIN_S = 3_600.0
"""At least so long between two looks through all."""

# Of those that come of themselves: objects made since the last look at the newest, and such looks for one at
# those a little older. The one at all that is left to `Garbage`.
_NEWEST, _OLDER, _NEVER = 700, 4, 1_000_000_000

_log = structlog.get_logger(__name__)


class Garbage:
    """`idle` says whether nobody waits for anything now.

    `blocks_in_use` gives the pieces of memory that the interpreter has handed out.
    """

    def __init__(
        self,
        idle: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        blocks_in_use: Callable[[], int] = sys.getallocatedblocks,
    ) -> None:
        self._idle = idle
        self._clock = clock
        self._blocks_in_use = blocks_in_use
        self._all_at_blocks = 2 * blocks_in_use()
        self._all_at_s = clock() + ALL_AGAIN_S

    def look(self) -> None:
        """Look through what is new, if there is enough of it."""
        if self._clock() >= self._all_at_s and self._idle() and self._blocks_in_use() > self._all_at_blocks:
            self._look_through_all()
        elif gc.get_count()[2]:
            gc.collect()
            if len(gc.get_objects(2)) > SET_ASIDE_ABOVE:
                gc.freeze()

    def _look_through_all(self) -> None:
        gc.unfreeze()
        found = gc.collect()
        gc.freeze()
        self._all_at_blocks = 2 * self._blocks_in_use()
        self._all_at_s = self._clock() + ALL_AGAIN_S
        _log.info("looked_for_garbage", found=found)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


@contextmanager
def looked_for_in_pieces(idle: Callable[[], bool]) -> Iterator[Garbage]:
    """Within the block, cycles are looked for by what is given; what there is by now stays."""
    before = gc.get_threshold()
    gc.set_threshold(_NEWEST, _OLDER, _NEVER)
    gc.freeze()
    try:
        yield Garbage(idle)
    finally:
        gc.set_threshold(*before)
