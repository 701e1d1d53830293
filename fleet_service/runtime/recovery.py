"""A head that starts again: what an earlier run wrote down is taken up (design: Nothing is lost).

Sessions come back without their contexts, which are read when they are used. Generations that had not ended
go on: on the node that had them, at the next index, if it still has them; else as after the loss of a node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from fleet_service.domain.epochs import term_of
from fleet_service.domain.errors import FleetError
from fleet_service.domain.node_types import Feature
from fleet_service.domain.specs import Sampling, SessionSpec
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.node import Node
from fleet_service.runtime.records import NodeMarked, RevokeOwed, Saved, SavedGeneration
from fleet_service.runtime.session import Session
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.store import StoreError

log = structlog.get_logger(__name__)

ENDED = "ended"
"""The mark of a node that had not come back when an operator ended what there was."""

READ_AGAIN_S = 0.5
"""How long after a store could not read something it is asked again, where that may pass."""


class Recovery:
    """Takes up what is saved, once. `drain` starts a drain as it was ordered."""

    def __init__(
        self,
        saved: Saved,
        sessions: Sessions,
        generations: Generations,
        drain: Callable[[Node, str, str, float], object],
    ) -> None:
        self._saved = saved
        self._sessions = sessions
        self._generations = generations
        self._drain = drain
        self._unfinished: list[Generation] = []
        self.marks = saved.marks
        """What operators ordered of nodes that have not come back yet."""
        self._revokes: dict[str, list[RevokeOwed]] = {}
        """Of nodes that have not come back yet, by their names."""
        for owed in saved.revokes.values():
            self._revokes.setdefault(owed.node, []).append(owed)

    def restore(self) -> None:
        """Everything but what runs, in one step: from here on callers find what is theirs."""
        saved = self._saved
        for kept in sorted(saved.sessions.values(), key=lambda each: each.kept.number):
            self._sessions.restore(kept)
        self._sessions.restored()
        ended = [each for each in saved.generations.values() if each.ended is not None]
        for generation in sorted(ended, key=lambda each: each.ended.ended_at if each.ended else 0.0):
            self._generations.restore(generation, self._session_of(generation))
        for generation in saved.generations.values():
            if generation.ended is None:
                session = self._session_of(generation)
                restored = self._generations.restore(generation, session)
                if session.finished:  # the head died, or was stopped, while it was
                    restored.cancel()
                self._unfinished.append(restored)
        self._finish_answered(saved)
        for held in sorted(saved.cancels.values(), key=lambda each: each.until):
            self._generations.restore_cancel(held)
        if saved.term:
            log.info("restored", sessions=len(saved.sessions), generations=len(self._unfinished))
        if saved.torn:
            log.warning("new_branch", why=saved.why_torn, generations=len(self._unfinished))
        # It may be much, and whoever opened the store has it still.
        for done in (saved.sessions, saved.generations, saved.cancels):
            done.clear()

    async def go_on(self) -> None:
        """Drive what had not ended, now that the nodes are being dialed."""
        unfinished, self._unfinished = self._unfinished, []
        for generation in unfinished:
            await self._read_context(generation)
            self._generations.go_on(generation)

    async def _read_context(self, generation: Generation) -> None:
        """Until it is read or the generation is decided: by that the store cannot read it, or by its time."""
        while generation.finished is None:
            try:
                await self._sessions.here(generation.session)
            except FleetError as error:
                cause = error.__cause__
                if not isinstance(cause, StoreError) or not cause.may_pass:
                    log.warning("generation_not_taken_up", generation=generation.generation_id)
                    generation.fail(error)
                    return
                await asyncio.sleep(READ_AGAIN_S)
            else:
                return

    def callers_may_come(self) -> None:
        """The head serves: readers have their time to return from now on."""
        for generation in self._generations.running:
            generation.waits_for_readers()

    def node_is_back(self, node: Node) -> list[NodeMarked]:
        """Carry out what operators had ordered of it, by its identity or address; what changes by that."""
        marks = [self.marks.pop(name, None) for name in (node.name, node.address)]
        if any(mark is not None and mark.mark == ENDED for mark in marks):
            return marks_of(node)
        mark = next((mark for mark in marks if mark is not None), None)
        if mark is None or node.cordoned:
            return []
        if mark.mark == "drain":
            node.cordon(mark.cordoned_by, mark.cordon_note, mark.cordoned_at)
            self._drain(node, mark.by, mark.note, mark.at)
        else:
            node.cordon(mark.by, mark.note, mark.at)
        return []

    def owed_to(self, node: Node) -> list[RevokeOwed]:
        """Let the node, which is back, have the revokes that an earlier run owed it; what is settled by that.

        One that says itself what it holds needs none, and another process holds nothing.
        """
        settled: list[RevokeOwed] = []
        for owed in self._revokes.pop(node.name, []):
            if owed.incarnation == node.incarnation and Feature.RECONCILE not in node.features:
                node.owe_revoke(owed.session_id, owed.epoch, surely_held=True)
            else:
                settled.append(replace(owed, settled=True))
        return settled

    def leases_ran_out(self) -> list[RevokeOwed]:
        """A lease after the start: what nodes held that have not come back, they hold no more."""
        revokes, self._revokes = self._revokes, {}
        return [replace(owed, settled=True) for of_node in revokes.values() for owed in of_node]

    def _finish_answered(self, saved: Saved) -> None:
        """A session for one answer ends with that; the head may have died before it came to it."""
        for session_id, kept in saved.sessions.items():
            session = self._sessions.known(session_id)
            if kept.kept.ephemeral and session is not None and not session.generation_id:
                self._sessions.remove(session)

    def _session_of(self, generation: SavedGeneration) -> Session:
        """Its session, or what stands for one that is over."""
        started = generation.started
        session = self._sessions.known(started.session_id)
        if session is not None:
            return session
        gone = Session(
            started.session_id,
            SessionSpec(model=""),
            Sampling(),
            now_s=0.0,
            unix_s=started.accepted_at,
            number=0,
            owner=started.owner,
        )
        gone.finished = True
        return gone


def term_after(saved: Saved, unix_s: int) -> int:
    """A term above that of every earlier run, and of every epoch it gave."""
    bound = (each.bound.epoch for each in saved.sessions.values() if each.bound is not None)
    return max(unix_s, saved.term + 1, saved.raised_term + 1, term_of(max(bound, default=0)) + 1)


def branch_after(saved: Saved, term: int) -> int:
    """The branch of what comes from here on: another one where the end of what there was may be lost.

    Named by the term, which no other run has: copies of one store know nothing of each other's branches.
    """
    return term if saved.torn else saved.branch


def addresses_after(configured: tuple[str, ...], listed: dict[str, bool]) -> list[str]:
    """The addresses and names to start with: those of the settings, as operators changed them since."""
    kept = [address for address in configured if listed.get(address, True)]
    return kept + [address for address, there in listed.items() if there and address not in kept]


def marks_of(node: Node, *, gone: bool = False) -> list[NodeMarked]:
    """What operators want of a node, as records: by its name, and no more by the address it had before."""
    drain, cordon = node.drain, (node.cordoned_by, node.cordoned_at or 0.0, node.cordon_note)
    if gone or not node.cordoned:
        named = NodeMarked(node.name, "")
    elif drain is not None:
        named = NodeMarked(node.name, "drain", drain.by, drain.started_at, drain.note, *cordon)
    else:
        named = NodeMarked(node.name, "cordon", *cordon)
    return [named] if node.name == node.address else [named, NodeMarked(node.address, "")]
