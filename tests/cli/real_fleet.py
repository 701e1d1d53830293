"""A head and stub nodes as processes, for tests of the commands."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.processes import Child, Children, command_of
from fleet_service.client import FleetClient
from node_stub.reference import StubModel, reference_tokens
from tests.cli.ended import Ended

SLOW_RATE = 40
MODEL = StubModel(name="demo")


def expected(prompt: list[int], count: int) -> list[int]:
    return reference_tokens(MODEL, 0, prompt, count)


@dataclass
class RealFleet:
    """Nodes "a" and "b", a head, and what is needed to talk to them."""

    children: Children
    nodes: dict[str, Child]
    head: Child
    callers: str
    admin: str

    async def fleet(self, *arguments: str) -> Ended:
        process = await self.start_fleet(*arguments)
        out, err = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

    async def start_fleet(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(command_of("fleet"), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                "FLEET_ADDRESS": self.callers,
                "FLEET_ADMIN_ADDRESS": self.admin,
                "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
            },
        )

    def client(self) -> FleetClient:
        return FleetClient(self.callers, self.admin)

    async def nodes_as_json(self) -> dict[str, dict[str, object]]:
        listed = json.loads((await self.fleet("nodes", "--json")).out)
        assert listed["books_balance"]
        return {node["name"]: node for node in listed["nodes"]}

    async def until_idle(self) -> None:
        while any(node["reservations"] for node in (await self.nodes_as_json()).values()):
            pass


async def start_node(children: Children, name: str) -> tuple[Child, str]:
    command = [command_of("fleet-node"), "--listen", "127.0.0.1:0", "--identity", name, "--model", MODEL.name]
    command += ["--decode-rate", str(SLOW_RATE), "--grace", "0"]
    child, line = await children.start(f"node-{name}", command, f"fleet-node: {name} on ")
    return child, line.rpartition(" ")[2]


@asynccontextmanager
async def real_fleet(folder: Path) -> AsyncIterator[RealFleet]:
    """Nodes "a" and "b", and a head that has them."""
    async with Children(folder) as children:
        (a, a_address), (b, b_address) = await asyncio.gather(
            start_node(children, "a"), start_node(children, "b")
        )
        command = [command_of("fleet"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        command += ["--node", a_address, "--node", b_address, "--log-format", "json"]
        head, line = await children.start("head", command, "fleet: serving")
        _, _, rest = line.partition("callers on ")
        callers, _, admin = rest.partition(", admin on ")
        yield RealFleet(children, {"a": a, "b": b}, head, callers, admin)
