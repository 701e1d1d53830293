"""A failing seed is told as a short story, which can be run again exactly as it was told."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice

import pytest

from tests.sim import planted
from tests.sim.masks import ALL, Mask
from tests.sim.shrink import Shrinker, kind_of, kinds_of
from tests.sim.world import Outcome, run_seed

_BUGS: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    planted.old_indexes_are_not_dropped,
    planted.the_context_is_not_sent_again,
    planted.a_failed_attempt_keeps_its_reservation,
)
_SEEDS = 60


def _parts(outcome: Outcome) -> int:
    assert outcome.drawn.faults is not None
    assert outcome.drawn.callers is not None
    return len(outcome.drawn.faults) + len(outcome.drawn.callers)


def test_a_mask_is_the_same_after_it_was_written_and_read() -> None:
    for mask in (ALL, Mask(frozenset({3, 11}), frozenset(), None), Mask(None, None, frozenset({0}))):
        assert Mask.parse(str(mask)) == mask
    with pytest.raises(ValueError, match="is not one of"):
        Mask.parse("fault:1")


def test_a_violation_is_of_the_same_kind_whatever_its_names_and_times() -> None:
    first = "at 3.2500 s: gen-7a: 3 tokens at 5, 4 was next, on node-1 ['node-1']"
    second = "at 19.1 s: caller-3.1: 12 tokens at 0, 80 was next, on node-2 ['node-0', 'node-2']"
    assert kind_of(first) == kind_of(second)
    assert kind_of(first) != kind_of("at 3.2500 s: gen-7a: a second terminal event")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", _BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_s_failure_is_told_with_far_fewer_faults_and_callers(
    plant: Callable[[], AbstractContextManager[None]],
) -> None:
    with plant():
        failing = (outcome for seed in range(_SEEDS) if (outcome := run_seed(seed)).violations)
        # Some stories need much of what happens in them; not all of the first ones do.
        told = ((each, Shrinker(run_seed, time.monotonic, 40.0).shrink(each)) for each in islice(failing, 3))
        failed, short = next(pair for pair in told if _parts(pair[1]) <= _parts(pair[0]) // 2)
        assert kinds_of(short) == kinds_of(failed)
        assert f"FLEET_SIM_SEED={failed.seed} FLEET_SIM_ONLY={short.mask}" in short.report()
        again = run_seed(failed.seed, Mask.parse(str(short.mask)))
        assert again.violations == short.violations
        assert again.story.lines() == short.story.lines()
    assert not run_seed(failed.seed, short.mask).violations, "the short story fails without the bug as well"
