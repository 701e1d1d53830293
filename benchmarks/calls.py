"""One call of a load, whichever way it is made; and what a way to make calls has to offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.plan import Outcome, count
from benchmarks.stamps import age_us, is_stamp


class Call:
    """Takes in what comes of one call, and checks it: every token once and in order."""

    __slots__ = (
        "_began_us",
        "_outcome",
        "_tally",
        "_then",
        "gap_us",
        "got",
        "last_us",
        "moved",
        "over",
        "wanted",
    )

    def __init__(
        self,
        wanted: int,
        began_us: int,
        outcome: Outcome,
        tally: Callable[[], bool],
        then: Callable[[Call, bool, str], None],
    ) -> None:
        self.wanted = wanted
        """Tokens asked for."""
        self.got = 0
        self._began_us = self.last_us = began_us
        self.gap_us = 0
        """The longest time between two of its tokens."""
        self.moved = False
        self.over = False
        self._outcome = outcome
        self._tally = tally
        self._then = then

    def take(self, first_index: int, token_ids: Sequence[int], now_us: int) -> None:
        """Tokens came. `first_index` -1 = the way tells none."""
        number = len(token_ids)
        if first_index not in (self.got, -1):
            self.finish(f"token {first_index} came after {self.got} of them", now_us)
            return
        if self.got and now_us - self.last_us > self.gap_us:
            self.gap_us = now_us - self.last_us
        self.last_us = now_us
        outcome = self._outcome
        if self._tally():
            outcome.tokens += number
            if not self.got:
                count(outcome.first_us, now_us - self._began_us)
            if is_stamp(token_ids[0]):
                for token_id in token_ids:
                    count(outcome.way_us, age_us(token_id, now_us))
        self.got += number

    def finish(self, failure: str, now_us: int) -> None:
        """It ended; `failure` empty = as it should."""
        if self.over:
            return
        self.over = True
        if not failure and self.got != self.wanted:
            failure = f"ended after {self.got} of {self.wanted} tokens"
        if self._tally():
            if failure:
                self._outcome.lost += 1
                self._outcome.failure = self._outcome.failure or failure
            else:
                self._outcome.requests += 1
                count(self._outcome.took_us, now_us - self._began_us)
        self._then(self, not failure, failure)


class Way(Protocol):
    """A way to make calls."""

    async def connect(self) -> None:
        """Make the connections. Raises OSError."""

    def start(self, call: Call, salt: int) -> None:
        """Begin a call; `salt` makes its prompt another's."""

    def flush(self) -> None:
        """What was started leaves now."""

    def close(self) -> None: ...
