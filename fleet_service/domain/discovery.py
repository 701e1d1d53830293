"""Which addresses of names become nodes, and what becomes of nodes whose name lists them no more.

A look-up that failed never gets here: what is decided on is each name's last good answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fleet_service.domain.node_types import NodeState


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as discovery sees it.

    `found_by` is the entry it was found by, "" for one that was given by its address or dialed in.
    `other_way_to`: the head found the node of that identity here, which is connected by another address.
    """

    address: str
    name: str
    state: NodeState
    cordoned: bool = False
    found_by: str = ""
    other_way_to: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. Nodes are named by their addresses, as in all of it.

    `other_ways` are the addresses that are no nodes of their own, each with the identity that answers there.
    `found_by` is the entry of every found node that stays, which changes when only another name lists it.
    """

    add: Mapping[str, str]
    """The entry that each new node is found by."""
    forget: AbstractSet[str]
    unlisted: AbstractSet[str]
    """Nodes that get no new work: their name lists them no more, and has others that can take it."""
    other_ways: Mapping[str, str]
    found_by: Mapping[str, str]
    no_room: Mapping[str, int]
    """How many addresses of an entry are left out because there are as many nodes as may be."""


def within_limit(answer: Sequence[str], had: AbstractSet[str], limit: int) -> tuple[str, ...]:
    """At most `limit` addresses of an answer, in order; those it had before go first, so that none flaps."""
    distinct = sorted(set(answer))
    if len(distinct) <= limit:
        return tuple(distinct)
    kept = [address for address in distinct if address in had]
    new = [address for address in distinct if address not in had]
    return tuple(sorted([*kept, *new][:limit]))


def plan(
    listed: Mapping[str, Sequence[str]],
    nodes: Sequence[KnownNode],
    other_ways: Mapping[str, str],
    removed: AbstractSet[str],
    room: int,
) -> Plan:
    """Bring the nodes in line with the names.

    `listed` has each entry's addresses, `other_ways` what the last plan said of them, `removed` the addresses
    that an operator took out, `room` how many nodes there may be beyond those there are.
    """
    sets = {entry: frozenset(addresses) for entry, addresses in listed.items()}
    home = _first_to_list(listed)
    ways = _other_ways(home, nodes, other_ways)
    reachable_otherwise = {identity for address, identity in ways.items() if address in home}
    found_by = {node.address: _entry_of(node, sets, home) for node in nodes if node.found_by}
    missing = [
        node
        for node in nodes
        if node.found_by and node.address not in home and node.name not in reachable_otherwise
    ]
    forget = {node.address for node in missing if node.state in (NodeState.DOWN, NodeState.CONNECTING)}
    forget |= {node.address for node in nodes if node.address in ways and node.found_by}
    replaced = {entry for entry, addresses in sets.items() if _takes_work(addresses, nodes, ways)}
    unlisted = {node.address for node in missing if node.found_by in replaced} - forget
    add, no_room = _new(listed, nodes, ways, removed, room + len(forget))
    for address in forget:
        found_by.pop(address, None)
    return Plan(add, forget, unlisted, ways, found_by, no_room)


def _first_to_list(listed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    home: dict[str, str] = {}
    for entry, addresses in listed.items():
        for address in addresses:
            home.setdefault(address, entry)
    return home


def _entry_of(node: KnownNode, listed: Mapping[str, AbstractSet[str]], home: Mapping[str, str]) -> str:
    if node.address in listed.get(node.found_by, ()):
        return node.found_by
    return home.get(node.address, node.found_by)


def _other_ways(
    home: Mapping[str, str], nodes: Sequence[KnownNode], before: Mapping[str, str]
) -> dict[str, str]:
    """Addresses that lead to a node which is connected by another one, as long as that one is not down."""
    there = {node.name: node for node in nodes if node.state is not NodeState.DOWN}
    taken = {node.address for node in nodes}
    ways = {
        address: identity
        for address, identity in before.items()
        if address in home and address not in taken and identity in there
    }
    for node in nodes:
        if node.found_by and node.state is NodeState.DOWN and node.other_way_to in there:
            ways[node.address] = node.other_way_to
    return ways


def _takes_work(listed: AbstractSet[str], nodes: Sequence[KnownNode], ways: Mapping[str, str]) -> bool:
    """Whether any node that is listed could take work."""
    identities = {identity for address, identity in ways.items() if address in listed}
    return any(
        node.state is NodeState.UP
        and not node.cordoned
        and (node.address in listed or node.name in identities)
        for node in nodes
    )


def _new(
    listed: Mapping[str, Sequence[str]],
    nodes: Sequence[KnownNode],
    ways: Mapping[str, str],
    removed: AbstractSet[str],
    room: int,
) -> tuple[dict[str, str], dict[str, int]]:
    """The addresses that become nodes, and by entry how many there is no room for."""
    # A name is looked up among nodes as an address is, so what bears an address as its name is in the way.
    taken = {node.address for node in nodes} | {node.name for node in nodes} | set(ways) | removed
    add: dict[str, str] = {}
    no_room: dict[str, int] = {}
    for entry, addresses in listed.items():
        for address in addresses:
            if address in taken or address in add:
                continue
            if len(add) < room:
                add[address] = entry
            else:
                no_room[entry] = no_room.get(entry, 0) + 1
    return add, no_room
