"""A simulated engine: lanes, a queue by class, prefill, one decode step for all runs; and its faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fleet_service.domain.commands import Phase, RunFinish
from node_stub import rules
from tests.sim.convert import head_refusal
from tests.sim.engine_run import EngineRun
from tests.sim.network import RunKey, RunPort, Step
from tests.sim.nodes import ArmedFault, RunFault, SimMachine


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


class Engine:
    """The runs of one process, from their admission to their last message."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._queue: list[EngineRun] = []
        self._prefilling: dict[EngineRun, None] = {}
        self._decoding: list[EngineRun] = []
        self._runs: dict[RunKey, EngineRun] = {}
        self._ended: dict[RunKey, EngineRun] = {}  # kept for their heads to come back to
        self._ports: dict[RunPort, EngineRun] = {}
        self._stepping = False

    @property
    def lanes_active(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queue_depth(self) -> int:
        return len(self._queue)

    def keys(self, *, kept: bool = False) -> list[RunKey]:
        """Of what is queued or runs; with `kept`, of what has ended and is kept as well."""
        return [*self._runs, *self._ended] if kept else list(self._runs)

    def keeps(self, key: RunKey) -> bool:
        return key in self._runs or key in self._ended

    def could_take_up(self, generation_id: str, epoch: int, index: int) -> bool:
        for runs in (self._runs, self._ended):
            for run in runs.values():
                if run.key[1:] == (epoch, generation_id) and run.resumes:
                    return run.has_index(index)
        return False

    def take(self, run: EngineRun) -> None:
        """Queue an admitted run."""
        self._runs[run.key] = run
        assert run.port is not None
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
        """Nobody listens any more: the run is cancelled, or kept for a while where it can be taken up."""
        run = self._ports.get(port)
        if run is None:
            return
        if not run.resumes:
            self._end(run)
            return
        del self._ports[port]
        run.port = None
        self._keep(run)

    def take_up(self, key: RunKey, index: int, port: RunPort) -> None:
        """Send the run over `port` from `index` on, which is kept; whoever sent it so far is told."""
        run = self._runs.get(key) or self._ended[key]
        if run.port is not None:
            self._ports.pop(run.port, None)
            taken = rules.Refusal(rules.Code.REPLAYED, detail="taken up over another link")
            run.port.send(Step(key[1], run.next_index, refusal=head_refusal(taken)))
        run.left += 1
        run.port = port
        again = run.kept_from(index)
        if run.last is None:
            self._ports[port] = run
            self._send(run, index, again, run.phase)
        else:
            port.send(Step(key[1], index, again, None, run.last.finish, run.last.refusal))
            self._keep(run)

    def acknowledge(self, key: RunKey, index: int) -> bool:
        """The head has all before `index`. False: it cannot."""
        run = self._runs.get(key)
        return run is None or run.acknowledge(index)

    def _keep(self, run: EngineRun) -> None:
        """Keep it for its head to come back to; then it is cancelled, or forgotten."""
        run.left += 1
        self._host.later(self._host.machine.profile.keep_s, lambda left=run.left: self._give_up(run, left))  # type: ignore[misc]

    def _give_up(self, run: EngineRun, left: int) -> None:
        if run.left == left:
            self._ended.pop(run.key, None)
            if self._drop(run):
                self._host.machine.overseer.met("a kept run is given up")

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
        if run.overflows:
            self._host.machine.overseer.met("a kept run overflows")
            self._drop(run)
            return
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
        self._host.machine.overseer.struck(self._host.machine, run.fault.fault.value, run.key)
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
        machine, key = self._host.machine, run.key
        index = run.admission.first_index + run.sent
        kills_at = machine.overseer.kills_at(key)
        if kills_at is not None and index >= kills_at:
            machine.overseer.struck(machine, "the request kills the node", key)
            machine.die(machine.rng.uniform(0.5, 4.0))
            return True
        fails_at = machine.overseer.engine_fails_at(key)
        if fails_at is not None and index >= fails_at:
            machine.overseer.struck(machine, "every engine fails on the request", key)
            self._end(run, refusal=rules.Refusal(rules.Code.ENGINE_ERROR))
            return True
        fault = run.fault
        if fault is None or run.sent < fault.after_tokens:
            return False
        if fault.fault in (RunFault.DIE_BEFORE_FINISH, RunFault.LATE_FINISH):
            return False
        run.fault = None
        machine.overseer.struck(machine, fault.fault.value, key)
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
            case RunFault.BLIP:
                machine.cut(fault.cut_s)
            case RunFault.ENGINE_ERROR:
                self._end(run, refusal=rules.Refusal(rules.Code.ENGINE_ERROR))
            case RunFault.STALL:
                run.stalled = True
            case RunFault.SKIP_INDEX:
                run.lose_one()
                return run.done
            case RunFault.REPEAT_INDEX:
                if run.tail:
                    self._send(run, index - len(run.tail), run.tail)
                return False
            case RunFault.FUTURE_EPOCH:
                self._lie(run, Step(run.admission.epoch + 1, index, [7]))
                return False
            case RunFault.OLD_EPOCH:
                self._lie(run, Step(run.admission.epoch - 1, index, [7]))
                return False
            case _:
                raise AssertionError(fault)
        return True

    @staticmethod
    def _lie(run: EngineRun, step: Step) -> None:
        if run.port is not None:
            run.port.send(step)

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
        run.phase = phase or run.phase
        if run.port is not None:
            index = run.next_index if first_index is None else first_index
            run.port.send(Step(admission.epoch, index, token_ids or (), phase))

    def _end(
        self,
        run: EngineRun,
        first_index: int | None = None,
        token_ids: list[int] | None = None,
        finish: RunFinish | None = None,
        refusal: rules.Refusal | None = None,
    ) -> None:
        """Free the lane; without finish and refusal nobody is told. Idempotent.

        What has ended otherwise than by a cancel is kept for a while where it can be taken up.
        """
        if not self._drop(run):
            return
        if finish is not None or refusal is not None:
            index = run.next_index if first_index is None else first_index
            step = Step(run.admission.epoch, index, token_ids or (), None, finish, head_refusal(refusal))
            if run.port is not None:
                run.port.send(step)
            if run.resumes:
                run.last = step
                self._ended[run.key] = run
                if run.port is not None:
                    self._keep(run)

    def _drop(self, run: EngineRun) -> bool:
        """Free the lane, if it has one."""
        if self._runs.pop(run.key, None) is None:
            return False
        if run.port is not None:
            self._ports.pop(run.port, None)
        self._prefilling.pop(run, None)
        if run in self._decoding:
            self._decoding.remove(run)
        if run in self._queue:
            self._queue.remove(run)
        self._host.rules.ended(*run.key)
        self._pump()
        return True


def _unused(_: object) -> None:
    """Drop a result."""
