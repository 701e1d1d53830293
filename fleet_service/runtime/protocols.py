"""The runtime's seams: what it asks of links, so that a simulation can stand in for the network.

Time is the running event loop's (`loop.time()`, `asyncio.sleep`); a simulation brings a loop of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from fleet_service.domain.commands import (
    Append,
    Assign,
    CancelRun,
    HeldSession,
    Introduction,
    Phase,
    Refusal,
    Revoke,
    Run,
    RunFinish,
)
from fleet_service.domain.node_types import ModelInfo, NodeHello, Report


class LinkError(Exception):
    """A command got no answer; whether the node executed it is unknown. The text is for logs."""


class LinkLostError(LinkError):
    """The connection to the node is gone or was never there. `refused`: nobody listens where it was."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class LinkTimeoutError(LinkError):
    """The node did not answer in time; the connection may be well."""


class NodeFaultError(LinkError):
    """The node answered outside the contract (an RPC error, an undecodable message); not the link's fault."""


class HandshakeRefusedError(LinkError):
    """The node refused the head (version, fleet, token), or is not a node; the text says what to do."""


class RunSink(Protocol):
    """Where a run's messages go. Called synchronously, in order, by the link; must not block or raise."""

    def on_step(
        self,
        epoch: int,
        first_index: int,
        token_ids: Sequence[int],
        phase: Phase | None,
        finish: RunFinish | None,
        refusal: Refusal | None,
    ) -> None:
        """One message of the run. A finish or a refusal is the last one."""

    def on_broken(self, error: LinkError) -> None:
        """The run's stream ended without a finish or refusal. Called at most once, and then nothing more."""


class RunHandle(Protocol):
    """A run under way."""

    def close(self) -> None:
        """Stop listening: nothing more reaches the sink. On a plain link the node takes it as a cancel."""


class LinkListener(Protocol):
    """Where a link tells of its node. Called synchronously; must not block or raise."""

    def on_sign(self) -> None:
        """Anything at all came from the node."""

    def on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        """A report; empty `models` = as before."""

    def on_leaving(self) -> None:
        """The node is being stopped in order: it takes nothing new, and its link will end."""

    def on_lost(self, error: LinkError) -> None:
        """The link is gone. Called at most once, and not after close()."""


class NodeLink(Protocol):
    """A live connection to one run of one node. Commands raise LinkError when they got no answer."""

    @property
    def hello(self) -> NodeHello:
        """What the node said at the handshake."""

    @property
    def resumes(self) -> bool:
        """Runs broken by this link's loss go on when the next one to the same incarnation runs them again."""

    async def assign(self, command: Assign) -> Refusal | None: ...

    async def append(self, command: Append) -> Refusal | None: ...

    def run(self, command: Run, sink: RunSink) -> RunHandle:
        """Start a generation; everything that comes of it goes to the sink, never by the calling stack."""

    async def cancel(self, command: CancelRun) -> Refusal | None: ...

    def revoke(self, command: Revoke) -> Awaitable[Refusal | None]:
        """To be awaited as the others are. There are many: without a coroutine, no task each."""

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        """False: no lease runs; what it covered is fenced. `lease_s` 0 ends it at once."""

    async def reconcile(self) -> Sequence[HeldSession]:
        """What the node holds of the fleet; only with feature RECONCILE."""

    async def ping(self) -> None:
        """Returns once the node has answered anything at all, which proves that it lives."""

    async def close(self) -> None:
        """Drop the connection; runs on it break."""


class OfferedLink(NodeLink, Protocol):
    """A link of a node that dialed in, waiting for its listener."""

    @property
    def introduction(self) -> Introduction:
        """What the head said of itself on this link."""

    def attach(self, listener: LinkListener) -> bool:
        """Who listens from now on; what came before is told at once. False: the link is lost already."""


class JoinRefusedError(Exception):
    """A node that dialed in is not taken in. `reason`: one of errors.proto; the text says what to change."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Dialer(Protocol):
    """Connects to nodes."""

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> NodeLink:
        """Dial, shake hands, start reports. Raises a LinkError: lost, timeout or handshake refused."""

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        """Dial and shake hands only. Raises as `connect`."""


class ResolveError(Exception):
    """A look-up gave no addresses; the text says why, for operators."""


class Resolver(Protocol):
    """Looks up names."""

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        """All addresses the name has, host:port each, IPv6 hosts in brackets. Raises ResolveError."""
