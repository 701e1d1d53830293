"""Nodes as the runtime's keepers see them: what dialing gives, how long a link lives, what a run says.

All on virtual time: `simulate` runs a story in several orders of events, each the same every time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

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
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.runtime.head import Head
from fleet_service.runtime.protocols import LinkError, LinkListener, LinkLostError, RunSink
from fleet_service.runtime.settings import HeadSettings
from tests.sim.loop import SimLoop

MODEL = "m"
UNIX_S = 1_800_000_000
"""What the wall clock says when a story begins; so the term of its head."""

SEEDS = range(4)
_SIGN_PERIOD_S = 1.0

Speak = Callable[[Run, RunSink], Coroutine[Any, Any, None]]


def hello(identity: str, **changes: Any) -> NodeHello:
    fields: dict[str, Any] = {
        "incarnation": "run-1",
        "models": (ModelInfo(MODEL, vocab_size=100, eos_token_ids=frozenset({2})),),
        "features": frozenset({Feature.INLINE_BIND}),
        "report": Report(max_lanes=4),
    }
    return NodeHello(identity, **(fields | changes))


@dataclass
class FakeNode:
    """A node to dial. `says` is its hello, or what dialing it raises; `lives_s` None = links last.

    `renews` is the answer to a renewal of a lease, `speak` what a run says; a `mute` one gives no signs of
    life; `revokes_in_s` is how long it takes over a revoke. The lists are in order of time.
    """

    says: NodeHello | Exception
    lives_s: float | None = None
    answers_after_s: float = 0.0
    renews: bool = True
    revokes_in_s: float = 0.0
    mute: bool = False
    speak: Speak | None = None
    at_dial: Callable[[FakeNode], None] = lambda _node: None
    dialed_s: list[float] = field(default_factory=list)
    links: list[FakeLink] = field(default_factory=list)
    leases: list[tuple[float, int]] = field(default_factory=list)
    revoked: list[Revoke] = field(default_factory=list)

    @property
    def waits_s(self) -> list[float]:
        """Between one dial and the next."""
        return [later - sooner for sooner, later in zip(self.dialed_s, self.dialed_s[1:], strict=False)]

    def change(self, **changes: Any) -> None:
        """Say another hello from now on."""
        assert isinstance(self.says, NodeHello)
        self.says = replace(self.says, **changes)


class FakeLink:
    """A NodeLink to a FakeNode, which gives signs of life while it is there."""

    def __init__(self, node: FakeNode, said: NodeHello, listener: LinkListener) -> None:
        self.hello = said
        self.open = True
        self._node = node
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._runs: set[asyncio.Task[None]] = set()
        self.sign()
        self._sign_again()
        if node.lives_s is not None:
            self._loop.call_later(node.lives_s, self.break_)

    def sign(self) -> None:
        """The node says something."""
        if self.open:
            self._listener.on_sign()

    def _sign_again(self) -> None:
        if self.open:
            if not self._node.mute:
                self.sign()
            self._loop.call_later(_SIGN_PERIOD_S, self._sign_again)

    def break_(self) -> None:
        if self.open:
            self.open = False
            self._listener.on_lost(LinkLostError("the connection was lost"))

    @property
    def resumes(self) -> bool:
        return Feature.RESUME in self.hello.features

    async def assign(self, command: Assign) -> Refusal | None:
        return None

    async def append(self, command: Append) -> Refusal | None:
        return None

    async def cancel(self, command: CancelRun) -> Refusal | None:
        return None

    async def revoke(self, command: Revoke) -> Refusal | None:
        await asyncio.sleep(self._node.revokes_in_s)
        self._node.revoked.append(command)
        return None

    async def ping(self) -> None:
        await asyncio.sleep(self._node.answers_after_s)

    async def reconcile(self) -> list[HeldSession]:
        return []

    async def renew_lease(self, lease_s: float, term: int) -> bool:
        self._node.leases.append((lease_s, term))
        return self._node.renews

    def run(self, command: Run, sink: RunSink) -> FakeRun:
        assert self._node.speak is not None
        return FakeRun(asyncio.create_task(self._node.speak(command, sink)))

    async def close(self) -> None:
        self.open = False


class FakeOffer(FakeLink):
    """An OfferedLink: that of a FakeNode which has dialed `head`."""

    def __init__(self, node: FakeNode, head: Head) -> None:
        assert isinstance(node.says, NodeHello)
        super().__init__(node, node.says, _Nobody())
        self.introduction = head.nodes.introduction()

    def attach(self, listener: LinkListener) -> bool:
        self._listener = listener
        return self.open


class _Nobody:
    """A LinkListener in place of one that is yet to come."""

    def on_sign(self) -> None:
        return

    def on_report(self, report: Report, models: tuple[ModelInfo, ...]) -> None:
        return

    def on_leaving(self) -> None:
        return

    def on_lost(self, error: LinkError) -> None:
        return


class FakeRun:
    """A RunHandle."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def close(self) -> None:
        self._task.cancel()


class FakeDialer:
    """A Dialer of the nodes it knows, by address; nobody is at any other."""

    def __init__(self, nodes: dict[str, FakeNode]) -> None:
        self._nodes = nodes

    async def connect(self, address: str, introduction: Introduction, listener: LinkListener) -> FakeLink:
        node = self._nodes[address]
        node.dialed_s.append(asyncio.get_running_loop().time())
        said = await self.probe(address, introduction)
        node.links.append(FakeLink(node, said, listener))
        return node.links[-1]

    async def probe(self, address: str, introduction: Introduction) -> NodeHello:
        node = self._nodes[address]
        node.at_dial(node)
        await asyncio.sleep(node.answers_after_s)
        if isinstance(node.says, Exception):
            raise node.says
        return node.says


async def head_of(nodes: dict[str, FakeNode], **settings: Any) -> Head:
    """A started head of these nodes, by address."""
    loop = asyncio.get_running_loop()
    head = Head(
        HeadSettings(**settings),
        dialer=FakeDialer(nodes),
        rng=random.Random(3),
        wall_clock=lambda: UNIX_S + loop.time(),
    )
    await head.start(list(nodes))
    return head


def simulate(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `story` to its end in several orders of events; nothing may go unhandled in any."""
    for seed in SEEDS:
        loop = SimLoop(seed)
        loop.drive(story())
        assert loop.unhandled == [], f"seed {seed}"
