"""The `world` fixture: a fleet that ends quiet."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.harness import World
from tests.ports import quiet_port


@pytest_asyncio.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A World; the test fails when anything is left at its end.

    A parameter says how head and nodes speak ("plain", "link", "join"); without one FLEET_E2E_KIND does.
    """
    kind = getattr(request, "param", os.environ.get("FLEET_E2E_KIND", "plain"))
    made = World(kind=kind, join_port=quiet_port() if kind == "join" else 0)
    try:
        yield made
    finally:
        await made.close()
