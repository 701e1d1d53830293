"""What became of a command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """What a command printed and its exit code."""

    code: int
    out: str
    err: str
