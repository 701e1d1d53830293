"""Terms and epochs: the fencing numbers that let a node tell the newest binding of a session.

An epoch is ``term << 32 | n``: the term belongs to a head's run, n counts that run's bindings. Terms rise
from run to run, so every epoch of a later run is above every epoch of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable

_N_BITS = 32
_MAX_32 = (1 << _N_BITS) - 1

CREDIBLE_TERMS_AHEAD = 366 * 86_400
"""Terms are unix seconds: one more than a year ahead of the head's own clock is not taken from a node."""


def make_epoch(term: int, n: int) -> int:
    """The epoch of binding `n` of `term`; both 0..2**32-1. ValueError beyond."""
    if not 0 <= term <= _MAX_32:
        raise ValueError(f"term {term} is not in 0..{_MAX_32}")
    if not 0 <= n <= _MAX_32:
        raise ValueError(f"n {n} is not in 0..{_MAX_32}")
    return term << _N_BITS | n


def term_of(epoch: int) -> int:
    """The term that issued `epoch`."""
    return epoch >> _N_BITS


class EpochCounter:
    """Issues the epochs of one term, each above the one before."""

    def __init__(self, term: int) -> None:
        """ValueError when `term` is not in 0..2**32-1."""
        make_epoch(term, 0)
        self._term = term
        self._n = 0

    @property
    def term(self) -> int:
        return self._term

    @property
    def last(self) -> int:
        """The newest epoch issued; ``term << 32`` before the first."""
        return make_epoch(self._term, self._n)

    def next(self) -> int:
        """The next epoch, n counting from 1. ValueError once the term's 2**32-1 epochs are spent."""
        epoch = make_epoch(self._term, self._n + 1)
        self._n += 1
        return epoch


def choose_term(unix_s: int, highest_epochs: Iterable[int]) -> int:
    """A term for a new run: the wall clock in seconds, raised above the term of every reported epoch.

    ValueError when no term is left, which only a clock or a node's report far out of range can bring about.
    """
    term = max([unix_s, *(term_of(epoch) + 1 for epoch in highest_epochs)])
    make_epoch(term, 0)
    return term
