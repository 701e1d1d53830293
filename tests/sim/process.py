"""One incarnation of a simulated node: the stub's pure rules in front of a simulated engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
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
from tests.sim.engine import Engine
from tests.sim.engine_run import EngineRun
from tests.sim.network import Command, RunKey, RunPort, Step
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

    def runs(self, *, kept: bool = False) -> list[RunKey]:
        return self.engine.keys(kept=kept)

    def could_take_up(self, generation_id: str, epoch: int, index: int) -> bool:
        return self.engine.could_take_up(generation_id, epoch, index)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, self.machine.when_running, self, action, context=self._loop.node_side)

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
        self.judge_leases()
        renewed = self.rules.renew_lease(owner, int(lease_s * 1000), self.now_ms)
        self.apply_effects(ended=lease_s == 0)
        return renewed

    def start_run(self, introduction: Introduction, command: Run, port: RunPort) -> None:
        overseer = self.machine.overseer
        if (command.assign or command.append) and Feature.INLINE_BIND not in self.machine.profile.features:
            overseer.violation(
                f"{command.generation_id} rides with its binding to a node that cannot take it"
            )
        if self.machine.profile.resumes and self._take_up(introduction, command, port):
            return
        key = (command.session_id, command.epoch, command.generation_id)
        fault = self.engine.take_fault(command.max_new_tokens)
        if fault is not None and fault.fault is RunFault.BUSY:
            overseer.struck(self.machine, fault.fault.value, key)
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
        profile = self.machine.profile
        run = EngineRun(
            answer,
            model,
            port,
            self.now_ms,
            fault,
            resumes=profile.resumes,
            buffer_tokens=profile.buffer_tokens,
        )
        self.engine.take(run)

    def _take_up(self, introduction: Introduction, command: Run, port: RunPort) -> bool:
        """Go on with a run that is there already; False when there is none."""
        key = (command.session_id, command.epoch, command.generation_id)
        if not self.engine.keeps(key):
            return False
        refusal = self.rules.resume(node_generate(command, introduction), self.now_ms)
        self.apply_effects()
        if refusal is None and not self.engine.could_take_up(
            command.generation_id, command.epoch, command.first_index
        ):
            refusal = rules.Refusal(rules.Code.REPLAYED, detail="no longer kept")
        if refusal is not None:
            port.send(Step(command.epoch, command.first_index, refusal=head_refusal(refusal)))
        else:
            self.machine.overseer.run_taken_up(self, command)
            self.engine.take_up(key, command.first_index, port)
        return True

    def stream_gone(self, port: RunPort) -> None:
        """The connection ended, or on a plain link the head hung up."""
        self.engine.hang_up(port)

    def run_cancelled(self, run: RunKey, port: RunPort) -> None:
        outcome = self.rules.cancel(*run, self.now_ms)
        self.apply_effects()
        if outcome.refusal is None:
            self.engine.stop(run)

    def acknowledged(self, run: RunKey, index: int) -> None:
        if not self.engine.acknowledge(run, index):
            self.machine.overseer.violation(f"tokens of {run[2]} before {index} are acknowledged, not sent")

    def held(self, introduction: Introduction) -> list[HeldSession]:
        self.judge_leases()
        kept: dict[tuple[str, int], list[str]] = {}
        for session_id, epoch, generation_id in self.engine.keys(kept=True):
            kept.setdefault((session_id, epoch), []).append(generation_id)
        return [
            HeldSession(
                each.session_id,
                each.epoch,
                each.owner.head_id,
                each.context_length,
                each.fenced,
                tuple(kept.get((each.session_id, each.epoch), ())),
            )
            for each in self.rules.holdings()
            if each.owner.fleet_id == introduction.fleet_id
        ]

    # Rules

    def _append(self, command: Append, now_ms: int) -> rules.Refusal | None:
        if self.machine.lose_appends > 0:
            self.machine.lose_appends -= 1
            key = (command.session_id, command.epoch, "")
            self.machine.overseer.struck(self.machine, "an append is answered but not done", key)
            return None
        return self.rules.append(node_append(command), now_ms)

    def _generate(self, command: rules.Generate) -> rules.Admission | rules.Refusal:
        if command.append is not None and self.machine.lose_appends > 0:
            self.machine.lose_appends -= 1
            key = (command.session_id, command.epoch, "")
            self.machine.overseer.struck(self.machine, "an append that rides along is not done", key)
            command = without_append(command)
        return self.rules.generate(command, self.now_ms)

    def judge_leases(self) -> None:
        self.rules.expire(self.now_ms)
        self.apply_effects()

    def apply_effects(self, *, ended: bool = False) -> None:
        """Stop what the rules stopped. `ended`: by the head's own word, where a lease is over."""
        for effect in self.rules.take_effects():
            if isinstance(effect, rules.Stopped):
                self.engine.stop(
                    (effect.session_id, effect.epoch, effect.generation_id), refusal=effect.refusal
                )
            else:
                self.machine.overseer.met("a lease is ended" if ended else "a lease ran out")
