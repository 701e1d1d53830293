"""The `world` fixture, a fleet that ends quiet, and `durable`, a head that is killed and started again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from examples.processes import Children
from tests.e2e.harness import World
from tests.e2e.restarts import Durable
from tests.ports import quiet_port


@pytest_asyncio.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A World; the test fails when anything is left at its end.

    A parameter is its kind (World.kind): "plain", "link", "join", "connect"; else FLEET_E2E_KIND says it.
    """
    kind = getattr(request, "param", os.environ.get("FLEET_E2E_KIND", "plain"))
    made = World(kind=kind, join_port=quiet_port() if kind == "join" else 0)
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture
async def durable(tmp_path: Path) -> AsyncIterator[Durable]:
    """A head to be started, and killed, by the test; whatever it started has ended afterwards."""
    async with Children(tmp_path) as children, AsyncExitStack() as stack:
        made = Durable(tmp_path, children, stack, ["--shutdown-grace", "0"])
        try:
            yield made
        finally:
            await asyncio.gather(*(node.close() for node in made.nodes))
