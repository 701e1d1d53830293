"""A head that starts again: what an earlier run wrote down is taken up (design: Nothing is lost).

Sessions come back without their contexts, which are read when they are used. Generations that had not ended go
on: on the node that had them, at the next index, if it still has them; else as after the loss of a node.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleet_service.domain.specs import Sampling, SessionSpec
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.ledger import RequestLedger
from fleet_service.runtime.node import Node
from fleet_service.runtime.records import NodeMarked, Saved, SavedGeneration
from fleet_service.runtime.session import Session
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.store import StoreError
from fleet_service.runtime.views import RequestKey

log = structlog.get_logger(__name__)


class Recovery:
    """Takes up what is saved, once. `drain` starts a drain as it was ordered."""

    def __init__(
        self,
        saved: Saved,
        sessions: Sessions,
        generations: Generations,
        ledger: RequestLedger,
        wall_clock: Callable[[], float],
        drain: Callable[[Node, str, str], object],
    ) -> None:
        self._saved = saved
        self._sessions = sessions
        self._generations = generations
        self._ledger = ledger
        self._wall_clock = wall_clock
        self._drain = drain
        self._unfinished: list[Generation] = []
        self.marks = saved.marks
        """What operators ordered of nodes that have not come back yet."""

    def restore(self) -> None:
        """Everything but what runs, in one step: from here on callers find what is theirs."""
        saved = self._saved
        for kept in saved.sessions.values():
            self._sessions.restore(kept)
        ended = [each for each in saved.generations.values() if each.ended is not None]
        for generation in sorted(ended, key=lambda each: each.ended.ended_at if each.ended else 0.0):
            self._generations.restore(generation, self._session_of(generation))
        for generation in saved.generations.values():
            if generation.ended is None:
                session = self._session_of(generation)
                self._unfinished.append(self._generations.restore(generation, session))
        for held in saved.cancels.values():
            self._generations.restore_cancel(held)
        now = self._wall_clock()
        for answered in sorted(saved.requests.values(), key=lambda each: each.until):
            if answered.until > now:
                key = RequestKey(answered.request_id, answered.fingerprint, answered.owner)
                self._ledger.restore(key, answered.answer, answered.until - now)
        if saved.term:
            log.info("restored", sessions=len(saved.sessions), generations=len(self._unfinished))

    async def go_on(self) -> None:
        """Drive what had not ended, now that the nodes are being dialed."""
        unfinished, self._unfinished = self._unfinished, []
        for generation in unfinished:
            try:
                await self._sessions.here(generation.session)
            except StoreError:
                log.exception("generation_not_taken_up", generation=generation.generation_id)
            self._generations.go_on(generation)

    def node_is_back(self, node: Node) -> None:
        """Carry out what operators had ordered of it."""
        mark = self.marks.pop(node.name, None)
        if mark is None or node.cordoned:
            return
        node.cordon(mark.by, mark.note, mark.at)
        if mark.mark == "drain":
            self._drain(node, mark.by, mark.note)

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


def addresses_after(configured: tuple[str, ...], listed: dict[str, bool]) -> list[str]:
    """The addresses and names to start with: those of the settings, as operators changed them since."""
    kept = [address for address in configured if listed.get(address, True)]
    return kept + [address for address, there in listed.items() if there and address not in kept]


def mark_of(node: Node) -> NodeMarked:
    """What operators want of a node, as a record."""
    mark = "drain" if node.drain is not None else "cordon" if node.cordoned else ""
    return NodeMarked(node.name, mark, node.cordoned_by, node.cordoned_at or 0.0, node.cordon_note)
