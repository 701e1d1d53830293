"""Listeners over loopback with a fake head behind them."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fleet.v1.admin_service_pb2_grpc import AdminServiceStub
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet_service.api.server import EdgeParts, Listener, callers_listener, operators_listener
from fleet_service.telemetry.tracing import Tracing, TracingSettings
from tests.api.connected import Connected
from tests.api.fakes import FakeHead

if TYPE_CHECKING:  # The stubs' types for asyncio have no counterpart at run time.
    from fleet.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub


@dataclass
class Edge:
    """Both listeners, open, with clients."""

    head: FakeHead
    callers: Listener
    operators: Listener
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel
    fleet: FleetServiceAsyncStub
    admin: AdminServiceAsyncStub
    spans: InMemorySpanExporter
    tracing: Tracing
    log: structlog.testing.CapturingLogger


MAX_OPEN_CALLS = 8
"""Of a connection."""


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(TracingSettings(""), SimpleSpanProcessor(exporter))
    captured = structlog.testing.CapturingLogger()
    numbers = itertools.count(1)
    parts = EdgeParts(
        log=structlog.wrap_logger(
            captured,
            processors=[structlog.contextvars.merge_contextvars],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        ),
        observer=tracing.rpc_observer,
        rng=random.Random(1),
        new_request_id=lambda: f"req-{next(numbers)}",
        max_open_calls=MAX_OPEN_CALLS,
    )
    head = FakeHead()
    callers = callers_listener(head, parts, "127.0.0.1:0")
    operators = operators_listener(head, parts, "127.0.0.1:0")
    await callers.start()
    await operators.start()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{callers.port}") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{operators.port}") as admin_channel,
    ):
        yield Edge(
            head=head,
            callers=callers,
            operators=operators,
            channel=channel,
            admin_channel=admin_channel,
            fleet=FleetServiceStub(channel),
            admin=AdminServiceStub(admin_channel),
            spans=exporter,
            tracing=tracing,
            log=captured,
        )
    await callers.stop(0.0)
    await operators.stop(0.0)
    await tracing.close()


@pytest.fixture
async def connected(edge: Edge) -> AsyncIterator[Connected]:
    call: Any = edge.fleet.Connect()
    made = Connected(edge, call)
    limits = (await made.read()).limits
    assert (limits.max_open_calls, limits.max_request_bytes) == (MAX_OPEN_CALLS, 16 * 1024 * 1024)
    yield made
    call.cancel()
