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


_ELSEWHERE = array("I")
"""Stands for ids that are put away, in all contexts; it stays empty."""


class Context:
    """Token ids in order, each 0..2**32-1. OverflowError for an id outside, and then nothing changes.

    One that is put away has its length and checksum alone, until it is taken out again; it can grow
    meanwhile, and what needs the ids raises RuntimeError.
    """

    __slots__ = ("_away", "_crc32", "_ids")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids = array("I")
        self._away: int | None = None
        self._crc32 = 0
        if token_ids:
            self.append(token_ids)

    @classmethod
    def kept_elsewhere(cls, length: int, crc32: int) -> Context:
        """A context that is put away."""
        context = cls()
        context._ids, context._away, context._crc32 = _ELSEWHERE, length, crc32
        return context

    @property
    def is_away(self) -> bool:
        return self._away is not None

    def put_away(self) -> None:
        """Keep only length and checksum; the ids are elsewhere."""
        if self._away is None:
            self._away = len(self._ids)
            self._ids = _ELSEWHERE

    def take_out(self, ids: array[int]) -> None:
        """The ids are here again. ValueError when they are not those that were put away."""
        if self._away is None:
            return
        if len(ids) != self._away or crc32_of(ids) != self._crc32:
            raise ValueError(f"these are not the {self._away} tokens of this context")
        self._ids, self._away = ids, None

    def __len__(self) -> int:
        return len(self._ids) if self._away is None else self._away

    def _check_here(self) -> None:
        if self._away is not None:
            raise RuntimeError("the context is put away")

    @property
    def crc32(self) -> int:
        """CRC-32 of the packed little-endian ids; 0 when there are none."""
        return self._crc32

    def append(self, ids: Iterable[int]) -> None:
        """Add `ids` at the end. Costs O(new tokens)."""
        new = array("I", ids)
        if self._away is None:
            self._ids.extend(new)
        else:
            self._away += len(new)
        self._crc32 = crc32_of(new, self._crc32)

    def truncate(self, length: int) -> None:
        """Keep the first `length` ids. ValueError unless 0 <= length <= len. Costs O(kept tokens)."""
        self._check_here()
        if not 0 <= length <= len(self._ids):
            raise ValueError(f"cannot truncate {len(self._ids)} tokens to {length}")
        if length < len(self._ids):
            del self._ids[length:]
            self._crc32 = crc32_of(self._ids)

    def tail(self, start: int) -> array[int]:
        """A copy of the ids from `start` on. ValueError unless 0 <= start <= len."""
        self._check_here()
        if not 0 <= start <= len(self._ids):
            raise ValueError(f"no tail from {start} in {len(self._ids)} tokens")
        return self._ids[start:]

    def token_ids(self) -> array[int]:
        """A copy of all ids."""
        self._check_here()
        return self._ids[:]
