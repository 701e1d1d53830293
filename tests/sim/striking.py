"""A fault to come, and those of worlds with a store: heads that are killed, a store that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet_service.runtime.records import (
    AttemptStarted,
    CancelHeld,
    ContextExtended,
    GenerationEnded,
    GenerationStarted,
    Record,
    RequestAnswered,
    SessionBound,
    SessionGone,
    SessionKept,
    TokensDelivered,
)
from fleet_service.runtime.store import StoreTrouble
from tests.sim.nodes import SimMachine
from tests.sim.stores import SLOWEST_S, Op
from tests.sim.strikes import Strikes

HORIZON_S = 25.0
OF_STORE = 100
"""Their numbers begin here."""
OF_END = 150
"""That of a head which ends in order, in some worlds."""
OF_RELAXED = 200
"""That of the one which befalls heads that tell ahead."""
# Of a hundred, how many are of which kind.
_KINDS = {"write": 38, "any time": 20, "again": 10, "recovery": 10, "trouble": 12, "order": 10}
_WITHOUT_END = 0.6
# What is in the write that heads are killed in.
_AIMS: tuple[type[Record] | None, ...] = (
    None,
    None,
    SessionKept,
    SessionGone,
    SessionGone,
    SessionBound,
    ContextExtended,
    GenerationStarted,
    AttemptStarted,
    GenerationEnded,
    GenerationEnded,
    RequestAnswered,
    CancelHeld,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come. `strike` returns whether it could (a dead node cannot be stopped)."""

    number: int
    at_s: float
    text: str
    strike: Callable[[], bool]


def draw_of_store(
    number: int, rng: random.Random, strikes: Strikes, machines: Sequence[SimMachine | None]
) -> Fault | None:
    """`machines` has None where one is left out."""
    at_s = rng.uniform(0.5, HORIZON_S)
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    down_s = rng.choice([0.0, rng.uniform(0.05, 1.0), rng.uniform(0.05, 3.0), rng.uniform(3.0, 12.0)])
    if kind == "order":
        machine = rng.choice(machines)
        return None if machine is None else _order(number, at_s, rng, strikes, machine)
    text, strike = _of(kind, rng, strikes, down_s)
    return Fault(number, at_s, text, strike)


def draw_of_relaxed(rng: random.Random, strikes: Strikes) -> Fault:
    """Much is lost, and the head after the next must know it: the next is killed before it writes."""
    at_s, takes_s = rng.uniform(2.0, HORIZON_S), rng.uniform(0.3, SLOWEST_S)
    down_s, again_s = rng.choice([0.0, 0.5 * rng.random()]), rng.choice([0.0, 0.5 * rng.random()])
    record = rng.choice([TokensDelivered, GenerationStarted, GenerationStarted])
    what = f"a write of {record.__name__} that takes {takes_s:.2f} s"
    text = f"the head is to be killed in {what}, the next one when it has its term"
    return Fault(OF_RELAXED, at_s, text, lambda: strikes.crash_twice(record, takes_s, down_s, again_s))


def draw_of_end(rng: random.Random, strikes: Strikes) -> Fault | None:
    """A head that ends in order loses nothing."""
    if rng.random() < _WITHOUT_END:
        return None
    at_s, grace_s = rng.uniform(1.0, HORIZON_S), rng.choice([0.0, rng.random()])
    down_s = rng.choice([0.0, rng.uniform(0.05, 3.0)])
    text = f"the head ends in order within {grace_s:.2f} s, another starts in {down_s:.2f} s"
    return Fault(OF_END, at_s, text, lambda: strikes.end_head(grace_s, down_s))


def _order(number: int, at_s: float, rng: random.Random, strikes: Strikes, machine: SimMachine) -> Fault:
    """What operators order of a node is ended while it is away, by another head than took the order."""
    ended_s, away_s, down_s = rng.uniform(0.6, 4.0), rng.uniform(3.0, 9.0), rng.uniform(0.0, 0.5)

    def strike() -> bool:
        if not strikes.cordon(machine, ended_s):
            return False
        machine.die(away_s)
        strikes.later(0.3, lambda: _unused(strikes.crash_head(down_s)))
        return True

    name = machine.profile.name
    text = (
        f"{name} is cordoned for {ended_s:.2f} s, dies for {away_s:.2f} s, then the head for {down_s:.2f} s"
    )
    return Fault(number, at_s, text, strike)


def _unused(_: object) -> None:
    """Drop a result."""


def _of(kind: str, rng: random.Random, strikes: Strikes, down_s: float) -> tuple[str, Callable[[], bool]]:
    match kind:
        case "write":
            left, where = rng.choice([1, 1, rng.randint(2, 40)]), rng.choice([rng.random(), 1.0])
            record = None if left > 1 else rng.choice(_AIMS)
            what = f"{left}. write" if record is None else f"next write of {record.__name__}"
            text = f"the head is to be killed in its {what}, at {where:.2f} of it"
            return text, lambda: strikes.crash_in(Op.WRITE, left, where, down_s, record)
        case "any time":
            text = f"the head is killed, another starts in {down_s:.2f} s"
            return text, lambda: strikes.crash_head(down_s)
        case "again":
            after_s, again_s = rng.choice([rng.uniform(0.0, 0.06), rng.uniform(0.0, 1.0)]), rng.random()
            text = f"the head is killed, and the next one, in {down_s:.2f} s, after {after_s:.3f} s"
            return text, lambda: strikes.crash_again(down_s, after_s, again_s)
        case "recovery":
            op, where = rng.choice([Op.OPEN, Op.TERM, Op.CONTEXT, Op.ANSWER]), rng.choice([rng.random(), 1.0])
            text = f"a head is to be killed as it {op.value}, at {where:.2f} of it"
            return text, lambda: strikes.crash_in(op, 1, where, down_s)
        case _:
            trouble = rng.choice([StoreTrouble.FULL, StoreTrouble.UNAVAILABLE])
            fails_s = rng.choice([rng.uniform(0.02, 1.0), rng.uniform(0.5, 6.0)])
            text = f"the store is {trouble.value} for {fails_s:.2f} s"
            if rng.random() < 0.5:
                return text, lambda: strikes.store_fails(trouble, fails_s)
            # From before the next head opens it, or while that takes up what it has read.
            after_s = rng.choice([0.0, down_s + rng.uniform(0.0, 0.06)])
            text += f", {after_s:.2f} s after the head is killed, another starts in {down_s:.2f} s"
            return text, lambda: strikes.crash_into_trouble(down_s, after_s, trouble, fails_s)
