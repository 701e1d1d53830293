"""Where a generation's output ends: EOS ids, stop sequences and the token limit, judged by the head.

The head judges its own log, not a node's word, so the end is the same whichever nodes produced the tokens
and however they were batched: a stop sequence may begin on one node and be completed on the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleet_service.domain.events import FinishReason
from fleet_service.domain.value import value


@value
class OutputEnd:
    """Why the output ends. `stop_index` names the stop sequence that was completed, with STOP only."""

    reason: FinishReason
    stop_index: int | None = None


_LENGTH = OutputEnd(FinishReason.LENGTH)


class OutputRules:
    """Decides, token by token, whether a generation's output ends.

    The first token that ends it counts. When one token does several, EOS goes before STOP (of the sequences
    it completes, the one with the lowest index), and STOP before LENGTH. Tokens that no rule watches cost a
    set lookup each; a token that could complete a sequence costs that sequence's length besides.
    """

    __slots__ = ("_count", "_end", "_eos", "_keep", "_max_new_tokens", "_stops_by_last", "_tail", "_watched")

    def __init__(
        self, eos_token_ids: frozenset[int], stop: tuple[tuple[int, ...], ...], max_new_tokens: int
    ) -> None:
        """ValueError for an empty stop sequence or a negative limit."""
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens {max_new_tokens} is negative")
        self._stops_by_last: dict[int, list[tuple[int, list[int]]]] = {}
        for index, sequence in enumerate(stop):
            if not sequence:
                raise ValueError(f"stop sequence {index} is empty")
            self._stops_by_last.setdefault(sequence[-1], []).append((index, list(sequence)))
        self._eos = eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._watched = eos_token_ids.union(self._stops_by_last) if stop else eos_token_ids
        # As much of the earlier output as a stop sequence can reach back into from the next token.
        self._keep = max((len(sequence) for sequence in stop), default=1) - 1
        self._tail: list[int] = []
        self._count = 0
        self._end: OutputEnd | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's EOS ids, as far as they are known."""
        return self._eos

    @property
    def limit(self) -> int:
        """Most tokens of the output."""
        return self._max_new_tokens

    @property
    def knows_eos(self) -> bool:
        """The model's EOS ids are known, so that only such a token is EOS."""
        return bool(self._eos)

    @property
    def count(self) -> int:
        """Tokens delivered so far."""
        return self._count

    @property
    def remaining(self) -> int:
        """Tokens that may still be delivered; 0 once the output has ended."""
        return 0 if self._end else self._max_new_tokens - self._count

    def end_now(self) -> OutputEnd | None:
        """How the output has ended without a further token: as found before, or LENGTH at the limit."""
        if self._end is None and self._count >= self._max_new_tokens:
            self._end = _LENGTH
        return self._end

    def accept(self, token_ids: Sequence[int]) -> tuple[int, OutputEnd | None]:
        """Take the next tokens of the output, in order.

        Returns how many of them are delivered, the ending one included, and how the output ends there (None:
        it goes on). After the end nothing more is delivered and the same end is returned.
        """
        room = self._max_new_tokens - self._count
        if self._end is not None or not room:
            return 0, self.end_now()
        taken = len(token_ids)
        if taken > room:
            token_ids, taken = token_ids[:room], room
        if not self._watched.isdisjoint(token_ids):
            taken, self._end = self._first_match(list(token_ids))
        self._count += taken
        if self._keep:
            self._tail = [*self._tail, *token_ids[:taken]][-self._keep :]
        return taken, self.end_now() if taken == room else self._end

    def _first_match(self, new: list[int]) -> tuple[int, OutputEnd | None]:
        output = self._tail + new
        for end, token_id in enumerate(output[len(self._tail) :], start=len(self._tail) + 1):
            if token_id not in self._watched:
                continue
            if token_id in self._eos:
                return end - len(self._tail), OutputEnd(FinishReason.EOS)
            for index, sequence in self._stops_by_last[token_id]:
                if end >= len(sequence) and output[end - len(sequence) : end] == sequence:
                    return end - len(self._tail), OutputEnd(FinishReason.STOP, index)
        return len(new), None
