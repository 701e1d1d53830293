"""What the checks know of the lives of heads, one after the other: what each has, and hands on.

A generation that the store has outlives its head; so does the binding that it has for a session, and a revoke
that is owed. All else ends with the head, and no epoch is used by two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleet_service.domain.epochs import term_of
from fleet_service.domain.errors import FleetError
from fleet_service.runtime.driver import OLD_NODE_S
from fleet_service.runtime.head import Head
from fleet_service.runtime.observer import GenerationInfo
from fleet_service.runtime.records import SessionBound
from tests.sim.nodes import NodeProcess
from tests.sim.records import Record
from tests.sim.staying import Staying
from tests.sim.stores import SimStore
from tests.sim.telling import Telling
from tests.sim.transcripts import Transcript

_MOMENT_S = 0.002


class Lives:
    """The part of the oracle that outlives heads."""

    def __init__(self, clock: Callable[[], float], store: SimStore | None) -> None:
        self._clock = clock
        self.store = store
        self.telling = None if store is None else Telling(store, clock, self.violation, self.met)
        self.violations: list[str] = []
        self.records: dict[str, Record] = {}  # of the head that lives, and what it is to take up
        self.lives = 1  # of heads, so far
        self.staying = Staying()
        self.standstills: list[tuple[float, float]] = []  # when the head did not run: from, to
        self._earlier: dict[tuple[str, int], Record] = {}  # of heads that died: by generation, epoch
        self._seen: dict[str, int] = {}  # by incarnation, the highest epoch it had seen when a head died
        self._epochs: set[int] = set()  # of the head that lives
        self._bindings: set[tuple[str, int]] = set()  # of the head that lives: session, epoch
        self._issued: dict[int, str] = {}  # epochs of all heads, and their sessions
        self._adopted: set[int] = set()  # epochs of earlier heads that the head that lives goes on under
        self._bound: dict[str, SessionBound] = {}  # as it was kept when the head that lives began
        self._owed: set[tuple[str, str, str, int]] = set()  # revokes, as it was kept then
        self._highest_term = 0
        # Set by the world: whom the head has a link to, and whether that told of a session as the link began.
        self.process_of: Callable[[str], NodeProcess | None] = lambda _node: None
        self.can_tell: Callable[[str, tuple[str, int]], bool] = lambda _node, _found: False
        self._behind_s = 0.0

    def violation(self, text: str) -> None:
        raise NotImplementedError

    def met(self, what: str) -> None:
        """Something worth counting happened."""
        raise NotImplementedError

    def record_of(self, generation_id: str, epoch: int) -> Record | None:
        """The generation that a run under that epoch is of, of whichever head."""
        record = self.records.get(generation_id)
        if record is not None and epoch in record.epochs:
            return record
        return self._earlier.get((generation_id, epoch))

    # Heads

    def head_died(self, processes: Iterable[NodeProcess], fleet_id: str, kept_s: float) -> None:
        """Nothing that the head did from here on counts, and generations break off that are not kept.

        All that it put before `kept_s` is.
        """
        self.lives += 1
        if self.telling is not None:
            self.telling.head_died(kept_s)
        kept: dict[str, Record] = {}
        for record in self.records.values():
            self._earlier |= dict.fromkeys(((record.generation_id, epoch) for epoch in record.epochs), record)
            saved = None if self.store is None else self.store.kept(record.generation_id)
            if self.telling is not None:
                self.telling.judge(record, saved, kept_s, self.lives)
            if saved is not None:
                record.breaks_off(saved)
                kept[record.generation_id] = record
        self.records = kept
        self._epochs.clear()
        self._bindings.clear()
        self._adopted.clear()
        self.staying = Staying()
        for process in processes:
            self._seen[process.incarnation] = process.rules.highest_epoch(fleet_id)

    def head_begins(self, behind_s: float, *, tells_ahead: bool) -> None:
        """The next one is made now; its clock is so much behind."""
        self._behind_s = behind_s
        if self.telling is not None:
            self.telling.ahead = tells_ahead
        if self.store is not None:
            self._bound = {
                name: saved.bound for name, saved in self.store.saved.sessions.items() if saved.bound
            }
            self._owed = set(self.store.saved.revokes)

    def head_has_begun(self, head: Head) -> None:
        """It is made, and has taken up what there is."""
        for record in self.records.values():
            try:
                log = head.find_generation(record.generation_id).log
            except FleetError:
                self.violation(f"{record.generation_id} is kept, and the head knows nothing of it")
                continue
            if record.finished is not None and record.life == 0:
                record.taken_up(self.lives, self._clock(), self._behind_s)
                if (log.finished, log.received) != (record.finished, record.finished.output_tokens):
                    self.violation(f"{record.generation_id} ended as {record.finished}, now {log.finished}")
            elif record.life != self.lives:
                self.violation(f"{record.generation_id} is kept, and the head does not go on with it")

    def callers_may_come(self) -> None:
        """From now on readers can attach to it."""
        for record in self.records.values():
            if record.abandoned_s is not None and record.readers_seen == 0:
                record.abandoned_s = self._clock()

    def has_term(self, term: int) -> None:
        """A head begins in that term."""
        if term <= self._highest_term:
            self.violation(f"a head begins in term {term}, and there was {self._highest_term}")
        self._highest_term = max(self._highest_term, term)

    def is_of_this_head(self, session_id: str, epoch: int) -> bool:
        """Two heads may use one epoch, where nothing is kept and no node has told: for other sessions."""
        return (session_id, epoch) in self._bindings

    def is_owed(self, node: str, incarnation: str, session_id: str, epoch: int) -> bool:
        """An earlier head owed the node the revoke of that, and the one that lives knows it."""
        return (node, incarnation, session_id, epoch) in self._owed

    # Standstills

    def stood_still(self, from_s: float, to_s: float) -> None:
        """The head did not run meanwhile."""
        if self.standstills and self.standstills[-1][1] == float("inf"):
            self.standstills.pop()
        self.standstills.append((from_s, to_s))

    def stands_still_from(self, from_s: float) -> None:
        """No head runs now, and what was done since then is lost."""
        self.stood_still(from_s, float("inf"))

    def overdue(self, due_s: float, now_s: float) -> bool:
        """Whether what was due ought to have happened; the head cannot act while it stands still."""
        if now_s <= due_s + _MOMENT_S:
            return False
        return not any(
            began_s <= due_s + _MOMENT_S and now_s <= ended_s + _MOMENT_S
            for began_s, ended_s in self.standstills
        )

    def ran_for(self, now_s: float) -> float:
        """How long the head has run without standing still, in seconds."""
        return now_s - max((ended_s for _, ended_s in self.standstills), default=-1e9)

    # Generations

    def transcript(self, record: Record, name: str, from_index: int, branch: int = 0) -> Transcript:
        """What one reader of it is to get."""
        return Transcript(record, name, from_index, self.violation, self.telling, branch)

    def _taken_up(self, info: GenerationInfo) -> Record:
        """A head that begins has a generation of an earlier one."""
        record = self.records.get(info.generation_id)
        if record is None or record.life == self.lives:
            self.violation(f"{info.generation_id} was started, and no caller asked for it")
            raise TypeError(info)
        record.taken_up(self.lives, self._clock(), self._behind_s)
        if record.finished is None:
            plan = record.plan
            wanted = (len(plan.context), record.limit, plan.wall_s)
            if (info.context_tokens, info.max_new_tokens, info.max_wall_s) != wanted:
                self.violation(f"{info} is not what was taken up: {wanted}")
        return record

    # Epochs

    def _check_epoch(self, record: Record, node: str, process: NodeProcess | None, epoch: int) -> None:
        """An attempt begins under it: it is the head's own, or that of the binding that is kept."""
        if epoch not in self._epochs and self.store is not None:
            if self._is_kept(record.session_id, node, process, epoch):
                self._adopted.add(epoch)
            elif self._issued.get(epoch) is not None:
                self.violation(f"{record.generation_id} is tried on {node} under epoch {epoch}, used before")
            elif term_of(epoch) < self._highest_term:
                self.violation(f"{record.generation_id} is tried on {node} under a term of an earlier head")
        if self.store is not None and self._issued.setdefault(epoch, record.session_id) != record.session_id:
            self.violation(f"epoch {epoch} is of {self._issued[epoch]} and {record.session_id}")
        self._epochs.add(epoch)
        self._bindings.add((record.session_id, epoch))
        if record.tries_again and epoch not in self._adopted:
            self._check_given_up(record)
        record.tries_again = False
        seen = 0 if process is None else self._seen.get(process.incarnation, 0)
        if epoch <= seen and epoch not in self._adopted:
            self.violation(f"{record.generation_id} is tried on {node} under an epoch of an earlier head")

    def _check_given_up(self, record: Record) -> None:
        """The head that took it up begins elsewhere, or anew: the node that had it must have lost it."""
        bound = self._bound.get(record.session_id)
        process = None if bound is None else self.process_of(bound.node)
        if bound is None or process is None or process.incarnation != bound.incarnation or self.store is None:
            return
        if record.taken_up_s is None or self._clock() - record.taken_up_s >= OLD_NODE_S:
            return
        kept, found = self.store.kept(record.generation_id), (record.session_id, bound.epoch)
        if any(run[:2] == found and run[2] not in self.records for run in process.runs(kept=True)):
            return  # another run of the session went with the head that died
        index = 0 if kept is None else len(kept.token_ids)
        if self.can_tell(bound.node, found) and process.could_take_up(
            record.generation_id, bound.epoch, index
        ):
            self.violation(
                f"{record.generation_id} is given up on {bound.node}, which could go on at {index}"
            )

    def sent_elsewhere(self, generation_id: str) -> None:
        """It waits for a lane where it was, and its link broke, or it would be done much sooner elsewhere."""
        if generation_id in self.records:
            self.records[generation_id].tries_again = False

    def _is_kept(self, session_id: str, node: str, process: NodeProcess | None, epoch: int) -> bool:
        """Whether the session was kept as bound just so. `process` None: it has gone meanwhile."""
        bound = self._bound.get(session_id)
        if bound is None or epoch not in self._issued:
            return False
        incarnation = bound.incarnation if process is None else process.incarnation
        return (bound.node, bound.incarnation, bound.epoch) == (node, incarnation, epoch)
