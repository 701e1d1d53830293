"""What goes wrong in a world, and when: at least MIN_FAULTS faults per seed, drawn before it begins.

Each fault is drawn by a seed of its own, so that some can be left out and the others stay as they are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from tests.sim.clones import Clones
from tests.sim.network import Noise
from tests.sim.nodes import ArmedFault, RunFault, SimMachine
from tests.sim.oracle import Oracle
from tests.sim.stores import SimStore
from tests.sim.strikes import Strikes
from tests.sim.striking import (
    HORIZON_S,
    OF_END,
    OF_RELAXED,
    OF_STORE,
    Fault,
    draw_of_end,
    draw_of_relaxed,
    draw_of_store,
)

MIN_FAULTS = 5
# Of a hundred faults, how many are of which kind; those of the whole fleet come rarely, and cost much.
_KINDS = {
    "run": 20,
    "kill": 8,
    "freeze": 8,
    "stall": 8,
    "drop": 6,
    "blip": 16,
    "refuse": 3,
    "noise": 7,
    "append": 5,
    "lies": 3,
    "silent": 3,
    "cordon": 4,
    "remove": 4,
    "head": 5,
    "crash": 3,
    "outage": 3,
    "clone": 4,
}


class FaultPlan:
    """The faults of one world. `only`: the numbers of those that strike; None = all.

    `machines` has None where one is left out of the story, and what was to befall it with it.
    """

    def __init__(
        self,
        seed: str,
        strikes: Strikes,
        clones: Clones,
        machines: Sequence[SimMachine | None],
        oracle: Oracle,
        only: frozenset[int] | None = None,
        store: SimStore | None = None,
    ) -> None:
        self._strikes = strikes
        self._clones = clones
        self._machines = machines
        self._oracle = oracle
        self._all = only is None
        self.struck = 0
        count = random.Random(f"faults {seed}").randint(MIN_FAULTS + 4, MIN_FAULTS + 12)
        drawn = (
            self._draw(number, random.Random(f"fault {number} {seed}"))
            for number in range(count)
            if only is None or number in only
        )
        found = list(drawn)
        if store is not None:
            of_store = range(OF_STORE, OF_STORE + random.Random(f"store faults {seed}").randint(2, 5))
            found += [
                draw_of_store(number, random.Random(f"fault {number} {seed}"), strikes, machines)
                for number in of_store
                if only is None or number in only
            ]
        if store is not None and (only is None or OF_END in only):
            found.append(draw_of_end(random.Random(f"fault {OF_END} {seed}"), strikes))
        if strikes.relaxed and (only is None or OF_RELAXED in only):
            found.append(draw_of_relaxed(random.Random(f"fault {OF_RELAXED} {seed}"), strikes))
        there = [fault for fault in found if fault is not None]
        self.faults = sorted(there, key=lambda fault: fault.at_s)

    async def run(self) -> None:
        """Strike each at its time."""
        loop = asyncio.get_running_loop()
        for fault in self.faults:
            await asyncio.sleep(fault.at_s - loop.time())
            if fault.strike():
                self.struck += 1
                self._oracle.story.note("* FAULT %d: %s", fault.number, fault.text)
        if self._all:
            await self._strike_enough()

    async def _strike_enough(self) -> None:
        """Too many could not strike when their time came: links break instead."""
        machines = [machine for machine in self._machines if machine is not None]
        for number in range(MIN_FAULTS - self.struck):
            await asyncio.sleep(0.5)
            self._strikes.drop(machines[number % len(machines)])
            self.struck += 1
            self._oracle.story.note("* FAULT more: the link to node-%d breaks", number % len(machines))

    async def undo(self) -> None:
        """Make the fleet whole again."""
        await self._strikes.undo()
        await self._clones.undo()

    # Drawing

    def _draw(self, number: int, rng: random.Random) -> Fault | None:
        at_s = rng.uniform(0.5, HORIZON_S)
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        machine = rng.choice(self._machines)
        if kind in ("noise", "head", "crash", "outage"):
            text, strike = self._of_fleet(kind, rng)
        elif machine is not None:
            text, strike = self._of_machine(kind, machine, rng)
        else:
            return None
        return Fault(number, at_s, text, strike)

    def _of_machine(
        self, kind: str, machine: SimMachine, rng: random.Random
    ) -> tuple[str, Callable[[], bool]]:
        strikes, name = self._strikes, machine.profile.name
        short_or_long = rng.choice([rng.uniform(0.2, 3.0), rng.uniform(3.0, 12.0), rng.uniform(15.0, 40.0)])
        match kind:
            case "run":
                return self._arm(machine, rng)
            case "kill":
                silently, after_s = rng.random() < 0.25, rng.uniform(0.1, 10.0)
                text = f"{name} dies{' with its machine' if silently else ''}, back in {after_s:.2f} s"
                return text, lambda: machine.die(after_s, silently=silently)
            case "freeze":
                return f"{name} is stopped for {short_or_long:.2f} s", lambda: machine.freeze(short_or_long)
            case "stall":
                text = f"nothing gets to or from {name} for {short_or_long:.2f} s"
                return text, lambda: machine.stall(short_or_long)
            case "drop":
                return f"the link to {name} breaks", lambda: strikes.drop(machine)
            case "blip":
                return self._blip(machine, rng)
            case "refuse":
                return f"{name} refuses handshakes", lambda: strikes.refuse(machine, short_or_long)
            case "append":
                appends = rng.randint(1, 3)
                return f"{name} is to lose {appends} appends", lambda: machine.loses_appends(appends)
            case "lies":
                return f"{name} reports lies", lambda: strikes.lie(machine, rng)
            case "silent":
                return f"{name} sends no reports", lambda: strikes.silence(machine, short_or_long)
            case "clone":
                return self._clone(machine, rng)
            case "cordon":
                back_s = rng.uniform(0.5, 8.0)
                text = f"an operator cordons {name} for {back_s:.2f} s"
                return text, lambda: strikes.cordon(machine, back_s)
            case _:
                back_s = rng.uniform(0.5, 8.0)
                text = f"an operator removes {name}, to have it again in {back_s:.2f} s"
                return text, lambda: strikes.remove(machine, back_s)

    def _arm(self, machine: SimMachine, rng: random.Random) -> tuple[str, Callable[[], bool]]:
        fault = ArmedFault(
            rng.choice(list(RunFault)), rng.choice([0, 0, 1, rng.randint(0, 30)]), rng.uniform(0.3, 12.0)
        )
        text = f"{machine.profile.name}: on a run, after {fault.after_tokens} tokens: {fault.fault.value}"
        return text, lambda: machine.arm(fault)

    def _blip(self, machine: SimMachine, rng: random.Random) -> tuple[str, Callable[[], bool]]:
        if rng.random() < 0.6:
            fault = ArmedFault(
                RunFault.BLIP,
                rng.randint(0, 25),
                cut_s=rng.choice([0.0, rng.uniform(0.0, 0.4), rng.uniform(0.7, 3.0)]),
            )
            text = f"{machine.profile.name}: on a run, after {fault.after_tokens} tokens: {fault.fault.value}"
            return f"{text}, {fault.cut_s:.3f} s", lambda: machine.arm(fault)
        cut_s = rng.choice([rng.uniform(0.0, 0.2), rng.uniform(0.0, 0.4), rng.uniform(0.3, 9.0), 11.5])
        text = f"{machine.profile.name} is cut off for {cut_s:.3f} s"
        return text, lambda: machine.cut(cut_s)

    def _clone(self, machine: SimMachine, rng: random.Random) -> tuple[str, Callable[[], bool]]:
        how = rng.choice(["lives", "is stopped", "is stopped", "is dead", "answers a stopped head"])
        lives_s, away_s, stop_s = rng.uniform(3.0, 12.0), rng.uniform(2.0, 12.0), rng.uniform(1.2, 8.0)

        def strike() -> bool:
            if not self._strikes.may_be_cloned(machine):
                return False
            if how == "is stopped":
                machine.freeze(away_s)
            elif how == "is dead":
                machine.die(away_s)
            elif how == "answers a stopped head":
                machine.stall(0.5)
                self._strikes.later(0.25, lambda: _unused(self._strikes.stop_head(stop_s)))
            return self._clones.make(machine, lives_s)

        return f"a clone of {machine.profile.name}, which {how}, dials in for {lives_s:.2f} s", strike

    def _of_fleet(self, kind: str, rng: random.Random) -> tuple[str, Callable[[], bool]]:
        strikes = self._strikes
        match kind:
            case "noise":
                return self._noise(rng)
            case "head":
                stop_s = rng.choice([rng.uniform(0.3, 3.0), rng.uniform(5.0, 25.0), rng.uniform(18.5, 25.0)])
                return f"the head is stopped for {stop_s:.2f} s", lambda: strikes.stop_head(stop_s)
            case "crash":
                down_s = rng.choice([0.0, rng.uniform(0.05, 3.0), rng.uniform(3.0, 25.0)])
                text = f"the head is killed, another starts in {down_s:.2f} s"
                return text, lambda: strikes.crash_head(down_s)
            case _:
                count = rng.randint(len(self._machines) // 3 + 1, len(self._machines))
                sample = rng.sample(list(self._machines), max(2, count))
                hit = [machine for machine in sample if machine is not None]
                silent_s = rng.choice([rng.uniform(7.0, 16.0), rng.uniform(19.0, 30.0)])
                names = ", ".join(machine.profile.name for machine in hit)
                text = f"nothing gets to or from {names} for {silent_s:.2f} s"
                return text, lambda: strikes.outage(hit, silent_s)

    def _noise(self, rng: random.Random) -> tuple[str, Callable[[], bool]]:
        lose, late, repeat = rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.6)
        noise = Noise(delay_max_s=rng.choice([0.01, 0.2]), lose=lose, late=late, repeat=repeat)
        duration_s = rng.uniform(1.0, 10.0)
        chances = f"lost ({lose:.2f}), late ({late:.2f}), repeated ({repeat:.2f})"
        return f"commands are {chances} for {duration_s:.2f} s", lambda: self._strikes.noise(
            noise, duration_s
        )


def _unused(_: object) -> None:
    """Drop a result."""
