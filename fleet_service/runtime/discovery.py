"""Names as a way to find nodes: looks them up again and again, and brings the nodes in line with the answers.

What to add, keep and forget is decided in domain.discovery. Here are the look-ups, one task per name, and one
task that follows the nodes' states, since what a name lists no more is forgotten once it is down.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from fleet_service.addresses import split_name
from fleet_service.domain.discovery import KnownNode, Plan, plan, within_limit
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import NodeState
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.node import Node
from fleet_service.runtime.nodes import FIRST_TRY_S, Nodes, all_set
from fleet_service.runtime.protocols import ResolveError, Resolver
from fleet_service.runtime.settings import DiscoverySettings
from fleet_service.runtime.views import NameInfo

log = structlog.get_logger(__name__)

JITTER = 0.2
"""Part of the time between two look-ups by which it varies, so that many heads don't ask at once."""

SOONEST_S = 1.0
"""Between two look-ups of a name, when a node of it goes down or it has never had an answer."""

FOLLOW_PAUSE_S = 0.1
"""Between two looks at the nodes, whose states may change much oftener."""


class NoResolver:
    """A Resolver for a head that is given none."""

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        raise ResolveError("this head has no resolver")


@dataclass(slots=True, eq=False)
class _Name:
    """A name and what is known of it. `addresses` is its last good answer, within the limit."""

    entry: str
    addresses: tuple[str, ...] = ()
    over_limit: int = 0
    no_room: int = 0
    failure: str = ""
    resolved_at: float | None = None
    soon: asyncio.Event = field(default_factory=asyncio.Event)
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def left_out(self) -> int:
        return self.over_limit + self.no_room


class Discovery:
    """The names and the nodes found by them."""

    def __init__(
        self,
        fleet: Fleet,
        nodes: Nodes,
        resolver: Resolver,
        settings: DiscoverySettings,
        rng: random.Random,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._fleet = fleet
        self._nodes = nodes
        self._resolver = resolver
        self._settings = settings
        self._rng = rng
        self._clock = clock
        self._wall_clock = wall_clock
        self._spawn = spawn
        self._names: dict[str, _Name] = {}
        self._other_ways: dict[str, str] = {}
        self._removed: set[str] = set()
        self._follower: asyncio.Task[None] | None = None

    # Names

    def restore_removed(self, addresses: Sequence[str]) -> None:
        """Nodes that an operator had removed before this run of the head."""
        self._removed |= set(addresses)

    async def start(self, entries: Sequence[str]) -> None:
        """Begin with these names; returns once each was looked up and its nodes tried, or after a while."""
        names = [self._begin(entry) for entry in entries]
        await self._first_try(names)

    async def add(self, entry: str) -> NameInfo:
        """Take a name in, answering after the first try. Raises NODE_ALREADY_EXISTS, LIMIT_EXCEEDED."""
        if entry in self._names:
            raise FleetError(
                Reason.NODE_ALREADY_EXISTS,
                f"the head has name {entry} already",
                metadata={"node": entry},
                resource=("fleet.v1.Node", f"nodes/{entry}"),
            )
        most = self._settings.max_dns_names
        if len(self._names) >= most:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"the head has {most} names, the most it takes",
                metadata={"limit": "max_dns_names", "value": str(most)},
            )
        name = self._begin(entry)
        await self._first_try([name])
        return self._info(name)

    async def remove(self, entry: str) -> NameInfo:
        """Take a name out, and every node that no other name lists. Raises NODE_NOT_FOUND."""
        name = self._names.get(entry)
        if name is None:
            raise self._fleet.unknown_node(entry)
        info = self._info(name)
        del self._names[entry]
        if name.task is not None:
            name.task.cancel()
        self._apply()  # what another name lists as well is that one's from here on
        gone = [node for node in self._fleet.nodes if node.found_by == entry]
        for node in gone:
            self._nodes.take_out(node)
        await asyncio.gather(*map(self._nodes.let_go, gone))
        return info

    def operator_removes(self, node: Node) -> None:
        """It shall not come back as long as a name goes on listing it, by whichever address."""
        self._apply()  # its other addresses may have been found out just now
        ways = {address for address, identity in self._other_ways.items() if identity == node.name}
        self._removed |= {node.address, *ways}

    def list(self) -> list[NameInfo]:
        """In the order given."""
        return [self._info(name) for name in self._names.values()]

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [name.task for name in self._names.values() if name.task is not None]
        if self._follower is not None:
            tasks.append(self._follower)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, entry: str) -> _Name:
        loop = asyncio.get_running_loop()
        name = self._names[entry] = _Name(entry)
        name.task = loop.create_task(self._look_up_for_ever(name), name=f"look up {entry}")
        if self._follower is None:
            self._follower = loop.create_task(self._follow(), name="follow found nodes")
        return name

    async def _first_try(self, names: Sequence[_Name]) -> None:
        if not names:
            return
        await all_set((name.tried for name in names), FIRST_TRY_S)
        entries = {name.entry for name in names}
        found = [node for node in self._fleet.nodes if node.found_by in entries]
        await self._nodes.first_try(*found)
        self._nodes.tell_unanswered(*found)
        self._apply()

    # Looking up

    async def _look_up_for_ever(self, name: _Name) -> None:
        while True:
            asked_s = self._clock()
            await self._look_up(name)
            name.tried.set()
            usual_s = self._settings.dns_refresh_s if name.addresses else self._soonest_s
            wait_s = usual_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            try:
                async with asyncio.timeout(wait_s):
                    await name.soon.wait()
            except TimeoutError:
                continue
            name.soon.clear()
            await asyncio.sleep(max(0.0, asked_s + self._soonest_s - self._clock()))

    @property
    def _soonest_s(self) -> float:
        return min(SOONEST_S, self._settings.dns_refresh_s)

    async def _look_up(self, name: _Name) -> None:
        answer: Sequence[str] = ()
        try:
            async with asyncio.timeout(self._settings.dns_timeout_s):
                answer = await self._resolver.resolve(*split_name(name.entry))
            failure = "" if answer else "the answer has no addresses"
        except TimeoutError:
            failure = f"no answer within {self._settings.dns_timeout_s:g} s"
        except ResolveError as error:
            failure = str(error)
        except Exception as error:
            log.exception("look_up_failed", name=name.entry)
            failure = f"the look-up failed: {error!r}"
        if failure:
            self._failed(name, failure)
        else:
            self._answered(name, answer)

    def _failed(self, name: _Name, failure: str) -> None:
        """Nothing changes for the nodes. Told once, whatever it fails with from then on."""
        if not name.failure:
            log.warning("name_not_resolved", name=name.entry, why=failure, addresses_kept=len(name.addresses))
        name.failure = failure

    def _answered(self, name: _Name, answer: Sequence[str]) -> None:
        most = self._settings.max_addresses_per_name
        addresses = within_limit(answer, set(name.addresses), most)
        left_out = len(set(answer)) - len(addresses)
        if left_out and not name.over_limit:
            log.warning(
                "addresses_left_out",
                name=name.entry,
                has=len(addresses) + left_out,
                used=most,
                advice="raise links.max_addresses_per_name to use all",
            )
        if name.failure or addresses != name.addresses:
            log.info("name_resolved", name=name.entry, addresses=len(addresses))
        name.over_limit, name.addresses, name.failure = left_out, addresses, ""
        name.resolved_at = self._wall_clock()
        self._apply()

    # Following

    async def _follow(self) -> None:
        """Look again whenever the nodes changed; a found node that went down has its name looked up soon."""
        down: set[Node] = set()
        while True:
            change = self._fleet.changed()
            self._apply()
            now = {node for node in self._fleet.nodes if node.found_by and node.state is NodeState.DOWN}
            for node in now - down:
                if (name := self._names.get(node.found_by)) is not None:
                    name.soon.set()
            down = now
            await asyncio.sleep(FOLLOW_PAUSE_S)
            await asyncio.wait({change})

    def _apply(self) -> None:
        listed = {name.entry: name.addresses for name in self._names.values()}
        if all(name.resolved_at is not None for name in self._names.values()):
            self._removed.intersection_update(address for each in listed.values() for address in each)
        nodes = self._fleet.nodes
        decided = plan(
            listed,
            [_known(node) for node in nodes],
            self._other_ways,
            self._removed,
            self._fleet.room,
        )
        for node in nodes:
            if node.address in decided.forget:
                self._forget(node, decided)
            elif node.found_by:
                self._keep(node, decided)
        for address, entry in decided.add.items():
            self._nodes.add(address).found_by = entry
        self._other_ways = dict(decided.other_ways)
        for name in self._names.values():
            self._tell_of_room(name, decided.no_room.get(name.entry, 0))

    def _forget(self, node: Node, decided: Plan) -> None:
        same_node = decided.other_ways.get(node.address)
        if same_node is not None:
            log.info("another_way_to_a_node", node=same_node, address=node.address)
        else:
            log.info("node_forgotten", node=node.name, address=node.address, no_more_listed_by=node.found_by)
        self._nodes.take_out(node)
        self._spawn(self._nodes.let_go(node))

    def _keep(self, node: Node, decided: Plan) -> None:
        node.found_by = decided.found_by[node.address]
        unlisted = node.address in decided.unlisted
        if unlisted is not node.unlisted:
            node.unlisted = unlisted
            log.info("node_unlisted" if unlisted else "node_listed", node=node.name, name=node.found_by)
            node.on_change(node)

    def _tell_of_room(self, name: _Name, no_room: int) -> None:
        if no_room and not name.no_room:
            log.warning(
                "addresses_left_out",
                name=name.entry,
                has=len(name.addresses),
                used=len(name.addresses) - no_room,
                advice="raise head.max_nodes to use all",
            )
        name.no_room = no_room

    def _info(self, name: _Name) -> NameInfo:
        return NameInfo(
            entry=name.entry,
            addresses=name.addresses,
            other_ways=tuple(each for each in name.addresses if each in self._other_ways),
            removed=tuple(each for each in name.addresses if each in self._removed),
            left_out=name.left_out,
            failure=name.failure,
            resolved_at=name.resolved_at,
        )


def _known(node: Node) -> KnownNode:
    return KnownNode(
        address=node.address,
        name=node.name,
        state=node.state,
        cordoned=node.cordoned,
        found_by=node.found_by,
        other_way_to=node.other_way_to,
    )
