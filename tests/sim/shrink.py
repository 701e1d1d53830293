"""Makes a failure's story short: faults, callers and nodes are left out as long as it fails in the same way.

Delta debugging over the numbers of what was drawn: chunks are left out, then halves of chunks, down to single
ones. The result is exact: a seed and a mask are a world.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tests.sim.masks import Mask
from tests.sim.world import Outcome

Run = Callable[[int, Mask], Outcome]
_KIND_CHARACTERS = 60


def kind_of(violation: str) -> str:
    """What a violation says, without its time, names and numbers."""
    text = re.sub(r"^at [\d.]+ s: ", "", violation)
    text = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)", "()", text)
    text = re.sub(r"\S*\d\S*", "#", text)
    return text[:_KIND_CHARACTERS]


def kinds_of(outcome: Outcome) -> set[str]:
    return {kind_of(violation) for violation in outcome.violations[:1]}


class Shrinker:
    """Shrinks one failed outcome within `seconds` of `clock`."""

    def __init__(self, run: Run, clock: Callable[[], float], seconds: float) -> None:
        self._run = run
        self._clock = clock
        self._give_up_s = clock() + seconds
        self.runs = 0

    def shrink(self, failed: Outcome) -> Outcome:
        """The shortest found that fails in the same way; `failed` itself when nothing can be left out."""
        best, wanted = failed, kinds_of(failed)
        while True:
            before = best
            for part in ("callers", "faults", "nodes"):
                best = self._shrink_part(best, part, wanted)
            if best is before or self._out_of_time():
                return best

    def _shrink_part(self, best: Outcome, part: str, wanted: set[str]) -> Outcome:
        """Leave out what can be left out of one part of the world."""
        numbers = sorted(getattr(best.drawn, part))
        chunk = len(numbers)
        while chunk >= 1 and not self._out_of_time():
            start = 0
            while start < len(numbers) and not self._out_of_time():
                fewer = numbers[:start] + numbers[start + chunk :]
                outcome = self._try(best, part, fewer, wanted)
                if outcome is None:
                    start += chunk
                else:
                    best, numbers = outcome, fewer
            chunk //= 2
        return best

    def _try(self, best: Outcome, part: str, numbers: list[int], wanted: set[str]) -> Outcome | None:
        if part == "nodes" and not numbers:
            return None
        mask = replace(best.drawn, **{part: frozenset(numbers)})
        self.runs += 1
        outcome = self._run(best.seed, mask)
        return outcome if kinds_of(outcome) & wanted else None

    def _out_of_time(self) -> bool:
        return self._clock() >= self._give_up_s
