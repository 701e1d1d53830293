"""A scripted head, a real one, and the command line as a real process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.cli.ended import Ended
from tests.cli.real_fleet import RealFleet, real_fleet
from tests.cli.scripted_head import ScriptedHead, scripted_head

Fleet = Callable[..., Awaitable[Ended]]


@pytest.fixture
async def head() -> AsyncIterator[ScriptedHead]:
    async with scripted_head() as script:
        yield script


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tmp_path) as fleet:
        yield fleet


async def start_fleet(head: ScriptedHead, *arguments: str) -> asyncio.subprocess.Process:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
    environ |= {"FLEET_ADDRESS": head.address, "FLEET_ADMIN_ADDRESS": head.admin_address}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleet_service", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )


@pytest.fixture
def fleet(head: ScriptedHead) -> Fleet:
    """Runs `fleet ARGUMENTS` against the scripted head."""

    async def run(*arguments: str, stdin: str = "") -> Ended:
        process = await start_fleet(head, *arguments)
        out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

    return run
