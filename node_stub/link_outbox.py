"""What a link has to say, gathered until its next frame."""

from __future__ import annotations

from fleet.v1 import link_pb2 as link_pb
from fleet.v1 import types_pb2
from node_stub import convert
from node_stub.runs import Step

MAX_FRAME_TOKENS = 65_536


class Outbox:
    """Builds one news frame after the other."""

    def __init__(self) -> None:
        self._replies: list[link_pb.NodeReply] = []
        self._handles: list[int] = []
        self._counts: list[int] = []
        self._first_indexes: list[int] = []
        self._token_ids: list[int] = []
        self._events: list[link_pb.RunEvent] = []
        self._report: types_pb2.CapacityReport | None = None
        self._leaving = False

    @property
    def is_full(self) -> bool:
        """No more steps are to be added to this frame."""
        return len(self._token_ids) >= MAX_FRAME_TOKENS

    @property
    def leaving(self) -> bool:
        """The goodbye has not been sent yet."""
        return self._leaving

    @property
    def reply_count(self) -> int:
        return len(self._replies)

    def add_reply(self, reply: link_pb.NodeReply) -> None:
        self._replies.append(reply)

    def add_step(self, handle: int, step: Step) -> None:
        """One message of a run: its tokens to the columns, all else to the events that follow them."""
        if step.token_ids:
            self._handles.append(handle)
            self._counts.append(len(step.token_ids))
            self._first_indexes.append(step.first_index)
            self._token_ids.extend(step.token_ids)
        if step.phase or step.is_last:
            event = link_pb.RunEvent(handle=handle)
            if step.phase:
                event.phase = convert.PHASES[step.phase]
            if step.finish:
                event.finish = convert.FINISHES[step.finish]
                event.next_index = step.first_index + len(step.token_ids)
            if refusal := convert.refusal_to(step.refusal):
                event.refusal.CopyFrom(refusal)
            self._events.append(event)

    def set_report(self, report: types_pb2.CapacityReport) -> None:
        """The load now; of several before the next frame the newest counts."""
        self._report = report

    def say_goodbye(self) -> None:
        """Tell the head that the node is being stopped."""
        self._leaving = True

    def take(self) -> link_pb.NodeFrame | None:
        """Everything gathered, as one frame; None when there is nothing."""
        if not (self._replies or self._handles or self._events or self._report or self._leaving):
            return None
        frame = link_pb.NodeFrame(
            type=link_pb.FRAME_TYPE_NEWS,
            replies=self._replies,
            events=self._events,
            report=self._report,
            leaving=self._leaving,
        )
        if self._handles:
            steps = frame.steps
            steps.handles.extend(self._handles)
            steps.counts.extend(self._counts)
            steps.first_indexes.extend(self._first_indexes)
            steps.token_ids.extend(self._token_ids)
        self._replies.clear()
        for column in (self._handles, self._counts, self._first_indexes, self._token_ids):
            column.clear()
        self._events.clear()
        self._report = None
        self._leaving = False
        return frame
