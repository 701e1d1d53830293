"""One incarnation of a simulated node: the stub's pure rules in front of a simulated engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    Introduction,
    Refusal,
    RefusalCode,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from node_stub import rules
from tests.sim.convert import head_refusal, node_append, node_assign, node_generate, without_append
from tests.sim.engine import Engine, EngineRun
from tests.sim.network import Command, RunPort, Step
from tests.sim.nodes import RunFault, SimMachine


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
                profile.max_context_tokens if profile.tells_window else 0,
            )
            for model in profile.models
        )
        self._stub_models = {model.name: model for model in profile.models}
        self.rules = rules.NodeRules(
            [
                rules.Model(m.name, m.revision, m.vocab_size, m.eos_token_ids, profile.max_context_tokens)
                for m in self.models
            ],
            profile.limits,
        )
        self.engine = Engine(self)

    @property
    def now_ms(self) -> int:
        return int((self._loop.time() - self._booted_s) * 1000)

    @property
    def lanes_active(self) -> int:
        return self.engine.lanes_active

    @property
    def queue_depth(self) -> int:
        return self.engine.queue_depth

    @property
    def running(self) -> bool:
        """Neither dead nor stopped."""
        return self.machine.process is self and not self.machine.frozen

    def runs(self) -> list[str]:
        return self.engine.generation_ids()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, self.machine.when_running, self, action)

    # Answers to the head

    def hello(self, introduction: Introduction) -> NodeHello:
        return NodeHello(
            identity=self.machine.profile.name,
            incarnation=self.incarnation,
            labels=self.machine.profile.labels,
            report=self._report(),
            models=self.models,
            features=self.machine.profile.features,
            highest_epoch=self.rules.highest_epoch(introduction.fleet_id),
        )

    def report(self, introduction: Introduction) -> tuple[Report, tuple[ModelInfo, ...]] | None:
        return None if self.machine.silent_reports else (self._report(), ())

    def _report(self) -> Report:
        self.judge_leases()
        profile = self.machine.profile
        truth: dict[str, int] = {
            "active_sessions": self.rules.live_sessions(),
            "max_sessions": profile.limits.max_sessions,
            "max_context_tokens": profile.max_context_tokens if profile.tells_window else 0,
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
        return Report(**(truth | self.machine.lies))

    def execute(self, introduction: Introduction, command: Command) -> Refusal | None:
        now_ms = self.now_ms
        refusal: rules.Refusal | None
        match command:
            case Assign():
                refusal = self.rules.assign(node_assign(command, introduction), now_ms)
            case Append():
                refusal = self._append(command, now_ms)
            case CancelRun():
                outcome = self.rules.cancel(command.session_id, command.epoch, command.generation_id, now_ms)
                refusal = outcome.refusal
                if refusal is None:
                    run = (command.session_id, command.epoch, command.generation_id)
                    self.engine.stop(run, finish=RunFinish.CANCELLED)
            case Revoke():
                refusal = self.rules.revoke(command.session_id, command.epoch, now_ms)
            case _:
                assert_never(command)
        self.apply_effects()
        return head_refusal(refusal)

    def renew(self, introduction: Introduction, lease_s: float, term: int) -> bool:
        owner = rules.Owner(introduction.fleet_id, introduction.head_id, term)
        renewed = self.rules.renew_lease(owner, int(lease_s * 1000), self.now_ms)
        self.apply_effects()
        return renewed

    def start_run(self, introduction: Introduction, command: Run, port: RunPort) -> None:
        overseer = self.machine.overseer
        if (command.assign or command.append) and Feature.INLINE_BIND not in self.machine.profile.features:
            overseer.violation(
                f"{command.generation_id} rides with its binding to a node that cannot take it"
            )
        fault = self.engine.take_fault(command.max_new_tokens)
        if fault is not None and fault.fault is RunFault.BUSY:
            overseer.struck(self.machine, fault.fault.value, command.generation_id)
            port.send(Step(command.epoch, command.first_index, refusal=Refusal(RefusalCode.BUSY)))
            return
        answer = self._generate(node_generate(command, introduction))
        self.apply_effects()
        if isinstance(answer, rules.Refusal):
            if fault is not None:
                self.machine.armed.append(fault)
            port.send(Step(command.epoch, command.first_index, refusal=head_refusal(answer)))
            return
        overseer.run_admitted(self, command, answer)
        model = self._stub_models[answer.model.name]
        self.engine.take(EngineRun(answer, model, port, self.now_ms, fault))

    def stream_gone(self, port: RunPort) -> None:
        """The head hung up, or the connection ended: the run is cancelled."""
        self.engine.hang_up(port)

    # Rules

    def _append(self, command: Append, now_ms: int) -> rules.Refusal | None:
        if self.machine.lose_appends > 0:
            self.machine.lose_appends -= 1
            self.machine.overseer.struck(
                self.machine, "an append is answered but not done", command.session_id
            )
            return None
        return self.rules.append(node_append(command), now_ms)

    def _generate(self, command: rules.Generate) -> rules.Admission | rules.Refusal:
        if command.append is not None and self.machine.lose_appends > 0:
            self.machine.lose_appends -= 1
            self.machine.overseer.struck(
                self.machine, "an append that rides along is not done", command.session_id
            )
            command = without_append(command)
        return self.rules.generate(command, self.now_ms)

    def judge_leases(self) -> None:
        self.rules.expire(self.now_ms)
        self.apply_effects()

    def apply_effects(self) -> None:
        """Stop what the rules stopped."""
        for effect in self.rules.take_effects():
            if isinstance(effect, rules.Stopped):
                self.engine.stop(
                    (effect.session_id, effect.epoch, effect.generation_id), refusal=effect.refusal
                )
