"""A session's context: its token ids, and the CRC-32 that a node must find over the same ids.

The checksum is that of the ids as packed little-endian 32-bit words (fleet.v1 NodeService.Generate). It is
carried along as tokens arrive, so an append costs what it adds; only a truncation runs over what is kept.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Literal


def crc32_of(ids: array[int], start_crc: int = 0, byteorder: Literal["little", "big"] = sys.byteorder) -> int:
    """CRC-32 of `ids` (typecode 'I', words in `byteorder`) as little-endian words, after `start_crc`."""
    if byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return zlib.crc32(ids, start_crc)


class Context:
    """Token ids in order, each 0..2**32-1. OverflowError for an id outside, and then nothing changes."""

    __slots__ = ("_crc32", "_ids")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids = array("I")
        self._crc32 = 0
        self.append(token_ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def crc32(self) -> int:
        """CRC-32 of the packed little-endian ids; 0 when there are none."""
        return self._crc32

    def append(self, ids: Iterable[int]) -> None:
        """Add `ids` at the end. Costs O(new tokens)."""
        new = array("I", ids)
        self._ids.extend(new)
        self._crc32 = crc32_of(new, self._crc32)

    def truncate(self, length: int) -> None:
        """Keep the first `length` ids. ValueError unless 0 <= length <= len. Costs O(kept tokens)."""
        if not 0 <= length <= len(self._ids):
            raise ValueError(f"cannot truncate {len(self._ids)} tokens to {length}")
        if length < len(self._ids):
            del self._ids[length:]
            self._crc32 = crc32_of(self._ids)

    def tail(self, start: int) -> array[int]:
        """A copy of the ids from `start` on. ValueError unless 0 <= start <= len."""
        if not 0 <= start <= len(self._ids):
            raise ValueError(f"no tail from {start} in {len(self._ids)} tokens")
        return self._ids[start:]

    def token_ids(self) -> array[int]:
        """A copy of all ids."""
        return self._ids[:]
