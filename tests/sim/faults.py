"""What goes wrong in a world, and when: at least MIN_FAULTS faults per seed, drawn before it begins."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.runtime.head import Head
from tests.sim.network import Noise, SimNetwork
from tests.sim.nodes import ArmedFault, RunFault, SimMachine
from tests.sim.oracle import Oracle

MIN_FAULTS = 5
_HORIZON_S = 25.0
# Between two of them the head must have had time to see for itself what came of its nodes.
_BETWEEN_STANDSTILLS_S = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come. `strike` returns whether it could (a dead node cannot be stopped)."""

    at_s: float
    text: str
    strike: Callable[[], bool]


class FaultPlan:
    """The faults of one world."""

    def __init__(
        self, rng: random.Random, head: Head, network: SimNetwork, machines: list[SimMachine], oracle: Oracle
    ) -> None:
        self._rng = rng
        self._head = head
        self._network = network
        self._machines = machines
        self._oracle = oracle
        self._operations: set[asyncio.Task[None]] = set()
        self.struck = 0
        self.cordoned: dict[str, None] = {}
        self.removed: dict[str, None] = {}
        self.faults = sorted(
            (self._draw() for _ in range(rng.randint(MIN_FAULTS + 2, MIN_FAULTS + 11))), key=lambda f: f.at_s
        )

    async def run(self) -> None:
        """Strike each at its time."""
        loop = asyncio.get_running_loop()
        for fault in self.faults:
            await asyncio.sleep(fault.at_s - loop.time())
            if fault.strike():
                self.struck += 1
                self._oracle.story.note("* FAULT %s", fault.text)

    async def undo(self) -> None:
        """Make the fleet whole again, and wait until every operation under way is done."""
        while self._operations:
            await asyncio.wait(set(self._operations))
        self._network.noise = Noise()
        for machine in self._machines:
            machine.heal()
        for name in list(self.cordoned):
            self._head.operators.uncordon_node(f"{name}:8454")
            del self.cordoned[name]

    # Drawing

    def _draw(self) -> Fault:
        rng = self._rng
        at_s = rng.uniform(0.5, _HORIZON_S)
        machine = rng.choice(self._machines)
        name = machine.profile.name
        kind = rng.choices(
            [
                "run",
                "kill",
                "freeze",
                "stall",
                "drop",
                "refuse",
                "noise",
                "append",
                "lies",
                "silent",
                "operate",
                "head",
            ],
            [8, 3, 3, 3, 3, 1, 3, 2, 1, 1, 3, 1],
        )[0]
        short_or_long = rng.choice([rng.uniform(0.2, 3.0), rng.uniform(3.0, 12.0), rng.uniform(15.0, 40.0)])
        match kind:
            case "run":
                return self._arm(at_s, machine)
            case "kill":
                silently = rng.random() < 0.25
                after_s = rng.uniform(0.1, 10.0)
                text = f"{name} dies{' with its machine' if silently else ''}, back in {after_s:.2f} s"
                return Fault(at_s, text, lambda: machine.die(after_s, silently=silently))
            case "freeze":
                return Fault(
                    at_s,
                    f"{name} is stopped for {short_or_long:.2f} s",
                    lambda: machine.freeze(short_or_long),
                )
            case "stall":
                text = f"nothing gets to or from {name} for {short_or_long:.2f} s"
                return Fault(at_s, text, lambda: machine.stall(short_or_long))
            case "drop":
                return Fault(at_s, f"the link to {name} breaks", lambda: self._drop(machine))
            case "refuse":
                return Fault(at_s, f"{name} refuses handshakes", lambda: self._refuse(machine, short_or_long))
            case "noise":
                return self._noise(at_s)
            case "append":
                return Fault(at_s, f"{name} is to lose appends", lambda: self._lose_appends(machine))
            case "lies":
                return Fault(at_s, f"{name} reports lies", lambda: self._lie(machine))
            case "silent":
                return Fault(at_s, f"{name} sends no reports", lambda: self._silence(machine, short_or_long))
            case "head":
                duration_s = rng.choice([rng.uniform(0.3, 3.0), rng.uniform(6.0, 15.0)])
                return Fault(
                    at_s, f"the head is stopped for {duration_s:.2f} s", lambda: self._stop_head(duration_s)
                )
            case _:
                return self._operate(at_s, machine)

    def _arm(self, at_s: float, machine: SimMachine) -> Fault:
        rng = self._rng
        fault = ArmedFault(
            rng.choice(list(RunFault)), rng.choice([0, 0, 1, rng.randint(0, 30)]), rng.uniform(0.3, 12.0)
        )

        def arm() -> bool:
            machine.armed.append(fault)
            return True

        text = f"{machine.profile.name}: on a run, after {fault.after_tokens} tokens: {fault.fault.value}"
        return Fault(at_s, text, arm)

    def _drop(self, machine: SimMachine) -> bool:
        self._oracle.lasts(machine.profile.name, 1)
        self._oracle.lasts(machine.profile.name, -1)
        machine.drop_links()
        return True

    def _refuse(self, machine: SimMachine, duration_s: float) -> bool:
        machine.refuses = "this node speaks version 2 to 3 only"
        machine.drop_links()
        self._until(machine, duration_s, lambda: setattr(machine, "refuses", ""))
        return True

    def _until(self, machine: SimMachine, duration_s: float, end: Callable[[], None]) -> None:
        name = machine.profile.name
        self._oracle.lasts(name, 1)

        def over() -> None:
            end()
            self._oracle.lasts(name, -1)

        self._network.loop.call_later(duration_s, over)

    def _noise(self, at_s: float) -> Fault:
        rng = self._rng
        lose, late, repeat = rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.6)
        noise = Noise(delay_max_s=rng.choice([0.01, 0.2]), lose=lose, late=late, repeat=repeat)
        duration_s = rng.uniform(1.0, 10.0)

        def start() -> bool:
            self._network.noise = noise
            self._oracle.wire_trouble.lasting += 1
            self._oracle.wire_trouble.count += 1
            self._network.loop.call_later(duration_s, over)
            return True

        def over() -> None:
            self._network.noise = Noise()
            self._oracle.wire_trouble.lasting -= 1
            self._oracle.wire_trouble.last_s = self._network.loop.time()

        chances = f"lost ({lose:.2f}), late ({late:.2f}), repeated ({repeat:.2f})"
        text = f"commands are {chances} for {duration_s:.2f} s"
        return Fault(at_s, text, start)

    def _lose_appends(self, machine: SimMachine) -> bool:
        machine.lose_appends += self._rng.randint(1, 3)
        return True

    def _lie(self, machine: SimMachine) -> bool:
        rng = self._rng
        lies = {
            "kv_blocks_used": rng.randint(0, 100),
            "kv_blocks_total": 100,
            "decode_tokens_per_s": rng.choice([0, 1, 10**6]),
            "prefill_tokens_per_s": rng.choice([0, 1, 10**6]),
            "queue_depth": rng.choice([0, 500]),
            "lanes_active": rng.choice([0, 500]),
            "own_queue_depth": rng.choice([0, 1000]),
        }
        machine.lies = {name: lies[name] for name in lies if rng.random() < 0.5}
        return True

    def _silence(self, machine: SimMachine, duration_s: float) -> bool:
        """A node that sends no reports and has nothing to say is silent, and so suspect."""
        machine.silent_reports = True
        self._until(machine, duration_s, lambda: setattr(machine, "silent_reports", False))
        return True

    def _stop_head(self, duration_s: float) -> bool:
        """All of it stands still; whatever was to happen meanwhile happens at once afterwards."""
        began_s = self._network.loop.time()
        if self._oracle.ran_for(began_s) < _BETWEEN_STANDSTILLS_S:
            return False
        self._network.loop.stand_still(duration_s)
        self._oracle.stood_still(began_s, self._network.loop.time())
        return True

    # Operators

    def _operate(self, at_s: float, machine: SimMachine) -> Fault:
        name = machine.profile.name
        back_s = self._rng.uniform(0.5, 8.0)
        if self._rng.random() < 0.5:
            return Fault(
                at_s, f"an operator cordons {name} for {back_s:.2f} s", lambda: self._cordon(name, back_s)
            )
        text = f"an operator removes {name}, to add it again in {back_s:.2f} s"
        return Fault(at_s, text, lambda: self._remove(machine, back_s))

    def _cordon(self, name: str, back_s: float) -> bool:
        if name in self.cordoned or name in self.removed:
            return False
        self._head.operators.cordon_node(f"{name}:8454", "seeded")
        self.cordoned[name] = None

        def uncordon() -> None:
            if self.cordoned.pop(name, name) is None:
                self._head.operators.uncordon_node(f"{name}:8454")

        self._network.loop.call_later(back_s, uncordon)
        return True

    def _remove(self, machine: SimMachine, back_s: float) -> bool:
        name = machine.profile.name
        if name in self.cordoned or name in self.removed:
            return False
        self.removed[name] = None
        self._oracle.lasts(name, 1)
        task = asyncio.get_running_loop().create_task(self._remove_and_add(machine, back_s))
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return True

    async def _remove_and_add(self, machine: SimMachine, back_s: float) -> None:
        name = machine.profile.name
        try:
            await self._head.operators.remove_node(machine.address)
            await asyncio.sleep(back_s)
            await self._head.operators.add_node(machine.address)
        except FleetError as error:
            if error.reason is not Reason.NODE_NOT_FOUND:
                raise
            self._oracle.violation(f"{name} was there, and could not be removed: {error}")
        finally:
            self.removed.pop(name, None)
            self._oracle.lasts(name, -1)
