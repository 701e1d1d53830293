"""What one reader of a generation got over all its attachments, checked as it comes (rules 1 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet_service.domain.errors import FleetError
from fleet_service.domain.events import Accepted, Event, Finished, Moved, Started, Tokens
from tests.sim.records import Record
from tests.sim.telling import Telling


class Transcript:
    """One reader. `branch`: that of the newest event it has.

    `telling` knows what may be told, and what of it may be lost; None = all ends with its head.
    """

    def __init__(
        self,
        record: Record,
        name: str,
        from_index: int,
        violation: Callable[[str], None],
        telling: Telling | None = None,
        branch: int = 0,
    ) -> None:
        self.record = record
        self.next_index = from_index
        self.token_ids: list[int] = []
        self.finished: Finished | None = None
        self.branch = branch
        self._life = record.life  # of the head that gave the newest of what it has
        self.name = name
        self._violation = violation
        self._telling = telling
        self._seen = 0
        self._started = False
        self._epoch = 0

    @property
    def _name(self) -> str:
        return f"{self.name} of {self.record.generation_id}"

    def attaches(self, branch: int) -> None:
        """It is attached, at its next index, to a log of that branch."""
        sure = self.record.sure_index(self._life)
        if sure is not None and self.next_index > sure:
            self._violation(f"{self._name} goes on at {self.next_index}, and only {sure} tokens are sure")
        if branch < self.branch:
            self._violation(f"{self._name} is of branch {branch} after {self.branch}")
        self.branch, self._life = branch, self.record.life
        self._seen, self._started, self._epoch = 0, False, 0

    def loses(self, refusal: FleetError) -> None:
        """It is told that what it has is not sure: it drops that."""
        sure, next_index = self.record.sure_index(self._life), int(refusal.metadata["nextIndex"])
        if sure is None or self.next_index <= sure:
            self._violation(f"{self._name} has {self.next_index} tokens, all sure, and is told: {refusal}")
        if next_index != sure or next_index > self.next_index:
            self._violation(f"{self._name} has {self.next_index} tokens, of which {sure} are sure: {refusal}")
        if self._telling is not None:
            self._telling.met("a reader is told what it has lost")
        first = self.next_index - len(self.token_ids)
        del self.token_ids[max(0, next_index - first) :]
        self.next_index = next_index

    def is_left(self, refusal: FleetError) -> None:
        """Its head ends, and the next goes on."""
        if int(refusal.metadata["nextIndex"]) != self.next_index:
            self._violation(f"{self._name} has {self.next_index} tokens, and is told: {refusal}")

    def follows(self, record: Record) -> None:
        """The generation was lost, and asked for again: under its id there is another one."""
        if self._telling is not None and self.next_index:
            self._telling.met("a reader reads on after its generation was lost")
        self.record = record

    def feed(self, events: Sequence[Event]) -> None:
        if not events:
            self._violation(f"{self._name}: a read gave nothing")
        for event in events:
            self._one(event)
            self._seen += 1

    def _one(self, event: Event) -> None:
        if self.finished is not None:
            self._violation(f"{self._name}: {event} after the terminal event")
        if (self._seen == 0) != isinstance(event, Accepted):
            self._violation(f"{self._name}: event {self._seen} is {event}")
        if self._telling is not None:
            self._telling.shows(self.name, self.record, event)
        match event:
            case Accepted(generation_id):
                if generation_id != self.record.generation_id:
                    self._violation(f"{self._name}: accepted as {generation_id}")
            case Started(epoch=epoch):
                if self._started:
                    self._violation(f"{self._name}: started twice")
                self._started, self._epoch = True, epoch
            case Tokens():
                self._tokens(event)
            case Moved():
                self._moved(event)
            case Finished():
                self._finish(event)

    def _tokens(self, event: Tokens) -> None:
        tokens = list(event.token_ids)
        if event.first_index != self.next_index or not tokens:
            self._violation(
                f"{self._name}: {len(tokens)} tokens at {event.first_index}, {self.next_index} was next"
            )
        self.next_index += len(tokens)
        self.token_ids += tokens
        expected = self.record.expected
        if expected is None:
            self._violation(f"{self._name}: tokens, and no node was asked for any")
        elif tuple(tokens) != expected.token_ids[event.first_index : event.first_index + len(tokens)]:
            right = list(expected.token_ids[event.first_index : event.first_index + len(tokens)])
            self._violation(f"{self._name}: at {event.first_index} came {tokens}, right is {right}")

    def _moved(self, event: Moved) -> None:
        if event.next_index != self.next_index:
            self._violation(f"{self._name}: {event}, and {self.next_index} is next")
        if event.epoch <= self._epoch:
            self._violation(f"{self._name}: {event} goes back from epoch {self._epoch}")
        if event.gap_s < 0:
            self._violation(f"{self._name}: {event} has a negative gap")
        self._epoch = event.epoch

    def _finish(self, event: Finished) -> None:
        self.finished = event
        self.record.end_lost = False
        if event != self.record.finished:
            self._violation(f"{self._name}: {event}, decided was {self.record.finished}")
        if event.output_tokens != self.next_index:
            self._violation(f"{self._name}: {self.next_index} tokens at the end of {event.output_tokens}")
        expected = self.record.expected
        right = () if expected is None else expected.token_ids[: self.next_index]
        if self.token_ids and tuple(self.token_ids) != right[-len(self.token_ids) :]:
            self._violation(f"{self._name}: it has {self.token_ids} at the end, right is {list(right)}")
