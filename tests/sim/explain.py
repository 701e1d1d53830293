"""What may be wrong with a fleet, and which failures and errors of generations that explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.sim.nodes import RunFault

# Failures after which a further attempt costs nothing (rule 7).
FREE_FAILURES = frozenset(
    {"busy", "fenced", "rebalanced", "evicted", "removed", "context_too_long", "no_answer"}
)
MAX_ATTEMPTS = 3
MAX_KILLS_AT_ONE_INDEX = 2
MAX_SAME_FAILURES = 5
MAX_PLACED_AT_ONCE = 200
# Failures of an attempt that only trouble with its node, or with the wire, explains; and for how long.
EXPLAINED_BY_TROUBLE = {
    "link_lost": 12.0,
    "node_silent": 12.0,
    "stalled": 40.0,
    "command_timeout": 40.0,
    "unknown_session": 120.0,
    "stale_epoch": 60.0,
    "fenced": 60.0,
    "evicted": 12.0,
    "no_answer": 12.0,
}
# Of those, what a head that stood still may take for trouble. Silence and stalls it must not (rule 13).
EXPLAINED_BY_STANDSTILL = frozenset({"command_timeout", "link_lost", "fenced", "evicted", "no_answer"})
# What a node may say to a head that goes on where an earlier one was: other tokens, or no run any more.
EXPLAINED_BY_RESTART = frozenset({"context_mismatch", "stale_epoch", "fenced"})
# Those that only a fault of this very generation explains.
EXPLAINED_BY_STRIKE = {
    "index_gap": RunFault.SKIP_INDEX.value,
    "node_fault": RunFault.SKIP_INDEX.value,
    "protocol": RunFault.FUTURE_EPOCH.value,
}
# How long after a disturbance of a node its effects may last: silence, a redial, a command's timeout.
AFTERMATH_S = 12.0
TOGETHER_S = 2.0
"""Nodes that fall silent within this time fall silent together (rule 13)."""


@dataclass(slots=True)
class Trouble:
    """What befell one node: when last, how often, and how many disturbances last."""

    last_s: float = -1e9
    losses: list[float] = field(default_factory=list)
    count: int = 0
    lasting: int = 0

    def quiet(self, now_s: float, aftermath_s: float = AFTERMATH_S) -> bool:
        return self.lasting == 0 and now_s - self.last_s > aftermath_s


@dataclass(slots=True)
class Hearing:
    """When the head last heard of a node, and when before that. Virtual seconds."""

    last_s: float
    before_s: float

    def heard(self, now_s: float) -> None:
        if now_s > self.last_s:
            self.before_s, self.last_s = self.last_s, now_s

    def until(self, now_s: float) -> float:
        """When it was last heard of before this moment."""
        return self.last_s if self.last_s < now_s else self.before_s


def held_for_doubt(node: Hearing, linked: Sequence[Hearing], silence_s: float, now_s: float) -> str | None:
    """Why the silence of a node must not count yet (rule 13); None when it may."""
    last_s = node.until(now_s)
    quiet_s = now_s - last_s
    if quiet_s < silence_s - 0.001:
        return f"it was heard of {quiet_s:.3f} s ago"
    silent = [each for each in linked if now_s - each.until(now_s) > silence_s]
    together = sum(abs(each.until(now_s) - last_s) <= TOGETHER_S for each in silent)
    if together >= 2 and together * 3 > len(linked) and quiet_s < 3.0 * silence_s - 0.001:
        return f"{together} of {len(linked)} nodes fell silent together, {quiet_s:.1f} s ago"
    return None
