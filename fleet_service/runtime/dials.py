"""All dials of a head: they begin one by one, and come rarer where very many nodes cannot be reached."""

from __future__ import annotations

from fleet_service.runtime.fairness import Turnstile

SPACING_S = 0.002
"""Of two dials of nodes that are down, on average half of it: a dial that fails costs some 0.4 ms."""


class Dials:
    """What the keepers of all nodes share."""

    def __init__(self) -> None:
        self.turnstile = Turnstile()
        """For what many nodes may need at the same moment: a dial, or the care for a link that broke."""
        self.failing = 0
        """Nodes that are dialed again and again."""

    def longest_pause_s(self, usual_s: float) -> float:
        """Between two dials of one node; `usual_s` where there are few."""
        return max(usual_s, self.failing * SPACING_S)
