"""What the node keeps of one session: its binding, its context, and the memory of its commands."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from node_stub.rules.context import Context, context_crc32
from node_stub.rules.leases import Owner
from node_stub.rules.values import Append, Assign, Code, Command, Generate, Model, Refusal, Sampling

Fingerprint = tuple[object, ...]


def fingerprint(command: Command) -> Fingerprint:
    """What tells a command sent again from another one under the same id, without keeping its tokens."""
    match command:
        case Assign():
            return ("assign", command)
        case Append():
            return ("append", command.base_length, len(command.token_ids), context_crc32(command.token_ids))
        case Generate():
            prefix_crc32 = context_crc32(command.prefix_token_ids)
            wanted = (command.context_length, command.context_crc32, prefix_crc32, command.max_new_tokens)
            return ("generate", command.generation_id, wanted)


@dataclass(slots=True)
class Record:
    """One session under one epoch. A fenced one has lost its content and refuses everything."""

    session_id: str
    epoch: int
    owner: Owner
    model: Model
    sampling: Sampling
    qos: int
    engine_options: bytes
    lease_ms: int
    context: Context = field(default_factory=Context)
    fenced: bool = False
    forgotten_ms: int = 0
    """When a fenced record may be dropped."""
    runs: set[str] = field(default_factory=set)
    """Generations queued or running."""
    _known: dict[str, None] = field(default_factory=dict)
    _last_id: int = -1
    _last_fingerprint: int = 0
    _last_reply: Refusal | None = None

    def judge(self, command: Command) -> Refusal | None:
        """Refuse what this record cannot take: wrong epoch, fenced, or an id lower than the last one."""
        if refusal := self._out_of_order(command):
            return refusal
        if command.command_id == self._last_id and self._last_fingerprint != _digest(command):
            return Refusal(Code.REPLAYED, detail=f"command {self._last_id} was another one")
        return None

    def take_up(self, command: Generate) -> Refusal | None:
        """Judge and remember a Generate for a run that is there already: under a new id or the last one."""
        refusal = self._out_of_order(command)
        if refusal is None:
            self.remember(command, None)
        return refusal

    def repeats(self, command: Command) -> bool:
        """Whether this is the last command again (`judge` let it pass)."""
        return command.epoch == self.epoch and command.command_id == self._last_id

    @property
    def last_reply(self) -> Refusal | None:
        """What the last command was answered; None = done."""
        return self._last_reply

    def remember(self, command: Command, reply: Refusal | None) -> None:
        """Keep the answer for the same command sent again."""
        self._last_id = command.command_id
        self._last_fingerprint = _digest(command)
        self._last_reply = reply

    def knows(self, generation_id: str) -> bool:
        return generation_id in self._known

    def learn(self, generation_id: str, capacity: int) -> None:
        """Keep the id, so that it never starts a second run. The oldest of too many makes room."""
        self._known[generation_id] = None
        if len(self._known) > capacity:
            # Its command id is far below the last one: sent again it is REPLAYED all the same.
            del self._known[next(iter(self._known))]

    def _out_of_order(self, command: Command) -> Refusal | None:
        if command.epoch != self.epoch:
            return Refusal(Code.STALE_EPOCH, current_epoch=self.epoch)
        if self.fenced:
            return Refusal(Code.FENCED, detail="the lease ran out")
        if command.command_id < self._last_id:
            return Refusal(Code.REPLAYED, detail=f"command {command.command_id} comes after {self._last_id}")
        return None

    def fence(self, forgotten_ms: int) -> None:
        self.fenced = True
        self.forgotten_ms = forgotten_ms
        self.context = Context()
        self.runs.clear()
        self._known.clear()


def _digest(command: Command) -> int:
    return zlib.crc32(repr(fingerprint(command)).encode())
