"""A tap on the links between a head and its nodes: sees every command, and may tamper with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Refusal,
    Revoke,
    Run,
)
from fleet_service.domain.node_types import NodeHello
from fleet_service.runtime.protocols import Dialer, LinkListener, NodeLink, RunHandle, RunSink

OnAppend = Callable[[NodeLink, Append], Awaitable[Refusal | None]]
OnRun = Callable[[NodeLink, Run, RunSink], RunHandle]


async def _pass_append(link: NodeLink, command: Append) -> Refusal | None:
    return await link.append(command)


def _pass_run(link: NodeLink, command: Run, sink: RunSink) -> RunHandle:
    return link.run(command, sink)


class Tap:
    """Use as `world.head(node, through=tap)`. `on_append` and `on_run` do what the link does, or worse."""

    def __init__(self) -> None:
        self.appends: list[Append] = []
        self.runs: list[Run] = []
        self.on_append: OnAppend = _pass_append
        self.on_run: OnRun = _pass_run

    def __call__(self, dialer: Dialer) -> Dialer:
        return _TappedDialer(self, dialer)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """Of every append, alone or within a Generate: what it keeps, and how many tokens it adds."""
        return [(append.base_length, len(append.token_ids)) for append in self.appends]


class _TappedDialer:
    def __init__(self, tap: Tap, dialer: Dialer) -> None:
        self._tap = tap
        self._dialer = dialer

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> NodeLink:
        return _TappedLink(self._tap, await self._dialer.connect(address, introduction, listener))

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        return await self._dialer.probe(address, introduction)


class _TappedLink:
    def __init__(self, tap: Tap, link: NodeLink) -> None:
        self._tap = tap
        self._link = link

    @property
    def hello(self) -> NodeHello:
        return self._link.hello

    @property
    def resumes(self) -> bool:
        return self._link.resumes

    async def assign(self, command: Assign) -> Refusal | None:
        return await self._link.assign(command)

    async def append(self, command: Append) -> Refusal | None:
        self._tap.appends.append(command)
        return await self._tap.on_append(self._link, command)

    def run(self, command: Run, sink: RunSink) -> RunHandle:
        self._tap.runs.append(command)
        if command.append is not None:
            self._tap.appends.append(command.append)
        return self._tap.on_run(self._link, command, sink)

    async def cancel(self, command: CancelRun) -> Refusal | None:
        return await self._link.cancel(command)

    async def revoke(self, command: Revoke) -> Refusal | None:
        return await self._link.revoke(command)

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        return await self._link.renew_lease(lease_s, term)

    async def reconcile(self) -> Sequence[HeldSession]:
        return await self._link.reconcile()

    async def ping(self) -> None:
        await self._link.ping()

    async def close(self) -> None:
        await self._link.close()
