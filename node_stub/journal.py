"""What a node executed, kept for tests and people: the newest entries of a bounded list."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

CAPACITY = 10_000


@dataclass(slots=True)
class Entry:
    """A command, or one generation with what became of it. Times are ms of the node's monotonic clock."""

    kind: str
    session_id: str
    epoch: int
    at_ms: int
    outcome: str
    generation_id: str = ""
    tokens_sent: int = 0
    prompt_tokens: int = 0
    cancel_seen_ms: int | None = None
    ended_ms: int | None = None
    resumes: int = 0
    traceparent: str = ""
    """W3C trace context that the generation's call carried; not part of the control's answers."""


class Journal:
    """Entries, oldest first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)

    def add(self, entry: Entry) -> Entry:
        """Keep the entry; a generation's is updated in place as it goes on."""
        self._entries.append(entry)
        return entry

    def entries(self, session_id: str = "", kind: str = "") -> list[Entry]:
        """Those of a session and of a kind; empty = any."""
        return [
            entry
            for entry in self._entries
            if session_id in ("", entry.session_id) and kind in ("", entry.kind)
        ]
