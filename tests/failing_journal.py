"""A journal of a head in the test's own process, whose store fails while the test wants it to."""

from __future__ import annotations

from fleet_service.runtime.journal import Durability, NoJournal
from fleet_service.runtime.store import StoreError, StoreTrouble

FULL = StoreError(StoreTrouble.FULL, "no space is left for /var/lib/fleet/head.db")


class FailingJournal(NoJournal):
    """Keeps all that it is given, but for the head's life only."""

    durability = Durability.STRICT
    keeps = True
    trouble: StoreError | None = None  # type: ignore[assignment] # it never has any there
