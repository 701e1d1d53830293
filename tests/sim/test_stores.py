"""The simulated store loses what the real one may lose, and says so as that does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from fleet_service.runtime.journal import Durability, StoreJournal
from fleet_service.runtime.records import TermRaised
from tests.sim.loop import SimLoop
from tests.sim.stores import Access, SimStore


def simulate(story: Callable[[SimStore], Awaitable[None]]) -> None:
    loop = SimLoop(3)
    store = SimStore(loop, random.Random(3))

    async def main() -> None:
        await story(store)

    loop.drive(main())


async def opened(store: SimStore, durability: Durability, term: int) -> tuple[Access, StoreJournal]:
    access = store.open_for_head(tells_ahead=durability is Durability.RELAXED)
    journal = StoreJournal(access, durability, broken=lambda _error: None)
    await access.open()
    await access.take_term(term, 0, tells_ahead=journal.tells_ahead)
    journal.start()
    return access, journal


def test_what_waits_goes_with_its_head_and_the_store_is_torn() -> None:
    async def story(store: SimStore) -> None:
        _access, journal = await opened(store, Durability.RELAXED, 1)
        journal.put(TermRaised(5))
        put_s = store.loop.time()
        await asyncio.sleep(0.2)
        assert put_s < store.kept_until_s()
        journal.put(TermRaised(6))
        put_s = store.loop.time()
        await asyncio.sleep(0.01)
        assert store.kept_until_s() <= put_s
        assert store.head_died() <= put_s
        assert (store.saved.raised_term, store.saved.torn) == (5, True)

    simulate(story)


def test_what_is_closed_in_order_is_whole() -> None:
    async def story(store: SimStore) -> None:
        access, journal = await opened(store, Durability.RELAXED, 1)
        journal.put(TermRaised(5))
        await journal.stop()
        await access.close()
        assert store.head_died() == store.loop.time()
        assert (store.saved.raised_term, store.saved.torn) == (5, False)

    simulate(story)


def test_what_is_told_once_it_is_kept_tears_nothing() -> None:
    async def story(store: SimStore) -> None:
        _access, journal = await opened(store, Durability.STRICT, 1)
        journal.put(TermRaised(5))
        await journal.settled()
        store.head_died()
        assert (store.saved.raised_term, store.saved.torn) == (5, False)

    simulate(story)
