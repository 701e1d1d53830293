"""The observers that tell the checks of one head's life; a head that has died is heard no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fleet_service.domain.events import Finished, Moved
from fleet_service.domain.placement import Verdict
from fleet_service.runtime.observer import (
    AttemptTrace,
    GenerationInfo,
    GenerationTrace,
    NullGenerationTrace,
    NullObserver,
)
from tests.sim.records import Record
from tests.sim.story import Story


class Checks(Protocol):
    """What is told."""

    story: Story
    lives: int
    moves: int

    def generation_started(self, info: GenerationInfo, parent: object | None) -> Record: ...

    def check_pace(self, record: Record) -> None: ...

    def attempt_begins(self, record: Record, node: str, epoch: int) -> None: ...

    def attempt_over(
        self, record: Record, node: str, epoch: int, failure: str | None, index: int
    ) -> None: ...

    def answered(self, record: Record, node: str, epoch: int) -> None: ...

    def ended(self, record: Record, finished: Finished) -> None: ...


class HeadWatch(NullObserver):
    """The runtime's FleetObserver; `life` is the number of its head."""

    __slots__ = ("checks", "life")

    def __init__(self, checks: Checks, life: int) -> None:
        self.checks = checks
        self.life = life

    @property
    def lives(self) -> bool:
        return self.life == self.checks.lives

    def generation_started(self, info: GenerationInfo, parent: object | None) -> GenerationTrace:
        if not self.lives:
            return NullGenerationTrace()
        return _GenerationWatch(self, self.checks.generation_started(info, parent))


class _GenerationWatch(NullGenerationTrace):
    """The runtime's GenerationTrace."""

    __slots__ = ("head", "record")

    def __init__(self, head: HeadWatch, record: Record) -> None:
        self.head = head
        self.record = record

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        if self.head.lives:
            self.head.checks.check_pace(self.record)
            self.head.checks.story.note("%s placed on %s", self.record.generation_id, node)

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> AttemptTrace:
        if self.head.lives:
            self.head.checks.attempt_begins(self.record, node, epoch)
            self.head.checks.story.note(
                "%s: attempt %d on %s, epoch %d, from index %d", self.record.generation_id, number, node,
                epoch & 0xFFFFFFFF, next_index,
            )  # fmt: skip
        return _AttemptWatch(self, node, epoch, next_index)

    def moved(self, event: Moved) -> None:
        if self.head.lives:
            self.head.checks.moves += 1
            self.head.checks.story.note(
                "%s moved from %s to %s: %s", self.record.generation_id, event.from_node, event.to_node,
                event.cause.value,
            )  # fmt: skip

    def finished(self, event: Finished) -> None:
        if self.head.lives:
            self.head.checks.ended(self.record, event)


class _AttemptWatch:
    """The runtime's AttemptTrace."""

    def __init__(self, watch: _GenerationWatch, node: str, epoch: int, next_index: int) -> None:
        self._watch = watch
        self._node = node
        self._epoch = epoch
        self._next_index = next_index

    def carrier(self) -> Mapping[str, str]:
        return {}

    def ended(self, failure: str | None, tokens: int) -> None:
        head, record = self._watch.head, self._watch.record
        if not head.lives:
            return
        head.checks.story.note(
            "%s: attempt on %s ended (%s) with %d tokens", record.generation_id, self._node,
            failure or "no failure", tokens,
        )  # fmt: skip
        head.checks.attempt_over(record, self._node, self._epoch, failure, self._next_index + tokens)
        if failure is None and tokens:
            head.checks.answered(record, self._node, self._epoch)
