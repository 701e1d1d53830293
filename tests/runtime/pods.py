"""Nodes a, b, c at addresses of the same names, their DNS name, and a head that knows it; on virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from fleet_service.domain.node_types import Feature
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.discovery import JITTER
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import LinkLostError, ResolveError
from fleet_service.runtime.settings import DiscoverySettings, HeadSettings
from tests.runtime.fakes import MODEL, UNIX_S, FakeDialer, FakeNode, hello

PODS = "dns:///pods.example:8454"
REFRESH_S = DiscoverySettings().dns_refresh_s
LONGEST_S = REFRESH_S * (1 + JITTER)
SETTLED_S = 2.0
ONE_NODE = hello("one", features=frozenset({Feature.RECONCILE}))
GONE = LinkLostError("connection refused", refused=True)


@dataclass
class FakeResolver:
    """A Resolver that says what the test wants: addresses by name, or what is raised."""

    says: dict[str, list[str] | Exception]
    answers_after_s: float = 0.0
    asked_s: list[float] = field(default_factory=list)

    async def resolve(self, name: str, port: int) -> list[str]:
        self.asked_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.answers_after_s)
        answer = self.says[name]
        if isinstance(answer, Exception):
            raise answer
        return [f"{host}:{port}" for host in answer]


@dataclass
class Pods:
    """Nodes a, b, c at addresses of the same names, their DNS name, and a head that knows it."""

    nodes: dict[str, FakeNode]
    dns: FakeResolver
    head: Head

    def at(self, host: str) -> FakeNode:
        return self.nodes[f"{host}:8454"]

    def lists(self, *hosts: str) -> None:
        self.dns.says["pods.example"] = list(hosts)

    def fails(self, why: str = "the DNS server gives no answer") -> None:
        self.dns.says["pods.example"] = ResolveError(why)

    def stops(self, host: str) -> None:
        node = self.at(host)
        node.says = GONE
        node.links[-1].break_()

    def states(self) -> dict[str, str]:
        """By name; with a star those that get no new work."""
        return {
            each.name: each.state.value + ("*" if each.unlisted else "")
            for each in sorted(self.head.fleet.nodes, key=lambda each: each.name)
        }

    async def placed(self, count: int = 6) -> set[str]:
        """Where so many sessions go."""
        views = [
            await self.head.create_session("", SessionSpec(model=MODEL), [1, 2], None) for _ in range(count)
        ]
        return {view.node for view in views}


async def pods(
    *listed: str,
    static: tuple[str, ...] = (),
    dialer: type[FakeDialer] = FakeDialer,
    says: list[str] | Exception | None = None,
    settings: dict[str, Any] | None = None,
    one_node: tuple[str, ...] = (),
    **discovery: Any,
) -> Pods:
    nodes = {f"{host}:8454": FakeNode(hello(host)) for host in "abc"}
    for host in one_node:
        nodes[f"{host}:8454"].says = ONE_NODE
    dns = FakeResolver({"pods.example": list(listed) if says is None else says})
    loop = asyncio.get_running_loop()
    head = Head(
        HeadSettings(**(settings or {})),
        dialer=dialer(nodes),
        rng=random.Random(3),
        wall_clock=lambda: UNIX_S + loop.time(),
        resolver=dns,
        discovery=DiscoverySettings(**discovery),
    )
    await head.start([*(f"{host}:8454" for host in static), PODS])
    return Pods(nodes, dns, head)
