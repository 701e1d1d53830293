"""A session's context on a node: its token ids, and the CRC-32 that a Generate must name."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence

WORD_BYTES = 4


def packed(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian 32-bit words. Raises OverflowError for an id outside 0..2**32-1."""
    words = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


def context_crc32(token_ids: Sequence[int]) -> int:
    """CRC-32 (as zlib's) of the packed ids; that of nothing is 0."""
    return zlib.crc32(packed(token_ids))


class Context:
    """Token ids with a CRC-32 kept up to date at the cost of what is added."""

    __slots__ = ("crc32", "token_ids")

    def __init__(self) -> None:
        self.token_ids: array[int] = array("I")
        self.crc32 = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def replace_tail(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Keep the first `base_length` tokens and add `token_ids`. `base_length` is at most the length."""
        if base_length < len(self.token_ids):
            del self.token_ids[base_length:]
            self.crc32 = context_crc32(self.token_ids)
        tail = array("I", token_ids)
        self.crc32 = zlib.crc32(packed(tail), self.crc32)
        self.token_ids.extend(tail)
