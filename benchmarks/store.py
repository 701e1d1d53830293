"""What it costs to keep everything on disk: commits by the number of streams, starts, and room.

`python -m benchmarks.store [--json] [FOLDER] [--sessions N ...]`. The store alone, without a head: each
commit carries one token of each stream; streams end and others begin, so that housekeeping has its work.
FOLDER says whose disk it is (default: the current one). CPU is that of this process, with both its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fleet_service.domain.context import Context
from fleet_service.domain.events import Finished, FinishReason, Timings
from fleet_service.domain.specs import GenerationSpec, Sampling, SessionSpec
from fleet_service.runtime.records import (
    ContextExtended,
    GenerationEnded,
    GenerationGone,
    GenerationStarted,
    Record,
    SessionKept,
    TokensDelivered,
)
from fleet_service.stores.sqlite import SqliteStore

STREAMS = (1, 128, 512)
COMMITS = 4_000
STREAM_TOKENS = 200
"""Of one generation, before it ends and another begins."""
KEPT_GENERATIONS = 2_000
"""How many that have ended stay, as they do for ten minutes."""
CONTEXT_TOKENS = 2_000
SESSIONS = (10_000, 100_000)
_SESSIONS_AT_ONCE = 100
_BATCHES_KEPT_BYTES = 4 * 1024 * 1024

_FINISHED = Finished(FinishReason.LENGTH, 10, STREAM_TOKENS, 1, Timings(0.0, 0.1, 1.0, 0.1))


@dataclass(frozen=True, slots=True)
class Commits:
    """Commits of one token of each of so many streams."""

    streams: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    cpu_us_per_commit: float
    cpu_us_per_token: float
    file_bytes_per_token: float
    """Of the tokens that are kept in the end."""
    step_p50_ms: float
    step_longest_ms: float
    """Of housekeeping, for which a commit may have to wait."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start on so many sessions, each with a context."""

    sessions: int
    open_s: float
    file_bytes_per_session: float
    context_read_ms: float


def generation(name: str) -> GenerationStarted:
    return GenerationStarted(
        name, "s1", "owner", GenerationSpec(STREAM_TOKENS), Sampling(), STREAM_TOKENS, (2,), 10, 1.0, 600.0
    )


def session(name: str, number: int, used_at: float) -> SessionKept:
    return SessionKept(name, number, "", SessionSpec("demo"), Sampling(), used_at, used_at)


class Streams:
    """So many generations at once, each of which is replaced by another when it has all its tokens."""

    def __init__(self, streams: int) -> None:
        self._made = 0
        self._lengths: dict[str, int] = {}
        self._ended: list[str] = []
        self._streams = streams

    def batch(self) -> list[Record]:
        """What one commit carries."""
        records: list[Record] = []
        # Few begin at a time, so that they end one after another.
        for _ in range(min(self._streams // STREAM_TOKENS + 1, self._streams - len(self._lengths))):
            self._made += 1
            self._lengths[f"g{self._made}"] = 0
            records.append(generation(f"g{self._made}"))
        for name, length in list(self._lengths.items()):
            records.append(TokensDelivered(name, length, (length,)))
            self._lengths[name] += 1
            if length + 1 == STREAM_TOKENS:
                records.append(GenerationEnded(name, _FINISHED, 1.0))
                self._ended.append(name)
                del self._lengths[name]
        while len(self._ended) > KEPT_GENERATIONS:
            records.append(GenerationGone(self._ended.pop(0)))
        return records

    @property
    def kept_tokens(self) -> int:
        return sum(self._lengths.values()) + len(self._ended) * STREAM_TOKENS


async def commits(file: Path, streams: int) -> Commits:
    store = SqliteStore(file, time.time, batches_kept_bytes=_BATCHES_KEPT_BYTES)
    await store.open()
    await store.take_term(1, 0)
    load = Streams(streams)
    for _ in range(streams):
        await store.write(load.batch())
    batches = [load.batch() for _ in range(COMMITS)]
    tokens = sum(isinstance(record, TokensDelivered) for batch in batches for record in batch)
    took: list[float] = []
    cpu = time.process_time()
    for batch in batches:
        begin = time.perf_counter()
        await store.write(batch)
        took.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu
    await store.close()
    took.sort()
    steps = sorted(await housekeeping(file))
    return Commits(
        streams=streams,
        p50_ms=took[len(took) // 2] * 1e3,
        p99_ms=took[len(took) * 99 // 100] * 1e3,
        longest_ms=took[-1] * 1e3,
        cpu_us_per_commit=cpu * 1e6 / COMMITS,
        cpu_us_per_token=cpu * 1e6 / tokens,
        file_bytes_per_token=os.path.getsize(file) / load.kept_tokens,  # noqa: PTH202, ASYNC240 - no server
        step_p50_ms=steps[len(steps) // 2] * 1e3,
        step_longest_ms=steps[-1] * 1e3,
    )


async def housekeeping(file: Path) -> list[float]:
    """How long each step took to move all that is in `batches`, in seconds."""
    store = SqliteStore(file, time.time, batches_kept_bytes=0)
    await store.open()
    took: list[float] = []
    begin = time.perf_counter()
    while await store.tidy(1):
        took.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    await store.close()
    return took


async def fill(file: Path, sessions: int) -> None:
    """Keep so many sessions there, used just now, s1 and on, each with a context of CONTEXT_TOKENS.

    They are those of whoever calls a head that asks nobody who he is.
    """
    ids = list(range(CONTEXT_TOKENS))
    crc32, now = Context(ids).crc32, time.time()
    store = SqliteStore(file)
    await store.open()
    await store.take_term(1, 0)
    for first in range(1, sessions + 1, _SESSIONS_AT_ONCE):
        batch: list[Record] = []
        for number in range(first, min(first + _SESSIONS_AT_ONCE, sessions + 1)):
            batch += [session(f"s{number}", number, now), ContextExtended(f"s{number}", 0, ids, crc32)]
        await store.write(batch)
    await store.close()


async def start(file: Path, sessions: int) -> Start:
    await fill(file, sessions)
    begin = time.perf_counter()
    store = SqliteStore(file)
    await store.open()
    open_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for number in range(1, sessions, sessions // 100):
        await store.context(f"s{number}")
    read_ms = (time.perf_counter() - begin) * 10
    await store.close()
    size = os.path.getsize(file)  # noqa: PTH202, ASYNC240 - no server
    return Start(sessions, open_s, size / sessions, read_ms)


async def measure(folder: Path, sessions: list[int]) -> tuple[list[Commits], list[Start]]:
    """Each on a file of its own, deleted afterwards."""
    streamed = [await commits(folder / f"streams-{streams}" / "head.db", streams) for streams in STREAMS]
    started = []
    for count in sessions:
        started.append(await start(folder / f"sessions-{count}" / "head.db", count))
        shutil.rmtree(folder / f"sessions-{count}")
    return streamed, started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sessions", type=int, nargs="*", default=list(SESSIONS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="store-") as folder:
        streamed, started = asyncio.run(measure(Path(folder), given.sessions))
    if given.json:
        json.dump({"commits": [*map(asdict, streamed)], "starts": [*map(asdict, started)]}, sys.stdout)
        return
    _table(streamed)
    _table(started)


def _table(results: Sequence[Commits | Start]) -> None:
    for number, result in enumerate(results):
        values = asdict(result)
        if not number:
            sys.stdout.write("  ".join(values) + "\n")
        sys.stdout.write("  ".join(f"{value:>{len(name)}.4g}" for name, value in values.items()) + "\n")


if __name__ == "__main__":
    main()
