"""The `world` fixture: a fleet that ends quiet."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.e2e.harness import World


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    """A World; the test fails when anything is left at its end."""
    made = World()
    try:
        yield made
    finally:
        await made.close()
