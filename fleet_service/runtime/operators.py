"""What operators do: see, add, remove, cordon and drain nodes, and ask how something would be placed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fleet_service.domain.errors import FleetError, Reason, invalid
from fleet_service.domain.node_types import ModelInfo, NodeHello
from fleet_service.domain.placement import Demand
from fleet_service.domain.specs import SessionSpec
from fleet_service.runtime.discovery import Discovery
from fleet_service.runtime.drain import DrainProgress, Drains
from fleet_service.runtime.fairness import in_turns
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.kept import Kept
from fleet_service.runtime.node import Node
from fleet_service.runtime.nodes import Nodes
from fleet_service.runtime.protocols import LinkError
from fleet_service.runtime.records import NodeListed, NodeMarked
from fleet_service.runtime.recovery import ENDED, marks_of
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.store import StoreError
from fleet_service.runtime.views import (
    Explanation,
    ModelSummary,
    NameInfo,
    NodeInfo,
    ProbeResult,
)
from fleet_service.runtime.watch import FleetWatch, Watcher

DRAINS_BESIDE_WATCHERS = 64
"""Drains whose progress can be read though all places of watchers are taken."""
PROBES_AT_ONCE = 16


class Operators:
    """The operators' side of the head."""

    def __init__(
        self,
        kept: Kept,
        fleet: Fleet,
        nodes: Nodes,
        sessions: Sessions,
        settings: HeadSettings,
        discovery: Discovery,
        drains: Drains,
        watch: FleetWatch,
    ) -> None:
        self._orders = kept.saved.marks
        """Cordons and drains of nodes that have not come back since an earlier run, by name."""
        self._journal = kept.journal
        self._fleet = fleet
        self._nodes = nodes
        self._discovery = discovery
        self._sessions = sessions
        self._settings = settings
        self._drains = drains
        self._watch = watch
        self.drain_places = DRAINS_BESIDE_WATCHERS

    # Reading

    @property
    def books_balance(self) -> bool:
        """Every node's reservations equal its queued and running attempts, now."""
        return all(node.books_balance for node in self._fleet.nodes)

    def list_nodes(self) -> list[NodeInfo]:
        """By name."""
        return sorted(map(self._watch.info, self._fleet.nodes), key=lambda info: info.name)

    async def all_nodes(self) -> list[NodeInfo]:
        """By name; each as it is when its turn comes."""
        nodes = sorted(self._fleet.nodes, key=lambda node: node.name)
        return [self._watch.info(node) async for node in in_turns(nodes)]

    def list_names(self) -> list[NameInfo]:
        """In the order given."""
        return self._discovery.list()

    def get_node(self, ref: str) -> NodeInfo:
        """Raises NODE_NOT_FOUND."""
        return self._watch.info(self._find(ref))

    def list_models(self) -> list[ModelSummary]:
        """By name and revision."""
        summaries: list[ModelSummary] = []
        for name in self._fleet.models:
            by_revision: dict[str, list[Node]] = {}
            for node in self._fleet.serving(name):
                by_revision.setdefault(node.models[name].revision, []).append(node)
            summaries += [_summary(name, nodes) for _revision, nodes in sorted(by_revision.items())]
        return summaries

    # Changing

    async def settled(self) -> None:
        """Return once what was ordered outlives the head; at once while nothing can be kept: it is done."""
        if self._journal.trouble is None:
            with suppress(StoreError):
                await self._journal.settled()

    async def add_node(self, address: str) -> NodeInfo:
        """Take a node in, answering after the first try. Raises NODE_ALREADY_EXISTS, LIMIT_EXCEEDED."""
        if self._fleet.find(address) is not None:
            raise FleetError(
                Reason.NODE_ALREADY_EXISTS,
                f"the head has node {address} already",
                metadata={"node": address},
                resource=("fleet.v1.Node", f"nodes/{address}"),
            )
        if not self._fleet.room:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"the head has {self._settings.max_nodes} nodes, the most it takes",
                metadata={"limit": "max_nodes", "value": str(self._settings.max_nodes)},
            )
        node = self._nodes.add(address)
        self._journal.put(NodeListed(address))
        await self._nodes.first_try(node)
        await self.settled()
        return self._watch.info(node)

    async def remove_node(self, ref: str) -> NodeInfo:
        """Take a node out; what it ran goes on elsewhere."""
        node = self._find(ref)
        info = self._watch.info(node)
        self._discovery.operator_removes(node)
        marks = marks_of(node, gone=True) if node.ever_heard else [self._ended(node)]
        self._journal.put(NodeListed(node.address, listed=False), *marks)
        if not node.removed:  # by then it may have been forgotten anyway
            await self._nodes.remove(node)
        await self.settled()
        return info

    async def add_name(self, entry: str) -> NameInfo:
        """Take in all addresses of a name (dns:///name:port). Raises NODE_ALREADY_EXISTS, LIMIT_EXCEEDED."""
        info = await self._discovery.add(entry)
        self._journal.put(NodeListed(entry))
        await self.settled()
        return info

    async def remove_name(self, entry: str) -> NameInfo:
        """Take a name out, with the nodes that only it lists. Raises NODE_NOT_FOUND."""
        info = await self._discovery.remove(entry)
        self._journal.put(NodeListed(entry, listed=False))
        await self.settled()
        return info

    def cordon_node(self, ref: str, note: str, by: str = "") -> NodeInfo:
        node = self._find(ref)
        self._drains.cordon(node, by, note)
        self._journal.put(*marks_of(node))
        return self._watch.info(node)

    def uncordon_node(self, ref: str) -> NodeInfo:
        """Let new work on a node again; ends a drain of it."""
        node = self._find(ref)
        self._drains.end(node)
        node.uncordon()
        self._journal.put(*(marks_of(node) if node.ever_heard else [self._ended(node)]))
        return self._watch.info(node)

    def _ended(self, node: Node) -> NodeMarked:
        """Whatever was ordered of it; that may have been by an identity which is not known yet."""
        ended = self._orders[node.address] = NodeMarked(node.address, ENDED)
        return ended

    def drain_node(self, ref: str, note: str, by: str) -> DrainProgress:
        """Move a node's sessions away; the progress is there to be read. Raises LIMIT_EXCEEDED for that."""
        node = self._find(ref)
        leave = self._watch.enter(self.drain_places)
        drain = self._drains.start(node, by, note)
        self._journal.put(*marks_of(node))
        return DrainProgress(drain, self._watch.stopping, leave)

    def watch_fleet(self, *, with_turns: bool) -> Watcher:
        """The fleet, and what becomes of it. Raises LIMIT_EXCEEDED."""
        return self._watch.open(with_turns=with_turns)

    # Asking

    async def probe_nodes(self, refs: Sequence[str]) -> list[ProbeResult]:
        """Shake hands anew with each node named (all, when none is), in the order asked."""
        nodes = [self._find(ref) for ref in refs] or list(self._fleet.nodes)
        at_once = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe(node: Node) -> ProbeResult:
            async with at_once:
                return await self._probe(node)

        return list(await asyncio.gather(*map(probe, nodes)))

    async def _probe(self, node: Node) -> ProbeResult:
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        hello: NodeHello | None = None
        detail = ""
        try:
            hello = await self._nodes.probe(node.address)
        except LinkError as error:
            detail = str(error)
        return ProbeResult(
            name=node.name,
            address=node.address,
            reachable=hello is not None,
            detail=detail,
            identity=hello.identity if hello else "",
            models=hello.models if hello else (),
            latency_s=clock() - asked_s,
            version=hello.version if hello else 0,
            authenticated=hello is not None and hello.authenticated,
            encrypted=hello is not None and hello.encrypted,
        )

    def explain_placement(self, session_id: str, spec: SessionSpec | None, prompt_tokens: int) -> Explanation:
        """How a session, or a request that is not made, would be placed now. Raises SESSION_NOT_FOUND."""
        if session_id:
            demand = self._fleet.session_demand(self._sessions.get(session_id))
        elif spec is not None:
            demand = Demand(
                model=spec.model,
                model_revision=spec.model_revision,
                selector=spec.node_selector,
                prompt_tokens=prompt_tokens,
                expected_output_tokens=spec.expected_output_tokens or self._settings.expected_output_tokens,
            )
        else:
            raise invalid("spec", "give a session_id or a spec")
        verdicts = self._fleet.explain(demand)
        chosen = verdicts[0].node if verdicts and verdicts[0].eligible else ""
        refusal = None if chosen else self._fleet.refusal(demand)
        return Explanation(self._fleet.policy_name, chosen, refusal, verdicts)

    def _find(self, ref: str) -> Node:
        node = self._fleet.find(ref)
        if node is None:
            raise self._fleet.unknown_node(ref)
        return node


def _summary(name: str, nodes: Sequence[Node]) -> ModelSummary:
    up = [node for node in nodes if node.usable and node.open_to_work]
    windows = [node.models[name].max_context_tokens for node in up or nodes]
    first = nodes[0].models[name]
    model = ModelInfo(
        name=name,
        revision=first.revision,
        vocab_size=first.vocab_size,
        eos_token_ids=first.eos_token_ids,
        max_context_tokens=0 if 0 in windows else max(windows),
    )
    return ModelSummary(model, nodes_up=len(up), nodes_known=len(nodes))
