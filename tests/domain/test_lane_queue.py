from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.lane_queue import LaneQueue, QueueFullError, Ticket
from fleet_service.domain.specs import Qos


def test_interactive_work_goes_first_and_equals_go_by_arrival() -> None:
    queue: LaneQueue[str] = LaneQueue(8)
    for item, qos in [
        ("late night", Qos.BACKGROUND),
        ("agent", Qos.AGENT),
        ("first", Qos.INTERACTIVE),
        ("second", Qos.INTERACTIVE),
    ]:
        queue.push(item, qos)
    assert list(queue) == ["first", "second", "agent", "late night"]
    assert [queue.pop() for _ in range(5)] == ["first", "second", "agent", "late night", None]


def test_a_full_queue_says_so_and_keeps_what_it_has() -> None:
    queue: LaneQueue[str] = LaneQueue(1)
    queue.push("a", 1)
    with pytest.raises(QueueFullError, match="1 wait") as raised:
        queue.push("b", 0)
    assert raised.value.limit == 1
    assert list(queue) == ["a"]
    queue.pop()
    queue.push("b", 0)
    assert list(queue) == ["b"]


def test_who_leaves_the_queue_moves_the_others_up() -> None:
    queue: LaneQueue[str] = LaneQueue(4)
    first, second, third = queue.push("a", 1), queue.push("b", 1), queue.push("c", 1)
    assert [queue.ahead_of(ticket) for ticket in (first, second, third)] == [0, 1, 2]
    assert queue.remove(first)
    assert not queue.remove(first)
    assert [queue.ahead_of(ticket) for ticket in (second, third)] == [0, 1]
    assert queue.pop() == "b"
    assert not queue.remove(second)
    with pytest.raises(KeyError):
        queue.ahead_of(second)


def test_equal_items_are_told_apart_by_their_tickets() -> None:
    queue: LaneQueue[str] = LaneQueue(4)
    queue.push("same", 1)
    last = queue.push("same", 1)
    assert queue.remove(last)
    assert len(queue) == 1


def test_the_queue_may_change_while_it_is_walked() -> None:
    queue: LaneQueue[str] = LaneQueue(4)
    tickets = {item: queue.push(item, 1) for item in "abc"}
    seen = []
    for item in queue:
        queue.remove(tickets[item])
        seen.append(item)
    assert seen == ["a", "b", "c"]
    assert len(queue) == 0


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        LaneQueue[str](-1)


@given(st.lists(st.one_of(st.integers(1, 4), st.just("pop"), st.floats(0, 0.999)), max_size=60))
def test_the_queue_is_always_in_order_of_class_and_arrival(steps: list[int | str | float]) -> None:
    limit = 10
    queue: LaneQueue[int] = LaneQueue(limit)
    model: list[tuple[int, int, Ticket]] = []
    for arrival, step in enumerate(steps):
        if isinstance(step, int):
            if len(model) == limit:
                with pytest.raises(QueueFullError):
                    queue.push(arrival, step)
            else:
                model.append((step, arrival, queue.push(arrival, step)))
                model.sort()
        elif step == "pop":
            assert queue.pop() == (model.pop(0)[1] if model else None)
        elif isinstance(step, float) and model:
            assert queue.remove(model.pop(int(step * len(model)))[2])
        assert list(queue) == [item for _, item, _ in model]
        assert len(queue) == len(model)
        assert [queue.ahead_of(ticket) for *_, ticket in model] == list(range(len(model)))
