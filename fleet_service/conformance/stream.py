"""One Generate call, read message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.conformance.requests import finish_name, refusal_text
from fleet_service.conformance.verdicts import Broken, Skipped

Message = pb.NodeServiceGenerateResponse
BY_ITSELF = (types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_EOS)
"""Finishes that nobody asked for."""
# What a generation that was stopped sends for longer than this, it has not had on its way.
_ON_ITS_WAY_S = 1.0


class Stream:
    """What came of a Generate so far, in order, and how its call ended."""

    def __init__(self, call: Any) -> None:
        self.messages: list[Message] = []
        self.status: grpc.StatusCode | None = None
        """None = the call has not ended."""
        self.details = ""
        self._call = call

    async def read(self) -> Message | None:
        """The next message; None at the end of the call, however it ended."""
        if self.status is not None:
            return None
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self.status, self.details = error.code(), error.details() or ""
            return None
        if message is grpc.aio.EOF:
            self.status = await self._call.code()
            return None
        if not isinstance(message, Message):
            raise Broken("a message of Generate could not be decoded")
        self.messages.append(message)
        return message

    async def to_end(self) -> Stream:
        """Read all there is."""
        while await self.read() is not None:
            pass
        return self

    async def stops(self, what: str) -> None:
        """Read the rest of a generation that was told to stop; `what` it is.

        Raises Broken where it goes on all the same, and Skipped where it was over before it could be told.
        """
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        await self.to_end()
        if self.refusal or self.finish not in BY_ITSELF:
            return
        if loop.time() - told_s > _ON_ITS_WAY_S:
            raise Broken(f"{what} ran on: {self.end}")
        raise Skipped(f"its generations are over before they can be stopped: {self.end}")

    async def until(self, done: Callable[[Message], bool]) -> bool:
        """Read up to the first message that is `done`; False when the call ended before."""
        while (message := await self.read()) is not None:
            if done(message):
                return True
        return False

    def cancel(self) -> None:
        """End the call, as a head does that wants no more of it."""
        self._call.cancel()

    @property
    def tokens(self) -> list[int]:
        return [token for message in self.messages for token in message.token_ids]

    @property
    def refusal(self) -> int:
        """Code of the refusal that came; 0 = none."""
        return next((m.refusal.code for m in self.messages if m.HasField("refusal")), 0)

    @property
    def finish(self) -> int:
        """The finish that came; 0 = none."""
        return next((m.finish for m in self.messages if m.finish), 0)

    @property
    def end(self) -> str:
        """How it ended, for people."""
        for message in self.messages:
            if message.HasField("refusal"):
                return f"refused: {refusal_text(message.refusal)}, {self.count}"
            if message.finish:
                return f"finish {finish_name(message.finish)}, {self.count}"
        if self.status is None:
            return f"no end, {self.count}"
        text = f" ({self.details[:120]})" if self.details else ""
        return f"the call ended with {self.status.name}{text} and no finish, {self.count}"

    @property
    def count(self) -> str:
        number = len(self.tokens)
        return f"{number} token{'' if number == 1 else 's'}"


def has_tokens(message: Message) -> bool:
    return len(message.token_ids) > 0
