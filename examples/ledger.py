"""What each session of the demonstration received, token by token, against what it should have received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

UNDISTURBED = "undisturbed"
HEAD_DIED = "head_died"


@dataclass(slots=True)
class Entry:
    """One session's answer so far. Times are seconds of one monotonic clock."""

    expected: Sequence[int]
    received: list[int | None] = field(default_factory=list)
    node: str = ""
    moves: list[str] = field(default_factory=list)
    skipped: int = 0
    repeated: int = 0
    last_token_at_s: float | None = None
    longest_gap_s: float = 0.0
    finish: str = ""
    error: str = ""
    done: bool = False
    caught_on: str = ""
    outlived: bool = False
    """Its head died meanwhile, and it went on with the next one."""
    away_s: float = 0.0
    """The gap that this made."""
    cut: bool = False
    """Nothing has come since its head died."""

    def take(self, first_index: int, token_ids: Sequence[int], now_s: float) -> None:
        """Tokens arrived, the first of them said to be number `first_index`."""
        if self.last_token_at_s is not None:
            gap_s = now_s - self.last_token_at_s
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
            if self.cut:
                self.away_s = gap_s
        if self.cut:
            self.outlived, self.cut = True, False
        self.last_token_at_s = now_s
        for index, token in enumerate(token_ids, first_index):
            if index < len(self.received):
                self.repeated += 1
                continue
            missing = index - len(self.received)
            self.skipped += missing
            self.received += [None] * missing
            self.received.append(token)

    def cut_off(self) -> None:
        """Its head died."""
        self.cut = True

    @property
    def lost(self) -> int:
        """Tokens that should have come and did not."""
        return self.skipped + max(0, len(self.expected) - len(self.received))

    @property
    def exact(self) -> bool:
        """Every token once, in order, the right one, and the right ending."""
        return (
            self.received == list(self.expected)
            and self.repeated == 0
            and self.finish == "LENGTH"
            and not self.error
        )

    @property
    def streaming(self) -> bool:
        """In the middle of its answer."""
        return not self.done and bool(self.received)


@dataclass(frozen=True, slots=True)
class Totals:
    """A group of sessions summed up."""

    sessions: int
    exact: int
    lost: int
    repeated: int
    moved: int
    outlived: int
    tokens: int
    longest_gap_s: float
    longest_away_s: float


def total(entries: Sequence[Entry]) -> Totals:
    """Sum up."""
    return Totals(
        sessions=len(entries),
        exact=sum(entry.exact for entry in entries),
        lost=sum(entry.lost for entry in entries),
        repeated=sum(entry.repeated for entry in entries),
        moved=sum(bool(entry.moves) for entry in entries),
        outlived=sum(entry.outlived for entry in entries),
        tokens=sum(len(entry.received) - entry.skipped for entry in entries),
        longest_gap_s=max((entry.longest_gap_s for entry in entries), default=0.0),
        longest_away_s=max((entry.away_s for entry in entries), default=0.0),
    )


def by_fate(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Sessions grouped by what happened to them: nothing, their head's death, or their first move's cause."""
    groups: dict[str, list[Entry]] = {UNDISTURBED: []}
    for entry in entries:
        fate = HEAD_DIED if entry.outlived else entry.moves[0] if entry.moves else UNDISTURBED
        groups.setdefault(fate, []).append(entry)
    return groups
