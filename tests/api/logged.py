"""A generation whose log a test writes, for those that are told of news by a callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet_service.domain.events import Accepted
from fleet_service.runtime.tokenlog import Follower, TokenLog


@dataclass
class LogGeneration:
    """Its followers, and whether one has gone."""

    log: TokenLog = field(default_factory=lambda: TokenLog(Accepted("gen-1", "s1"), branch=7))
    readers: list[Follower] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    generation_id = "gen-1"
    session_id = "s1"

    def attach(self, from_index: int = 0, branch: int = 0) -> Any:
        raise AssertionError("a connection follows")

    def follow(self, from_index: int, branch: int, on_news: Callable[[], None]) -> Follower:
        self.readers.append(Follower(self.log, from_index, lambda _: self.gone.set(), on_news))
        return self.readers[-1]
