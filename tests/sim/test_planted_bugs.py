"""The simulation finds faults: each of the bugs planted in the head shows within 500 seeds, or 3,000."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.sim.planted import PLANTED
from tests.sim.world import Outcome, run_seed

_SEEDS = 500
_RARE = {
    # A node that cannot say what it holds, and a head that dies while it owes that node something.
    "the_next_head_takes_owed_revokes_for_delivered": 3_000
}


def _first_found(plant: Callable[[], AbstractContextManager[None]]) -> Outcome | None:
    for seed in range(_RARE.get(plant.__name__, _SEEDS)):
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
def test_a_planted_bug_is_found(plant: Callable[[], AbstractContextManager[None]]) -> None:
    found = _first_found(plant)
    assert found is not None
    assert not run_seed(found.seed).violations, "the seed fails without the bug as well"
