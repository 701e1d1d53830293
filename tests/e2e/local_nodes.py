"""Stub nodes inside the test's own process: what a test needs that kills and freezes none of them.

They speak over real sockets like every node, and start in a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc

from node_stub.join import JoinSettings
from node_stub.reference import StubModel
from node_stub.rules import Limits
from node_stub.stub_engine import EngineSettings
from node_stub.stub_node import StubNode, StubSettings
from tests.e2e.harness import MODEL, NodeProcess, World
from tests.ports import quiet_port


class LocalNode(NodeProcess):
    """A StubNode that can be used like a NodeProcess."""

    def __init__(self, stub: StubNode) -> None:
        super().__init__(stub.settings.identity, ())
        self.stub = stub
        self._up = False

    @property
    def alive(self) -> bool:
        return self._up

    async def start(self, port: int = 0) -> LocalNode:
        """Serve; again after `kill`, on the same port and as a new incarnation."""
        assert port == 0, "a local node chooses its own port"
        await self.stub.start()
        self._up = True
        self.address = self.stub.address
        if self._channel is None:
            options = [("grpc.use_local_subchannel_pool", 1)]
            self._channel = grpc.aio.insecure_channel(self.address, options=options)
        return self

    async def kill(self) -> None:
        """End the server and every call on it, without a word."""
        self._up = False
        await self.stub.stop()

    async def leave(self, grace_s: float) -> None:
        """Stop in order: what runs may end within `grace_s`."""
        self._up = False
        await self.stub.stop(grace_s)


async def local_node(
    world: World,
    identity: str = "",
    *,
    models: Mapping[str, int] | None = None,
    window_tokens: int = 32_768,
    lanes: int = 4,
    decode_rate: float = 200.0,
    prefill_rate: float = 0.0,
    labels: Mapping[str, str] | None = None,
    inline_bind: bool = True,
    limits: Limits | None = None,
    revision: str = MODEL.revision,
    resume: bool = True,
    fleet_id: str = "",
) -> LocalNode:
    """A node for `world`, serving `models` (name to window in tokens), by default the one of the harness."""
    served = models or {MODEL.name: window_tokens}
    settings = StubSettings(
        address=f"127.0.0.1:{quiet_port()}",
        identity=identity or f"node-{len(world.nodes) + 1}",
        models=[(StubModel(name, revision), window) for name, window in served.items()],
        engine=EngineSettings(lanes, decode_rate, prefill_rate),
        labels=labels or {},
        inline_bind=inline_bind,
        limits=limits or Limits(),
        resume=resume,
        fleet_id=fleet_id,
        join=JoinSettings(f"127.0.0.1:{world.join_port}") if world.kind == "join" else None,
    )
    node = await LocalNode(StubNode(settings)).start()
    world.nodes.append(node)
    return node


async def local_nodes(world: World, count: int, **settings: object) -> list[LocalNode]:
    """`count` equal nodes, node-1 and on; `settings` as of `local_node`."""
    first = len(world.nodes) + 1
    names = [f"node-{first + i}" for i in range(count)]
    return list(await asyncio.gather(*(local_node(world, name, **settings) for name in names)))  # type: ignore[arg-type]
