"""What outlives one run of the head."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_service.runtime.journal import Journal, NoJournal
from fleet_service.runtime.records import Saved


@dataclass(frozen=True, slots=True)
class Kept:
    """What earlier runs left, and where this one writes down what it does. By default nothing is kept.

    `saved` becomes the head's own, which changes it.
    """

    journal: Journal = field(default_factory=NoJournal)
    saved: Saved = field(default_factory=Saved)
