"""A simulated engine: lanes, a queue by class, prefill, one decode step for all runs; and its faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fleet_service.domain.commands import Phase, RunFinish
from node_stub import rules
from node_stub.reference import StubModel, absorb, effective_seed, initial_state, next_token
from tests.sim.convert import head_refusal
from tests.sim.network import RunPort, Step
from tests.sim.nodes import ArmedFault, RunFault, SimMachine

RunKey = tuple[str, int, str]
"""Session, epoch, generation."""


class Host(Protocol):
    """The process that an engine runs in."""

    @property
    def machine(self) -> SimMachine: ...

    @property
    def rules(self) -> rules.NodeRules: ...

    @property
    def now_ms(self) -> int: ...

    @property
    def running(self) -> bool:
        """Neither dead nor stopped."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None: ...

    def judge_leases(self) -> None: ...

    def apply_effects(self) -> None:
        """Stop what the rules stopped."""


class EngineRun:
    """One run in the engine."""

    __slots__ = (
        "admission",
        "deadline_ms",
        "eos",
        "fault",
        "model",
        "port",
        "sent",
        "stalled",
        "state",
        "tail",
    )

    def __init__(
        self,
        admission: rules.Admission,
        model: StubModel,
        port: RunPort,
        now_ms: int,
        fault: ArmedFault | None,
    ) -> None:
        self.admission = admission
        self.model = model
        self.port = port
        self.deadline_ms = now_ms + (admission.max_wall_ms or 10**12)
        seed = effective_seed(admission.sampling.temperature, admission.sampling.seed)
        self.state = absorb(initial_state(model, seed), admission.prompt_token_ids)
        self.sent = 0
        self.eos = False
        self.stalled = False
        self.fault = fault
        self.tail: list[int] = []

    @property
    def key(self) -> tuple[str, int, str]:
        return self.admission.session_id, self.admission.epoch, self.admission.generation_id

    @property
    def done(self) -> bool:
        return self.eos or self.sent >= self.admission.max_new_tokens

    def draw(self, count: int) -> list[int]:
        """The next tokens, at most `count`, ending with EOS or the budget."""
        drawn: list[int] = []
        while len(drawn) < count and not self.done:
            token = next_token(self.model, self.state)
            self.state = absorb(self.state, (token,))
            drawn.append(token)
            self.sent += 1
            self.eos = token == self.model.eos_token_id
        return drawn


class Engine:
    """The runs of one process, from their admission to their last message."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._queue: list[EngineRun] = []
        self._prefilling: dict[EngineRun, None] = {}
        self._decoding: list[EngineRun] = []
        self._runs: dict[RunKey, EngineRun] = {}
        self._ports: dict[RunPort, EngineRun] = {}
        self._stepping = False

    @property
    def lanes_active(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queue_depth(self) -> int:
        return len(self._queue)

    def generation_ids(self) -> list[str]:
        return [generation_id for _, _, generation_id in self._runs]

    def take(self, run: EngineRun) -> None:
        """Queue an admitted run."""
        self._runs[run.key] = run
        self._ports[run.port] = run
        self._queue.append(run)
        self._queue.sort(key=lambda each: each.admission.qos)
        if self.lanes_active >= self._host.machine.profile.lanes:
            self._send(run, phase=Phase.QUEUED)
        self._pump()

    def stop(
        self, key: RunKey, *, finish: RunFinish | None = None, refusal: rules.Refusal | None = None
    ) -> None:
        """End a run, if it is there, and tell its stream."""
        run = self._runs.get(key)
        if run is not None:
            self._end(run, finish=finish, refusal=refusal)

    def hang_up(self, port: RunPort) -> None:
        """Nobody listens any more: the run is cancelled."""
        run = self._ports.get(port)
        if run is not None:
            self._end(run)

    def take_fault(self, budget: int) -> ArmedFault | None:
        for fault in self._host.machine.armed:
            if fault.after_tokens < max(budget, 1):
                self._host.machine.armed.remove(fault)
                return fault
        return None

    def _pump(self) -> None:
        """Give free lanes to those that wait."""
        while self._queue and self.lanes_active < self._host.machine.profile.lanes:
            run = self._queue.pop(0)
            self._prefilling[run] = None
            self._send(run, phase=Phase.PREFILL)
            prefill_s = len(run.admission.prompt_token_ids) / self._host.machine.profile.prefill_tokens_per_s
            self._host.later(prefill_s, lambda each=run: self._prefilled(each))  # type: ignore[misc]

    def _prefilled(self, run: EngineRun) -> None:
        if run not in self._prefilling:
            return
        self._prefilling.pop(run, None)
        self._decoding.append(run)
        self._send(run, phase=Phase.DECODE)
        if not self._stepping:
            self._stepping = True
            self._host.later(self._host.machine.profile.step_s, self._step)

    def _step(self) -> None:
        """One decode step for all runs."""
        self._host.judge_leases()
        for run in list(self._decoding):
            if run in self._decoding:
                self._advance(run)
                if not self._host.running:
                    break
        if self._decoding:
            self._host.later(self._host.machine.profile.step_s, self._step)
        else:
            self._stepping = False

    def _advance(self, run: EngineRun) -> None:
        if run.stalled or self._strikes(run):
            return
        if self._host.now_ms >= run.deadline_ms:
            self._end(run, finish=RunFinish.WALL_CLOCK)
            return
        count = self._host.machine.profile.tokens_per_step
        if run.fault is not None:
            count = max(1, min(count, run.fault.after_tokens - run.sent))
        first_index = run.admission.first_index + run.sent
        drawn = run.draw(count)
        run.tail = (run.tail + drawn)[-4:]
        if not run.done:
            self._send(run, first_index, drawn)
        elif run.fault is not None and run.fault.fault in (RunFault.DIE_BEFORE_FINISH, RunFault.LATE_FINISH):
            self._send(run, first_index, drawn)
            self._hold_finish(run)
        else:
            self._finish(run, first_index, drawn)

    def _hold_finish(self, run: EngineRun) -> None:
        assert run.fault is not None
        self._host.machine.overseer.struck(
            self._host.machine, run.fault.fault.value, run.admission.generation_id
        )
        run.stalled = True
        duration_s = run.fault.duration_s
        if run.fault.fault is RunFault.DIE_BEFORE_FINISH:
            self._host.later(0.02, lambda: _unused(self._host.machine.die(duration_s)))
        else:
            self._host.later(duration_s, lambda: self._finish(run, run.admission.first_index + run.sent, []))

    def _finish(self, run: EngineRun, first_index: int, drawn: list[int]) -> None:
        refusal = self._host.rules.judge_emission(
            run.admission.session_id, run.admission.epoch, self._host.now_ms
        )
        if refusal is not None:
            self._host.apply_effects()
            self._end(run, refusal=refusal)
            return
        self._end(run, first_index, drawn, finish=RunFinish.EOS if run.eos else RunFinish.LENGTH)

    def _strikes(self, run: EngineRun) -> bool:
        """Let what is to go wrong with the run go wrong; True when it sends nothing in this step."""
        machine, generation_id = self._host.machine, run.admission.generation_id
        index = run.admission.first_index + run.sent
        kills_at = machine.overseer.kills_at(generation_id)
        if kills_at is not None and index >= kills_at:
            machine.overseer.struck(machine, "the request kills the node", generation_id)
            machine.die(machine.rng.uniform(0.5, 4.0))
            return True
        fails_at = machine.overseer.engine_fails_at(generation_id)
        if fails_at is not None and index >= fails_at:
            machine.overseer.struck(machine, "every engine fails on the request", generation_id)
            self._end(run, refusal=rules.Refusal(rules.Code.ENGINE_ERROR))
            return True
        fault = run.fault
        if fault is None or run.sent < fault.after_tokens:
            return False
        if fault.fault in (RunFault.DIE_BEFORE_FINISH, RunFault.LATE_FINISH):
            return False
        run.fault = None
        machine.overseer.struck(machine, fault.fault.value, generation_id)
        return self._strike(run, fault, index)

    def _strike(self, run: EngineRun, fault: ArmedFault, index: int) -> bool:
        machine = self._host.machine
        match fault.fault:
            case RunFault.DIE:
                machine.die(fault.duration_s)
            case RunFault.FREEZE:
                machine.freeze(fault.duration_s)
            case RunFault.DROP_LINK:
                machine.drop_links()
            case RunFault.ENGINE_ERROR:
                self._end(run, refusal=rules.Refusal(rules.Code.ENGINE_ERROR))
            case RunFault.STALL:
                run.stalled = True
            case RunFault.SKIP_INDEX:
                run.draw(1)
                return run.done
            case RunFault.REPEAT_INDEX:
                if run.tail:
                    self._send(run, index - len(run.tail), run.tail)
                return False
            case RunFault.FUTURE_EPOCH:
                run.port.send(Step(run.admission.epoch + 1, index, [7]))
                return False
            case RunFault.OLD_EPOCH:
                run.port.send(Step(run.admission.epoch - 1, index, [7]))
                return False
            case _:
                raise AssertionError(fault)
        return True

    def _send(
        self,
        run: EngineRun,
        first_index: int | None = None,
        token_ids: list[int] | None = None,
        phase: Phase | None = None,
    ) -> None:
        admission = run.admission
        refusal = self._host.rules.judge_emission(admission.session_id, admission.epoch, self._host.now_ms)
        if refusal is not None:
            self._host.apply_effects()
            self._end(run, refusal=refusal)
            return
        index = admission.first_index + run.sent if first_index is None else first_index
        run.port.send(Step(admission.epoch, index, token_ids or (), phase))

    def _end(
        self,
        run: EngineRun,
        first_index: int | None = None,
        token_ids: list[int] | None = None,
        finish: RunFinish | None = None,
        refusal: rules.Refusal | None = None,
    ) -> None:
        """Free the lane; without finish and refusal nobody is told. Idempotent."""
        if self._runs.pop(run.key, None) is None:
            return
        self._ports.pop(run.port, None)
        self._prefilling.pop(run, None)
        if run in self._decoding:
            self._decoding.remove(run)
        if run in self._queue:
            self._queue.remove(run)
        admission = run.admission
        self._host.rules.ended(*run.key)
        if finish is not None or refusal is not None:
            index = admission.first_index + run.sent if first_index is None else first_index
            run.port.send(Step(admission.epoch, index, token_ids or (), None, finish, head_refusal(refusal)))
        self._pump()


def _unused(_: object) -> None:
    """Drop a result."""
