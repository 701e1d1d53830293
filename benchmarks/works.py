"""The work that is measured: what callers ask for, and how fast nodes make tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """`slots` calls at a time for `tokens` tokens each, or `arrivals_per_s` calls at set times; over so
    many connections where calls share them. Nodes make `rate` tokens a second for each call, 0 = as fast
    as they can.
    """

    key: str
    title: str
    slots: int
    tokens: int
    rate: float = 0.0
    connections: int = 4
    arrivals_per_s: float = 0.0

    @property
    def per_request(self) -> bool:
        """Its cost is that of requests, not of tokens."""
        return self.tokens == 1


_LONG = 4_000
"""Tokens of a paced call: more than there is time for."""

FULL = tuple(
    Work(f"full-{streams}", f"{streams} stream{'s' * (streams > 1)}, full speed", streams, 256)
    for streams in (1, 32, 128, 512)
)
PACED = tuple(
    Work(
        f"paced-{streams}x{rate}-{connections}",
        f"{streams} streams, {rate} tokens/s each, {connections} connections",
        streams,
        _LONG,
        float(rate),
        connections,
    )
    for streams, rate in ((128, 50), (512, 25))
    for connections in (4, 32)
)
ONE_TOKEN = tuple(
    Work(f"one-{slots}", f"one-token requests, {slots} at a time", slots, 1) for slots in (1, 64)
)
ARRIVING = Work("arriving", "one-token requests, 100 a second", 64, 1, arrivals_per_s=100.0)
WORKS = (*FULL, *ONE_TOKEN, ARRIVING, *PACED)
BY_KEY = {work.key: work for work in WORKS}

CHIEF = ("full-128", "one-64", "paced-128x50-4", "paced-512x25-4")
"""What is measured of every variant."""
