"""A session as the head keeps it: the truth about its context, and the binding that is only a cache of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleet_service.domain.commands import HeldSession
from fleet_service.domain.context import Context
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import Sampling, SessionSpec
from fleet_service.runtime.node import Node
from fleet_service.runtime.records import SessionBound
from fleet_service.runtime.views import SessionView

_COMMAND_BITS = 24
"""Of a command id: how many commands one run of the head can give about one binding."""


class Binding:
    """A session's tie to one life of one node, under one epoch.

    `sent`: an Assign may have reached the node, so leaving owes a revoke. `assigned`: the node confirmed it.
    `synced_tokens`: how much of the context the node holds, None while an answer is outstanding.
    `overhang`: the node holds more behind that, which has been cut here since. `kept_runs`: generations of an
    earlier run of the head that the node had kept.
    """

    __slots__ = (
        "_commands",
        "_generates",
        "assigned",
        "epoch",
        "kept_runs",
        "life",
        "node",
        "overhang",
        "sent",
        "synced_tokens",
    )

    def __init__(self, node: Node, epoch: int, *, generates: bool) -> None:
        self.node = node
        self.life = node.life
        self.epoch = epoch
        self.sent = False
        self.assigned = False
        self.synced_tokens: int | None = 0
        self.overhang = False
        self.kept_runs: tuple[str, ...] = ()
        self._commands = 0
        self._generates = generates
        node.sessions += 1
        node.generating_sessions += generates

    @property
    def valid(self) -> bool:
        """The node still lives the life the session was bound to, and nothing about it is in doubt."""
        in_doubt = self.sent and (not self.assigned or self.synced_tokens is None)
        return self.life == self.node.life and not self.node.removed and not in_doubt

    @property
    def holds(self) -> bool:
        """The node lives the life the session was bound to, and can be used."""
        return self.life == self.node.life and self.node.usable

    @property
    def usable(self) -> bool:
        """Valid, and the node can be used now."""
        return self.valid and self.node.usable

    def generates(self, now: bool) -> None:  # noqa: FBT001
        """Whether the session has a generation; its node counts those that have."""
        if self.life == self.node.life:
            self.node.generating_sessions += now - self._generates
        self._generates = now

    def cut(self, length: int) -> None:
        """The context was cut to `length`."""
        if self.synced_tokens is not None and length < self.synced_tokens:
            self.synced_tokens = length
            self.overhang = True

    def synced(self, length: int) -> None:
        """The node holds exactly the first `length` tokens of the context."""
        self.synced_tokens = length
        self.overhang = False

    def adopted(self, held: HeldSession, tokens: int, own_term: int) -> None:
        """It goes on from an earlier run of the head, whose command ids are not known."""
        self.sent = self.assigned = True
        self.synced_tokens, self.overhang = min(held.context_length, tokens), held.context_length > tokens
        self.kept_runs = held.generation_ids
        # Above every id that any run could have come to: terms rise from run to run.
        self._commands = own_term << _COMMAND_BITS

    def next_command_id(self) -> int:
        self._commands += 1
        return self._commands

    def dropped(self, session_id: str) -> None:
        """The session leaves; the node is owed a revoke when it may hold something."""
        if self.life == self.node.life:
            self.node.sessions -= 1
            self.node.generating_sessions -= self._generates
            if self.sent:
                self.node.owe_revoke(session_id, self.epoch, surely_held=self.assigned)


class Session:
    """One session. Only Head and the attempts of its one generation change it."""

    # There may be very many.
    __slots__ = (
        "binding",
        "context",
        "created_at",
        "ephemeral",
        "finished",
        "generation_id",
        "last_used_at",
        "last_used_s",
        "number",
        "owner",
        "parked",
        "sampling",
        "session_id",
        "spec",
        "was_bound",
        "winding_down",
    )

    def __init__(
        self,
        session_id: str,
        spec: SessionSpec,
        sampling: Sampling,
        *,
        now_s: float,
        unix_s: float,
        number: int,
        owner: str = "",
    ) -> None:
        self.session_id = session_id
        self.owner = owner
        self.spec = spec
        self.sampling = sampling
        self.context = Context()
        self.was_bound: SessionBound | None = None
        """Where an earlier run of the head had it."""
        self.binding: Binding | None = None
        self.parked = False
        self.generation_id = ""
        self.winding_down: asyncio.Task[None] | None = None
        self.ephemeral = False
        self.finished = False
        self.number = number
        self.created_at = unix_s
        self.last_used_at = unix_s
        self.last_used_s = now_s

    @property
    def state(self) -> SessionState:
        """Derived, so that it cannot disagree with what it is about."""
        if self.parked:
            return SessionState.PARKED
        if self.generation_id:
            return SessionState.GENERATING
        if self.binding is not None and self.binding.usable:
            return SessionState.BOUND
        return SessionState.UNBOUND

    @property
    def node_name(self) -> str:
        """The node it is bound to, "" where it is to none that can be used."""
        return self.binding.node.name if self.binding is not None and self.binding.usable else ""

    def generates(self, generation_id: str) -> None:
        """It has that generation from now on; "" = none."""
        self.generation_id = generation_id
        if self.binding is not None:
            self.binding.generates(bool(generation_id))

    def bind(self, node: Node, next_epoch: Callable[[], int]) -> Binding:
        """The binding to use on `node`: the one there is while it holds, else a new one under a new epoch."""
        binding = self.binding
        if binding is not None and binding.node is node and binding.valid:
            return binding
        self.unbind()
        self.was_bound = None
        self.binding = Binding(node, next_epoch(), generates=bool(self.generation_id))
        return self.binding

    def adopt(self, node: Node, held: HeldSession, own_term: int) -> bool:
        """Bind it again where an earlier run of the head had it, if the node still holds just that."""
        was = self.was_bound
        here = was is not None and (was.node, was.incarnation, was.epoch) == (
            node.name,
            node.incarnation,
            held.epoch,
        )
        if not here or self.binding is not None or self.parked:
            return False
        self.was_bound = None
        binding = Binding(node, held.epoch, generates=bool(self.generation_id))
        binding.adopted(held, len(self.context), own_term)
        self.binding = binding
        node.adopted(held.epoch)
        return True

    def take_binding(self, binding: Binding) -> None:
        """Leave the node for one that `binding` was made on beforehand."""
        self.unbind()
        self.binding = binding

    def unbind(self) -> None:
        """Leave the node; owes it a revoke."""
        binding, self.binding = self.binding, None
        if binding is not None:
            binding.dropped(self.session_id)

    def drop_doubtful_binding(self) -> None:
        """After an attempt was cut short: a binding whose last command was not answered is not used again."""
        if self.binding is not None and not self.binding.valid:
            self.unbind()

    def pin_revision(self, revision: str) -> None:
        """Token ids of different revisions do not mix: the first node's revision is the session's."""
        if not self.spec.model_revision:
            self.spec = self.spec.of_revision(revision)

    async def settle(self) -> None:
        """Wait until the attempts of a generation that was decided have let go (they wait for nothing)."""
        while self.winding_down is not None and not self.generation_id:
            winding_down = self.winding_down
            await asyncio.wait({winding_down})
            if self.winding_down is winding_down:
                self.winding_down = None

    def view(self) -> SessionView:
        bound = self.binding if self.binding is not None and self.binding.usable else None
        return SessionView(
            session_id=self.session_id,
            spec=self.spec,
            state=self.state,
            context_length=len(self.context),
            context_crc32=self.context.crc32,
            node=self.node_name,
            epoch=bound.epoch if bound else 0,
            generation_id=self.generation_id,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            owner=self.owner,
        )
