"""Whether the end of SQLite's write-ahead log was lost.

SQLite reads the log up to the first frame that is not as it was written, and says nothing of what stands
behind. A head that was killed leaves nothing of worth there: at most one batch that nobody was told of. More
than one behind a damaged frame is another matter.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">8I")  # magic, version, page size, sequence, salts, checksums
_FRAME = struct.Struct(">6I")  # page, pages of the file if it ends a transaction, salts, checksums
_WRAP = 2**32
_MASK = _WRAP - 1
# The last bit says whether what is summed is read with the high byte first.
_MAGIC = 0x377F0682
_VERSION = 3_007_000
# Of the header, and of what stands before a frame's page.
_SUMMED_OF_HEADER, _SUMMED_OF_FRAME = 24, 8


@dataclass(frozen=True, slots=True)
class LogSeen:
    """A log as it stood before SQLite opened it. Frames count from 1."""

    last_but_one: int = 0
    """The frame that ends the last transaction but one, whether they are whole or not."""
    of_this_file: bool = True
    """Whether the header goes with the frames."""

    def lost_end(self, valid_frames: int) -> bool:
        """Whether there was more than the frames that SQLite takes."""
        return self.last_but_one > valid_frames or not (valid_frames or self.of_this_file)


def look_at_log(file: Path) -> LogSeen:
    """Reads a little of each frame. Raises OSError."""
    try:
        log = file.open("rb")
    except FileNotFoundError:
        return LogSeen()
    with log:
        header = log.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return LogSeen()
        _, _, page_bytes, _, *salts = _HEADER.unpack(header)[:6]
        if not 512 <= page_bytes <= 65_536:
            return LogSeen(of_this_file=False)
        last, last_but_one, of_this_file, number = 0, 0, True, 0
        while len(frame := log.read(_FRAME.size)) == _FRAME.size:
            number += 1
            _, commits, *own_salts = _FRAME.unpack(frame)[:4]
            if own_salts == salts:
                if commits:
                    last, last_but_one = number, last
            elif number == 1:
                # A log is begun anew from its front with the next salt; behind are frames of before.
                of_this_file = (own_salts[0] + 1) % _WRAP == salts[0]
            log.seek(page_bytes, 1)
    return LogSeen(last_but_one, of_this_file)


def damage_of_log(file: Path, page_bytes: int) -> int | None:
    """The byte behind which SQLite takes nothing, though whole commits stand there; None: there is none.

    What usually ends a log is no damage: frames of before, with other salts, and a commit that was under way.
    Every frame is summed, as SQLite does it, on from the one before it: a second for 64 MB. `page_bytes` is
    the store's, for a header that is damaged itself. Nobody may write to the log meanwhile. Raises OSError.
    """
    try:
        log = file.open("rb")
    except FileNotFoundError:
        return None
    with log:
        header = log.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        magic, version, size, _, *rest = _HEADER.unpack(header)
        salts, sums = rest[:2], rest[2:]
        swap = (magic & 1) != (sys.byteorder == "big")
        known = (magic | 1, version) == (_MAGIC | 1, _VERSION)
        damaged_at = None
        if not known or _summed([0, 0], header[:_SUMMED_OF_HEADER], swap=swap) != sums:
            # SQLite takes nothing of it; the first frame tells which salts it had.
            damaged_at, salts, size, swap = 0, [], page_bytes, False
        at, whole = _HEADER.size, True
        while len(frame := log.read(_FRAME.size + size)) == _FRAME.size + size:
            _, commits, *rest = _FRAME.unpack_from(frame)
            salts, own_salts, own_sums = salts or rest[:2], rest[:2], rest[2:]
            right = own_salts == salts and own_sums == _summed(
                sums, frame[:_SUMMED_OF_FRAME] + frame[_FRAME.size :], swap=swap
            )
            if not right and damaged_at is None:
                damaged_at = at
            if commits and own_salts == salts:
                if right and whole and damaged_at is not None:
                    return damaged_at
                whole = True  # until a frame of the next one is wrong
            elif not right:
                whole = False
            at, sums = at + len(frame), own_sums
    return None


def _summed(sums: list[int], data: bytes, *, swap: bool) -> list[int]:
    """SQLite's two running sums, on from `sums`."""
    words = array("I", data)
    if swap:
        words.byteswap()
    first, second = sums
    pairs = iter(words)
    for left, right in zip(pairs, pairs, strict=True):
        first = (first + left + second) & _MASK
        second = (second + right + first) & _MASK
    return [first, second]
