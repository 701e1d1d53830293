"""Nodes of the command `fleet-node` at work: one, or many of a kind in one process, until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from node_stub.faults import Fault, Faults, ProcessHazards, ReportLies
from node_stub.join import JoinSettings
from node_stub.llama import LlamaSettings, create_engine
from node_stub.node import Node, NodeSettings
from node_stub.reference import StubModel
from node_stub.runs import RunTrace
from node_stub.server import NodeServer
from node_stub.stub_engine import EngineSettings, StubEngine
from node_stub.tls import TlsFiles
from node_stub.token import FleetToken

log = logging.getLogger("node_stub")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says, checked."""

    listen: str
    join: str | None
    """None = heads dial this node."""
    token: FleetToken | None
    tls: TlsFiles | None
    nodes: Sequence[NodeSettings]
    """One or more, each at the next port."""
    models: Sequence[tuple[str, int]]
    llama: LlamaSettings | None
    """None = the stub's engine."""
    pace: EngineSettings
    revision: str
    vocab_size: int
    eos_per_mille: int
    faults: Sequence[Fault]
    lies: ReportLies
    slow_down: float
    idle_timeout_s: float
    grace_s: float
    otlp_endpoint: str
    """Empty = no traces."""


async def serve(options: Options) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the grace.

    Raises BindError, LlamaUnavailableError, JoinRefusedError.
    """
    if len(options.nodes) > 1:
        _open_many_files()
    if not options.otlp_endpoint:
        await _serve(options)
        return
    from node_stub.tracing import Tracing

    first = options.nodes[0]
    tracing = Tracing(options.otlp_endpoint, first.identity, first.incarnation)
    try:
        await _serve(options, tracing.run_started)
    finally:
        await tracing.close()


def _open_many_files() -> None:
    """Each node has sockets of its own, and the usual limit was made for programs with few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True)
class _Member:
    """A node and what it is served by."""

    node: Node
    server: NodeServer


def _member(options: Options, settings: NodeSettings) -> _Member:
    node = _node(options, settings)
    node.set_faults(list(options.faults), options.lies, options.slow_down)
    served = None if options.join else options.tls  # a node that joins is not dialed, but for its control
    server = NodeServer(node, ProcessHazards(), options.idle_timeout_s, token=options.token, tls=served)
    return _Member(node, server)


async def _started(options: Options, trace_run: Callable[..., RunTrace] | None) -> list[_Member]:
    """All nodes, each told of once it serves. Raises BindError, and then none serves."""
    members: list[_Member] = []
    host, _, port = options.listen.rpartition(":")
    try:
        for number, settings in enumerate(options.nodes):
            member = _member(options, settings)
            if trace_run is not None:
                member.node.trace_run = trace_run
            listen = f"{host}:{int(port) + number if int(port) else 0}"
            address = f"{host}:{await member.server.start(listen)}"
            members.append(member)
            where = f"joins {options.join}, control on {address}" if options.join else f"on {address}"
            sys.stdout.write(f"fleet-node: {settings.identity} {where}\n")
            sys.stdout.flush()
    except BaseException:
        await _stop(members, 0)
        raise
    return members


async def _serve(options: Options, trace_run: Callable[..., RunTrace] | None = None) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for awaited in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(awaited, asked.set)
    members = await _started(options, trace_run)
    work = asyncio.create_task(_work(members, options), name="work")
    stop = asyncio.create_task(asked.wait(), name="signals")
    await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        stop.cancel()
        await _stop(members, 0)
        work.result()
    log.info("stopping; calls have %.1f s to end", options.grace_s)
    asked.clear()
    again = asyncio.create_task(asked.wait(), name="signals")
    ending = asyncio.create_task(_stop(members, options.grace_s), name="stop")
    await asyncio.wait([ending, again], return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        await _stop(members, 0)
    for task in (again, work):
        task.cancel()
    await asyncio.gather(ending, again, work, return_exceptions=True)


async def _stop(members: Sequence[_Member], grace_s: float) -> None:
    await asyncio.gather(*(member.server.stop(grace_s) for member in members))


async def _work(members: Sequence[_Member], options: Options) -> None:
    """Run the engines, and keep the nodes joined. Raises what made any fail."""
    tasks = [asyncio.create_task(member.node.run(), name="engine") for member in members]
    if options.join:
        join = JoinSettings(options.join, options.tls)
        joiners = [member.server.joiner(join, random.Random(), _say) for member in members]
        tasks += [asyncio.create_task(joiner.run(), name="join") for joiner in joiners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


def _say(line: str) -> None:
    sys.stderr.write(f"fleet-node: {line}\n")
    sys.stderr.flush()


def _node(options: Options, settings: NodeSettings) -> Node:
    if options.llama:
        # What it runs on is not a GPU, and how much memory it takes was settled when it was loaded.
        about = replace(settings, gpu_memory_bytes=0)
        return Node(about, create_engine(options.llama, time.monotonic), Faults(), time.monotonic)
    models = [
        (StubModel(name, options.revision, options.vocab_size, eos_per_mille=options.eos_per_mille), window)
        for name, window in options.models
    ]
    return Node(settings, StubEngine(models, options.pace, time.monotonic), Faults(), time.monotonic)
