"""Ids and seeds that the head makes, from a random source given to it."""

from __future__ import annotations

import random

GENERATION_PREFIX = "gen-"
"""Begins every generation id the head makes, and none a caller may choose."""

SESSION_PREFIX = "ses-"


class Ids:
    """Makes ids of 96 random bits and non-zero 63-bit seeds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def session(self) -> str:
        return f"{SESSION_PREFIX}{self._rng.getrandbits(96):024x}"

    def generation(self) -> str:
        return f"{GENERATION_PREFIX}{self._rng.getrandbits(96):024x}"

    def seed(self) -> int:
        return self._rng.getrandbits(62) + 1

    def is_own(self, generation_id: str) -> bool:
        """A generation id of the kind only the head makes."""
        return generation_id.startswith(GENERATION_PREFIX)
