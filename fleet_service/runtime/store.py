"""Where records go, as a Protocol: into memory, a file, or a database that several heads share."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from fleet_service.runtime.records import Record, RequestAnswered, Saved


class StoreTrouble(Enum):
    """What is wrong with a store."""

    FULL = "full"
    """No space is left; it may come back."""
    UNAVAILABLE = "unavailable"
    """It cannot be reached or written now; it may come back."""
    IN_USE = "in_use"
    """Another head has it."""
    CORRUPT = "corrupt"
    NEWER = "newer"
    """A newer release made it."""


class StoreError(Exception):
    """A store did not do what was asked of it; nothing of the batch was kept."""

    def __init__(self, trouble: StoreTrouble, text: str) -> None:
        super().__init__(text)
        self.trouble = trouble

    @property
    def may_pass(self) -> bool:
        """Whether the same may work later."""
        return self.trouble in (StoreTrouble.FULL, StoreTrouble.UNAVAILABLE)


class SessionStore(Protocol):
    """Keeps what is to outlive the head. One writer at a time.

    A batch is kept whole or not at all, and batches in their order. What `write` has returned for is kept
    whatever happens to the process and the machine.
    """

    async def open(self) -> Saved:
        """Take the store for this head; what there is. Raises StoreError."""

    async def take_term(self, term: int, branch: int, *, tells_ahead: bool = False) -> None:
        """Keep the term of this run, above every one before. Raises StoreError.

        `tells_ahead`: callers are told of changes before these are kept; should the run end without `close`,
        the next one finds the store `torn`.
        """

    async def write(self, batch: Sequence[Record]) -> None:
        """Keep a batch. Raises StoreError; then nothing of it was kept."""

    async def context(self, session_id: str) -> array[int]:
        """The token ids of a session's context. Raises StoreError, KeyError for an unknown one."""

    async def answered(self, owner: str, request_id: str) -> RequestAnswered | None:
        """The answer that a request got; there may be far too many for a head to have them all in memory.

        Raises StoreError.
        """

    async def close(self) -> None:
        """Let go of it; what was written stays."""
