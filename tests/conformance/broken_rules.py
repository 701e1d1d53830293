"""Node rules with one mistake each: what a node's author may get wrong, for the rule that must tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from node_stub.rules import (
    Admission,
    Append,
    Assign,
    CancelOutcome,
    Code,
    Generate,
    Limits,
    Model,
    NodeRules,
    Owner,
    Refusal,
)
from node_stub.rules.record import Record
from node_stub.rules.tombstones import Tombstones

LEASE_MS = 60_000


class ForgetsTheHighestEpoch(NodeRules):
    def highest_epoch(self, fleet_id: str) -> int:
        return 0


class WorksForAnyFleet(NodeRules):
    def fleet_at_work(self, now_ms: int) -> str:
        return ""


class KeepsTheOldContext(NodeRules):
    def assign(self, command: Assign, now_ms: int) -> Refusal | None:
        old = self._records.get(command.session_id)
        refusal = super().assign(command, now_ms)
        if old and refusal is None:
            self._records[command.session_id].context = old.context
        return refusal


class TakesAnEqualEpoch(NodeRules):
    def assign(self, command: Assign, now_ms: int) -> Refusal | None:
        old = self._records.get(command.session_id)
        if old and old.epoch == command.epoch and not old.repeats(command):
            del self._records[command.session_id]
        return super().assign(command, now_ms)


class TakesAnOldEpoch(NodeRules):
    def assign(self, command: Assign, now_ms: int) -> Refusal | None:
        old = self._records.get(command.session_id)
        if old and old.epoch > command.epoch:
            del self._records[command.session_id]
        return super().assign(command, now_ms)


class StopsNothing(NodeRules):
    """What runs goes on, whatever becomes of its session."""

    def _stop_runs(self, record: Record, refusal: Refusal) -> None:
        self._runs -= len(record.runs)

    def judge_emission(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        return None


class AppendsUnderAnyEpoch(NodeRules):
    def append(self, command: Append, now_ms: int) -> Refusal | None:
        if record := self._records.get(command.session_id):
            command = replace(command, epoch=record.epoch)
        return super().append(command, now_ms)


class TellsNoCurrentEpoch(NodeRules):
    def append(self, command: Append, now_ms: int) -> Refusal | None:
        refusal = super().append(command, now_ms)
        return replace(refusal, current_epoch=0) if refusal else None


class AppendsToUnknownSessions(NodeRules):
    def append(self, command: Append, now_ms: int) -> Refusal | None:
        return super().append(command, now_ms) if command.session_id in self._records else None


class ServesAnyModel(NodeRules):
    def assign(self, command: Assign, now_ms: int) -> Refusal | None:
        return super().assign(replace(command, model=next(iter(self._models)), model_revision=""), now_ms)


class RefusesARepeat(NodeRules):
    def append(self, command: Append, now_ms: int) -> Refusal | None:
        record = self._records.get(command.session_id)
        if record and record.repeats(command):
            return Refusal(Code.REPLAYED)
        return super().append(command, now_ms)


class TakesALowerId(NodeRules):
    def append(self, command: Append, now_ms: int) -> Refusal | None:
        record = self._records.get(command.session_id)
        if record and command.command_id < record._last_id:
            command = replace(command, command_id=record._last_id + 1)
        return super().append(command, now_ms)


class TakesAnotherCommandUnderTheSameId(NodeRules):
    def append(self, command: Append, now_ms: int) -> Refusal | None:
        record = self._records.get(command.session_id)
        if record and record.judge(command) and command.command_id == record._last_id:
            record._last_id -= 1
        return super().append(command, now_ms)


class AppendsAtTheEnd(NodeRules):
    """Whatever base_length says."""

    def append(self, command: Append, now_ms: int) -> Refusal | None:
        record = self._records.get(command.session_id)
        if record and command.base_length < len(record.context):
            command = replace(command, base_length=len(record.context))
        return super().append(command, now_ms)


class KeepsWhatThereIs(NodeRules):
    """Where it is to keep more."""

    def append(self, command: Append, now_ms: int) -> Refusal | None:
        record = self._records.get(command.session_id)
        if record and command.base_length > len(record.context):
            command = replace(command, base_length=len(record.context))
        return super().append(command, now_ms)


class _Boundless(NodeRules):
    """Judges by models without some of their bounds, and tells them whole."""

    def __init__(self, models: Sequence[Model], limits: Limits | None = None) -> None:
        super().__init__(models, limits)
        self._told = tuple(models)
        self._models = {model.name: self.without_bound(model) for model in models}

    def without_bound(self, model: Model) -> Model:
        raise NotImplementedError

    def models(self) -> tuple[Model, ...]:
        return self._told


class KnowsNoVocabulary(_Boundless):
    def without_bound(self, model: Model) -> Model:
        return replace(model, vocab_size=0)


class KnowsNoWindow(_Boundless):
    def without_bound(self, model: Model) -> Model:
        return replace(model, max_context_tokens=0)


class IgnoresTheChecksum(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        if record := self._records.get(command.session_id):
            command = replace(command, context_crc32=record.context.crc32)
        return super()._admit(command, now_ms)


class IgnoresTheLength(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        if record := self._records.get(command.session_id):
            command = replace(command, context_length=len(record.context))
        return super()._admit(command, now_ms)


class GeneratesOneTooMany(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        reply = super()._admit(command, now_ms)
        if isinstance(reply, Admission):
            return replace(reply, max_new_tokens=reply.max_new_tokens + 1)
        return reply


class GeneratesBeyondTheWindow(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        reply = super()._admit(command, now_ms)
        if isinstance(reply, Admission):
            return replace(reply, max_new_tokens=command.max_new_tokens)
        return reply


class LetsThePrefixJoin(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        reply = super()._admit(command, now_ms)
        if isinstance(reply, Admission):
            context = self._records[command.session_id].context
            context.replace_tail(len(context), command.prefix_token_ids)
        return reply


class TakesAnyFirstIndex(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        return super()._admit(replace(command, first_index=len(command.prefix_token_ids)), now_ms)


class RunsAGenerationAgain(NodeRules):
    def _admit(self, command: Generate, now_ms: int) -> Admission | Refusal:
        if record := self._records.get(command.session_id):
            record._known.clear()
        return super()._admit(command, now_ms)


class StartsWhatWasCancelled(NodeRules):
    def cancel(self, session_id: str, epoch: int, generation_id: str, now_ms: int) -> CancelOutcome:
        outcome = super().cancel(session_id, epoch, generation_id, now_ms)
        if not outcome.refusal and not outcome.was_running:
            self._records[session_id]._known.pop(generation_id)
        return outcome


class CancelsUnderAnyEpoch(NodeRules):
    def cancel(self, session_id: str, epoch: int, generation_id: str, now_ms: int) -> CancelOutcome:
        record = self._records.get(session_id)
        return super().cancel(session_id, record.epoch if record else epoch, generation_id, now_ms)


class RenewsWhatNeverWas(NodeRules):
    def renew_lease(self, owner: Owner, lease_ms: int, now_ms: int) -> bool:
        super().renew_lease(owner, lease_ms, now_ms)
        return True


class ForgetsToRenew(NodeRules):
    def renew_lease(self, owner: Owner, lease_ms: int, now_ms: int) -> bool:
        return super().renew_lease(owner, lease_ms, now_ms) if lease_ms == 0 else owner in self._leases


class NeverFences(NodeRules):
    def expire(self, now_ms: int) -> None:
        pass


class RenewsWhatRanOut(NodeRules):
    def renew_lease(self, owner: Owner, lease_ms: int, now_ms: int) -> bool:
        self.expire(now_ms)
        if lease_ms and owner not in self._leases:
            self._leases.start(owner, lease_ms, now_ms)
            for record in self._records.values():
                record.fenced &= record.owner != owner
        return super().renew_lease(owner, lease_ms, now_ms)


class NeverEndsALease(NodeRules):
    def renew_lease(self, owner: Owner, lease_ms: int, now_ms: int) -> bool:
        return super().renew_lease(owner, lease_ms or LEASE_MS, now_ms)


class HasOneLeaseForAHead(NodeRules):
    def renew_lease(self, owner: Owner, lease_ms: int, now_ms: int) -> bool:
        for other in list(self._leases._ends_ms):
            if (other.fleet_id, other.head_id) == (owner.fleet_id, owner.head_id):
                self._leases.start(other, lease_ms, now_ms)
        return super().renew_lease(owner, lease_ms, now_ms)


class FreesWithAnOldEpoch(NodeRules):
    def assign(self, command: Assign, now_ms: int) -> Refusal | None:
        self.expire(now_ms)
        old = self._records.get(command.session_id)
        if old and old.fenced:
            del self._records[command.session_id]
        return super().assign(command, now_ms)


class KeepsWhatIsRevoked(NodeRules):
    def revoke(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        return None


class RevokesUnderAnyEpoch(NodeRules):
    def revoke(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        record = self._records.get(session_id)
        return super().revoke(session_id, max(epoch, record.epoch if record else 0), now_ms)


class _NoTombstones(Tombstones):
    def bury(self, session_id: str, epoch: int, expires_ms: int, now_ms: int) -> None:
        pass


class ForgetsTombstones(NodeRules):
    def __init__(self, models: Sequence[Model], limits: Limits | None = None) -> None:
        super().__init__(models, limits)
        self._tombstones = _NoTombstones(1)


class BarsNothingUnknown(NodeRules):
    def revoke(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        if session_id not in self._records:
            return Refusal(Code.UNKNOWN_SESSION)
        return super().revoke(session_id, epoch, now_ms)


class _ShortTombstones(Tombstones):
    def bury(self, session_id: str, epoch: int, expires_ms: int, now_ms: int) -> None:
        super().bury(session_id, epoch, now_ms + (expires_ms - now_ms) // 2, now_ms)


class KeepsTombstonesForOneLease(NodeRules):
    def __init__(self, models: Sequence[Model], limits: Limits | None = None) -> None:
        super().__init__(models, limits)
        self._tombstones = _ShortTombstones(1_000)


class FreesNothing(NeverEndsALease):
    """Neither a revoke nor the end of a lease."""

    def revoke(self, session_id: str, epoch: int, now_ms: int) -> Refusal | None:
        return None
