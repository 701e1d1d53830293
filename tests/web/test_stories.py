"""What is remembered of generations, and how little of it."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_service.domain.events import Finished, FinishReason, MoveCause, Moved, Timings
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.placement import Verdict
from fleet_service.domain.specs import Qos
from fleet_service.runtime.observer import GenerationInfo
from fleet_service.web.convert import story_json
from fleet_service.web.stories import EXPLAINED_AT_ONCE, EXPLAINED_PER_S, MAX_TURNS, Stories

FINISHED = Finished(FinishReason.LENGTH, 3, 10, 1, Timings(0.0, 0.1, 1.0, 0.02))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def info(generation_id: str, session_id: str = "s") -> GenerationInfo:
    return GenerationInfo(generation_id, session_id, "m", Qos.INTERACTIVE, 3, 10, 60.0, "alice")


def verdict(node: str) -> Verdict:
    return Verdict(node, True, "", 100, 0, 20, 200, None, 0, 0, 0, None, False, False)


def moved(index: int) -> Moved:
    return Moved("n1", "n2", MoveCause.LINK_LOST, index, 0.25, 7)


def no_verdicts() -> Sequence[Verdict]:
    return ()


def ids(stories: Stories, session_id: str = "s") -> list[str]:
    return [story.info.generation_id for story in stories.of_session(session_id)]


def test_a_story_tells_what_happened_in_its_order_and_when() -> None:
    clock = Clock()
    stories = Stories(10, clock)
    trace = stories.generation_started(info("g"), None)
    trace.placed("n1", lambda: [verdict("n2"), verdict("n1"), verdict("n3"), verdict("n4")])
    trace.waited(0.0)  # not worth a line
    trace.waited(0.5)
    attempt = trace.attempt_started("n1", 5, 1, 0)
    clock.now += 1.0
    trace.first_token()
    attempt.ended("link_lost", 4)
    trace.failed(FailureClass.LINK_LOST)
    trace.moved(moved(4))
    trace.finished(FINISHED)
    (story,) = stories.of_session("s")
    assert stories.of_generation("g") is story
    told = story_json(story)
    assert (told["owner"], told["accepted_ms"], told["left_out"]) == ("alice", 1_000_000, 0)
    kinds = [next(key for key in turn if key != "at_ms") for turn in told["turns"]]
    assert kinds == ["placed", "waited", "tried", "first_token", "left", "failed", "moved", "finished"]
    assert [turn["at_ms"] for turn in told["turns"]] == [1_000_000] * 3 + [1_001_000] * 5
    # The chosen one first, then the best others.
    assert [each["node"] for each in told["turns"][0]["placed"]["verdicts"]] == ["n1", "n2", "n3"]
    assert told["turns"][6]["moved"] == {
        "from_node": "n1",
        "to_node": "n2",
        "cause": "MOVE_CAUSE_LINK_LOST",
        "next_index": 4,
        "gap_ms": 250,
        "epoch": "7",
    }


def test_the_longest_ended_is_forgotten_first_and_what_runs_last() -> None:
    stories = Stories(3, Clock())
    traces = [stories.generation_started(info(f"g{number}"), None) for number in range(3)]
    traces[1].finished(FINISHED)
    traces[2].finished(FINISHED)
    stories.generation_started(info("g3"), None)
    assert ids(stories) == ["g0", "g2", "g3"]
    stories.generation_started(info("g4"), None)
    stories.generation_started(info("g5"), None)
    assert ids(stories) == ["g3", "g4", "g5"]
    traces[0].moved(moved(1))  # forgotten, though it runs on: nobody minds
    traces[0].finished(FINISHED)
    assert stories.remembered == 3
    assert stories.of_generation("g0") is None


def test_a_session_whose_generations_are_forgotten_is_forgotten() -> None:
    stories = Stories(1, Clock())
    stories.generation_started(info("a", "one"), None).finished(FINISHED)
    stories.generation_started(info("b", "two"), None)
    assert (ids(stories, "one"), ids(stories, "two")) == ([], ["b"])
    assert stories._by_session.keys() == {"two"}


def test_an_id_that_comes_again_begins_a_new_story() -> None:
    stories = Stories(5, Clock())
    stories.generation_started(info("a", "one"), None).finished(FINISHED)
    stories.generation_started(info("a", "two"), None)
    assert (ids(stories, "one"), ids(stories, "two"), stories.remembered) == ([], ["a"], 1)


def test_of_a_long_story_the_beginning_and_the_newest_turns_remain() -> None:
    stories = Stories(5, Clock())
    trace = stories.generation_started(info("g"), None)
    trace.placed("n1", no_verdicts)
    for index in range(1000):
        trace.moved(moved(index))
    told = story_json(stories.of_session("s")[0])
    assert len(told["turns"]) == MAX_TURNS
    assert told["left_out"] == 1001 - MAX_TURNS
    assert "placed" in told["turns"][0]
    assert told["turns"][-1]["moved"]["next_index"] == 999


def test_a_flood_of_choices_is_not_explained_one_by_one() -> None:
    clock = Clock()
    stories = Stories(1000, clock)
    looks: list[str] = []

    def explain() -> Sequence[Verdict]:
        looks.append("look")
        return [verdict("n1")]

    def place(times: int) -> int:
        before = len(looks)
        for _ in range(times):
            stories.generation_started(info("g"), None).placed("n1", explain)
        return len(looks) - before

    assert place(500) == EXPLAINED_AT_ONCE
    clock.now += 1.0
    assert place(500) == EXPLAINED_PER_S
    clock.now -= 3600.0  # somebody sets the clock back
    assert place(5) == 0
    clock.now += 2.0
    assert place(1) == 1
