"""What lately became of each generation, as the runtime tells it: the memory behind a session's story.

Bounded by a number of generations and of turns of each; nothing is kept per token. The ended go first, the
longest ended of them before the others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from fleet_service.domain.errors import Reason
from fleet_service.domain.events import Finished, Moved
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.runtime.observer import GenerationInfo

MAX_TURNS = 64
"""Kept of one generation; of a longer story the first placing and the newest turns remain."""

VERDICTS_KEPT = 3
EXPLAINED_PER_S = 20
EXPLAINED_AT_ONCE = 40
"""Choices that are explained: it costs a look at every node."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A node was chosen. `verdicts`: on it and the next best; empty when it was not asked for."""

    node: str
    verdicts: Sequence[Verdict]


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait for a lane is over."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt goes to a node; its first token will have that index."""

    node: str
    number: int
    next_index: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is there."""


@dataclass(frozen=True, slots=True)
class Left:
    """An attempt is over; `failure` None = it did not fail."""

    node: str
    number: int
    tokens: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A try failed, dispatched or still waiting."""

    kind: FailureClass


What = Chosen | Waited | Tried | FirstToken | Left | Failed | Moved | Finished


@dataclass(slots=True)
class Story:
    """One generation so far. Times are unix seconds."""

    info: GenerationInfo
    accepted_at: float
    first: tuple[float, What] | None = None
    turns: deque[tuple[float, What]] = field(default_factory=lambda: deque(maxlen=MAX_TURNS - 1))
    left_out: int = 0
    ended: bool = False

    def told(self) -> Iterator[tuple[float, What]]:
        """The turns kept, in order."""
        if self.first is not None:
            yield self.first
        yield from self.turns

    def begins_with(self, what: What) -> bool:
        return self.first is not None and self.first[1] is what

    def add(self, at: float, what: What) -> None:
        if self.first is None:
            self.first = (at, what)
            return
        self.left_out += len(self.turns) == self.turns.maxlen
        self.turns.append((at, what))


class Stories:
    """A FleetObserver that remembers. `clock` gives unix seconds; `kept`: generations at most."""

    def __init__(self, kept: int, clock: Callable[[], float]) -> None:
        self._kept = kept
        self._clock = clock
        self._running: OrderedDict[str, Story] = OrderedDict()
        self._ended: OrderedDict[str, Story] = OrderedDict()
        self._by_session: dict[str, dict[str, Story]] = {}
        self._may_explain: float = EXPLAINED_AT_ONCE
        self._counted_at = clock()

    # Asking

    @property
    def remembered(self) -> int:
        """Generations."""
        return len(self._running) + len(self._ended)

    def of_session(self, session_id: str) -> list[Story]:
        """Its generations, the oldest first."""
        return list(self._by_session.get(session_id, {}).values())

    def of_generation(self, generation_id: str) -> Story | None:
        return self._running.get(generation_id) or self._ended.get(generation_id)

    def lately(self, count: int) -> list[tuple[float, Story, Chosen | Moved | Finished]]:
        """The last of what WatchFleet tells of generations: first placings, moves and ends, in order."""
        newest = chain(
            islice(reversed(self._running.values()), count), islice(reversed(self._ended.values()), count)
        )
        turns = [
            (at, story, what)
            for story in newest
            for at, what in story.told()
            if isinstance(what, Moved | Finished) or (isinstance(what, Chosen) and story.begins_with(what))
        ]
        turns.sort(key=lambda turn: turn[0])
        return turns[-count:]

    # FleetObserver

    def generation_started(self, info: GenerationInfo, parent: object | None) -> _Teller:
        story = Story(info, self._clock())
        self._forget(info.generation_id)  # ids that callers choose come again
        self._running[info.generation_id] = story
        self._by_session.setdefault(info.session_id, {})[info.generation_id] = story
        while self.remembered > self._kept:
            self._forget(next(iter(self._ended or self._running)))
        return _Teller(self, story)

    def placement(self, refused: Reason | None) -> None:
        return

    def books_checked(self, wrong_nodes: int) -> None:
        return

    def committed(self, took_s: float) -> None:
        return

    # For tellers

    def tell(self, story: Story, what: What) -> None:
        story.add(self._clock(), what)

    def end(self, story: Story, event: Finished) -> None:
        self.tell(story, event)
        story.ended = True
        generation_id = story.info.generation_id
        if self._running.get(generation_id) is story:
            self._ended[generation_id] = self._running.pop(generation_id)

    def verdicts(self, node: str, explain: Callable[[], Sequence[Verdict]]) -> Sequence[Verdict]:
        """On `node` and the best others; none when there were too many just before."""
        now = self._clock()
        earned = max(0.0, now - self._counted_at) * EXPLAINED_PER_S
        self._counted_at = now
        self._may_explain = min(EXPLAINED_AT_ONCE, self._may_explain + earned)
        if self._may_explain < 1.0:
            return ()
        self._may_explain -= 1.0
        found = explain()
        chosen = [verdict for verdict in found if verdict.node == node]
        others = [verdict for verdict in found if verdict.node != node]
        return (*chosen, *others[: VERDICTS_KEPT - len(chosen)])

    def _forget(self, generation_id: str) -> None:
        story = self._running.pop(generation_id, None) or self._ended.pop(generation_id, None)
        if story is None:
            return
        of_session = self._by_session[story.info.session_id]
        del of_session[generation_id]
        if not of_session:
            del self._by_session[story.info.session_id]


class _Teller:
    """The GenerationTrace of one story."""

    __slots__ = ("_stories", "_story")

    def __init__(self, stories: Stories, story: Story) -> None:
        self._stories = stories
        self._story = story

    def placed(self, node: str, verdicts: Callable[[], Sequence[Verdict]]) -> None:
        self._stories.tell(self._story, Chosen(node, self._stories.verdicts(node, verdicts)))

    def waited(self, waited_s: float) -> None:
        if waited_s >= 0.001:
            self._stories.tell(self._story, Waited(waited_s))

    def attempt_started(self, node: str, epoch: int, number: int, next_index: int) -> _AttemptTeller:
        self._stories.tell(self._story, Tried(node, number, next_index))
        return _AttemptTeller(self._stories, self._story, node, number)

    def first_token(self) -> None:
        self._stories.tell(self._story, FirstToken())

    def failed(self, kind: FailureClass) -> None:
        self._stories.tell(self._story, Failed(kind))

    def moved(self, event: Moved) -> None:
        self._stories.tell(self._story, event)

    def finished(self, event: Finished) -> None:
        self._stories.end(self._story, event)


class _AttemptTeller:
    """The AttemptTrace of one try."""

    __slots__ = ("_node", "_number", "_stories", "_story")

    def __init__(self, stories: Stories, story: Story, node: str, number: int) -> None:
        self._stories = stories
        self._story = story
        self._node = node
        self._number = number

    def carrier(self) -> Mapping[str, str]:
        return {}

    def ended(self, failure: str | None, tokens: int) -> None:
        self._stories.tell(self._story, Left(self._node, self._number, tokens, failure))
