"""A node that says what a test wants it to say, and looks better to placement than any honest one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet.v1.admin_service_pb2 import NODE_FEATURE_INLINE_BIND
from tests.e2e.harness import MODEL, HeadServer, World, until
from tests.e2e.local_nodes import local_node
from tests.links.scripted_node import ScriptedNode, serving

WINDOW_TOKENS = 32_768
_REPORT = types_pb2.CapacityReport(max_lanes=8, decode_tokens_per_s=10**6, prefill_tokens_per_s=10**6)

Context = grpc.aio.ServicerContext[Any, Any]
Lie = Callable[[pb.NodeServiceGenerateRequest], pb.NodeServiceGenerateResponse]


def liar_hello(**changes: Any) -> pb.HandshakeResponse:
    """Well-formed, of the model that the others serve too; `changes` are the lie."""
    model = types_pb2.Model(
        name=MODEL.name,
        revision=MODEL.revision,
        vocab_size=MODEL.vocab_size,
        eos_token_ids=[MODEL.eos_token_id],
        max_context_tokens=WINDOW_TOKENS,
    )
    fields: dict[str, Any] = {
        "version": 1,
        "identity": "liar",
        "incarnation": "run-1",
        "models": [model],
        "features": [NODE_FEATURE_INLINE_BIND],
        "report": _REPORT,
    }
    return pb.HandshakeResponse(**(fields | changes))


async def reports(request: pb.WatchStatusRequest, context: Context) -> None:
    """Reports as they should be."""
    while True:
        await context.write(pb.WatchStatusResponse(report=_REPORT))
        await asyncio.sleep(0.25)


async def says_nothing(request: pb.NodeServiceGenerateRequest, context: Context) -> None:
    await asyncio.Event().wait()


def once(lie: Lie) -> Any:
    """Answer each generation with one message."""

    async def generate(request: pb.NodeServiceGenerateRequest, context: Context) -> None:
        await context.write(lie(request))

    return generate


def again_and_again(*lies: Lie) -> Any:
    """The messages in turn, for ever, at a pace at which nothing is ever silent."""

    async def generate(request: pb.NodeServiceGenerateRequest, context: Context) -> None:
        for lie in itertools.cycle(lies):
            await context.write(lie(request))
            await asyncio.sleep(0.05)

    return generate


def liar(generate: Any = says_nothing, **hello: Any) -> ScriptedNode:
    """A node in the test's own process; `generate` answers its generations."""
    node = ScriptedNode()
    node.answers["Handshake"] = liar_hello(**hello)
    node.streams["WatchStatus"] = reports
    node.streams["Generate"] = generate
    return node


@asynccontextmanager
async def beside_a_healthy_node(
    world: World, node: ScriptedNode, *, taken_in: bool = True, **settings: Any
) -> AsyncIterator[HeadServer]:
    """A head of `node` and an honest one; in the end all must be quiet, while both are still there."""
    healthy = await local_node(world, "healthy", lanes=16)
    async with serving(node.handler()) as address:
        server = await world.head(address, healthy, **settings)
        known = server.head.fleet.nodes[0]
        assert known.usable or not taken_in
        yield server
        await until(lambda: not known.outbox or not known.usable, "the lying node was told what it is owed")
        await world.close()
