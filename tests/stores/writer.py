"""A process that writes to a store for ever, and prints what it was told is kept.

Token n of its one generation is n, and so is that of its session's context, which grows in the same batches.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from fleet_service.domain.context import Context
from fleet_service.runtime.records import ContextExtended, Record, TokensDelivered
from fleet_service.runtime.store import StoreError
from fleet_service.stores.sqlite import SqliteStore
from tests.stores.histories import generation, session

_RETRY_S = 0.02
# Small, so that there is much to tidy.
_BATCHES_KEPT_BYTES = 20_000


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def write_for_ever(file: Path, tokens_a_batch: int) -> None:
    store = SqliteStore(file, batches_kept_bytes=_BATCHES_KEPT_BYTES)
    try:
        saved = await store.open()
        await store.take_term(saved.term + 1, 0)
        if "g" not in saved.generations:
            await store.write([session("s", 1), generation("g", "s")])
        context = Context(await store.context("s"))
    except StoreError as error:
        say(f"refused {error.trouble.value}: {error}")
        return
    say(f"open {len(context)}")
    while True:
        length = len(context)
        ids = range(length, length + tokens_a_batch)
        context.append(ids)
        batch: list[Record] = [
            TokensDelivered("g", length, ids),
            ContextExtended("s", length, ids, context.crc32),
        ]
        while True:
            try:
                await store.write(batch)
                break
            except StoreError as error:
                say(f"{error.trouble.value}: {error}")
                if not error.may_pass:
                    return
                await asyncio.sleep(_RETRY_S)
        say(f"kept {len(context)}")


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1]), int(sys.argv[2])))
