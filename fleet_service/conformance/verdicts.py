"""What a check of a rule can come to, and the rule it is of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet_service.conformance.head import Head


class Broken(Exception):
    """The rule does not hold; the text is what was seen."""


class Skipped(Exception):
    """The rule is not of this node, or this node gives no chance to try it; the text says why."""


class Untried(Exception):
    """What the check needs first did not work: another rule is broken. The text is what was seen."""


class Outcome(StrEnum):
    """What became of a rule."""

    OK = "ok"
    BROKEN = "broken"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule by its number in docs/node-contract.md. `check` returns where it holds, else raises."""

    number: str
    what: str
    check: Callable[[Head], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Result:
    """What was found of one rule. `seen` is empty where it holds."""

    number: str
    what: str
    outcome: Outcome
    seen: str = ""
    untried: bool = False
    """Skipped for want of something that a node must be able to do."""
    took_s: float = 0.0


def expect(holds: object, seen: str) -> None:
    """Raise Broken, with what was seen instead, unless it holds."""
    if not holds:
        raise Broken(seen)
