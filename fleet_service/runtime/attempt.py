"""One attempt: one node's try at a generation, from binding the session there to the failure that ends it.

The node's messages arrive synchronously through on_step and go straight into the token log. When the
generation is decided the driver cancels the attempt; whatever ends it, `run` leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet_service.domain.commands import Append, Assign, Phase, Refusal, Run, RunFinish
from fleet_service.domain.events import FinishReason
from fleet_service.domain.failures import Failure, FailureClass, failure_of_refusal
from fleet_service.domain.node_types import Feature
from fleet_service.domain.placement import window_tokens
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.journal import Journal
from fleet_service.runtime.node import Node
from fleet_service.runtime.protocols import (
    LinkError,
    LinkLostError,
    LinkTimeoutError,
    NodeFaultError,
    NodeLink,
    RunHandle,
)
from fleet_service.runtime.reservation import Reservation
from fleet_service.runtime.session import Binding
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.stall import StallWatch

# The head's own timer decides WALL_CLOCK; the node's limit is only there in case the head is gone.
NODE_WALL_MARGIN_S = 5.0
# Most tokens in one Append, and the most bytes a token takes on the wire.
APPEND_TOKENS = 1_000_000
TOKEN_BYTES = 5

_FAILURE_OF_LINK_ERROR: dict[type[LinkError], FailureClass] = {
    LinkLostError: FailureClass.LINK_LOST,
    LinkTimeoutError: FailureClass.COMMAND_TIMEOUT,
    NodeFaultError: FailureClass.NODE_FAULT,
}


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What every attempt of a head shares. `violated` is told when a node broke the protocol."""

    settings: HeadSettings
    loop: asyncio.AbstractEventLoop
    own_term: Callable[[], int]
    journal: Journal
    violated: Callable[[Node, str], None]


class _Refused(Exception):
    """A command before the run was refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code.value)
        self.refusal = refusal


class Attempt:
    """A RunSink."""

    def __init__(
        self,
        context: AttemptContext,
        generation: Generation,
        reservation: Reservation,
        binding: Binding,
        link: NodeLink,
    ) -> None:
        self.generation = generation
        self.node = reservation.node
        self.binding = binding
        self.epoch = binding.epoch
        self.tokens = 0
        self._clock = context.loop.time
        self.last_sign_s = self._clock()
        self._context = context
        self._reservation = reservation
        self._link = link
        self._ended: asyncio.Future[Failure] = context.loop.create_future()
        self._handle: RunHandle | None = None
        self._over = False
        self._confirmed = False
        model = self.node.models.get(generation.session.spec.model)
        self._vocab_size = model.vocab_size if model is not None else 0
        self._stall = StallWatch(
            context.loop,
            context.settings.generation_stall_s,
            generation.context_tokens + generation.log.received,
            self.node.prefill_tokens_per_s,
        )

    async def run(self, dispatched: Callable[[Attempt], None]) -> Failure:
        """The failure that ended the attempt. Cancelled when its generation is decided first.

        `dispatched` is called when its commands go out. Once it has ended nothing of it points to itself, so
        that it goes without having to be found as garbage.
        """
        session = self.generation.session
        trace = self.generation.trace.attempt_started(
            self.node.name, self.epoch, self.generation.attempts, self.generation.log.received
        )
        self._reservation.on_lost = self._node_lost
        failure: Failure | None = None
        try:
            dispatched(self)
            try:
                command = await self._prepare(dict(trace.carrier()))
            except _Refused as refused:
                failure = self._failure_of(refused.refusal)
                return failure
            except LinkError as error:
                # What became of the node says more than that its answer did not come.
                failure = self._ended.result() if self._ended.done() else self._failure_of_link(error)
                return failure
            failure = await self._follow(command)
            return failure
        finally:
            self._over = True
            self._reservation.on_lost = None
            self._stall.stop()
            del self._stall  # what it calls holds the attempt: without a cycle both go at once
            if self._handle is not None and not self.generation.left:
                self._handle.close()  # which cancels it at the node
            # A cancel of this task cancels the future it waits for as well.
            if failure is None and self._ended.done() and not self._ended.cancelled():
                session.unbind()  # decided while its link was lost: the node may have kept the run
            session.drop_doubtful_binding()
            trace.ended(None if failure is None else failure.kind.value, self.tokens)

    async def _follow(self, command: Run) -> Failure:
        """Run it, and take it up again where the link blips and the node has kept it."""
        while True:
            self._handle = self._link.run(command, self)
            self._stall.start(self._stalled)
            failure = await self._ended
            if failure.kind is not FailureClass.LINK_LOST or not self._link.resumes:
                return failure
            link = await self._link_again()
            if link is None:
                return failure
            if self._reservation.to_move():
                return self._failure(FailureClass.DRAINED, "")
            self._handle.close()
            self._link = link
            self._ended = self._context.loop.create_future()
            command = self._rest_of(command)

    async def _link_again(self) -> NodeLink | None:
        """The next link to the same run of the node, if it comes at once and can take up what ran here."""
        node = self.node
        if not await node.link_gone(self._link, self._context.settings.relink_s):
            return None
        await node.relink_verdict()
        link = node.link
        if link is None or not link.resumes or not self.binding.holds:
            return None
        return link

    def _rest_of(self, command: Run) -> Run:
        """The same command from the next index on: a node that knows it goes on, another begins there."""
        log = self.generation.log
        return replace(
            command,
            prefix_token_ids=log.slice(0),
            first_index=log.received,
            max_new_tokens=self.generation.rules.remaining,
            max_wall_s=self.generation.remaining_wall_s() + NODE_WALL_MARGIN_S,
            assign=None if self._confirmed else command.assign,
            append=None if self._confirmed else command.append,
        )

    # Before the run: the node must hold exactly the context the head means

    async def _prepare(self, carrier: dict[str, str]) -> Run:
        assign, appends = self._owed_assign(), self._owed_appends()
        if Feature.INLINE_BIND in self.node.features and len(appends) <= 1:
            self._confirmed = assign is None and not appends
            if appends:
                self.binding.synced_tokens = None
            return self._run_command(carrier, assign, next(iter(appends), None))
        if assign is not None:
            await self._command(self._link.assign(assign))
            self.binding.assigned = True
            self.node.assigned(self.epoch)
        for append in appends:
            self.binding.synced_tokens = None
            await self._command(self._link.append(append))
            self.binding.synced(append.base_length + len(append.token_ids))
        self._confirmed = True
        return self._run_command(carrier, None, None)

    async def _command(self, answer: Coroutine[Any, Any, Refusal | None]) -> None:
        """Await a command's answer, or the node's loss, whichever comes first."""
        command = self._context.loop.create_task(answer)
        try:
            waits: list[asyncio.Future[Any]] = [command, self._ended]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not command.done():
                raise LinkLostError("the node was lost before it answered")
            refusal = command.result()
        finally:
            command.cancel()
        if refusal is not None:
            raise _Refused(refusal)

    def _owed_assign(self) -> Assign | None:
        session, binding = self.generation.session, self.binding
        if binding.assigned:
            return None
        binding.sent = True
        options = session.spec.engine_options if Feature.ENGINE_OPTIONS in self.node.features else b""
        return Assign(
            session_id=session.session_id,
            epoch=binding.epoch,
            command_id=binding.next_command_id(),
            model=session.spec.model,
            model_revision=session.spec.model_revision,
            sampling=session.sampling,
            qos=session.spec.qos,
            engine_options=options,
            lease_s=self._context.settings.lease_s,
        )

    def _owed_appends(self) -> list[Append]:
        """What the node lacks of the context, in commands that fit its messages."""
        session, binding = self.generation.session, self.binding
        held = binding.synced_tokens or 0
        tail = session.context.tail(held)
        limit_bytes = self._link.hello.max_message_bytes or APPEND_TOKENS * TOKEN_BYTES
        step = max(1, min(APPEND_TOKENS, limit_bytes // (2 * TOKEN_BYTES)))
        return [
            Append(
                session_id=session.session_id,
                epoch=binding.epoch,
                command_id=binding.next_command_id(),
                base_length=held + start,
                token_ids=tail[start : start + step],
            )
            for start in range(0, len(tail) or int(binding.overhang), step)
        ]

    def _run_command(self, carrier: dict[str, str], assign: Assign | None, append: Append | None) -> Run:
        generation = self.generation
        session = generation.session
        return Run(
            session_id=session.session_id,
            epoch=self.epoch,
            command_id=self.binding.next_command_id(),
            generation_id=generation.generation_id,
            context_length=len(session.context),
            context_crc32=session.context.crc32,
            prefix_token_ids=generation.log.slice(0),
            first_index=generation.log.received,
            max_new_tokens=generation.rules.remaining,
            max_wall_s=generation.remaining_wall_s() + NODE_WALL_MARGIN_S,
            sampling=generation.sampling,
            qos=generation.qos,
            assign=assign,
            append=append,
            carrier=carrier,
        )

    # While it runs: the sink

    def on_step(
        self,
        epoch: int,
        first_index: int,
        token_ids: Sequence[int],
        phase: Phase | None,
        finish: RunFinish | None,
        refusal: Refusal | None,
    ) -> None:
        if self._over or self._ended.done():
            return
        now_s = self._clock()
        self.last_sign_s = now_s
        if refusal is not None:
            self._fail(self._failure_of(refusal))
            return
        if epoch != self.epoch:
            self._wrong_epoch(epoch)
            return
        if not self._confirmed:
            self._confirm()
        if phase is not None:
            self._stall.enter(phase, now_s)
        # A finish without tokens has an index too: one past what there is means that a token is missing.
        if (token_ids or finish is not None) and not self._take_tokens(first_index, token_ids, now_s):
            return
        if finish is not None:
            self._node_finished(finish)

    def on_broken(self, error: LinkError) -> None:
        self._fail(self._failure_of_link(error))

    def _take_tokens(self, first_index: int, token_ids: Sequence[int], now_s: float) -> bool:
        generation = self.generation
        log = generation.log
        have = log.received
        if first_index > have:
            self._fail(self._failure(FailureClass.INDEX_GAP, f"index {first_index} came, {have} was next"))
            return False
        new = token_ids if first_index == have else token_ids[have - first_index :]
        if new:
            vocab_size = self._vocab_size
            if vocab_size and max(new) >= vocab_size:
                self._fail(
                    self._failure(FailureClass.NODE_FAULT, f"token {max(new)} is out of the vocabulary")
                )
                return False
            self._reservation.caught_up()
            self._stall.token(now_s)
            generation.deliver(new, now_s)
            self.tokens += log.received - have
        return log.finished is None

    def _confirm(self) -> None:
        """The first answer to a run that carried its own assign and append."""
        self._confirmed = True
        if not self.binding.assigned:
            self.binding.assigned = True
            self.node.assigned(self.epoch)
        self.binding.synced(self.generation.context_tokens)

    def _wrong_epoch(self, epoch: int) -> None:
        session_id = self.generation.session_id
        if epoch < self.epoch:
            self.node.owe_revoke(session_id, epoch, surely_held=False)
            return
        detail = f"tokens came under epoch {epoch}, which was never issued"
        self._fail(self._failure(FailureClass.PROTOCOL, detail))
        self._context.violated(self.node, detail)

    def _node_finished(self, finish: RunFinish) -> None:
        """The node's word counts only where the head's own rules could not decide."""
        generation = self.generation
        if finish is RunFinish.EOS:
            self._says_eos()
        elif finish is RunFinish.LENGTH:
            self._window_is_full()
        elif finish is RunFinish.ERROR:
            self._fail(self._failure(FailureClass.ENGINE_ERROR, "the engine failed"))
        elif finish is RunFinish.WALL_CLOCK and generation.remaining_wall_s() <= 0:
            generation.decide(FinishReason.WALL_CLOCK)
        else:
            self._fail(
                self._failure(FailureClass.NODE_FAULT, f"the node ended the run unasked: {finish.value}")
            )

    def _says_eos(self) -> None:
        """Where the model names its EOS ids, the log would have ended on one: then a token is missing."""
        if self.generation.rules.knows_eos:
            self._fail(self._failure(FailureClass.NODE_FAULT, "EOS was said, but no such token came"))
        else:
            self.generation.decide(FinishReason.EOS)

    def _window_is_full(self) -> None:
        window = window_tokens(self.node, self.generation.session.spec.model)
        held = self.generation.context_tokens + self.generation.log.received
        if not window:
            self.generation.decide(FinishReason.LENGTH)
        elif held < window:
            self._fail(self._failure(FailureClass.NODE_FAULT, f"the node ended at {held} of {window} tokens"))
        else:
            self._fail(Failure(FailureClass.CONTEXT_TOO_LONG, self.node.name, "full", window_tokens=window))

    # What ends it

    def _node_lost(self, kind: FailureClass, detail: str) -> None:
        self._fail(self._failure(kind, detail))

    def _stalled(self, detail: str) -> None:
        self._fail(self._failure(FailureClass.STALLED, detail))

    def _fail(self, failure: Failure) -> None:
        if not self._over and not self._ended.done():
            self._ended.set_result(failure)

    def _failure(self, kind: FailureClass, detail: str) -> Failure:
        return Failure(kind, self.node.name, detail)

    def _failure_of(self, refusal: Refusal) -> Failure:
        failure = failure_of_refusal(refusal, self.node.name, own_term=self._context.own_term())
        generation = self.generation
        most = generation.context_tokens + generation.log.received + generation.rules.remaining
        if failure.kind is FailureClass.CONTEXT_TOO_LONG and failure.window_tokens >= most:
            detail = f"at most {most} tokens were refused by a window of {failure.window_tokens}"
            return self._failure(FailureClass.NODE_FAULT, detail)
        return failure

    def _failure_of_link(self, error: LinkError) -> Failure:
        kind = _FAILURE_OF_LINK_ERROR.get(type(error), FailureClass.NODE_FAULT)
        return self._failure(kind, str(error))
