"""Token ids that say when they were made, so that whoever reads one knows how long it was on its way.

All processes of one machine share CLOCK_MONOTONIC. An id has the time in microseconds in its low 30 bits, and
bit 30 set, so that it is never small: EOS and other special ids are.
"""

from __future__ import annotations

import time

_MARK = 1 << 30
_MASK = _MARK - 1
VOCAB_SIZE = 1 << 31
"""Of a model with such ids."""


def now_us() -> int:
    return int(time.monotonic() * 1e6)


def stamp(at_us: int) -> int:
    """The id of a token that is made then."""
    return at_us & _MASK | _MARK


def age_us(token_id: int, at_us: int) -> int:
    """How long ago that token was made; right for ages below a quarter of an hour."""
    return (at_us - token_id) & _MASK


def is_stamp(token_id: int) -> bool:
    return token_id >= _MARK
