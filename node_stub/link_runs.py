"""The runs of one link: their handles, and how each puts what it has into the link's next frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleet.v1 import link_pb2 as link_pb
from node_stub import convert
from node_stub.calls import Call, LinkDropped
from node_stub.commands import Commands
from node_stub.faults import Action, Fault
from node_stub.link_outbox import Outbox
from node_stub.rules import Code, Refusal
from node_stub.runs import Run, Step
from node_stub.sender import Sender

# Faults that strike when a run is accepted but keep only the run from going on, not its acceptance.
_HOLD_UP_THE_RUN = frozenset({Action.STALL, Action.DELAY})


class LinkRun:
    """A run that a link sends, from its acceptance to its last message."""

    def __init__(self, run: Run, handle: int, call_id: int, sender: Sender, *, resumed: bool) -> None:
        self.run = run
        self.handle = handle
        self.striking: asyncio.Task[None] | None = None
        """A fault strikes: nothing is sent until it has."""
        self._call_id = call_id
        self._sender = sender
        self._resumed = resumed
        self.accepted = False
        """Its acceptance has been told."""
        # What strikes at the start is for those that start here.
        self._started = resumed
        self._held_up: Fault | None = None

    def next(self) -> Step | Fault | link_pb.NodeReply | None:
        """What comes next: the acceptance, steps, faults; None until there is news."""
        if not self._started:
            fault, self._held_up = self._held_up or self._sender.start_fault(), None
            if fault and (self.accepted or fault.action not in _HOLD_UP_THE_RUN):
                return fault
            self._held_up, self._started = fault, fault is None
        if not self.accepted:
            self.accepted = True
            return self._acceptance()
        return self._sender.next()

    def taken_over(self) -> Step | link_pb.NodeReply:
        """The last that this link says of a run that another link sends from now on."""
        refusal = Refusal(Code.REPLAYED, detail="taken up over another link")
        if self.accepted:
            return Step(self.run.next_index, refusal=refusal)
        accepted = link_pb.RunAccepted(refusal=convert.refusal_to(refusal))
        return link_pb.NodeReply(call_id=self._call_id, generate=accepted)

    def _acceptance(self) -> link_pb.NodeReply:
        # Nothing else names an epoch on a link.
        self._sender.take_epoch_lie()
        accepted = link_pb.RunAccepted(
            handle=self.handle, epoch=self.run.admission.epoch + self.run.epoch_lie, resumed=self._resumed
        )
        return link_pb.NodeReply(call_id=self._call_id, generate=accepted)


class LinkRuns:
    """All runs of a link.

    `wake` is called when there is something to gather, `on_error` with what a fault's striking raised.
    """

    def __init__(
        self,
        commands: Commands,
        call: Call,
        outbox: Outbox,
        *,
        wake: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._node = commands.node
        self._striker = commands.striker
        self._call = call
        self._outbox = outbox
        self._wake = wake
        self._on_error = on_error
        self._runs: dict[int, LinkRun] = {}
        self._dirty: dict[LinkRun, None] = {}
        self._last_handle = 0

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: Run, call_id: int, *, resumed: bool) -> None:
        """Send a run from now on; its acceptance answers `call_id`."""
        self._last_handle += 1
        linked = LinkRun(run, self._last_handle, call_id, Sender(self._node, run), resumed=resumed)
        self._runs[linked.handle] = linked
        run.resumable = self._node.settings.resume
        run.on_news = lambda: self._mark(linked)
        run.on_taken = lambda: self._give_up(linked)
        self._mark(linked)

    def acknowledge(self, ack: link_pb.RunAck) -> str:
        """Take note of an acknowledgement; what is wrong with it, or nothing."""
        if not 0 < ack.handle <= self._last_handle:
            return f"handle {ack.handle} was never given out"
        linked = self._runs.get(ack.handle)
        # One that has ended may be acknowledged before the head has read of its end.
        if linked and not linked.run.acknowledge(ack.next_index):
            return f"tokens of run {ack.handle} before {ack.next_index} are acknowledged, not all were sent"
        return ""

    def gather(self) -> None:
        """Put what the runs have into the outbox, until the frame is full."""
        while self._dirty and not self._outbox.is_full:
            linked = next(iter(self._dirty))
            if self._put_one(linked):
                self._dirty.pop(linked, None)

    async def leave(self) -> None:
        """The link is gone."""
        striking = [linked.striking for linked in self._runs.values() if linked.striking]
        for linked in list(self._runs.values()):
            self._forget(linked)
            self._node.leave(linked.run)
        await asyncio.gather(*striking, return_exceptions=True)

    def _put_one(self, linked: LinkRun) -> bool:
        """Put the run's next message into the outbox; whether there is no more of it now."""
        match linked.next():
            case None:
                return True
            case Fault() as fault:
                linked.striking = asyncio.create_task(
                    self._strike(linked, fault), name=f"fault {fault.action}"
                )
                return True
            case Step() as step:
                self._outbox.add_step(linked.handle, step)
                linked.run.note_sent(step)
                if step.is_last:
                    self._forget(linked)
                    self._node.leave(linked.run)
                return step.is_last
            case reply:
                self._outbox.add_reply(reply)
                return False

    async def _strike(self, linked: LinkRun, fault: Fault) -> None:
        async def write(step: Step, epoch: int) -> None:  # noqa: ARG001 - columns name no epoch
            self._outbox.add_step(linked.handle, step)
            self._wake()

        try:
            await self._striker.on_run(fault, linked.run, self._call, write)
        except LinkDropped:
            return
        except Exception as error:  # noqa: BLE001 - the link's end tells of it
            self._on_error(error)
            return
        linked.striking = None
        self._mark(linked)

    def _mark(self, linked: LinkRun) -> None:
        if linked.striking is None and linked.handle in self._runs:
            self._dirty[linked] = None
            self._wake()

    def _give_up(self, linked: LinkRun) -> None:
        """Another link takes it up."""
        self._forget(linked)
        match linked.taken_over():
            case Step() as step:
                self._outbox.add_step(linked.handle, step)
            case reply:
                self._outbox.add_reply(reply)
        self._wake()

    def _forget(self, linked: LinkRun) -> None:
        """Send no more of it."""
        self._runs.pop(linked.handle, None)
        self._dirty.pop(linked, None)
        linked.run.on_news = linked.run.on_taken = None
        if linked.striking:
            linked.striking.cancel()
