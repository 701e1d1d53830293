"""What follows a failed attempt: how often it is tried again, where, and with which cause it ends."""

from __future__ import annotations

import pytest

from fleet_service.domain.commands import Refusal, RefusalCode
from fleet_service.domain.epochs import make_epoch
from fleet_service.domain.errors import Reason
from fleet_service.domain.failures import (
    FAILURE_RULES,
    AttemptBudget,
    Failure,
    FailureClass,
    GiveUp,
    TryAgain,
    Where,
    failure_of_refusal,
)


def _cause(step: TryAgain | GiveUp) -> Reason:
    assert isinstance(step, GiveUp)
    return step.cause.reason


def _again(step: TryAgain | GiveUp) -> TryAgain:
    assert isinstance(step, TryAgain)
    return step


def test_every_failure_class_and_refusal_has_its_rule() -> None:
    assert set(FAILURE_RULES) == set(FailureClass)
    for code in RefusalCode:
        assert failure_of_refusal(Refusal(code), "a", own_term=1).kind in FailureClass


def test_three_attempts_without_progress_end_it() -> None:
    budget = AttemptBudget()
    assert _again(budget.after(Failure(FailureClass.STALLED, "a"), 0)).prefer_not == {"a"}
    assert _again(budget.after(Failure(FailureClass.INDEX_GAP, "b"), 0)).prefer_not == {"a", "b"}
    step = budget.after(Failure(FailureClass.NODE_FAULT, "c"), 0)
    assert _cause(step) is Reason.ATTEMPTS_EXHAUSTED
    assert isinstance(step, GiveUp)
    assert step.cause.metadata["nextIndex"] == "0"


def test_an_attempt_that_added_a_token_resets_the_count() -> None:
    budget = AttemptBudget()
    for index in range(10):
        step = _again(budget.after(Failure(FailureClass.STALLED, "a"), index + 1))
        assert step.prefer_not == {"a"}
    budget.after(Failure(FailureClass.STALLED, "b"), 10)
    assert _cause(budget.after(Failure(FailureClass.STALLED, "c"), 10)) is Reason.ATTEMPTS_EXHAUSTED


@pytest.mark.parametrize(
    "kind",
    [
        FailureClass.BUSY,
        FailureClass.FENCED,
        FailureClass.EVICTED,
        FailureClass.REMOVED,
        FailureClass.DRAINED,
    ],
)
def test_busy_fenced_and_leaving_nodes_cost_no_attempt(kind: FailureClass) -> None:
    budget = AttemptBudget()
    for _ in range(20):
        assert isinstance(budget.after(Failure(kind, "a"), 0), TryAgain)


def test_two_losses_at_one_token_are_poison_and_progress_between_is_not() -> None:
    budget = AttemptBudget()
    _again(budget.after(Failure(FailureClass.LINK_LOST, "a"), 3))
    assert _cause(budget.after(Failure(FailureClass.NODE_SILENT, "b"), 3)) is Reason.POISON_REQUEST
    other = AttemptBudget()
    _again(other.after(Failure(FailureClass.LINK_LOST, "a"), 3))
    _again(other.after(Failure(FailureClass.LINK_LOST, "b"), 4))


def test_a_link_that_is_back_at_once_is_no_lost_node_but_is_trusted_once() -> None:
    budget = AttemptBudget()
    back = Failure(FailureClass.LINK_LOST, "a", same_run_is_back=True)
    assert _again(budget.after(back, 0)).where is Where.SAME_NODE
    second = _again(budget.after(back, 0))
    assert second.where is Where.ANYWHERE
    assert second.prefer_not == {"a"}
    assert _cause(budget.after(back, 0)) is Reason.ATTEMPTS_EXHAUSTED


def test_nodes_that_leave_in_order_are_blamed_on_no_request() -> None:
    budget = AttemptBudget()
    for name in "abcdefgh":
        _again(budget.after(Failure(FailureClass.LINK_LOST, name, node_left=True), 3))
    _again(budget.after(Failure(FailureClass.LINK_LOST, "i"), 3))
    assert _cause(budget.after(Failure(FailureClass.LINK_LOST, "j"), 3)) is Reason.POISON_REQUEST


def test_a_fleet_that_leaves_node_by_node_does_not_keep_a_request_for_ever() -> None:
    budget = AttemptBudget()
    left = Failure(FailureClass.LINK_LOST, "a", node_left=True)
    for _ in range(12):
        _again(budget.after(left, 3))
    assert _cause(budget.after(left, 3)) is Reason.ATTEMPTS_EXHAUSTED
    _again(AttemptBudget().after(left, 4))


def test_a_node_that_does_not_answer_before_a_replay_costs_nothing() -> None:
    budget = AttemptBudget()
    _again(budget.after(Failure(FailureClass.LINK_LOST, "a"), 3))
    for _ in range(20):
        assert _again(budget.after(Failure(FailureClass.NO_ANSWER, "b"), 3)).prefer_not == {"b"}


def test_a_lost_session_is_bound_again_there_once_then_elsewhere() -> None:
    budget = AttemptBudget()
    first = _again(budget.after(Failure(FailureClass.CONTEXT_MISMATCH, "a"), 0))
    assert first.where is Where.SAME_NODE
    second = _again(budget.after(Failure(FailureClass.UNKNOWN_SESSION, "a"), 0))
    assert second.where is Where.ANYWHERE
    assert second.prefer_not == {"a"}


def test_an_engine_error_gets_one_other_node() -> None:
    budget = AttemptBudget()
    step = _again(budget.after(Failure(FailureClass.ENGINE_ERROR, "a"), 0))
    assert step.never == {"a"}
    only = budget.only_option_failed()
    assert only is not None
    assert only.reason is Reason.ENGINE_ERROR
    assert _cause(budget.after(Failure(FailureClass.ENGINE_ERROR, "b"), 0)) is Reason.ENGINE_ERROR


def test_a_window_too_narrow_bars_the_node_for_good_and_asks_for_a_wider_one() -> None:
    budget = AttemptBudget()
    failure = Failure(FailureClass.CONTEXT_TOO_LONG, "a", window_tokens=64)
    assert _again(budget.after(failure, 0)).min_window_tokens == 64
    later = _again(budget.after(Failure(FailureClass.STALLED, "b"), 7))
    assert later.min_window_tokens == 64
    assert "a" in later.never


def test_a_constraint_the_engine_cannot_satisfy_ends_it_at_once() -> None:
    step = AttemptBudget().after(Failure(FailureClass.CONSTRAINT, "a"), 0)
    assert _cause(step) is Reason.CONSTRAINT_UNSATISFIABLE


def test_without_replay_nothing_delivered_is_continued() -> None:
    budget = AttemptBudget(replay_allowed=False)
    _again(budget.after(Failure(FailureClass.LINK_LOST, "a"), 0))
    step = budget.after(Failure(FailureClass.LINK_LOST, "b"), 5)
    assert _cause(step) is Reason.NODE_LOST
    assert isinstance(step, GiveUp)
    assert step.cause.metadata["nextIndex"] == "5"


def test_an_epoch_of_a_later_term_means_that_another_head_owns_the_session() -> None:
    newer = Refusal(RefusalCode.STALE_EPOCH, current_epoch=make_epoch(9, 1))
    same = Refusal(RefusalCode.STALE_EPOCH, current_epoch=make_epoch(8, 7))
    assert failure_of_refusal(newer, "a", own_term=8).kind is FailureClass.OWNER_CHANGED
    assert failure_of_refusal(same, "a", own_term=8).kind is FailureClass.STALE_EPOCH
    absurd = Refusal(RefusalCode.STALE_EPOCH, current_epoch=make_epoch(2**32 - 1, 1))
    assert failure_of_refusal(absurd, "a", own_term=8).kind is FailureClass.NODE_FAULT
    owner_changed = Failure(FailureClass.OWNER_CHANGED, "a")
    assert _cause(AttemptBudget().after(owner_changed, 2)) is Reason.OWNER_CHANGED
