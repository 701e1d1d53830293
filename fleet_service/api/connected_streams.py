"""The streams of one connection, and the messages that carry what is ready for all of them.

A stream has no task and no queue: a generation's log marks it as having news, and the next message takes what
there is, up to the stream's credit. So a reader without credit costs nobody anything (design: the token log).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from fleet.v1 import fleet_service_pb2 as fleet
from fleet_service.api import convert_sessions as convert
from fleet_service.api.facade import Follower, StreamStart
from fleet_service.domain.events import Accepted, Event, Finished, Tokens

_REPLY_BYTES_PER_MESSAGE: Final = 256 * 1024
"""Of replies in line; the last one may be larger."""
_STREAMS_IN_ONE_STEP: Final = 512
"""In one message, so that others have their turn between."""


class _Columns:
    """The tokens of one message, gathered before it is made."""

    __slots__ = ("call_ids", "counts", "first_indexes", "token_ids")

    def __init__(self) -> None:
        self.call_ids: list[int] = []
        self.counts: list[int] = []
        self.first_indexes: list[int] = []
        self.token_ids: list[int] = []

    def add(self, call_id: int, tokens: Tokens) -> None:
        self.call_ids.append(call_id)
        self.counts.append(len(tokens.token_ids))
        self.first_indexes.append(tokens.first_index)
        self.token_ids += tokens.token_ids

    def write_to(self, response: fleet.ConnectResponse) -> None:
        if self.call_ids:
            columns = response.tokens
            columns.call_ids.extend(self.call_ids)
            columns.counts.extend(self.counts)
            columns.first_indexes.extend(self.first_indexes)
            columns.token_ids.extend(self.token_ids)


class ConnectedStream:
    """One reader of a generation among those of a connection. `credit_tokens` None = any number."""

    __slots__ = ("_credit_tokens", "_follower", "_out", "call_id")

    def __init__(self, call_id: int, credit_tokens: int | None, out: Outbound) -> None:
        self.call_id = call_id
        self._credit_tokens = credit_tokens
        self._out = out
        self._follower: Follower | None = None

    def follow(self, start: StreamStart) -> None:
        """Raises FleetError, as Generation.follow does."""
        self._follower = start.generation.follow(start.from_index, start.branch, self._news)

    def grant(self, tokens: int) -> None:
        """It may send so many more."""
        if self._credit_tokens is not None:
            self._credit_tokens += tokens
            self._news()

    def grant_all(self) -> None:
        """It may send all it has."""
        self._credit_tokens = None
        self._news()

    def close(self) -> None:
        """Nobody reads it any more."""
        if self._follower is not None:
            self._follower.close()

    def _news(self) -> None:
        self._out.mark(self)

    def write(self, response: fleet.ConnectResponse, columns: _Columns, room_tokens: int) -> int:
        """Put what is new into a message, at most so many tokens of it; how many it were.

        Tokens come once in a message: what lies behind an event that follows them is for the next one. Raises
        FleetError when there is no more and the generation has not ended.
        """
        follower, credit = self._follower, self._credit_tokens
        if follower is None:
            return 0
        tokens = 0
        for event in follower.take_some(room_tokens if credit is None else min(room_tokens, credit)):
            if isinstance(event, Tokens):
                columns.add(self.call_id, event)
                tokens = len(event.token_ids)
            elif isinstance(event, Finished):
                convert.write_finished(response.replies.add(call_id=self.call_id).finished, event)
                self._out.over(self, None)
                self.close()
                return tokens
            else:
                self._write_event(response, event, follower)
        if credit is not None:
            self._credit_tokens = credit = credit - tokens
        if follower.has_some(1 if credit is None else credit):
            self._news()
        return tokens

    def _write_event(self, response: fleet.ConnectResponse, event: Event, follower: Follower) -> None:
        message = response.events.add(call_id=self.call_id).event
        convert.write_event(message, event)
        if isinstance(event, Accepted):
            message.branch = follower.branch


class Outbound:
    """What is ready for one connection. `over` is told of a stream's end: None, or the error that it was."""

    def __init__(
        self,
        limits: fleet.ConnectLimits,
        over: Callable[[ConnectedStream, Exception | None], None],
        idle: Callable[[], bool],
    ) -> None:
        """`idle`: whether no call is open."""
        self.over = over
        self._idle = idle
        self._limits: fleet.ConnectLimits | None = limits
        self._ready: dict[ConnectedStream, None] = {}
        self._replies: deque[tuple[fleet.ConnectReply, int]] = deque()
        self._reply_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ends_when_idle = False
        self._finishing = False
        self._aborted = False

    @property
    def replies_waiting(self) -> int:
        return len(self._replies)

    @property
    def reply_bytes_waiting(self) -> int:
        return self._reply_bytes

    def mark(self, stream: ConnectedStream) -> None:
        """It has something new."""
        self._ready[stream] = None
        if self._waiter is not None:
            self._wake()

    def forget(self, stream: ConnectedStream) -> None:
        """Nothing of it is sent any more."""
        self._ready.pop(stream, None)

    def reply(self, call_id: int, kind: str, message: Any) -> None:
        """The last of a call; `kind` names the reply's field."""
        reply = fleet.ConnectReply(call_id=call_id, **{kind: message})
        size_bytes = reply.ByteSize()
        self._replies.append((reply, size_bytes))
        self._reply_bytes += size_bytes
        self._wake()

    def finish_when_idle(self) -> None:
        """No further call comes: end once none is open."""
        self._ends_when_idle = True
        self._wake()

    def finish(self) -> None:
        """End once what is ready has been sent."""
        self._finishing = True
        self._wake()

    def abort(self) -> None:
        """End at once."""
        self._aborted = True
        self._wake()

    async def next_message(self) -> fleet.ConnectResponse | None:
        """All that is ready, waiting for something; None at the end."""
        if self._limits is not None:
            limits, self._limits = self._limits, None
            return fleet.ConnectResponse(limits=limits)
        while not self._aborted:
            response = self.ready_message()
            if response is not None or self._finishing or (self._ends_when_idle and self._idle()):
                return response
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            await asyncio.sleep(0)  # what others have ready in this turn goes along
        return None

    def ready_message(self) -> fleet.ConnectResponse | None:
        """What is ready, as much as one message may hold; None when there is nothing."""
        while self._ready or self._replies:
            response = self._gather()
            if response is not None:
                return response
        return None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _gather(self) -> fleet.ConnectResponse | None:
        """One message; None when what is marked has no news. Who finds no room is first in the next.

        Replies and streams each have a share, so that neither keeps the other waiting.
        """
        response, columns = fleet.ConnectResponse(), _Columns()
        self._gather_replies(response)
        room_tokens = convert.MAX_TOKENS_PER_MESSAGE
        ready, self._ready = self._ready, {}
        left_out: dict[ConnectedStream, None] = {}
        for number, stream in enumerate(ready):
            if room_tokens <= 0 or number >= _STREAMS_IN_ONE_STEP:
                left_out[stream] = None
                continue
            try:
                room_tokens -= stream.write(response, columns, room_tokens)
            except Exception as error:  # noqa: BLE001 - it costs this stream, and no other
                stream.close()
                self.over(stream, error)
        if left_out:
            self._ready = left_out | self._ready
        columns.write_to(response)
        written = columns.call_ids or response.events or response.replies
        return response if written else None

    def _gather_replies(self, response: fleet.ConnectResponse) -> None:
        """Those in line, up to a share, but one at least. A stream's error comes behind its last tokens."""
        room_bytes = _REPLY_BYTES_PER_MESSAGE
        while self._replies and room_bytes > 0:
            reply, size_bytes = self._replies.popleft()
            self._reply_bytes -= size_bytes
            response.replies.append(reply)
            room_bytes -= size_bytes
