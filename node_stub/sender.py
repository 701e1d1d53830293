"""Sends a run's messages, and lets the faults strike between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from node_stub.calls import Call, Calls, LinkDropped
from node_stub.faults import APPEND_ACTIONS, Action, Fault, Hazards, Point
from node_stub.node import Node
from node_stub.rules import Append, Code, Refusal
from node_stub.runs import Run, Step

# What was written must be at the peer before the process is killed or stopped. A write returns when the
# message has been handed to the socket; the rest is the kernel's, and this leaves it room.
_FLUSH_S = 0.05

Write = Callable[[Step, int], Awaitable[None]]


class Striker:
    """Carries out faults."""

    def __init__(self, node: Node, hazards: Hazards, calls: Calls) -> None:
        self._node = node
        self._hazards = hazards
        self._calls = calls

    async def on_command(self, point: Point, session_id: str, call: Call) -> Refusal | None:
        """Let what is due at this point of a command strike. Raises LinkDropped."""
        struck: set[int] = set()
        actions = frozenset(Action) - APPEND_ACTIONS
        while fault := self._node.faults.take(point, session_id, struck=struck, actions=actions):
            match fault.action:
                case Action.DELAY:
                    await asyncio.sleep(fault.delay_ms / 1000)
                case Action.REFUSE | Action.ENGINE_ERROR:
                    return refusal_of(fault)
                case _:
                    await self.on_process(fault, call)
        return None

    def append(self, command: Append) -> Refusal | None:
        """Execute an Append, or lose or repeat it where a fault says so."""
        fault = self._node.faults.take(Point.AFTER_APPEND, command.session_id, actions=APPEND_ACTIONS)
        if fault is None:
            return self._node.append(command)
        if fault.action is Action.LOSE_APPEND:
            return None
        return self._node.append(replace(command, token_ids=[*command.token_ids, *command.token_ids]))

    async def on_run(self, fault: Fault, run: Run, call: Call, write: Write) -> None:
        """Let a fault strike in a run. Raises LinkDropped."""
        match fault.action:
            case Action.DELAY:
                await _any_of(run.stopped(), asyncio.sleep(fault.delay_ms / 1000))
            case Action.STALL:
                run.stall()
                await run.stopped()
            case Action.REFUSE | Action.ENGINE_ERROR:
                self._node.stop(run, refusal_of(fault))
            case Action.WRONG_EPOCH:
                run.epoch_lie = 1
            case Action.REPEAT_INDEX:
                await write(run.repeat(), run.admission.epoch + run.epoch_lie)
            case Action.SKIP_INDEX:
                run.skip_token()
            case _:
                await self.on_process(fault, call)

    async def on_process(self, fault: Fault, call: Call) -> None:
        """Die, freeze, drop or cut the link, once what was written before has left. Raises LinkDropped.

        A call that ends meanwhile (its head has heard enough) changes nothing about that.
        """
        try:
            await asyncio.sleep(_FLUSH_S)
        finally:
            self._carry_out(fault, call)
        if fault.action is not Action.FREEZE:
            raise LinkDropped

    def _carry_out(self, fault: Fault, call: Call) -> None:
        match fault.action:
            case Action.DIE:
                self._hazards.die()
            case Action.FREEZE:
                self._hazards.freeze()
            case Action.DROP_LINK:
                self._calls.break_connection(call.peer)
            case Action.CUT_LINK:
                self._calls.cut(fault.delay_ms / 1000)


class Sender:
    """What a run sends next, and where a fault comes in between."""

    def __init__(self, node: Node, run: Run) -> None:
        self._node = node
        self._run = run

    def start_fault(self) -> Fault | None:
        """The next fault that strikes before anything is sent."""
        return self._due(Point.AFTER_GENERATE)

    def take_epoch_lie(self) -> None:
        """Let a wrong epoch strike now, wherever it is due: for a link, which names an epoch but once."""
        run = self._run
        if self._node.faults.take_anywhere(Action.WRONG_EPOCH, run.admission.session_id, run.struck):
            run.epoch_lie = 1

    def next(self) -> Step | Fault | None:
        """A step to send (and then to be noted by the run), or a fault to let strike first.

        None: nothing is to be sent until the run has news. Raises LinkDropped.
        """
        run, faults = self._run, self._node.faults
        session_id = run.admission.session_id
        if fault := self._due(Point.AFTER_TOKENS):
            return fault
        while run.has_news and not run.delivered:
            if run.all_tokens_sent and (fault := self._due(Point.BEFORE_FINISH)):
                return fault
            if run.dropped:
                raise LinkDropped
            self._node.may_send(run)
            limit = faults.next_boundary(session_id, run.sent, run.struck)
            with_finish = run.all_tokens_sent or not faults.expects_finish(session_id, run.struck)
            if step := run.take(limit, with_finish=with_finish):
                return step
        return None

    def _due(self, point: Point) -> Fault | None:
        run = self._run
        return self._node.faults.take(point, run.admission.session_id, sent=run.sent, struck=run.struck)


async def send_all(sender: Sender, run: Run, striker: Striker, call: Call, write: Write) -> None:
    """Send a run over a call of its own, until the finish or a refusal has gone out. Raises LinkDropped."""
    while fault := sender.start_fault():
        await striker.on_run(fault, run, call, write)
    while not run.delivered:
        match sender.next():
            case None:
                await run.ready()
            case Fault() as fault:
                await striker.on_run(fault, run, call, write)
            case Step() as step:
                await write(step, run.admission.epoch + run.epoch_lie)
                run.note_sent(step)


def refusal_of(fault: Fault) -> Refusal:
    """The refusal that REFUSE or ENGINE_ERROR gives."""
    code = Code.ENGINE_ERROR if fault.action is Action.ENGINE_ERROR else fault.refusal_code
    return Refusal(code or Code.ENGINE_ERROR, detail="a fault that was asked for")


async def _any_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
