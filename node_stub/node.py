"""A node without its transport: the rules, the engine, the runs between them, faults and the journal."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from node_stub.engine import Engine, Finish, Load, Pace
from node_stub.faults import Fault, FaultError, Faults, ReportLies
from node_stub.journal import Entry, Journal
from node_stub.keeper import Keeper, RunKey
from node_stub.rules import (
    Admission,
    Append,
    Assign,
    CancelOutcome,
    Code,
    Fenced,
    Generate,
    Holding,
    Limits,
    NodeRules,
    Owner,
    Refusal,
    Stopped,
)
from node_stub.runs import DEFAULT_BUFFER_TOKENS, Run, RunTrace

log = logging.getLogger(__name__)

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Who the node is and what it announces. An empty `fleet_id` is that of whose lease runs.

    A run whose link is gone is kept for `keep_s`, and so is one whose end was just told; any run buffers at
    most `buffer_tokens`.
    """

    identity: str
    incarnation: str
    fleet_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    inline_bind: bool = True
    engine_options: bool = False
    link: bool = True
    resume: bool = True
    reconcile: bool = True
    keep_s: float = 10.0
    buffer_tokens: int = DEFAULT_BUFFER_TOKENS
    limits: Limits = field(default_factory=Limits)
    gpu_memory_bytes: int = 24 * 1024**3


@dataclass(frozen=True, slots=True)
class Report:
    """Load at one moment; the fields are those of fleet.v1.CapacityReport."""

    gpu_memory_bytes: int
    gpu_memory_free_bytes: int
    host_memory_bytes: int
    active_sessions: int
    max_sessions: int
    max_context_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    lanes_active: int
    max_lanes: int
    queue_depth: int
    own_lanes_active: int
    own_queue_depth: int
    decode_tokens_per_s: int
    prefill_tokens_per_s: int
    sampled_at_ms: int


class Node:
    """Executes commands. All calls on one event loop; `clock` is monotonic, in seconds."""

    def __init__(
        self, settings: NodeSettings, engine: Engine, faults: Faults, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.faults = faults
        self.journal = Journal()
        self.trace_run: Callable[[Admission, Mapping[str, str]], RunTrace] | None = None
        """What watches a run that was admitted, under the W3C headers it came with; None = nothing does."""
        total = engine.load().kv_blocks_total
        self.rules = NodeRules(engine.models, replace(settings.limits, kv_blocks_total=total))
        self._clock = clock
        self._started_s = clock()
        self._runs: dict[RunKey, Run] = {}
        # Apart, so that many that have ended push out none that runs.
        self._detached = Keeper(settings.keep_s, settings.limits.max_runs, self._expire_run)
        self._ended = Keeper(settings.keep_s, settings.limits.max_runs, self._expire_run)
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_ms: int | None = None
        self._host_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def now_ms(self) -> int:
        """Milliseconds since the node started."""
        return int((self._clock() - self._started_s) * 1000)

    async def run(self) -> None:
        """Let the engine work until cancelled. Raises what made the engine fail."""
        try:
            await self.engine.run(lambda: self.rules.context_blocks)
        finally:
            if self._expiry:
                self._expiry.cancel()
            self._detached.close()
            self._ended.close()

    # ------------------------------------------------------------------------------------------ commands

    def assign(self, command: Assign) -> Refusal | None:
        refusal = self.rules.assign(command, self.now_ms())
        self._record("assign", command.session_id, command.epoch, refusal)
        return refusal

    def append(self, command: Append) -> Refusal | None:
        refusal = self.rules.append(command, self.now_ms())
        self._record("append", command.session_id, command.epoch, refusal)
        return refusal

    def start(self, command: Generate, headers: Mapping[str, str] = _NO_HEADERS) -> Run | Refusal:
        """Admit a Generate (its Assign and Append already executed) and hand it to the engine.

        `headers`: the W3C trace context it came with.
        """
        reply = self.rules.generate(command, self.now_ms())
        if isinstance(reply, Admission):
            return self._launch(reply, headers)
        return self._refused(command, reply)

    def resume(self, command: Generate) -> Run | Refusal | None:
        """Take up a run that can be resumed, at the command's first index; None = there is no such run.

        Whoever sent it so far is told that it is taken over.
        """
        key = (command.session_id, command.epoch, command.generation_id)
        run = self._runs.get(key) or self._detached.get(key) or self._ended.get(key)
        if run is None or not run.resumable:
            return None
        refusal = self.rules.resume(command, self.now_ms())
        self._settle()
        if refusal is None and not run.has_index(command.first_index):
            refusal = Refusal(Code.REPLAYED, detail=f"index {command.first_index} is no longer kept")
        if refusal:
            return self._refused(command, refusal)
        if run.on_taken:
            run.on_taken()
        self._detached.release(run)
        self._ended.release(run)
        run.rewind(command.first_index)
        run.entry.resumes += 1
        return run

    def refuse_rest(self, command: Generate, refusal: Refusal) -> None:
        self.rules.refuse_rest(command, refusal)

    def cancel(self, session_id: str, epoch: int, generation_id: str) -> CancelOutcome:
        outcome = self.rules.cancel(session_id, epoch, generation_id, self.now_ms())
        self._record("cancel", session_id, epoch, outcome.refusal).generation_id = generation_id
        run = self._runs.get((session_id, epoch, generation_id))
        if run and outcome.was_running:
            self._cancel(run, Finish.CANCELLED)
        return outcome

    def revoke(self, session_id: str, epoch: int) -> Refusal | None:
        refusal = self.rules.revoke(session_id, epoch, self.now_ms())
        self._record("revoke", session_id, epoch, refusal)
        return refusal

    def renew_lease(self, owner: Owner, lease_ms: int) -> tuple[bool, int]:
        """Whether the lease runs again, and how many of the owner's sessions live."""
        renewed = self.rules.renew_lease(owner, lease_ms, self.now_ms())
        self._settle()
        outcome = "done" if renewed else "expired"
        self.journal.add(Entry("lease", "", owner.term << 32, self.now_ms(), outcome))
        return renewed, self.rules.live_sessions(owner)

    # ---------------------------------------------------------------------------------------------- runs

    def may_send(self, run: Run) -> bool:
        """Ask the rules before a message of the run is sent; if not, the run now holds their refusal."""
        refusal = self.rules.judge_emission(*run.key[:2], self.now_ms())
        self._settle()
        if refusal:
            self.stop(run, refusal)
        return refusal is None

    def stop(self, run: Run, refusal: Refusal) -> None:
        """End a run with a refusal."""
        run.refuse(refusal)
        self.engine.cancel(run.job)

    def abandon(self, run: Run) -> None:
        """Its call is over. If not all of it had been sent, that is a cancel."""
        if run.delivered:
            return
        self._cancel(run, Finish.CANCELLED)
        if run.entry.cancel_seen_ms is None:
            run.entry.cancel_seen_ms = self.now_ms()
        if not run.refused:
            run.entry.outcome = Finish.CANCELLED.name

    def leave(self, run: Run) -> None:
        """Its link is gone, or its last message went out over it; a run that can be resumed is kept."""
        if not run.resumable:
            self.abandon(run)
            return
        run.detach()
        if run.delivered:
            run.forget_prompt()
            self._ended.keep(run)
        else:
            self._detached.keep(run)

    def _expire_run(self, run: Run) -> None:
        """Nobody came back to it."""
        self.abandon(run)

    def _overflow(self, run: Run) -> None:
        """Nobody reads it, and it is not to be held back."""
        refusal = Refusal(Code.BUSY, detail=f"more than {self.settings.buffer_tokens} tokens wait to be read")
        # Not from within the engine's own step, which this run's tokens came out of.
        asyncio.get_running_loop().call_soon(self._stop_overflowed, run, refusal)

    def _stop_overflowed(self, run: Run, refusal: Refusal) -> None:
        self.stop(run, refusal)
        self._detached.release(run)

    def _launch(self, admission: Admission, headers: Mapping[str, str]) -> Run:
        now_ms = self.now_ms()
        entry = Entry("generate", admission.session_id, admission.epoch, now_ms, "running")
        entry.generation_id = admission.generation_id
        entry.prompt_tokens = len(admission.prompt_token_ids)
        entry.traceparent = headers.get("traceparent", "")
        owner = self.rules.owner_of(admission.session_id)
        if owner is None:
            raise AssertionError("an admitted run has a session")
        run = Run(
            admission,
            owner,
            self.journal.add(entry),
            self.now_ms,
            self._left,
            self._overflow,
            self.settings.buffer_tokens,
        )
        if self.trace_run:
            run.trace = self.trace_run(admission, headers)
        self._runs[run.key] = run
        if admission.max_wall_ms:
            loop = asyncio.get_running_loop()
            wall_s = admission.max_wall_ms / 1000
            run.deadline = loop.call_later(wall_s, self._cancel, run, Finish.WALL_CLOCK)
        self._settle()
        self.engine.submit(run.job)
        return run

    def _cancel(self, run: Run, finish: Finish) -> None:
        if run.ended:
            return
        if finish is Finish.CANCELLED and run.entry.cancel_seen_ms is None:
            run.entry.cancel_seen_ms = self.now_ms()
        run.want(finish)
        self.engine.cancel(run.job)

    def _left(self, run: Run) -> None:
        if run.deadline:
            run.deadline.cancel()
        self._runs.pop(run.key, None)
        self.rules.ended(*run.key)

    # ------------------------------------------------------------------------------------------- reading

    def fleet_at_work(self) -> str:
        """The fleet whose head has a running lease here; empty = none has."""
        fleet_id = self.rules.fleet_at_work(self.now_ms())
        self._settle()
        return fleet_id

    def held(self, fleet_id: str) -> list[tuple[Holding, list[str]]]:
        """The sessions of a fleet, each with its generations that run or are kept."""
        self.rules.expire(self.now_ms())
        self._settle()
        generations: dict[tuple[str, int], list[str]] = {}
        for session_id, epoch, generation_id in {**self._runs, **self._detached.runs, **self._ended.runs}:
            generations.setdefault((session_id, epoch), []).append(generation_id)
        return [
            (holding, generations.get((holding.session_id, holding.epoch), []))
            for holding in self.rules.holdings()
            if holding.owner.fleet_id == fleet_id
        ]

    def report(self, owner: Owner | None = None) -> Report:
        """The load now, as it is."""
        load: Load = self.engine.load(owner)
        used = self.rules.context_blocks + load.run_blocks
        total = load.kv_blocks_total
        gpu_bytes = self.settings.gpu_memory_bytes
        windows = [model.max_context_tokens for model in self.rules.models()]
        return Report(
            gpu_memory_bytes=gpu_bytes,
            gpu_memory_free_bytes=gpu_bytes * max(0, total - used) // total if total else 0,
            host_memory_bytes=self._host_memory_bytes,
            active_sessions=self.rules.live_sessions(),
            max_sessions=self.settings.limits.max_sessions,
            max_context_tokens=0 if 0 in windows else max(windows),
            kv_blocks_used=used,
            kv_blocks_total=total,
            lanes_active=load.lanes_active,
            max_lanes=load.max_lanes,
            queue_depth=load.queue_depth,
            own_lanes_active=load.own_lanes_active,
            own_queue_depth=load.own_queue_depth,
            decode_tokens_per_s=load.decode_tokens_per_s,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            sampled_at_ms=self.now_ms(),
        )

    def report_told(self, owner: Owner | None = None) -> Report:
        """The load as reports tell it: with the lies that are set."""
        lies = self.faults.lies
        told = {
            name: value
            for name in ReportLies.__dataclass_fields__
            if name != "silent" and (value := getattr(lies, name)) is not None
        }
        return replace(self.report(owner), **told)

    def set_faults(self, faults: list[Fault], lies: ReportLies, slow_down: float) -> None:
        """Replace faults, lies and pace. Raises FaultError, changing nothing."""
        if not 0 < slow_down < math.inf:
            raise FaultError(f"slow_down is a factor above 0, not {slow_down}")
        self.faults.arm(faults)
        self.faults.lies = lies
        self.faults.slow_down = slow_down
        self.engine.set_pace(Pace(slow_down))

    # -------------------------------------------------------------------------------------------- inside

    def _refused(self, command: Generate, refusal: Refusal) -> Refusal:
        entry = self._record("generate", command.session_id, command.epoch, refusal)
        entry.generation_id, entry.ended_ms = command.generation_id, entry.at_ms
        return refusal

    def _record(self, kind: str, session_id: str, epoch: int, refusal: Refusal | None) -> Entry:
        self._settle()
        outcome = refusal.code.name if refusal else "done"
        return self.journal.add(Entry(kind, session_id, epoch, self.now_ms(), outcome))

    def _settle(self) -> None:
        """Carry out what the rules decided, and wake when the next lease runs out."""
        for effect in self.rules.take_effects():
            match effect:
                case Fenced():
                    log.warning("lease ran out: session %s fenced", effect.session_id)
                    entry = Entry("fence", effect.session_id, effect.epoch, self.now_ms(), "done")
                    self.journal.add(entry)
                case Stopped():
                    run = self._runs.get((effect.session_id, effect.epoch, effect.generation_id))
                    if run:
                        self.stop(run, effect.refusal)
        self._arm_expiry()

    def _arm_expiry(self) -> None:
        due_ms = self.rules.next_expiry_ms
        if self._expiry:
            if due_ms == self._expiry_ms:
                return
            self._expiry.cancel()
        self._expiry, self._expiry_ms = None, due_ms
        if due_ms is not None:
            delay_s = max(0.0, (due_ms - self.now_ms()) / 1000)
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.rules.expire(self.now_ms())
        self._settle()
