"""What is measured: sources and nodes by themselves, bare relays, and our head in its kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import grpc

from benchmarks.grpc_way import MODEL
from benchmarks.loads import callers_address, head_command
from benchmarks.processes import python
from benchmarks.works import CHIEF
from examples.processes import Child, ChildFailedError, Children, command_of
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

NODES = 2
_UP_TIMEOUT_S = 20.0
_POLL_S = 0.05


@dataclass(slots=True)
class Running:
    """A target that serves."""

    address: str
    middle: Sequence[Child] = ()
    """What is measured; none = there is nothing between."""
    nodes: list[Child] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self.middle]


@dataclass(frozen=True, slots=True)
class Nodes:
    """How nodes, or what stands for them, are to be: so many, each with `lanes`, at `rate`."""

    rate: float
    lanes: int
    number: int = NODES
    timed: bool = True
    """Where it is our own nodes: tokens say when they were made."""
    more: int = 4_096
    """Sessions a node holds at most."""


class Target(Protocol):
    """Something that callers get tokens through."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> str:
        """How it is called (`benchmarks.plan.Plan.shape`)."""

    @property
    def only(self) -> Sequence[str]:
        """Works that it is measured with; empty = all."""

    async def start(self, children: Children, nodes: Nodes) -> Running:
        """Serve until `children` end. Raises ChildFailedError, and SkippedError where it cannot be had
        here.
        """


class SkippedError(Exception):
    """A target cannot be measured on this machine; the text says why."""


async def start_sources(children: Children, nodes: Nodes, shape: str) -> tuple[list[str], list[Child]]:
    """Sources of tokens; where they serve calls of that shape."""
    started = [
        await children.start(f"source-{number}", python("source", "--rate", str(nodes.rate)), "source:")
        for number in range(nodes.number)
    ]
    word = 3 if shape == "complete" else 7
    return [line.split()[word] for _, line in started], [child for child, _ in started]


@dataclass(frozen=True, slots=True)
class Direct:
    """Callers speak to a source; its steps are those of all its nodes."""

    shape: str
    only: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"direct ({self.shape})"

    async def start(self, children: Children, nodes: Nodes) -> Running:
        addresses, sources = await start_sources(children, Nodes(nodes.rate, nodes.lanes, 1), self.shape)
        return Running(addresses[0], (), sources)


@dataclass(frozen=True, slots=True)
class DirectNodes:
    """Callers speak to nodes as a head does, over a link to each."""

    name: str = "direct to nodes (Link)"
    shape: str = "link"
    only: Sequence[str] = ()

    async def start(self, children: Children, nodes: Nodes) -> Running:
        addresses, started = await start_nodes(children, nodes)
        return Running(",".join(addresses), (), started)


@dataclass(frozen=True, slots=True)
class Bare:
    """A relay of `benchmarks.bare`."""

    shape: str
    only: Sequence[str] = ()

    @property
    def name(self) -> str:
        return "bare relay, a stream per call" if self.shape == "complete" else "bare relay, gathered"

    async def start(self, children: Children, nodes: Nodes) -> Running:
        addresses, sources = await start_sources(children, nodes, self.shape)
        role = "relay" if self.shape == "complete" else "gather"
        relay, line = await children.start("relay", python("bare", role, *addresses), "bare: serving")
        return Running(line.split()[-1], [relay], sources)


@dataclass(frozen=True, slots=True)
class Head:
    """Our head. `links` is how nodes are reached: link or plain (dialed), or join (they dial)."""

    shape: str
    links: str = "link"
    durability: str = "memory"
    traced: bool = False
    only: Sequence[str] = ()
    more: Sequence[str] = ()
    """Further flags."""

    @property
    def name(self) -> str:
        caller = "Complete" if self.shape == "complete" else "Connect"
        links = {"link": "Link", "plain": "plain RPCs", "join": "Join"}[self.links]
        kept = "" if self.durability == "memory" else f", {self.durability}"
        return f"head, {caller}, nodes by {links}{kept}{', traced' if self.traced else ''}"

    async def start(self, children: Children, nodes: Nodes) -> Running:
        joined = self.links == "join"
        addresses, started = ([], []) if joined else await start_nodes(children, nodes)
        flags = [
            "--durability",
            self.durability,
            "--set",
            f"head.max_lanes_per_node={nodes.lanes}",
            *self.more,
        ]
        if joined:
            flags += ["--join-listen", "127.0.0.1:0"]
        if self.traced:
            _, line = await children.start("sink", python("bare", "sink"), "bare: serving")
            flags += ["--otlp-endpoint", f"http://{line.split()[-1]}"]
        command = head_command(addresses, *flags, multiplexed=self.links != "plain")
        head, line = await children.start("head", command, "fleet: serving")
        if joined:
            _, started = await start_nodes(children, nodes, join=line.split()[-1])
        address = callers_address(line)
        await nodes_are_up(address, nodes.number)
        return Running(address, [head], started)


async def start_nodes(children: Children, nodes: Nodes, join: str = "") -> tuple[list[str], list[Child]]:
    """Stub nodes; their addresses."""
    started = await asyncio.gather(*(start_node(children, nodes, f"n{i}", join) for i in range(nodes.number)))
    return [address for address, _ in started], [child for _, child in started]


async def start_node(
    children: Children, nodes: Nodes, name: str, join: str = "", listen: str = "127.0.0.1:0"
) -> tuple[str, Child]:
    """A stub node; its address."""
    joining = ["--join", join] if join else []
    if nodes.timed:
        flags = ["--identity", name, "--rate", str(nodes.rate), "--lanes", str(nodes.lanes), *joining]
        child, line = await children.start(name, python("timed_node", *flags), "timed-node:")
    else:
        flags = [
            "--model",
            MODEL,
            "--identity",
            name,
            "--listen",
            listen,
            "--lanes",
            str(nodes.lanes),
            *joining,
        ]
        flags += ["--decode-rate", str(nodes.rate), "--prefill-rate", "0", "--log-level", "warning"]
        flags += ["--kv-blocks", "0", "--max-sessions", str(nodes.more), "--max-runs", str(nodes.more)]
        child, line = await children.start(name, [command_of("fleet-node"), *flags], "fleet-node:")
    return line.rpartition(" on ")[2].strip(), child


async def nodes_are_up(address: str, number: int) -> None:
    """Wait until so many nodes take work. Raises ChildFailedError when they don't in time."""
    async with grpc.aio.insecure_channel(address) as channel:
        fleet: FleetServiceAsyncStub = FleetServiceStub(channel)
        for _ in range(int(_UP_TIMEOUT_S / _POLL_S)):
            models = (await fleet.ListModels(pb.ListModelsRequest())).models
            if models and models[0].nodes_up == number:
                return
            await asyncio.sleep(_POLL_S)
    raise ChildFailedError(f"{number} nodes did not come up in {_UP_TIMEOUT_S:.0f} s")


def ours(*, quick: bool) -> list[Target]:
    """All of them, without the peers."""
    shapes = ("complete", "connect")
    base: list[Target] = [
        DirectNodes(),
        Direct("complete"),
        Direct("connect"),
        Bare("complete"),
        Bare("connect"),
    ]
    base += [Head(shape) for shape in shapes]
    if quick:
        return base
    variants: list[Target] = [Head("complete", "plain", only=CHIEF), Head("complete", "join", only=CHIEF)]
    for shape in shapes:
        variants += [Head(shape, durability=how, only=CHIEF) for how in ("relaxed", "strict")]
        variants.append(Head(shape, traced=True, only=CHIEF))
    return base + variants
