"""Simulated nodes: the stub's pure rules and its foretellable model, on virtual time, with faults on demand.

A `SimMachine` outlives its processes: it can kill, stop, continue and start them. A `SimProcess` is one
incarnation: the node rules, and an engine with lanes, a queue, prefill and decode steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    Introduction,
    Phase,
    Refusal,
    RefusalCode,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.domain.specs import Sampling
from node_stub import rules
from node_stub.reference import StubModel, absorb, effective_seed, initial_state, next_token
from tests.sim.network import Command, RunPort, SimNetwork, Step


class RunFault(Enum):
    """What goes wrong with one run, once it has sent so many tokens."""

    DIE = "the process dies"
    DIE_BEFORE_FINISH = "the process dies before the finish"
    FREEZE = "the process is stopped for a while"
    DROP_LINK = "the link breaks"
    ENGINE_ERROR = "the engine fails"
    STALL = "no more tokens come"
    SKIP_INDEX = "an index is left out"
    REPEAT_INDEX = "old indexes come again"
    FUTURE_EPOCH = "an epoch never issued"
    OLD_EPOCH = "tokens of an older epoch"
    BUSY = "refused as busy"
    LATE_FINISH = "the finish comes later, alone"


@dataclass(slots=True)
class ArmedFault:
    """Strikes the next run on the machine that gets so far."""

    fault: RunFault
    after_tokens: int
    duration_s: float = 3.0


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a machine's processes are like. Rates in tokens per second, times in seconds."""

    name: str
    models: tuple[StubModel, ...]
    max_context_tokens: int
    lanes: int
    step_s: float
    tokens_per_step: int
    prefill_tokens_per_s: float
    limits: rules.Limits = rules.Limits()
    labels: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[Feature] = frozenset({Feature.INLINE_BIND})


class Overseer(Protocol):
    """Told what nodes do, for the checks and the story."""

    def run_admitted(self, process: SimProcess, run: Run, admission: rules.Admission) -> None: ...

    def struck(self, machine: SimMachine, fault: str, generation_id: str) -> None: ...

    def lasts(self, node: str, change: int) -> None:
        """A disturbance that lasts has begun (+1) or ended (-1)."""

    def violation(self, text: str) -> None: ...

    def engine_fails_at(self, generation_id: str) -> int | None:
        """After how many tokens every engine fails on it."""

    def kills_at(self, generation_id: str) -> int | None:
        """After how many tokens every node dies of it."""


class SimMachine:
    """One node's place in the network: its address, its process if it runs, and what holds it up."""

    def __init__(
        self, profile: NodeProfile, network: SimNetwork, rng: random.Random, overseer: Overseer
    ) -> None:
        self.profile = profile
        self.address = f"{profile.name}:8454"
        self.network = network
        self.rng = rng
        self.overseer = overseer
        self.refuses = ""
        self.stalled = False
        self.unreachable = False
        self.frozen = False
        self.silent_reports = False
        self.lies: dict[str, int] = {}
        self.lose_appends = 0
        self.armed: list[ArmedFault] = []
        self._incarnations = 0
        self._backlog: list[tuple[SimProcess, Callable[[], None]]] = []
        self._process: SimProcess | None = None
        network.machines[self.address] = self
        self.start()

    @property
    def process(self) -> SimProcess | None:
        return self._process

    def when_running(self, process: object, action: Callable[[], None]) -> None:
        if process is not self._process:
            return
        if self.frozen:
            assert self._process is not None
            self._backlog.append((self._process, action))
        else:
            action()

    def start(self) -> None:
        """Boot a process, unless one runs."""
        if self._process is not None:
            return
        self._incarnations += 1
        self._process = SimProcess(self, f"{self.profile.name}-run-{self._incarnations}")
        self.unreachable = False

    def die(self, return_s: float, *, silently: bool = False) -> bool:
        """The process is gone; another starts after `return_s`. False when none ran.

        `silently`: its machine goes with it, so that only keepalive finds out.
        """
        if self._process is None:
            return False
        self.thaw_without_work()
        self._process = None
        self.unreachable = silently
        for wire in self.network.wires_of(self):
            if silently:
                self.network.loop.call_later(self.network.timeouts.keepalive_s, wire.break_, "keepalive")
            else:
                wire.break_("connection reset")
        self._lasting(return_s, self.start)
        return True

    def freeze(self, duration_s: float) -> bool:
        """SIGSTOP, and SIGCONT after `duration_s`. False when there was nothing to stop."""
        if self._process is None or self.frozen:
            return False
        self.frozen = True
        for wire in self.network.wires_of(self):
            self.network.loop.call_later(self.network.timeouts.keepalive_s, self._give_up, wire.break_)
        self._lasting(duration_s, self.thaw)
        return True

    def _give_up(self, break_: Callable[[str], None]) -> None:
        if self.frozen:
            break_("keepalive had no answer")

    def thaw(self) -> None:
        """SIGCONT: everything that waited happens, in order. A process stopped anew on the way stops there."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for process, action in backlog:
            self.when_running(process, action)

    def thaw_without_work(self) -> None:
        self.frozen = False
        self._backlog.clear()

    def stall(self, duration_s: float) -> bool:
        """Nothing gets through, either way, for `duration_s`; then all that was held arrives."""
        if self.stalled:
            return False
        self.stalled = True
        for wire in self.network.wires_of(self):
            wire.stall()
        self._lasting(duration_s, self.release)
        return True

    def release(self) -> None:
        self.stalled = False
        for wire in self.network.stalled_wires_of(self):
            wire.release()

    def drop_links(self) -> None:
        for wire in self.network.wires_of(self):
            wire.break_("link dropped")

    def _lasting(self, duration_s: float, end: Callable[[], None]) -> None:
        name = self.profile.name
        self.overseer.lasts(name, 1)

        def over() -> None:
            end()
            self.overseer.lasts(name, -1)

        self.network.loop.call_later(duration_s, over)


class _EngineRun:
    """One run in the engine."""

    __slots__ = ("admission", "deadline_ms", "eos", "fault", "model", "port", "sent", "stalled", "state", "tail")

    def __init__(self, admission: rules.Admission, model: StubModel, port: RunPort, deadline_ms: float) -> None:
        self.admission = admission
        self.model = model
        self.port = port
        self.deadline_ms = deadline_ms
        seed = effective_seed(admission.sampling.temperature, admission.sampling.seed)
        self.state = absorb(initial_state(model, seed), admission.prompt_token_ids)
        self.sent = 0
        self.eos = False
        self.stalled = False
        self.fault: ArmedFault | None = None
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


class SimProcess:
    """One incarnation of a node."""

    def __init__(self, machine: SimMachine, incarnation: str) -> None:
        self.machine = machine
        self.incarnation = incarnation
        profile = machine.profile
        self._loop = machine.network.loop
        self._booted_s = self._loop.time() - machine.rng.random() * 100.0
        self.models = tuple(
            ModelInfo(
                model.name,
                model.revision,
                model.vocab_size,
                frozenset({model.eos_token_id}),
                profile.max_context_tokens,
            )
            for model in profile.models
        )
        self._stub_models = {model.name: model for model in profile.models}
        self.rules = rules.NodeRules(
            [
                rules.Model(m.name, m.revision, m.vocab_size, m.eos_token_ids, m.max_context_tokens)
                for m in self.models
            ],
            profile.limits,
        )
        self._queue: list[_EngineRun] = []
        self._prefilling: set[_EngineRun] = set()
        self._decoding: list[_EngineRun] = []
        self._runs: dict[tuple[str, int, str], _EngineRun] = {}
        self._ports: dict[RunPort, _EngineRun] = {}
        self._stepping = False

    @property
    def now_ms(self) -> int:
        return int((self._loop.time() - self._booted_s) * 1000)

    @property
    def lanes_active(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queue_depth(self) -> int:
        return len(self._queue)

    # Answers to the head

    def hello(self, introduction: Introduction) -> NodeHello:
        report = self.report(introduction)
        return NodeHello(
            identity=self.machine.profile.name,
            incarnation=self.incarnation,
            labels=self.machine.profile.labels,
            report=report[0] if report else Report(),
            models=self.models,
            features=self.machine.profile.features,
            highest_epoch=self.rules.highest_epoch(introduction.fleet_id),
        )

    def report(self, introduction: Introduction) -> tuple[Report, tuple[ModelInfo, ...]] | None:
        if self.machine.silent_reports:
            return None
        self._after_rules(self.rules.expire(self.now_ms))
        profile = self.machine.profile
        truth: dict[str, int] = {
            "active_sessions": self.rules.live_sessions(),
            "max_sessions": profile.limits.max_sessions,
            "max_context_tokens": profile.max_context_tokens,
            "kv_blocks_used": self.rules.context_blocks,
            "kv_blocks_total": profile.limits.kv_blocks_total,
            "lanes_active": self.lanes_active,
            "max_lanes": profile.lanes,
            "queue_depth": self.queue_depth,
            "own_lanes_active": self.lanes_active,
            "own_queue_depth": self.queue_depth,
            "decode_tokens_per_s": int(profile.tokens_per_step / profile.step_s),
            "prefill_tokens_per_s": int(profile.prefill_tokens_per_s),
            "sampled_at_ms": self.now_ms,
        }
        return Report(**(truth | self.machine.lies)), ()

    def execute(self, introduction: Introduction, command: Command) -> Refusal | None:
        now_ms = self.now_ms
        match command:
            case Assign():
                refusal = self.rules.assign(_assign(command, introduction), now_ms)
            case Append():
                refusal = self._append(command, now_ms)
            case CancelRun():
                outcome = self.rules.cancel(command.session_id, command.epoch, command.generation_id, now_ms)
                refusal = outcome.refusal
                if refusal is None:
                    self._cancel(command)
            case Revoke():
                refusal = self.rules.revoke(command.session_id, command.epoch, now_ms)
        self._after_rules(None)
        return _refusal(refusal)

    def renew(self, introduction: Introduction, lease_s: float) -> bool:
        owner = rules.Owner(introduction.fleet_id, introduction.head_id, introduction.term)
        renewed = self.rules.renew_lease(owner, int(lease_s * 1000), self.now_ms)
        self._after_rules(None)
        return renewed

    def start_run(self, introduction: Introduction, command: Run, port: RunPort) -> None:
        overseer = self.machine.overseer
        if (command.assign or command.append) and Feature.INLINE_BIND not in self.machine.profile.features:
            overseer.violation(f"{command.generation_id} rides with its binding to a node that cannot take it")
        fault = self._take_fault(command.max_new_tokens)
        if fault is not None and fault.fault is RunFault.BUSY:
            overseer.struck(self.machine, fault.fault.value, command.generation_id)
            port.send(Step(command.epoch, command.first_index, refusal=Refusal(RefusalCode.BUSY)))
            return
        answer = self._generate(_generate(command, introduction))
        self._after_rules(None)
        if isinstance(answer, rules.Refusal):
            if fault is not None:
                self.machine.armed.append(fault)
            port.send(Step(command.epoch, command.first_index, refusal=_refusal(answer)))
            return
        overseer.run_admitted(self, command, answer)
        model = self._stub_models[answer.model.name]
        run = _EngineRun(answer, model, port, self.now_ms + (answer.max_wall_ms or 10**12))
        run.fault = fault
        self._runs[run.key] = run
        self._ports[port] = run
        self._queue.append(run)
        self._queue.sort(key=lambda each: each.admission.qos)
        if self.lanes_active >= self.machine.profile.lanes:
            self._send(run, phase=Phase.QUEUED)
        self._pump()

    def stream_gone(self, port: RunPort) -> None:
        """The head hung up, or the connection ended: the run is cancelled."""
        run = self._ports.get(port)
        if run is not None:
            self._end(run)

    # Rules

    def _append(self, command: Append, now_ms: int) -> rules.Refusal | None:
        if self.machine.lose_appends > 0:
            self.machine.lose_appends -= 1
            self.machine.overseer.struck(self.machine, "an append is answered but not done", command.session_id)
            return None
        return self.rules.append(_append(command), now_ms)

    def _generate(self, command: rules.Generate) -> rules.Admission | rules.Refusal:
        if command.append is not None and self.machine.lose_appends > 0:
            self.machine.lose_appends -= 1
            self.machine.overseer.struck(self.machine, "an append that rides along is not done", command.session_id)
            command = _without_append(command)
        return self.rules.generate(command, self.now_ms)

    def _after_rules(self, _: None) -> None:
        """Stop what the rules stopped."""
        for effect in self.rules.take_effects():
            if isinstance(effect, rules.Stopped):
                run = self._runs.get((effect.session_id, effect.epoch, effect.generation_id))
                if run is not None:
                    self._end(run, refusal=effect.refusal)

    def _cancel(self, command: CancelRun) -> None:
        run = self._runs.get((command.session_id, command.epoch, command.generation_id))
        if run is not None:
            self._end(run, finish=RunFinish.CANCELLED)

    # Engine

    def _take_fault(self, budget: int) -> ArmedFault | None:
        for fault in self.machine.armed:
            if fault.after_tokens < max(budget, 1):
                self.machine.armed.remove(fault)
                return fault
        return None

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, self.machine.when_running, self, action)

    def _pump(self) -> None:
        """Give free lanes to those that wait."""
        while self._queue and self.lanes_active < self.machine.profile.lanes:
            run = self._queue.pop(0)
            self._prefilling.add(run)
            self._send(run, phase=Phase.PREFILL)
            prefill_s = len(run.admission.prompt_token_ids) / self.machine.profile.prefill_tokens_per_s
            self._later(prefill_s, lambda each=run: self._prefilled(each))  # type: ignore[misc]

    def _prefilled(self, run: _EngineRun) -> None:
        if run not in self._prefilling:
            return
        self._prefilling.discard(run)
        self._decoding.append(run)
        self._send(run, phase=Phase.DECODE)
        if not self._stepping:
            self._stepping = True
            self._later(self.machine.profile.step_s, self._step)

    def _step(self) -> None:
        """One decode step for all runs."""
        self._after_rules(self.rules.expire(self.now_ms))
        for run in list(self._decoding):
            if run in self._decoding:
                self._advance(run)
                if self.machine.process is not self:
                    return
                if self.machine.frozen:
                    break
        if self._decoding:
            self._later(self.machine.profile.step_s, self._step)
        else:
            self._stepping = False

    def _advance(self, run: _EngineRun) -> None:
        if run.stalled or self._strikes(run):
            return
        if self.now_ms >= run.deadline_ms:
            self._end(run, finish=RunFinish.WALL_CLOCK)
            return
        count = self.machine.profile.tokens_per_step
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

    def _hold_finish(self, run: _EngineRun) -> None:
        assert run.fault is not None
        self.machine.overseer.struck(self.machine, run.fault.fault.value, run.admission.generation_id)
        run.stalled = True
        duration_s = run.fault.duration_s
        if run.fault.fault is RunFault.DIE_BEFORE_FINISH:
            self._later(0.02, lambda: _unused(self.machine.die(duration_s)))
        else:
            self._later(duration_s, lambda: self._finish(run, run.admission.first_index + run.sent, []))

    def _finish(self, run: _EngineRun, first_index: int, drawn: list[int]) -> None:
        refusal = self.rules.judge_emission(run.admission.session_id, run.admission.epoch, self.now_ms)
        if refusal is not None:
            self._after_rules(None)
            self._end(run, refusal=refusal)
            return
        self._end(run, first_index, drawn, finish=RunFinish.EOS if run.eos else RunFinish.LENGTH)

    def _strikes(self, run: _EngineRun) -> bool:
        """Let what is to go wrong with the run go wrong; True when it sends nothing in this step."""
        machine, generation_id = self.machine, run.admission.generation_id
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

    def _strike(self, run: _EngineRun, fault: ArmedFault, index: int) -> bool:
        machine = self.machine
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
        run: _EngineRun,
        first_index: int | None = None,
        token_ids: list[int] | None = None,
        phase: Phase | None = None,
    ) -> None:
        admission = run.admission
        refusal = self.rules.judge_emission(admission.session_id, admission.epoch, self.now_ms)
        if refusal is not None:
            self._after_rules(None)
            self._end(run, refusal=refusal)
            return
        index = admission.first_index + run.sent if first_index is None else first_index
        run.port.send(Step(admission.epoch, index, token_ids or (), phase))

    def _end(
        self,
        run: _EngineRun,
        first_index: int | None = None,
        token_ids: list[int] | None = None,
        finish: RunFinish | None = None,
        refusal: rules.Refusal | None = None,
    ) -> None:
        """Free the lane; without finish and refusal nobody is told. Idempotent."""
        if self._runs.pop(run.key, None) is None:
            return
        self._ports.pop(run.port, None)
        self._prefilling.discard(run)
        if run in self._decoding:
            self._decoding.remove(run)
        if run in self._queue:
            self._queue.remove(run)
        admission = run.admission
        self.rules.ended(*run.key)
        if finish is not None or refusal is not None:
            index = admission.first_index + run.sent if first_index is None else first_index
            run.port.send(Step(admission.epoch, index, token_ids or (), None, finish, _refusal(refusal)))
        self._pump()


def _unused(_: object) -> None:
    """Drop a result."""


def _sampling(sampling: Sampling) -> rules.Sampling:
    return rules.Sampling(
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, sampling.seed
    )


def _assign(command: Assign, introduction: Introduction) -> rules.Assign:
    return rules.Assign(
        command.session_id,
        command.epoch,
        command.command_id,
        introduction.fleet_id,
        introduction.head_id,
        command.model,
        command.model_revision,
        _sampling(command.sampling),
        int(command.qos),
        command.engine_options,
        int(command.lease_s * 1000),
    )


def _append(command: Append) -> rules.Append:
    return rules.Append(
        command.session_id, command.epoch, command.command_id, command.base_length, list(command.token_ids)
    )


def _generate(command: Run, introduction: Introduction) -> rules.Generate:
    return rules.Generate(
        session_id=command.session_id,
        epoch=command.epoch,
        command_id=command.command_id,
        generation_id=command.generation_id,
        context_length=command.context_length,
        context_crc32=command.context_crc32,
        max_new_tokens=command.max_new_tokens,
        prefix_token_ids=list(command.prefix_token_ids),
        first_index=command.first_index,
        max_wall_ms=int(command.max_wall_s * 1000),
        sampling=_sampling(command.sampling),
        qos=int(command.qos),
        assign=None if command.assign is None else _assign(command.assign, introduction),
        append=None if command.append is None else _append(command.append),
    )


def _without_append(command: rules.Generate) -> rules.Generate:
    return rules.Generate(
        **{
            name: getattr(command, name)
            for name in rules.Generate.__dataclass_fields__
            if name != "append"
        }
    )


def _refusal(refusal: rules.Refusal | None) -> Refusal | None:
    if refusal is None:
        return None
    return Refusal(
        RefusalCode[refusal.code.name],
        refusal.current_epoch,
        refusal.context_length,
        refusal.max_context_tokens,
        refusal.retry_after_ms / 1000,
        refusal.detail,
    )
