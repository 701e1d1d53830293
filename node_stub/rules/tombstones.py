"""Tombstones: epochs of a revoked session that a late Assign must not bring back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Tombstone:
    epoch: int
    expires_ms: int


class Tombstones:
    """A bounded table. When it is full, the one buried longest ago makes room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._table: dict[str, _Tombstone] = {}

    def __len__(self) -> int:
        return len(self._table)

    def barred_epoch(self, session_id: str, now_ms: int) -> int:
        """Highest epoch that is barred for the session; 0 = none."""
        tombstone = self._table.get(session_id)
        return tombstone.epoch if tombstone and now_ms < tombstone.expires_ms else 0

    def bury(self, session_id: str, epoch: int, expires_ms: int, now_ms: int) -> None:
        """Bar `epoch` and older ones; a tombstone that stands is never lowered or shortened."""
        old = self._table.pop(session_id, None)
        if old and now_ms < old.expires_ms:
            epoch, expires_ms = max(epoch, old.epoch), max(expires_ms, old.expires_ms)
        if len(self._table) >= self._capacity:
            del self._table[next(iter(self._table))]
        self._table[session_id] = _Tombstone(epoch, expires_ms)

    def lift(self, session_id: str) -> None:
        """A higher Assign was accepted: its record bars what the tombstone did."""
        self._table.pop(session_id, None)

    def sweep(self, now_ms: int) -> None:
        """Drop what has run out."""
        for session_id in [s for s, stone in self._table.items() if stone.expires_ms <= now_ms]:
            del self._table[session_id]
