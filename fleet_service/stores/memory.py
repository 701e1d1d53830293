"""A store that forgets with its process: for tests, and for those who want nothing on disk.

It is also what every other store must agree with: `replay` says what records mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from copy import deepcopy

from fleet_service.runtime.records import (
    AttemptStarted,
    BranchCut,
    CancelHeld,
    ContextExtended,
    GenerationEnded,
    GenerationGone,
    GenerationStarted,
    NodeListed,
    NodeMarked,
    Record,
    RequestAnswered,
    RevokeOwed,
    Saved,
    SavedGeneration,
    SavedSession,
    SessionBound,
    SessionGone,
    SessionKept,
    TermRaised,
    TokensDelivered,
)

Answers = dict[tuple[str, str], RequestAnswered]
"""By owner and request_id."""


class MemoryStore:
    """A SessionStore. Opened again, it has what it had: a head can be restarted on it within one process."""

    def __init__(self) -> None:
        self._saved = Saved()
        self._contexts: dict[str, array[int]] = {}
        self._answers: Answers = {}

    async def open(self) -> Saved:
        return deepcopy(self._saved)

    async def take_term(self, term: int, branch: int, *, tells_ahead: bool = False) -> None:
        self._saved.term, self._saved.branch, self._saved.torn = term, branch, tells_ahead

    async def write(self, batch: Sequence[Record]) -> None:
        replay(batch, self._saved, self._contexts, self._answers)

    async def context(self, session_id: str) -> array[int]:
        return self._contexts[session_id][:]

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        return self._answers.get((owner, request_id))

    async def close(self) -> None:
        self._saved.torn = False


def replay(batch: Iterable[Record], saved: Saved, contexts: dict[str, array[int]], answers: Answers) -> None:
    """Carry records out on what is saved."""
    for record in batch:
        match record:
            case SessionKept() | SessionGone() | ContextExtended() | SessionBound():
                _session(record, saved, contexts)
            case (
                GenerationStarted()
                | TokensDelivered()
                | AttemptStarted()
                | BranchCut()
                | GenerationEnded()
                | GenerationGone()
            ):
                _generation(record, saved)
            case RequestAnswered():
                answers[record.owner, record.request_id] = record
            case _:
                _other(record, saved)


def _session(
    record: SessionKept | SessionGone | ContextExtended | SessionBound,
    saved: Saved,
    contexts: dict[str, array[int]],
) -> None:
    match record:
        case SessionKept():
            known = saved.sessions.get(record.session_id)
            if known is None:
                saved.sessions[record.session_id] = SavedSession(record)
                contexts[record.session_id] = array("I")
            else:
                known.kept = record
        case SessionGone():
            saved.sessions.pop(record.session_id, None)
            contexts.pop(record.session_id, None)
        case ContextExtended():
            ids = contexts[record.session_id]
            del ids[record.base_length :]
            ids.extend(record.token_ids)
            session = saved.sessions[record.session_id]
            session.context_length, session.context_crc32 = len(ids), record.crc32
        case SessionBound():
            saved.sessions[record.session_id].bound = record if record.node else None


def _generation(
    record: GenerationStarted
    | TokensDelivered
    | AttemptStarted
    | BranchCut
    | GenerationEnded
    | GenerationGone,
    saved: Saved,
) -> None:
    generations = saved.generations
    match record:
        case GenerationStarted():
            generations[record.generation_id] = SavedGeneration(record)
        case TokensDelivered():
            ids = generations[record.generation_id].token_ids
            del ids[record.first_index :]
            ids.extend(record.token_ids)
        case AttemptStarted():
            generation = generations[record.generation_id]
            generation.marks.append((record.index, record.event))
            generation.attempts = record.attempts
        case BranchCut():
            generations[record.generation_id].cuts.append(record)
        case GenerationEnded():
            generations[record.generation_id].ended = record
        case GenerationGone():
            generations.pop(record.generation_id, None)


def _other(record: CancelHeld | RevokeOwed | NodeListed | NodeMarked | TermRaised, saved: Saved) -> None:
    match record:
        case TermRaised():
            saved.raised_term = max(saved.raised_term, record.term)
        case CancelHeld():
            saved.cancels.pop((record.owner, record.generation_id), None)
            if record.until:
                saved.cancels[record.owner, record.generation_id] = record
        case RevokeOwed():
            key = (record.node, record.incarnation, record.session_id, record.epoch)
            saved.revokes.pop(key, None)
            if not record.settled:
                saved.revokes[key] = record
        case NodeListed():
            saved.listed[record.address] = record.listed
        case NodeMarked():
            saved.marks.pop(record.node, None)
            if record.mark:
                saved.marks[record.node] = record
