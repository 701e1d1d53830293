"""What callers may be told, and what of that a head that is killed may take with it.

Under STRICT nothing is told that is not kept. Under RELAXED the last of it may be lost, but nothing that was
told before it must have been written; and while nothing can be written, nothing more is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleet_service.domain.events import Event, Finished, Tokens
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.records import SavedGeneration
from tests.sim.records import Record
from tests.sim.stores import SimStore


class Telling:
    """Judges what is told by the heads that have a store, one after the other."""

    def __init__(
        self,
        store: SimStore,
        clock: Callable[[], float],
        violation: Callable[[str], None],
        met: Callable[[str], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._violation = violation
        self.met = met
        self.ahead = False  # whether the head that lives tells before it keeps
        self._deaths: list[tuple[float, float]] = []  # of heads, and until when all that was put is kept
        self._spell = 0
        self._shown: dict[str, int] = {}  # of each that runs, as its head saw that the store fails

    # While a head lives

    def shows(self, name: str, record: Record, event: Event) -> None:
        """A reader gets an event."""
        kept = self._store.kept(record.generation_id)
        if not self.ahead:
            self._check_kept(name, record, event, kept)
            return
        if self._store.failing and self._spell == self._store.spells:
            self._check_shown(name, record, event)
        if isinstance(event, Tokens):
            record.told.append((self._clock(), event.first_index + len(event.token_ids)))

    def nothing_can_be_kept(self, running: Iterable[Generation]) -> None:
        """The head has seen it."""
        self._spell = self._store.spells
        self._shown = {each.generation_id: each.log.visible for each in running}

    def _check_kept(self, name: str, record: Record, event: Event, kept: SavedGeneration | None) -> None:
        """Nothing is shown that may yet be lost."""
        whose = f"{name} of {record.generation_id}"
        if kept is None:
            self._violation(f"{whose}: {event}, and the generation is not kept yet")
        elif isinstance(event, Tokens):
            end = event.first_index + len(event.token_ids)
            if list(kept.token_ids[event.first_index : end]) != list(event.token_ids):
                self._violation(f"{whose}: tokens before {end} are shown, kept are {len(kept.token_ids)}")
        elif isinstance(event, Finished) and (kept.ended is None or kept.ended.finished != event):
            self._violation(f"{whose}: {event} is shown, kept is {kept.ended}")

    def _check_shown(self, name: str, record: Record, event: Event) -> None:
        """Nothing can be kept now, and so nothing more is told."""
        shown = self._shown.get(record.generation_id)
        if shown is None:
            return
        more = isinstance(event, Finished) or (
            isinstance(event, Tokens) and event.first_index + len(event.token_ids) > shown
        )
        if more:
            self._violation(
                f"{name} of {record.generation_id}: {event} is shown while nothing can be kept,"
                f" {shown} tokens were before that"
            )

    # When it dies

    def head_died(self, kept_s: float) -> None:
        """All that it put before `kept_s` is kept."""
        self._deaths.append((self._clock(), kept_s))

    def judge(self, record: Record, saved: SavedGeneration | None, kept_s: float, next_life: int) -> None:
        """What is kept of it when its head dies; that is marked which is lost."""
        name = record.generation_id
        if saved is None:
            record.lost = True
            if record.accepted_s < kept_s:
                self._violation(f"{name} was accepted at {record.accepted_s:.4f} s, and is lost")
            return
        if record.finished is not None and saved.ended is None and record.finished_s < kept_s:
            self._violation(f"{name} ended at {record.finished_s:.4f} s, which is lost")
        left = len(saved.token_ids)
        for told_s, index in record.told:
            if index > left and told_s < kept_s:
                self._violation(f"{name}: {index} tokens were told of at {told_s:.4f} s, {left} are kept")
        record.told = [(told_s, index) for told_s, index in record.told if index <= left]
        if self.ahead and saved.ended is None:
            record.losses.append((next_life, left))

    def is_kept(self, told_s: float) -> bool:
        """What was told then was not lost with the next head that died."""
        return all(told_s < kept_s for died_s, kept_s in self._deaths if told_s <= died_s)
