"""The checks that go on while a simulation runs: what nodes execute, how generations go, and how they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fleet_service.domain.commands import Run
from fleet_service.domain.errors import Reason
from fleet_service.domain.events import Finished, FinishReason
from fleet_service.runtime.generation import FIRST_READER_S
from fleet_service.runtime.observer import FleetObserver, GenerationInfo
from node_stub import rules
from node_stub.reference import effective_seed
from tests.sim.explain import (
    AFTERMATH_S,
    EXPLAINED_BY_RESTART,
    EXPLAINED_BY_STANDSTILL,
    EXPLAINED_BY_STRIKE,
    EXPLAINED_BY_TROUBLE,
    FREE_FAILURES,
    MAX_ATTEMPTS,
    MAX_KILLS_AT_ONE_INDEX,
    MAX_PLACED_AT_ONCE,
    MAX_SAME_FAILURES,
    Trouble,
)
from tests.sim.lives import Lives
from tests.sim.loop import StepLimitError
from tests.sim.network import RunKey
from tests.sim.nodes import NodeProcess, SimMachine
from tests.sim.records import Plan, Record, right_end
from tests.sim.staying import Disturbances
from tests.sim.stores import SimStore
from tests.sim.story import Story
from tests.sim.watching import HeadWatch


class Oracle(Lives):
    """Collects violations. It watches the heads, one after the other, and is the nodes' overseer."""

    def __init__(
        self,
        clock: Callable[[], float],
        story: Story,
        on_violation: Callable[[], None],
        store: SimStore | None = None,
    ) -> None:
        super().__init__(clock, store)
        self._on_violation = on_violation
        self.story = story
        self._runs: dict[tuple[str, int, str], Record] = {}  # whose each is, by incarnation, epoch, id
        self._admissions: set[tuple[str, int, str, int]] = set()
        self.troubles: dict[str, Trouble] = {}
        self.wire_trouble = Trouble()
        self.struck_kinds: Counter[str] = Counter()
        self.lost_appends: Counter[str] = Counter()  # by session
        self.finishes: Counter[FinishReason] = Counter()
        self.moves = 0
        self.started = 0
        # Set by the world: what is wrong with an ERROR, or a failure, given which nodes are there.
        self.judge_placement: Callable[[Record, Reason], None] = lambda _record, _reason: None
        self.judge_failure: Callable[[Record, str, int, str, int], None] = lambda *_: None

    def violation(self, text: str) -> None:
        self.violations.append(f"at {self._clock():.4f} s: {text}")
        self.story.note("* VIOLATION %s", text)
        self._on_violation()

    def trouble_of(self, node: str) -> Trouble:
        return self.troubles.setdefault(node, Trouble())

    def met(self, what: str) -> None:
        self.struck_kinds[what] += 1

    # The head's observer

    def watch(self) -> FleetObserver:
        """The observer of the head that begins to live now."""
        return HeadWatch(self, self.lives)

    def generation_started(self, info: GenerationInfo, parent: object | None) -> Record:
        now_s = self._clock()
        if parent is None and self.store is not None and info.generation_id in self.records:
            return self._taken_up(info)
        if not isinstance(parent, Plan):
            self.violation(f"{info.generation_id} was started, and no caller asked for it")
            raise TypeError(info)
        if info.generation_id in self.records:
            self.violation(f"{info.generation_id} was started twice")
        if any(record.plan is parent for record in self.records.values()):
            self.violation(f"{info.generation_id} is a second generation of one request")
        record = Record(
            info.generation_id,
            info.session_id,
            parent,
            now_s,
            parent.seed,
            None if parent.revision_open else parent.model,
            info.max_new_tokens,
            life=self.lives,
            first_life=self.lives,
            behind_s=self._behind_s,
        )
        self.records[info.generation_id] = record
        self.started += 1
        if parent.cancelled_before:
            record.cancel_asked_s = now_s
            # A clock that jumps may have had it forgotten.
            record.cancel_waits_s = now_s if parent.cancelled_behind_s == self._behind_s else None
        wanted = (len(parent.context), parent.max_new_tokens, parent.wall_s)
        if (info.context_tokens, info.max_new_tokens, info.max_wall_s) != wanted and (
            len(parent.context) + info.max_new_tokens not in parent.windows
        ):
            self.violation(f"{info} is not what was asked for: {wanted}")
        self.story.note(
            "%s of %s (%s) accepted: %d context tokens, at most %d new, %.2f s",
            info.generation_id, info.session_id, parent.session_label, info.context_tokens,
            info.max_new_tokens, info.max_wall_s,
        )  # fmt: skip
        return record

    # The nodes' overseer

    def run_admitted(self, process: NodeProcess, run: Run, admission: rules.Admission) -> None:
        node, record = process.machine.profile.name, self.record_of(run.generation_id, run.epoch)
        # A head that goes on under an earlier one's epoch may find that the node has dropped the run.
        admission_key = (process.incarnation, run.epoch, run.generation_id, self.lives)
        if admission_key in self._admissions:
            self.violation(f"{run.generation_id} is prefilled twice on {node} under one epoch")
        self._admissions.add(admission_key)
        if record is None:
            self.violation(f"{node} was asked for {run.generation_id}, which nobody asked the head for")
            return
        record.admitted.append((node, run.first_index))
        self._runs[process.incarnation, run.epoch, run.generation_id] = record
        seed = effective_seed(admission.sampling.temperature, admission.sampling.seed)
        if record.seed is None:
            record.seed = seed
            if seed == 0:
                self.violation(f"{run.generation_id} is sampled without a seed")
        elif record.seed != seed:
            self.violation(f"{run.generation_id} runs on {node} with seed {seed}, not {record.seed}")
        model = next(m for m in process.machine.profile.models if m.name == admission.model.name)
        record.model = record.model or model
        if record.model != model:
            self.violation(f"{run.generation_id} of {record.model} goes on with {model} on {node}")
        expected = record.expected
        assert expected is not None
        right = (*record.plan.context, *expected.token_ids[: run.first_index])
        if tuple(admission.prompt_token_ids) != right:
            self.violation(
                f"{run.generation_id} runs on {node} on a wrong context: "
                f"{_difference(tuple(admission.prompt_token_ids), right)}"
            )
        if run.first_index + run.max_new_tokens > record.limit:
            self.violation(f"{run.generation_id} may give {run.max_new_tokens} more after {run.first_index}")
        if run.first_index >= len(expected.token_ids):
            self.violation(f"{run.generation_id} runs on {node}, and all of its output was delivered")
        self._check_binding(process, run)
        self.story.note(
            "%s: %s admitted, epoch %d, from index %d", node, run.generation_id, run.epoch & 0xFFFFFFFF,
            run.first_index,
        )  # fmt: skip

    def _check_binding(self, process: NodeProcess, run: Run) -> None:
        for holding in process.rules.holdings():
            if holding.session_id == run.session_id and holding.context_length != run.context_length:
                self.violation(
                    f"{run.session_id} holds {holding.context_length} tokens, not {run.context_length}"
                )

    def run_taken_up(self, process: NodeProcess, run: Run) -> None:
        node, record = process.machine.profile.name, self.record_of(run.generation_id, run.epoch)
        self.met("a run is taken up")
        self.story.note("%s: %s goes on at index %d", node, run.generation_id, run.first_index)
        if record is not self._runs.get((process.incarnation, run.epoch, run.generation_id)):
            self.violation(f"{run.generation_id} on {node} is of a request that was taken and not kept")
        if record is None or record.expected is None:
            self.violation(f"{run.generation_id} is taken up on {node}, which nobody asked the head for")
        elif tuple(run.prefix_token_ids) != record.expected.token_ids[: run.first_index]:
            self.violation(f"{run.generation_id} is taken up on {node} behind a wrong prefix")

    def asked(self, run: Run, received: int) -> None:
        """The head asks for a run, having `received` tokens."""
        if run.first_index != received:
            self.violation(
                f"{run.generation_id} is asked for from index {run.first_index}, {received} is next"
            )

    def struck(self, machine: SimMachine, fault: str, run: RunKey | None = None) -> None:
        """A fault happened to a node, at once over."""
        name, (session_id, epoch, generation_id) = machine.profile.name, run or ("", 0, "")
        self.story.note("* %s: %s %s", name, fault, f"({generation_id})" if generation_id else "")
        self.struck_kinds[fault] += 1
        trouble = self.trouble_of(name)
        trouble.last_s = self._clock()
        trouble.count += 1
        if "die" in fault or "kill" in fault or "link" in fault or "stopped" in fault:
            trouble.losses.append(self._clock())
        record = self.record_of(generation_id, epoch)
        if "append" in fault:
            self.lost_appends[session_id] += 1
        if record is not None:
            record.strikes[fault] += 1
        if record is not None and "engine" in fault:
            record.engine_failures += 1
        # What a head that died had asked for, the next one cannot hold against the request.
        if record is not None and "kills" in fault and self.is_of_this_head(session_id, epoch):
            first_index = next((i for node, i in reversed(record.admitted) if node == name), 0)
            assert record.plan.kills_at is not None
            record.kills.append((first_index, record.plan.kills_at))
            at_once = sum(1 for first, index in record.kills if first == index)
            if at_once > MAX_KILLS_AT_ONE_INDEX:
                self.violation(f"{generation_id} has killed {at_once} nodes at one index")

    def lasts(self, node: str, change: int) -> None:
        """A disturbance that lasts has begun (+1) or ended (-1)."""
        trouble = self.trouble_of(node)
        trouble.lasting += change
        trouble.last_s = self._clock()
        trouble.count += 1
        trouble.losses.append(self._clock())

    def engine_fails_at(self, run: RunKey) -> int | None:
        record = self.record_of(run[2], run[1])
        return None if record is None else record.plan.engine_fails_at

    def kills_at(self, run: RunKey) -> int | None:
        record = self.record_of(run[2], run[1])
        return None if record is None else record.plan.kills_at

    def check_pace(self, record: Record) -> None:
        """A head that places one generation for ever without a pause freezes; this gets it out of there."""
        now_s = self._clock()
        if record.placed_s != now_s:
            record.placed_s, record.placed_at_once = now_s, 0
        record.placed_at_once += 1
        if record.placed_at_once > MAX_PLACED_AT_ONCE:
            self.violation(f"{record.generation_id} is placed for ever, and no time passes")
            raise StepLimitError(record.generation_id)

    # Ends

    def ended(self, record: Record, finished: Finished) -> None:
        now_s = self._clock()
        self.finishes[finished.reason] += 1
        cause = f" ({finished.error.reason})" if finished.error else ""
        self.story.note(
            "%s finished: %s%s after %d tokens, %d attempts", record.generation_id, finished.reason.value,
            cause, finished.output_tokens, finished.attempts,
        )  # fmt: skip
        if record.finished is not None:
            self.violation(f"{record.generation_id}: a second terminal event, {finished}")
            return
        record.finished, record.finished_s = finished, now_s
        if self.overdue(record.deadline_s, now_s):
            self.violation(f"{record.generation_id} ended {now_s - record.deadline_s:.3f} s too late")
        nobody_came = record.readers_seen == 0 and record.abandoned_s is None
        if nobody_came and self.ran_for(now_s) < FIRST_READER_S:
            record.abandoned_s = now_s  # the head stood still until its patience with the caller was out
        wrong = right_end(record, finished, now_s) or self._wrong_error(record, finished)
        if wrong is not None:
            self.violation(f"{record.generation_id} {wrong}")
        if finished.attempts != record.attempts:
            self.violation(f"{record.generation_id} says {finished.attempts} attempts of {record.attempts}")

    def _wrong_error(self, record: Record, finished: Finished) -> str | None:
        """Whether what befell the generation explains its ERROR (rule 7)."""
        if finished.error is None:
            return None
        reason, classes = finished.error.reason, [kind for _, kind, _ in record.failures]
        match reason:
            case Reason.POISON_REQUEST:
                if self.losses_since(record.accepted_s) < 2:
                    return "is called poison, and fewer than two nodes were lost"
            case Reason.ATTEMPTS_EXHAUSTED:
                costly = [kind for kind in classes if kind not in FREE_FAILURES]
                if len(costly) < MAX_ATTEMPTS:
                    return f"gave up after {classes}"
            case Reason.ENGINE_ERROR:
                if record.engine_failures == 0:
                    return "ended with ENGINE_ERROR, and no engine failed"
            case Reason.NODE_LOST:
                if not record.plan.replay_never:
                    return "ended with NODE_LOST, and it may be replayed"
            case (
                Reason.NO_ELIGIBLE_NODE
                | Reason.FLEET_SATURATED
                | Reason.CONTEXT_TOO_LONG
                | Reason.MODEL_NOT_FOUND
                | Reason.MODEL_UNPLACEABLE
            ):
                self.judge_placement(record, reason)
            case _:
                return f"ended with {reason}"
        return None

    def winding_down(self, now_s: float) -> list[str]:
        """Generations decided in this very moment, which may not have let go yet."""
        return [id_ for id_, record in self.records.items() if record.finished and record.finished_s >= now_s]

    def losses_since(self, since_s: float) -> int:
        """Losses of nodes that a generation accepted then may have met."""
        return sum(
            1 for trouble in self.troubles.values() for at_s in trouble.losses if at_s > since_s - AFTERMATH_S
        ) + sum(1 for at_s in self.wire_trouble.losses if at_s > since_s - AFTERMATH_S)

    def attempt_begins(self, record: Record, node: str, epoch: int) -> None:
        record.attempts += 1
        record.epochs.add(epoch)
        if record.finished is not None:
            self.violation(f"{record.generation_id} is tried on {node} after its end")
        self._check_epoch(record, node, self.process_of(node), epoch)
        now_s = self._clock()
        quiet = self.wire_trouble.quiet(now_s) and self.trouble_of(node).quiet(now_s)
        quiet = quiet and self.ran_for(now_s) > AFTERMATH_S
        befallen = self._disturbances(node) if quiet and record.attempts == 1 else None
        if self.staying.has_left(record.session_id, node, epoch, now_s, befallen):
            self.violation(f"{record.session_id} is bound anew on {node}, and nothing befell it")

    def answered(self, record: Record, node: str, epoch: int) -> None:
        """An attempt has ended, and it did not fail."""
        self.staying.answered(record.session_id, node, epoch, self._clock(), self._disturbances(node))

    def _disturbances(self, node: str) -> Disturbances:
        return self.trouble_of(node).count, self.wire_trouble.count, len(self.standstills)

    def attempt_over(self, record: Record, node: str, epoch: int, failure: str | None, index: int) -> None:
        if failure is None:
            return
        record.failures.append((node, failure, index))
        self.judge_failure(record, node, epoch, failure, index)
        stale = epoch in self._adopted and failure in EXPLAINED_BY_RESTART
        if not stale and not self._explained(record, node, failure):
            self.violation(f"{record.generation_id}: {failure} on {node}, and nothing explains it")
        lately = record.failures[record.failed_before :]
        same = sum(1 for each in lately[-MAX_SAME_FAILURES - 1 :] if each == (node, failure, index))
        if failure != "busy" and same > MAX_SAME_FAILURES:
            self.violation(
                f"{record.generation_id} has failed on {node} with {failure} {same} times in a row"
            )
        without_progress = 0
        for _, kind, at_index in reversed(lately):
            if at_index != index:
                break
            without_progress += kind not in FREE_FAILURES
        # The attempt that reached this index is the first of those that did not get past it.
        if without_progress > MAX_ATTEMPTS + (1 if index > 0 else 0):
            self.violation(f"{record.generation_id} had {without_progress} attempts at index {index}")

    def _explained(self, record: Record, node: str, failure: str) -> bool:
        now_s = self._clock()
        if failure == "unknown_session" and self.ran_for(now_s) < AFTERMATH_S:
            return True  # while the head stood still its lease ran out, and the room was needed
        if failure in EXPLAINED_BY_STRIKE:
            return record.strikes[EXPLAINED_BY_STRIKE[failure]] > 0
        if failure in EXPLAINED_BY_TROUBLE:
            within_s = EXPLAINED_BY_TROUBLE[failure]
            if failure in EXPLAINED_BY_STANDSTILL and self.ran_for(now_s) < within_s:
                return True
            troubles = (self.trouble_of(node), self.wire_trouble)
            return not all(trouble.quiet(now_s, within_s) for trouble in troubles)
        match failure:
            case "engine_error":
                return record.engine_failures > 0
            case "context_mismatch":
                return self.lost_appends[record.session_id] > 0 or not self.wire_trouble.quiet(now_s, 60.0)
            case _:
                return failure in FREE_FAILURES


def _difference(got: tuple[int, ...], right: tuple[int, ...]) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right))
    )
    return f"{len(got)} tokens, right are {len(right)}; the first difference is at {at}: {got[at : at + 4]}"
