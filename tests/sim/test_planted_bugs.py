"""The simulation finds faults: each of the bugs planted in the head shows within 500 seeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.sim.planted import PLANTED
from tests.sim.world import Outcome, run_seed

_SEEDS = 500


def _first_found(plant: Callable[[], AbstractContextManager[None]]) -> Outcome | None:
    for seed in range(_SEEDS):
        with plant():
            outcome = run_seed(seed)
        if outcome.violations:
            return outcome
    return None


def test_many_bugs_of_the_fleet_of_generations_and_of_the_store_are_planted() -> None:
    names = {plant.__name__ for plant in PLANTED}
    assert len(names) == len(PLANTED) >= 60


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_within_500_seeds(plant: Callable[[], AbstractContextManager[None]]) -> None:
    found = _first_found(plant)
    assert found is not None
    assert not run_seed(found.seed).violations, "the seed fails without the bug as well"
