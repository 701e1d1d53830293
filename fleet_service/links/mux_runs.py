"""The runs of one multiplexed link: handles, the columns of a step, ends, acknowledgements. No I/O.

The sinks are the head's log: what was passed to on_step is taken in, and that is what is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from fleet.v1 import link_pb2
from fleet_service.domain.commands import CancelRun, Phase, Refusal, Run, RunFinish
from fleet_service.links import convert
from fleet_service.links.frames import ProtocolViolationError
from fleet_service.runtime.protocols import LinkError, NodeFaultError, RunSink

_log = structlog.get_logger(__name__)

_MAX_INDEX = 0xFFFF_FFFF

ACK_TOKENS = 256
"""A run is acknowledged every so many tokens; a node keeps at most 4,096 that are not."""

UNACKED_TOKENS = 256
"""The newest are never acknowledged: a head that dies before they are on disk takes them up from the node."""


class MuxRun:
    """A RunHandle. `handle` is 0 until the node has accepted the run; `sink` is None once nobody listens."""

    __slots__ = (
        "_closed",
        "acked_index",
        "call_id",
        "cancel",
        "ending",
        "epoch",
        "handle",
        "next_index",
        "sink",
    )

    def __init__(self, command: Run, sink: RunSink, closed: Callable[[MuxRun], None]) -> None:
        self.cancel = CancelRun(command.session_id, command.epoch, command.generation_id)
        self.epoch = command.epoch
        self.sink: RunSink | None = sink
        self.handle = 0
        self.call_id = 0
        self.next_index = self.acked_index = command.first_index
        self.ending = False
        self._closed = closed

    def close(self) -> None:
        """Stop listening. Before the run's end the node is told to cancel it; after that there is nobody."""
        if self.sink is not None:
            self.sink = None
            if not self.ending:
                self._closed(self)

    def tell(
        self,
        first_index: int,
        token_ids: Sequence[int],
        phase: Phase | None = None,
        finish: RunFinish | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """Pass a message to the sink, if there is one. One that raises, by a bug, costs its run."""
        sink = self.sink
        if sink is None:
            return
        try:
            sink.on_step(self.epoch, first_index, token_ids, phase, finish, refusal)
        except Exception as error:  # noqa: BLE001 - a fault of the head must not cost the link
            _log.exception("a run's sink raised")
            self.close()
            _tell_broken(sink, NodeFaultError(f"Generate: the sink failed: {error!r}"))

    def break_(self, error: LinkError) -> None:
        """The run's messages end here, for a reason of the link."""
        self.ending = True
        sink, self.sink = self.sink, None
        if sink is not None:
            _tell_broken(sink, error)


def _tell_broken(sink: RunSink, error: LinkError) -> None:
    try:
        sink.on_broken(error)
    except Exception:  # noqa: BLE001 - the same
        _log.exception("a sink or listener raised")


class RunTable:
    """The accepted runs of a link by their handles.

    `ack_due` is called when an acknowledgement is to go out; `acks` gives them, and takes them off. A link
    whose runs do not outlive it acknowledges nothing.
    """

    def __init__(self, *, acknowledges: bool, ack_due: Callable[[], None]) -> None:
        self._runs: dict[int, MuxRun] = {}
        self._left: set[int] = set()
        self._due: dict[int, int] = {}
        self._ack_due = ack_due
        # No run gets that far, so that the loop over a step's runs has one comparison and no second case.
        self._ack_tokens = UNACKED_TOKENS + ACK_TOKENS if acknowledges else 2 * _MAX_INDEX + 1

    @property
    def left(self) -> int:
        """Runs that nobody listens to and that the node has not ended."""
        return len(self._left)

    def accept(self, run: MuxRun, accepted: link_pb2.RunAccepted) -> None:
        """The node has answered a Generate. Raises ProtocolViolationError."""
        if accepted.HasField("refusal"):
            run.ending = True
            run.epoch = accepted.epoch
            run.tell(0, (), refusal=convert.refusal(accepted.refusal))
            run.sink = None
            return
        handle = accepted.handle
        if not handle or handle in self._runs:
            raise ProtocolViolationError(f"the node gave a run the handle {handle}, which is no new one")
        run.handle = handle
        run.epoch = accepted.epoch
        self._runs[handle] = run
        if run.sink is None:
            self._left.add(handle)

    def leave(self, run: MuxRun) -> None:
        """Nobody listens to `run` any more. Its handle stays until the node has ended it."""
        if run.handle in self._runs:
            self._left.add(run.handle)
            self._due.pop(run.handle, None)

    def take_steps(self, steps: link_pb2.StepColumns) -> None:
        """Tokens of many runs. Raises ProtocolViolationError."""
        handles, counts, first_indexes = steps.handles, steps.counts, steps.first_indexes
        token_ids = steps.token_ids[:]  # a list, quicker to cut up
        if not len(handles) == len(counts) == len(first_indexes) or sum(counts) != len(token_ids):
            raise ProtocolViolationError("the columns of a step do not fit together")
        runs, ack_tokens = self._runs, self._ack_tokens
        start = 0
        for handle, count, first_index in zip(handles, counts, first_indexes, strict=True):
            run = runs.get(handle)
            if run is None:
                raise ProtocolViolationError(f"a step has tokens of run {handle}, which is not under way")
            end = start + count
            run.tell(first_index, token_ids[start:end])
            start = end
            run.next_index = next_index = first_index + count
            if next_index - run.acked_index >= ack_tokens:
                self._acknowledge(run)

    def announce_ends(self, events: Sequence[link_pb2.RunEvent]) -> None:
        """Note the ends that a frame holds, before its tokens are passed on.

        A run that is closed on its last token need not be cancelled then.
        """
        for event in events:
            if (event.finish or event.HasField("refusal")) and (run := self._runs.get(event.handle)):
                run.ending = True

    def take_event(self, event: link_pb2.RunEvent) -> None:
        """A change of one run. Raises ProtocolViolationError."""
        run = self._runs.get(event.handle)
        if run is None:
            raise ProtocolViolationError(f"an event is of run {event.handle}, which is not under way")
        refusal = convert.refusal(event.refusal) if event.HasField("refusal") else None
        phase = convert.PHASES.get(event.phase)
        if refusal is None and not event.finish:
            if phase is not None:
                run.tell(run.next_index, (), phase)
            return
        self._forget(run)
        finish = convert.RUN_FINISHES.get(event.finish)
        if refusal is None and finish is None:
            run.break_(NodeFaultError(f"Generate: unknown finish {event.finish}"))
            return
        index = run.next_index if finish is None else event.next_index
        run.tell(index, (), phase, finish, refusal)
        run.sink = None

    def acks(self) -> list[link_pb2.RunAck]:
        """What is to be acknowledged now."""
        due, self._due = self._due, {}
        return [link_pb2.RunAck(handle=handle, next_index=index) for handle, index in due.items()]

    def break_all(self, error: LinkError) -> None:
        """The link is gone."""
        runs, self._runs = self._runs, {}
        self._left.clear()
        self._due.clear()
        for run in runs.values():
            run.break_(error)

    def _acknowledge(self, run: MuxRun) -> None:
        if run.next_index > _MAX_INDEX:
            raise ProtocolViolationError(f"a step of run {run.handle} goes beyond every index")
        run.acked_index = run.next_index - UNACKED_TOKENS
        if run.sink is not None:
            self._due[run.handle] = run.acked_index
            self._ack_due()

    def _forget(self, run: MuxRun) -> None:
        run.ending = True
        del self._runs[run.handle]
        self._left.discard(run.handle)
        self._due.pop(run.handle, None)
