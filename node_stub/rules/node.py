"""The node rules: every command is judged here, and only here (design: Node rules)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from node_stub.rules.checks import (
    admission,
    assign_refusal,
    blocks_of,
    generate_refusal,
    parts_refusal,
    vocabulary_refusal,
    window_refusal,
)
from node_stub.rules.leases import Leases, Owner
from node_stub.rules.record import Record
from node_stub.rules.tombstones import Tombstones
from node_stub.rules.values import (
    Admission,
    Append,
    Assign,
    CancelOutcome,
    Code,
    Command,
    Generate,
    Model,
    Refusal,
    term_of,
)

_SWEEP_PERIOD_MS = 1_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every table. `kv_blocks_total` bounds the contexts held; 0 = no bound."""

    max_sessions: int = 4096
    max_runs: int = 1024
    max_tombstones: int = 65_536
    max_known_generations: int = 1024
    max_leases: int = 256
    max_fleets: int = 64
    kv_blocks_total: int = 0
    default_lease_ms: int = 60_000
    retry_after_ms: int = 100


@dataclass(frozen=True, slots=True)
class Holding:
    """A session that the node holds."""

    session_id: str
    epoch: int
    owner: Owner
    context_length: int
    fenced: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that must stop at once, and what its stream is told."""

    session_id: str
    epoch: int
    generation_id: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Fenced:
    """A session whose lease ran out."""

    session_id: str
    epoch: int


class NodeRules:
    """The sessions of one node and what may be done with them.

    Every method takes `now_ms` of the node's monotonic clock and judges leases before anything else. A
    command is answered with None (done) or a Refusal; Generate with an Admission or a Refusal. A run that
    a command or an expired lease stops is found in `take_effects()`, to be read after each call.
    """

    def __init__(self, models: Sequence[Model], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._models = {model.name: model for model in models}
        self._records: dict[str, Record] = {}
        self._leases = Leases()
        self._tombstones = Tombstones(self.limits.max_tombstones)
        self._highest: dict[str, int] = {}
        # Revokes of unknown sessions name no fleet; their epochs count for each.
        self._highest_of_any = 0
        self._effects: list[Stopped | Fenced] = []
        self._runs = 0
        self._context_blocks = 0
        self._sweep_ms = 0

    # ------------------------------------------------------------------------------------------ commands

    def assign(self, command: Assign, now_ms: int) -> Refusal | None:
        """Bind a session under a strictly higher epoch, with an empty context; starts or renews the lease."""
        self.expire(now_ms)
        record = self._records.get(command.session_id)
        if record and record.epoch == command.epoch:
            refusal = record.judge(command)
            if refusal is None and not record.repeats(command):
                refusal = Refusal(Code.STALE_EPOCH, current_epoch=record.epoch)
            return refusal or record.last_reply
        owner = Owner(command.fleet_id, command.head_id, term_of(command.epoch))
        refusal = self._assign_refusal(command, record, owner, now_ms)
        if refusal:
            return refusal
        if record:
            self._drop(record, Refusal(Code.STALE_EPOCH, current_epoch=command.epoch))
        self._tombstones.lift(command.session_id)
        lease_ms = command.lease_ms or self.limits.default_lease_ms
        self._leases.start(owner, lease_ms, now_ms)
        record = Record(
            session_id=command.session_id,
            epoch=command.epoch,
            owner=owner,
            model=self._models[command.model],
            sampling=command.sampling,
            qos=command.qos,
            engine_options=command.engine_options,
            lease_ms=lease_ms,
        )
        record.remember(command, None)
        self._records[command.session_id] = record
        self._highest[owner.fleet_id] = max(self._highest.get(owner.fleet_id, 0), command.epoch)
        return None

    def append(self, command: Append, now_ms: int) -> Refusal | None:
        """Set the context to context[:base_length] + token_ids, under the exact epoch."""
        self.expire(now_ms)
        record = self._records.get(command.session_id)
        if record is None:
            return Refusal(Code.UNKNOWN_SESSION)
        if refusal := record.judge(command):
            return refusal
        if record.repeats(command):
            return record.last_reply
        refusal = self._append_refusal(command, record)
        if refusal is None:
            self._context_blocks -= blocks_of(len(record.context))
            record.context.replace_tail(command.base_length, command.token_ids)
            self._context_blocks += blocks_of(len(record.context))
        record.remember(command, refusal)
        return refusal

    def generate(self, command: Generate, now_ms: int) -> Admission | Refusal:
        """Execute the Assign and Append that ride along, then admit the run."""
        steps = self.steps(command)
        if isinstance(steps, Refusal):
            return steps
        *parts, alone = steps
        for part in parts:
            refusal = self.execute(part, now_ms)
            if isinstance(refusal, Refusal):
                self.refuse_rest(command, refusal)
                return refusal
        return self._admit(alone, now_ms)

    def steps(self, command: Generate) -> tuple[*tuple[Assign | Append, ...], Generate] | Refusal:
        """The parts of a Generate, in the order of their execution, the last without the others.

        A Generate sent again is one step only: its parts were executed under ids that are now too low.
        """
        if refusal := parts_refusal(command):
            return refusal
        alone = replace(command, assign=None, append=None)
        record = self._records.get(command.session_id)
        if record and record.repeats(command):
            return (alone,)
        return (*(part for part in (command.assign, command.append) if part), alone)

    def execute(self, step: Command, now_ms: int) -> Admission | Refusal | None:
        """Do one step of a Generate."""
        match step:
            case Assign():
                return self.assign(step, now_ms)
            case Append():
                return self.append(step, now_ms)
            case Generate():
                return self._admit(step, now_ms)

    def resume(self, command: Generate, now_ms: int) -> Refusal | None:
        """Judge a Generate that takes up a run that is there already: it starts nothing."""
        self.expire(now_ms)
        record = self._records.get(command.session_id)
        if record is None:
            return Refusal(Code.UNKNOWN_SESSION)
        return record.take_up(command)

    def refuse_rest(self, command: Generate, refusal: Refusal) -> None:
        """A part of `command` was refused: the same Generate again is to get the same answer."""
        record = self._records.get(command.session_id)
        if record and record.judge(command) is None and not record.repeats(command):
            record.remember(replace(command, assign=None, append=None), refusal)

    def cancel(self, session_id: str, epoch: int, generation_id: str, now_ms: int) -> CancelOutcome:
        """End a run. One that has not come yet will not start: a cancel may overtake its Generate."""
        self.expire(now_ms)
        record = self._records.get(session_id)
        if record is None:
            return CancelOutcome(Refusal(Code.UNKNOWN_SESSION), was_running=False)
        if record.epoch != epoch:
            return CancelOutcome(Refusal(Code.STALE_EPOCH, current_epoch=record.epoch), was_running=False)
        if record.fenced:
            return CancelOutcome(Refusal(Code.FENCED), was_running=False)
        record.learn(generation_id, self.limits.max_known_generations)
        return CancelOutcome(None, was_running=generation_id in record.runs)

    def revoke(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        """Free a session and bar `epoch` and older ones for two leases, also where it is unknown."""
        self.expire(now_ms)
        record = self._records.get(session_id)
        if record and record.epoch > epoch:
            return Refusal(Code.STALE_EPOCH, current_epoch=record.epoch)
        lease_ms = record.lease_ms if record else self.limits.default_lease_ms
        self._tombstones.bury(session_id, epoch, now_ms + 2 * lease_ms, now_ms)
        if record is None:
            self._highest_of_any = max(self._highest_of_any, epoch)
            return Refusal(Code.UNKNOWN_SESSION)
        fleet_id = record.owner.fleet_id
        self._highest[fleet_id] = max(self._highest.get(fleet_id, 0), epoch)
        self._drop(record, Refusal(Code.STALE_EPOCH, current_epoch=epoch, detail="revoked"))
        return None

    def renew_lease(self, owner: Owner, lease_ms: int, now_ms: int) -> bool:
        """Let the owner's lease run again from now. False: it is not running; only an Assign starts one.

        lease_ms 0 ends it at once.
        """
        self.expire(now_ms)
        if owner not in self._leases:
            return False
        self._leases.start(owner, lease_ms, now_ms)
        self.expire(now_ms)
        return lease_ms > 0

    def expire(self, now_ms: int) -> None:
        """Fence the sessions of every lease that has run out and free their contexts."""
        for owner in self._leases.take_expired(now_ms):
            for record in self._records.values():
                if record.owner == owner and not record.fenced:
                    self._fence(record, now_ms)
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + _SWEEP_PERIOD_MS
            self._tombstones.sweep(now_ms)
            for record in [r for r in self._records.values() if r.fenced and r.forgotten_ms <= now_ms]:
                del self._records[record.session_id]

    # ---------------------------------------------------------------------------------------------- runs

    def judge_emission(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        """Whether a run under `epoch` may still send anything; to be asked before each message."""
        self.expire(now_ms)
        record = self._records.get(session_id)
        if record is None:
            barred = self._tombstones.barred_epoch(session_id, now_ms)
            return Refusal(Code.STALE_EPOCH if barred else Code.UNKNOWN_SESSION, current_epoch=barred)
        if record.epoch != epoch:
            return Refusal(Code.STALE_EPOCH, current_epoch=record.epoch)
        return Refusal(Code.FENCED) if record.fenced else None

    def ended(self, session_id: str, epoch: int, generation_id: str) -> None:
        """The run is over, however it ended. Its id stays known."""
        record = self._records.get(session_id)
        if record and record.epoch == epoch and generation_id in record.runs:
            record.runs.discard(generation_id)
            self._runs -= 1

    def take_effects(self) -> list[Stopped | Fenced]:
        """What the calls since the last time entailed, in order."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------------------------------------- reading

    def models(self) -> tuple[Model, ...]:
        return tuple(self._models.values())

    def highest_epoch(self, fleet_id: str) -> int:
        """Highest epoch seen of any session of the fleet; 0 = none."""
        return max(self._highest.get(fleet_id, 0), self._highest_of_any)

    def fleet_at_work(self, now_ms: int) -> str:
        """The fleet whose head has a running lease here; empty = none has."""
        self.expire(now_ms)
        return self._leases.fleet_id

    def holdings(self) -> list[Holding]:
        return [
            Holding(r.session_id, r.epoch, r.owner, len(r.context), r.fenced) for r in self._records.values()
        ]

    def context_of(self, session_id: str) -> array[int]:
        """A copy of the context's ids. Raises KeyError for an unknown session."""
        return self._records[session_id].context.token_ids[:]

    def live_sessions(self, owner: Owner | None = None) -> int:
        """Sessions that are not fenced, of one owner or of all."""
        return sum(1 for r in self._records.values() if not r.fenced and owner in (None, r.owner))

    def owner_of(self, session_id: str) -> Owner | None:
        record = self._records.get(session_id)
        return record.owner if record else None

    @property
    def context_blocks(self) -> int:
        """KV-cache blocks that the contexts held take."""
        return self._context_blocks

    @property
    def active_runs(self) -> int:
        return self._runs

    @property
    def next_expiry_ms(self) -> int | None:
        """When the next lease runs out, as things stand; None when none runs."""
        return self._leases.first_expiry_ms

    # ------------------------------------------------------------------------------------------ judgments

    def _assign_refusal(
        self, command: Assign, record: Record | None, owner: Owner, now_ms: int
    ) -> Refusal | None:
        current = record.epoch if record else self._tombstones.barred_epoch(command.session_id, now_ms)
        if record and not record.fenced and record.owner.fleet_id != owner.fleet_id:
            return self._busy("the id belongs to a session of another fleet")
        if command.epoch <= current:
            return Refusal(Code.STALE_EPOCH, current_epoch=current)
        if refusal := assign_refusal(command, self._models.get(command.model)):
            return refusal
        if record is None and not self._room_for_session():
            return self._busy("every session's place is taken")
        if owner not in self._leases and len(self._leases) >= self.limits.max_leases:
            return self._busy("too many heads hold a lease")
        if owner.fleet_id not in self._highest and not self._room_for_fleet():
            return self._busy("too many fleets")
        return None

    def _append_refusal(self, command: Append, record: Record) -> Refusal | None:
        length, base = len(record.context), command.base_length
        if base > length:
            return Refusal(Code.CONTEXT_MISMATCH, context_length=length)
        if refusal := vocabulary_refusal(record.model, command.token_ids):
            return refusal
        if refusal := window_refusal(record.model, base + len(command.token_ids)):
            return refusal
        held = self._context_blocks - blocks_of(length) + blocks_of(base + len(command.token_ids))
        if self.limits.kv_blocks_total and held > max(self.limits.kv_blocks_total, self._context_blocks):
            return self._busy("no KV blocks left")
        return None

    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        self.expire(now_ms)
        record = self._records.get(command.session_id)
        if record is None:
            return Refusal(Code.UNKNOWN_SESSION)
        if refusal := record.judge(command):
            return refusal
        if record.repeats(command):
            return record.last_reply or Refusal(Code.REPLAYED, detail="the generation was started before")
        refusal = self._generate_refusal(command, record)
        record.remember(command, refusal)
        if refusal:
            return refusal
        record.learn(command.generation_id, self.limits.max_known_generations)
        record.runs.add(command.generation_id)
        self._runs += 1
        return admission(command, record)

    def _generate_refusal(self, command: Generate, record: Record) -> Refusal | None:
        context, prefix = record.context, command.prefix_token_ids
        if record.knows(command.generation_id):
            return Refusal(Code.REPLAYED, detail="the generation is known")
        if command.context_length != len(context) or command.context_crc32 != context.crc32:
            return Refusal(Code.CONTEXT_MISMATCH, context_length=len(context))
        if refusal := generate_refusal(command, record.model):
            return refusal
        if refusal := window_refusal(record.model, len(context) + len(prefix)):
            return refusal
        if self._runs >= self.limits.max_runs:
            return self._busy("the queue is full")
        return None

    def _busy(self, detail: str) -> Refusal:
        return Refusal(Code.BUSY, retry_after_ms=self.limits.retry_after_ms, detail=detail)

    # ---------------------------------------------------------------------------------------------- state

    def _room_for_session(self) -> bool:
        """Make room with a fenced record, the one fenced first, when the table is full."""
        if len(self._records) < self.limits.max_sessions:
            return True
        fenced = [record for record in self._records.values() if record.fenced]
        if not fenced:
            return False
        del self._records[min(fenced, key=lambda record: record.forgotten_ms).session_id]
        return True

    def _room_for_fleet(self) -> bool:
        """Make room with a fleet that has no session here; its epochs count for each from then on."""
        if len(self._highest) < self.limits.max_fleets:
            return True
        present = {record.owner.fleet_id for record in self._records.values()}
        absent = next((fleet_id for fleet_id in self._highest if fleet_id not in present), None)
        if absent is None:
            return False
        self._highest_of_any = max(self._highest_of_any, self._highest.pop(absent))
        return True

    def _drop(self, record: Record, refusal: Refusal) -> None:
        self._stop_runs(record, refusal)
        self._context_blocks -= blocks_of(len(record.context))
        del self._records[record.session_id]

    def _fence(self, record: Record, now_ms: int) -> None:
        self._effects.append(Fenced(record.session_id, record.epoch))
        self._stop_runs(record, Refusal(Code.FENCED, detail="the lease ran out"))
        self._context_blocks -= blocks_of(len(record.context))
        record.fence(now_ms + 2 * record.lease_ms)

    def _stop_runs(self, record: Record, refusal: Refusal) -> None:
        for generation_id in sorted(record.runs):
            self._effects.append(Stopped(record.session_id, record.epoch, generation_id, refusal))
        self._runs -= len(record.runs)
