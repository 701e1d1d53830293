"""The checks that look at a whole fleet: at every tick, at rest, and when a head says that it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from fleet_service.domain.commands import Revoke
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import Feature, NodeState
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.head import Head
from fleet_service.runtime.node import Node
from fleet_service.runtime.recovery import ENDED
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.views import NodeInfo
from tests.sim.clones import Clones
from tests.sim.explain import AFTERMATH_S, held_for_doubt
from tests.sim.heads import Heads
from tests.sim.links import SimLink
from tests.sim.loop import SimLoop
from tests.sim.network import SimNetwork
from tests.sim.nodes import NodeProcess, SimMachine
from tests.sim.oracle import Oracle
from tests.sim.owing import Owing
from tests.sim.records import Record
from tests.sim.stores import SimStore
from tests.sim.strikes import Strikes

_PERIOD_S = 0.7
# How long a node may still run what was decided: a hang-up's way, and how late an end is noticed.
_RUN_ON_S = 3.0
# How long a node that can be reached may hold what its head does not mean it to.
_ORPHANED_S = 3.0
_LONG_WALL_S = 300.0
# How long a head that has just started may lack nodes that dial in.
_SETTLED_S = 3.0
# Why a head may drop a link that is whole.
_DROPPED_FOR = (
    "the node dialed in anew",
    "another run of the node has replaced it",
    "tokens came under epoch",
)
# Failures that are no fault of a node, and must not be held against it (rule 7).
_NO_FAULT = frozenset({"busy", "context_too_long", "constraint", "fenced", "unknown_session", "evicted"})


class Fleet(Protocol):
    """What is looked at. `everyone`: the machines, and what clones there are."""

    loop: SimLoop
    oracle: Oracle
    settings: HeadSettings
    network: SimNetwork
    machines: list[SimMachine]
    everyone: list[SimMachine]
    heads: Heads
    strikes: Strikes
    clones: Clones
    store: SimStore | None

    def living_head(self) -> Head | None: ...


class FleetChecks:
    """Looks at `fleet`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._oracle = fleet.oracle
        self._unmeant: dict[tuple[str, str, int], float] = {}
        self._owing = Owing(fleet.store, fleet.loop.time, fleet.oracle.violation)
        fleet.oracle.judge_placement = self._judge_placement
        fleet.oracle.judge_failure = self._judge_failure
        fleet.oracle.process_of = self.process_of
        fleet.oracle.can_tell = self._can_tell

    @property
    def _now_s(self) -> float:
        return self._fleet.loop.time()

    def process_of(self, node: str) -> NodeProcess | None:
        """Whom the head has a link to under that name."""
        head = self._fleet.living_head()
        known = head.fleet.named(node) if head is not None else None
        return None if known is None else self._process_behind(known)

    def _can_tell(self, name: str, found: tuple[str, int]) -> bool:
        """Whether the node has told the head that lives that it holds this."""
        head = self._fleet.living_head()
        node = head.fleet.named(name) if head is not None else None
        if node is None or not isinstance(node.link, SimLink) or not node.usable or not node.link.whole:
            return False
        return Feature.RECONCILE in node.features and node.link.resumes and found in node.link.found

    def _process_behind(self, node: Node) -> NodeProcess | None:
        link = node.link
        machine = link.machine if isinstance(link, SimLink) else None
        process = machine.process if isinstance(machine, SimMachine) else None
        return process if isinstance(link, SimLink) and process is link.process else None

    def _undisturbed(self, node: str) -> bool:
        """Nothing has befallen the node for a while, nor the head."""
        now_s = self._now_s
        settled = self._oracle.ran_for(now_s) > AFTERMATH_S and now_s - self._fleet.heads.since_s > _SETTLED_S
        return settled and self._oracle.trouble_of(node).quiet(now_s)

    # Refusals and failures

    def check_refusal(self, error: FleetError, spec: SessionSpec, context_tokens: int) -> None:
        """Whether the nodes, as they are, explain the refusal."""
        serving = [machine for machine in self._fleet.machines if _serves(machine, spec)]
        # One that was removed, or added again while it is down, is not known for what it is.
        known = [machine for machine in serving if self._undisturbed(machine.profile.name)]
        match error.reason:
            case Reason.NO_ELIGIBLE_NODE | Reason.FLEET_SATURATED:
                well = [m.profile.name for m in serving if self._could_take(m, error.reason, context_tokens)]
                if well:
                    self._oracle.violation(f"{error}; but {well} could have taken {context_tokens} tokens")
            case Reason.CONTEXT_TOO_LONG:
                if any(m.profile.max_context_tokens >= context_tokens for m in known):
                    self._oracle.violation(f"{error}; but there is a wider node")
            case Reason.MODEL_NOT_FOUND | Reason.MODEL_UNPLACEABLE:
                if known:
                    self._oracle.violation(f"{error}; but there is one")
            case _:
                self._oracle.violation(f"a caller was refused with {error}")

    def _judge_placement(self, record: Record, reason: Reason) -> None:
        if reason is Reason.CONTEXT_TOO_LONG or record.model is None:
            return
        spec = SessionSpec(model=record.model.name, model_revision=record.model.revision)
        error = FleetError(reason, f"{record.generation_id} ended with ERROR")
        if not record.plan.selector:
            self.check_refusal(error, spec, len(record.plan.context) + record.limit)

    def _could_take(self, machine: SimMachine, reason: Reason, context_tokens: int) -> bool:
        name, profile, strikes = machine.profile.name, machine.profile, self._fleet.strikes
        if reason is Reason.FLEET_SATURATED and (
            self._fleet.settings.queue_limit_per_node < 100
            or profile.limits.max_sessions < 100
            or profile.limits.kv_blocks_total
            or not self._oracle.wire_trouble.quiet(self._now_s)  # a ping may have been lost
        ):
            return False
        return (
            machine.process is not None
            and self._undisturbed(name)
            # What a node is asked at a handshake may get lost as well.
            and (self._oracle.wire_trouble.quiet(self._now_s) or self.process_of(name) is not None)
            and name not in strikes.cordoned
            and name not in strikes.removed
            and profile.max_context_tokens >= context_tokens
        )

    def _judge_failure(self, record: Record, name: str, epoch: int, failure: str, index: int) -> None:
        head = self._fleet.living_head()
        node = head.fleet.named(name) if head is not None else None
        if head is None or node is None or not isinstance(node.link, SimLink):
            return
        if failure == "link_lost":
            process = self._process_behind(node)
            if node.usable and process and process.could_take_up(record.generation_id, epoch, index):
                self._oracle.violation(
                    f"{record.generation_id} is given up on {name}, which is back and could go on at {index}"
                )
        elif failure == "node_silent":
            silence_s = self._fleet.settings.silence_s
            if self._oracle.ran_for(self._now_s) < 4.0 * silence_s:
                return  # what it heard before it stood still it may have heard in any order
            links = [each.link for each in head.fleet.nodes if isinstance(each.link, SimLink)]
            held = held_for_doubt(node.link.hearing, [link.hearing for link in links], silence_s, self._now_s)
            if held is not None:
                self._oracle.violation(f"{record.generation_id} leaves {name} for its silence, but {held}")

    # Links

    def linked(self, link: SimLink) -> None:
        """A link has opened."""
        earlier = [each for each in link.found if not self._oracle.is_of_this_head(*each)]
        if earlier and Feature.RECONCILE in link.hello.features:
            self._oracle.met("a node holds what an earlier head left")

    def revoking(self, link: SimLink, command: Revoke) -> None:
        """The head sends a revoke."""
        hello = link.hello
        if self._oracle.is_owed(hello.identity, hello.incarnation, command.session_id, command.epoch):
            self._oracle.met("a revoke that an earlier head owed is sent")
        head = self._fleet.living_head()
        try:
            binding = head.sessions.get(command.session_id).binding if head is not None else None
        except FleetError:
            return
        if binding is not None and binding.node.link is link and binding.epoch == command.epoch:
            self._oracle.violation(f"{command.session_id} is revoked where it is bound")

    def link_lost(self, name: str, error: str) -> None:
        """The head says that it has lost the link to a node."""
        head = self._fleet.living_head()
        node = head.fleet.named(name) if head is not None else None
        # One that is being removed has its name still, and another may have it already.
        if node is None or name in self._fleet.strikes.removed or error.startswith(_DROPPED_FOR):
            return
        for link in self._fleet.network.links:
            if link.whole and link.attached and link.hello.incarnation == node.incarnation:
                self._oracle.violation(
                    f"the link to {name} is dropped ({error}), and nothing is wrong with it"
                )

    # At every tick

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            head = self._fleet.living_head()
            if head is None or not self._fleet.heads.up.is_set():
                continue
            for info in head.operators.list_nodes():
                self._check_node(info)
            for node in head.fleet.nodes:
                if not head.fleet.pool.is_current(node):
                    self._oracle.violation(f"{node.name} is not placed by what it is now")
                self._fleet.clones.check(node)
                self._owing.check(node)
                self._check_held(head, node)
            for machine in self._fleet.everyone:
                self._check_machine(machine)
            for record in self._oracle.records.values():
                self._check_record(record)

    def _check_node(self, info: NodeInfo) -> None:
        name = info.address.removeprefix("joined:").partition(":")[0]
        if info.reservations != info.running + info.queued:
            self._oracle.violation(
                f"{info.name}: {info.reservations} reservations, {info.running} running, {info.queued} queued"
            )
        live = sum(1 for record in self._oracle.records.values() if record.finished is None)
        if info.reservations > live + len(self._oracle.winding_down(self._now_s)):
            self._oracle.violation(f"{info.name}: {info.reservations} reservations, and {live} generations")
        if info.queued > self._fleet.settings.queue_limit_per_node or info.running > max(info.lanes, 1):
            self._oracle.violation(f"{info.name}: {info.running} running, {info.queued} queued: too many")
        well = self._undisturbed(name) and self._oracle.wire_trouble.quiet(self._now_s)
        if well and info.state is not NodeState.UP and self._lives_at(info.address):
            self._oracle.violation(
                f"{info.name} is {info.state.value} ({info.state_detail}), and nothing befell it"
            )
        undisturbed = self._oracle.trouble_of(name).count == 0 and not self._oracle.standstills
        if undisturbed and not self._oracle.wire_trouble.count and info.failures:
            self._oracle.violation(f"{info.name} is blamed for {dict(info.failures)}, and nothing befell it")
        if wrongly := _NO_FAULT & info.failures.keys():
            self._oracle.violation(f"{info.name} is blamed for {wrongly}, which is no fault of a node")

    def _lives_at(self, address: str) -> bool:
        """Not where a clone was, or that which it took the identity from while it has it."""
        return any(machine.address == address for machine in self._fleet.machines)

    def _check_held(self, head: Head, node: Node) -> None:
        """A node that can be reached holds what its head means it to, and runs what is not decided."""
        link, process = node.link, self._process_behind(node)
        if not isinstance(link, SimLink) or process is None or process.machine.frozen:
            return
        up_s = min(self._now_s - link.since_s, self._oracle.ran_for(self._now_s))
        if not link.whole or not self._oracle.wire_trouble.quiet(self._now_s) or up_s < _ORPHANED_S:
            return
        for held in process.rules.holdings():
            key = (process.incarnation, held.session_id, held.epoch)
            if held.fenced or self._means(head, node, link, held.session_id, held.epoch):
                self._unmeant.pop(key, None)
            elif self._now_s - self._unmeant.setdefault(key, self._now_s) > _ORPHANED_S:
                self._oracle.violation(
                    f"{node.name} holds {held.session_id} for nobody, epoch {held.epoch & 0xFFFFFFFF}"
                )
        for session_id, epoch, generation_id in process.runs():
            record = self._oracle.record_of(generation_id, epoch)
            ended = record is not None and record.finished is not None
            if self._cannot_know(node, link, session_id, epoch):
                continue  # until its lease runs out
            if (
                ended
                and record is not None
                and self._now_s - record.finished_s > _may_run_on_s(record, process)
            ):
                self._oracle.violation(
                    f"{node.name} can be reached, and runs {generation_id}, which has ended"
                )

    def _means(self, head: Head, node: Node, link: SimLink, session_id: str, epoch: int) -> bool:
        """The head means the node to hold it, or is about to have it freed, or cannot know of it."""
        if self._cannot_know(node, link, session_id, epoch):
            return True
        owed = node.outbox.get(session_id)
        if owed is not None and owed.epoch >= epoch:
            return True
        try:
            binding = head.sessions.get(session_id).binding
        except FleetError:
            return False
        return binding is not None and binding.node is node and binding.epoch == epoch

    def _cannot_know(self, node: Node, link: SimLink, session_id: str, epoch: int) -> bool:
        """An earlier head had it there, and neither the node nor what that head left tells of it."""
        told = Feature.RECONCILE in node.features and (session_id, epoch) in link.found
        known = self._now_s - self._fleet.heads.since_s < self._fleet.settings.lease_s
        known = known and node.name not in self._fleet.clones.names
        owed = known and self._oracle.is_owed(node.name, node.incarnation, session_id, epoch)
        return not (told or owed or self._oracle.is_of_this_head(session_id, epoch))

    def _check_machine(self, machine: SimMachine) -> None:
        process, name = machine.process, machine.profile.name
        if process is None:
            return
        if process.lanes_active > machine.profile.lanes:
            self._oracle.violation(f"{name} runs {process.lanes_active} on {machine.profile.lanes} lanes")
        if not self._undisturbed(name):
            return
        for session_id, epoch, generation_id in process.runs():
            record = self._oracle.record_of(generation_id, epoch)
            own = self._oracle.is_of_this_head(session_id, epoch)
            if record is None:
                self._oracle.violation(f"{name} runs {generation_id}, which no head asked for")
            elif own and record.finished is not None and self._now_s - record.finished_s > _RUN_ON_S:
                self._oracle.violation(f"{name} still runs {generation_id}, which ended long ago")

    def _check_record(self, record: Record) -> None:
        now_s = self._now_s
        if record.finished is not None:
            return
        if self._oracle.overdue(record.deadline_s, now_s):
            self._oracle.violation(f"{record.generation_id} goes on after its deadline")
        if record.cancel_waits_s is not None and self._oracle.overdue(record.cancel_waits_s, now_s):
            self._oracle.violation(f"{record.generation_id} goes on after its cancel")
        abandoned_s = record.abandoned_s
        if abandoned_s is not None and self._oracle.overdue(abandoned_s + record.patience_s, now_s):
            self._oracle.violation(f"{record.generation_id} goes on, and its readers have long gone")
        if now_s - record.accepted_s > _LONG_WALL_S:
            self._oracle.violation(f"{record.generation_id} goes on for {now_s - record.accepted_s:.0f} s")

    # At rest

    def check_kept(self, store: SimStore) -> None:
        """After the last head has ended in order: what is kept is what was."""
        saved = store.saved
        if saved.torn:
            self._oracle.violation("the last head has ended in order, and its end may be lost")
        orders = [name for name, order in saved.marks.items() if order.mark != ENDED]
        head = self._fleet.living_head()
        # A node that has not come back yet is owed what an earlier head owed it, until its leases run out.
        back = [key for key in saved.revokes if head is not None and head.fleet.named(key[0]) is not None]
        owed = [key for key in saved.revokes if key in back or not self._oracle.is_owed(*key)]
        if saved.sessions or owed or orders:
            self._oracle.violation(f"still kept: {list(saved.sessions)}, {owed}, {orders}")
        for record in self._oracle.records.values():
            kept, expected = store.kept(record.generation_id), record.expected
            ended = None if kept is None or kept.ended is None else kept.ended.finished
            tokens = () if kept is None else tuple(kept.token_ids)
            right = () if expected is None else expected.token_ids[: len(tokens)]
            if ended != record.finished or tokens != right:
                self._oracle.violation(f"{record.generation_id} is kept as {tokens}, {ended}")

    def unrest(self) -> list[str]:
        """What is not as it must be when nothing is going on (rules 9 and 10)."""
        head = self._fleet.living_head()
        if head is None:
            return ["there is no head"]
        unrest: list[str] = []
        for info in head.operators.list_nodes():
            counts = (info.sessions, info.running, info.queued, info.reservations, info.outbox)
            if any(counts) or info.state is not NodeState.UP:
                unrest.append(f"{info.name} is {info.state.value}, {counts=}")
        unrest += [text for machine in self._fleet.machines if (text := _held_by(machine))]
        if len(head.sessions) or head.generations.running:
            unrest.append(f"{len(head.sessions)} sessions, {head.generations.running} run")
        return unrest


def _may_run_on_s(record: Record, process: NodeProcess) -> float:
    """What ended before the head had asked for it, the node keeps for as long as it does without a head."""
    return _RUN_ON_S + (process.machine.profile.keep_s if record.tries_again else 0.0)


def _held_by(machine: SimMachine) -> str:
    process = machine.process
    if process is None:
        return f"{machine.profile.name} is down"
    held: Sequence[str] = [each.session_id for each in process.rules.holdings() if not each.fenced]
    if held or process.runs() or process.lanes_active or process.queue_depth:
        return f"{machine.profile.name} holds {held}, runs {process.runs()}"
    return ""


def _serves(machine: SimMachine, spec: SessionSpec) -> bool:
    profile = machine.profile
    labels = all(profile.labels.get(key) == value for key, value in spec.node_selector.items())
    return labels and any(
        model.name == spec.model and spec.model_revision in ("", model.revision) for model in profile.models
    )
