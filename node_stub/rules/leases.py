"""Leases: how long a node may serve what one head's term assigned to it without hearing from that head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """One term of one head of one fleet: what a lease covers."""

    fleet_id: str
    head_id: str
    term: int


class Leases:
    """The running leases. One that ran out is gone: it cannot be renewed, only started anew."""

    def __init__(self) -> None:
        self._ends_ms: dict[Owner, int] = {}
        self._first_expiry_ms: int | None = None

    def __len__(self) -> int:
        return len(self._ends_ms)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._ends_ms

    @property
    def fleet_id(self) -> str:
        """The fleet whose lease runs, the first of several; empty = none does."""
        return next((owner.fleet_id for owner in self._ends_ms), "")

    @property
    def first_expiry_ms(self) -> int | None:
        """When the next lease runs out; None when there is none."""
        return self._first_expiry_ms

    def start(self, owner: Owner, duration_ms: int, now_ms: int) -> None:
        """Start the owner's lease, or let it run from now again."""
        self._ends_ms[owner] = now_ms + duration_ms
        self._find_first()

    def take_expired(self, now_ms: int) -> list[Owner]:
        """Forget and return the owners whose lease has run out."""
        if self._first_expiry_ms is None or now_ms < self._first_expiry_ms:
            return []
        expired = [owner for owner, end_ms in self._ends_ms.items() if end_ms <= now_ms]
        for owner in expired:
            del self._ends_ms[owner]
        self._find_first()
        return expired

    def _find_first(self) -> None:
        self._first_expiry_ms = min(self._ends_ms.values(), default=None)
