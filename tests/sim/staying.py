"""Whether a session stays on the node that gave its last answer, so that the next needs no prefill of all."""

from __future__ import annotations

from dataclasses import dataclass

Disturbances = tuple[int, int, int]
"""How often anything befell the node, the wires, the head."""

STAYS_S = 5.0
"""For so long after its use a session stays on its node, whatever the settings."""


@dataclass(frozen=True, slots=True)
class _Answer:
    node: str
    epoch: int
    at_s: float
    befallen: Disturbances


class Staying:
    """What is known of one head's sessions."""

    def __init__(self) -> None:
        self._last: dict[str, _Answer] = {}

    def answered(self, session_id: str, node: str, epoch: int, now_s: float, befallen: Disturbances) -> None:
        """An attempt there has ended, and it did not fail."""
        self._last[session_id] = _Answer(node, epoch, now_s, befallen)

    def parked(self, session_id: str) -> None:
        """Its caller has it leave its node."""
        self._last.pop(session_id, None)

    def has_left(
        self, session_id: str, node: str, epoch: int, now_s: float, befallen: Disturbances | None
    ) -> bool:
        """It is bound to the same node anew, and had no cause to leave. `befallen` None: there may be one."""
        last = self._last.pop(session_id, None)
        if last is None or last.node != node or last.befallen != befallen:
            return False
        return now_s - last.at_s < STAYS_S and epoch != last.epoch
