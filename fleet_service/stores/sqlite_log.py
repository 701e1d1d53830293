"""Whether the end of SQLite's write-ahead log was lost.

SQLite reads the log up to the first frame that is not as it was written, and says nothing of what stands
behind. A head that was killed leaves nothing of worth there: at most one batch that nobody was told of. More
than one behind a damaged frame is another matter.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">8I")  # magic, version, page size, sequence, salts, checksums
_FRAME = struct.Struct(">6I")  # page, pages of the file if it ends a transaction, salts, checksums
_WRAP = 2**32


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
