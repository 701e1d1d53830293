"""Fleets that all tests of a process share, and clients that are run against them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from examples.processes import Children, command_of
from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.client import FleetClient
from tests.certificates import Authority
from tests.cli.scripted_head import ScriptedHead, scripted_head
from tests.clients.support import PROMPT, ClientRun, Fleet, Wire
from tests.clients.toolchains import command_for

Start = Callable[..., Awaitable[ClientRun]]


@dataclass(frozen=True)
class Guard:
    """A head that asks for a token over TLS, and what opens it."""

    fleet: Fleet
    ca: Path
    token_file: Path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    async with Children(folder) as children:
        fleet = Fleet(children, folder / "data")
        for name in ("a", "b"):
            await fleet.start_node(name)
        await fleet.start_head()
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def fleet_and_eye(shared_fleet: Fleet) -> AsyncIterator[tuple[Fleet, FleetClient]]:
    """The fleet, all up and with nothing left of it at the end, and what looks at it."""
    async with FleetClient(shared_fleet.callers, shared_fleet.admin) as eye:
        if shared_fleet.head is None or not shared_fleet.head.alive:
            await shared_fleet.start_head()
        await shared_fleet.uncordon(eye)
        await shared_fleet.until_up(eye)
        yield shared_fleet, eye
        await shared_fleet.until_quiet(eye)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guard(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guard]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    pair = authority.issue("head")
    access, token = folder / "access.toml", folder / "caller.token"
    async with Children(folder) as children:
        add = ["access", "add", "caller", "--may", "call", "--file", str(access), "--token-file", str(token)]
        added, _ = await children.start("access", [command_of("fleet"), *add], "")
        assert await added.process.wait() == 0
        fleet = Fleet(children, folder / "data")
        await fleet.start_node("guarded")
        tls = (f"callers_tls.cert_file={pair.cert}", f"callers_tls.key_file={pair.key}")
        flags = [part for each in (*tls, f"access_file={access}") for part in ("--set", each)]
        await fleet.start_head(*flags)
        yield Guard(fleet, authority.ca, token)


@pytest_asyncio.fixture(loop_scope="session")
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a client: the language's, at an address, with further flags."""
    runs: list[ClientRun] = []

    async def begin(language: str, address: str, *flags: str) -> ClientRun:
        prompt = ",".join(map(str, PROMPT))
        command = (*command_for(language), "--address", address, "--prompt", prompt, *flags)
        runs.append(await ClientRun.start(command, tmp_path / f"notes-{len(runs)}"))
        return runs[-1]

    yield begin
    for run in runs:
        await run.close()


@pytest_asyncio.fixture(loop_scope="session")
async def scripted() -> AsyncIterator[ScriptedHead]:
    """A head that answers what the test tells it to."""
    async with scripted_head() as script:
        script.replies["FinishSession"] = pb.FinishSessionResponse()
        yield script


@pytest_asyncio.fixture(loop_scope="session")
async def wire(shared_fleet: Fleet) -> AsyncIterator[Wire]:
    wire = await Wire(shared_fleet.callers).start()
    yield wire
    await wire.close()
