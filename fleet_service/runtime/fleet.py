"""The fleet: the nodes by name and by model, and placement over them (design: Placement).

A choice is a reservation and a binding, made in the same step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice

from fleet_service.domain.epochs import EpochCounter, choose_term
from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.node_types import ModelInfo
from fleet_service.domain.placement import (
    Demand,
    LeftOut,
    Pool,
    Rates,
    Verdict,
    choose,
    estimates_ms,
    explain,
    left_out,
    make_policy,
    never,
    rates_of,
    refusal,
    takers,
    typical_rates,
)
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.node import Node
from fleet_service.runtime.observer import FleetObserver
from fleet_service.runtime.reservation import Reservation
from fleet_service.runtime.session import Session
from fleet_service.runtime.settings import HeadSettings
from fleet_service.runtime.turns import Turns

TYPICAL_OF = 256
"""Nodes of a model by which is judged what its typical rates are."""


class Fleet:
    """The nodes the head knows and the choice among them."""

    def __init__(
        self, settings: HeadSettings, clock: Callable[[], float], term: int, observer: FleetObserver
    ) -> None:
        self._settings = settings
        self.observer = observer
        self._clock = clock
        self._epochs = EpochCounter(term)
        self._policy = make_policy(settings.policy, settings.pool_high_pct)
        self._nodes: dict[str, Node] = {}
        self._by_address: dict[str, Node] = {}
        self._without_models: dict[Node, None] = {}
        self._by_model: dict[str, dict[str, Node]] = {}
        self._models_of: dict[str, Mapping[str, ModelInfo]] = {}
        self.pool: Pool[Node] = Pool(shuns_hot=self._policy.shuns_hot)
        """What is dealt from where there are very many nodes."""
        # By model: its vocabulary, and a node that held what was last asked for.
        self._vocabularies: dict[str, int] = {}
        self._holders: dict[str, Node] = {}
        self._changed: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.turns = Turns()
        self.on_owed: Callable[[Node, str, int, bool], None] = lambda *_: None
        """As Node.on_owed, of all nodes."""
        self.on_term: Callable[[int], None] = lambda _term: None
        """Called with the term that the head goes on in."""

    # Epochs

    @property
    def term(self) -> int:
        return self._epochs.term

    @property
    def last_epoch(self) -> int:
        return self._epochs.last

    def next_epoch(self) -> int:
        return self._epochs.next()

    def raise_term_above(self, epoch: int, unix_s: int) -> None:
        """A node has seen an epoch this head never issued: go on in a term above it."""
        self._epochs = EpochCounter(choose_term(unix_s, [epoch, self._epochs.last]))
        self.on_term(self.term)

    # Nodes

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes, in the order they were added."""
        return list(self._nodes.values())

    @property
    def room(self) -> int:
        """How many more nodes there may be."""
        return max(0, self._settings.max_nodes - len(self._nodes))

    @property
    def policy_name(self) -> str:
        return self._policy.name

    def find(self, ref: str) -> Node | None:
        """The node of that name or address."""
        return self._nodes.get(ref) or self.at(ref)

    def at(self, address: str) -> Node | None:
        """The node dialed at that address."""
        return self._by_address.get(address)

    def named(self, name: str) -> Node | None:
        """The node of that name."""
        return self._nodes.get(name)

    def add(self, node: Node) -> None:
        node.on_change = self._node_changed
        node.on_heat = self.pool.update
        node.on_room = self._has_room
        node.on_owed = self.on_owed
        self._nodes[node.name] = node
        self._by_address[node.address] = node
        self._node_changed(node)

    def rename(self, node: Node, name: str) -> None:
        """A node's identity became known: it is its name from now on, its place in the order stays.

        ValueError when another node has that name.
        """
        if node.name == name:
            return
        if name in self._nodes:
            raise ValueError(f"there is a node {name} already")
        self._unindex(node)
        old = node.name
        node.name = name
        self._nodes = {name if key == old else key: each for key, each in self._nodes.items()}
        self._index(node)

    def remove(self, node: Node) -> None:
        node.removed = True
        del self._nodes[node.name]
        if self._by_address.get(node.address) is node:
            del self._by_address[node.address]
        self._unindex(node)
        self._without_models.pop(node, None)
        self.pool.take_out(node)
        self._announce()

    def serving(self, model: str) -> Collection[Node]:
        """The nodes known to serve a model, up or not; to be gone through in one step."""
        return self._by_model.get(model, {}).values()

    def vocabulary(self, model: str) -> int:
        """The size of the model's vocabulary, as far as a node tells of it; 0 = unknown."""
        size = self._vocabularies.get(model)
        if size is None:
            sizes = (node.models[model].vocab_size for node in self.serving(model))
            size = self._vocabularies[model] = next((size for size in sizes if size), 0)
        return size

    @property
    def models(self) -> Sequence[str]:
        return sorted(self._by_model)

    def changed(self) -> asyncio.Future[None]:
        """Resolves at the next change of any node's state or models."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _node_changed(self, node: Node) -> None:
        if not node.removed:
            if self._models_of.get(node.name) != node.models:
                self._unindex(node)
                self._index(node)
            if node.models:
                self._without_models.pop(node, None)
            else:
                self._without_models[node] = None
            self.pool.update(node)
        self._announce()

    def room_for_more(self) -> asyncio.Future[None]:
        """Resolves when any node may have got room for more, and at the next change of one."""
        if self._room is None or self._room.done():
            self._room = asyncio.get_running_loop().create_future()
        return self._room

    def _has_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _announce(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._has_room()

    def _index(self, node: Node) -> None:
        self._models_of[node.name] = node.models
        for model in node.models:
            self._by_model.setdefault(model, {})[node.name] = node
            self._vocabularies.pop(model, None)

    def _unindex(self, node: Node) -> None:
        for model in self._models_of.pop(node.name, {}):
            self._vocabularies.pop(model, None)
            self._holders.pop(model, None)
            self._by_model[model].pop(node.name, None)
            if not self._by_model[model]:
                del self._by_model[model]

    # Placement

    def choose(self, demand: Demand) -> Node:
        """The node that takes `demand`. Raises FleetError as domain.placement.choose does."""
        known, now_s, limit = self.serving(demand.model), self._clock(), self._settings.queue_limit_per_node
        if len(known) <= self._settings.compare_all_nodes:
            chosen = choose(known, self._without_models, demand, self._policy, now_s, limit)
            return self._nodes[chosen.name]
        dealt = self.pool.choose(demand, self._policy, now_s, limit)
        if dealt is None:
            raise self.refusal(demand)
        return dealt

    def choose_with(self, demand: Demand, fits: Callable[[Node], bool]) -> Node | None:
        """Of those nodes that fit, one that takes `demand`; None where none of those looked at does."""
        found = self._takers_with(demand, fits)
        if not found:
            return None
        limit = self._settings.queue_limit_per_node
        chosen = choose(found, found, demand, self._policy, self._clock(), limit)
        return self._nodes[chosen.name]

    def _takers_with(self, demand: Demand, fits: Callable[[Node], bool]) -> list[Node]:
        """All nodes that fit and can take `demand`; where there are very many nodes, of the next in turn."""
        known, now_s = self.serving(demand.model), self._clock()
        if len(known) > self._settings.compare_all_nodes:
            return self.pool.some(demand, fits, now_s)
        return [node for node in takers(known, demand, now_s) if fits(node)]

    def bind(self, session: Session, demand: Demand) -> Node:
        """Choose a node and bind the session to it, in one step. Raises FleetError as `choose` does."""
        try:
            node = self._choose_and_bind(session, demand)
        except FleetError as error:
            self.not_placed(error)
            raise
        self.observer.placement(None)
        return node

    def not_placed(self, error: FleetError) -> None:
        """A placement was given up."""
        self.observer.placement(error.reason)

    def _choose_and_bind(self, session: Session, demand: Demand) -> Node:
        node = self.choose(demand)
        session.pin_revision(node.models[demand.model].revision)
        session.bind(node, self.next_epoch)
        return node

    def place_again(self, generation: Generation, demands: Sequence[Demand]) -> Reservation:
        """Choose, bind and reserve in one step, by the first demand that can be met, or its FleetError.

        Who asks may ask again: it says with `not_placed` that it does not.
        """
        refused: FleetError | None = None
        for demand in demands:
            try:
                node = self._choose_and_bind(generation.session, demand)
            except FleetError as error:
                refused = refused or error
                continue
            self._placed(generation, node, demand)
            return self.reserve_on(node, generation, replays=True)
        raise refused or ValueError("no demand was given")

    def moved_by_plan(self, generation: Generation, node: Node) -> None:
        """A place that was kept for a generation beforehand was taken."""
        self._placed(generation, node, self.demand_of(generation))

    def _placed(self, generation: Generation, node: Node, demand: Demand) -> None:
        self.observer.placement(None)
        generation.trace.placed(node.name, partial(self.explain_choice, node, demand))

    def reserve_on(self, node: Node, generation: Generation, *, replays: bool = False) -> Reservation:
        """A reservation for the generation's next attempt. Raises QueueFullError."""
        return node.reserve(
            generation.qos,
            partial(self.demand_of, generation),
            replays=replays,
            generation_id=generation.generation_id,
        )

    def demand_of(self, generation: Generation) -> Demand:
        """What the generation's next attempt asks of a node."""
        return Demand(
            model=generation.session.spec.model,
            model_revision=generation.session.spec.model_revision,
            selector=generation.session.spec.node_selector,
            prompt_tokens=generation.context_tokens + generation.log.received,
            expected_output_tokens=generation.expected_output_tokens(),
            state_dependent=True,
        )

    def session_demand(self, session: Session, *, tokens: int | None = None, grown: bool = True) -> Demand:
        """What a session, with a context of `tokens` (its own length by default), asks of a node."""
        spec = session.spec
        return Demand(
            model=spec.model,
            model_revision=spec.model_revision,
            selector=spec.node_selector,
            prompt_tokens=len(session.context) if tokens is None else tokens,
            expected_output_tokens=spec.expected_output_tokens or self._settings.expected_output_tokens,
            state_dependent=grown,
        )

    def could_take(self, demand: Demand) -> bool:
        """Whether a node could take `demand`, now or once it is less busy."""
        now_s, limit = self._clock(), self._settings.queue_limit_per_node
        passing = (None, LeftOut.BUSY, LeftOut.QUEUE_FULL)
        return any(left_out(node, demand, now_s, limit) in passing for node in self.serving(demand.model))

    def soonest_free(self, demand: Demand) -> tuple[Node, int] | None:
        """Of the nodes that could take `demand` into a free lane now, the soonest done, and when, in ms.

        Where there are very many nodes, of those that are next in turn.
        """
        free = self._takers_with(demand, lambda node: len(node.running) < node.lanes and not node.waiting)
        if not free:
            return None
        etas_ms = estimates_ms(free, demand, self._clock(), self._typical(demand.model))
        eta_ms = min(etas_ms)
        return free[etas_ms.index(eta_ms)], eta_ms

    def left_here_ms(self, node: Node, demand: Demand, ahead: int) -> int:
        """What is left until an attempt behind `ahead` others on `node` is done, its prefill left out."""
        rates = rates_of(node, self._typical(demand.model))
        return (ahead + 1) * demand.expected_output_tokens * 1000 // rates.decode_tokens_per_s

    def _typical(self, model: str) -> Rates:
        return typical_rates(islice(self.serving(model), TYPICAL_OF))

    def too_long(self, demand: Demand) -> FleetError | None:
        """CONTEXT_TOO_LONG when no node known for the model, up or down, could hold `demand`; else None."""
        if not demand.min_window_tokens and self._some_could_hold(demand):
            return None
        found = self.refusal(demand)
        return found if found.reason is Reason.CONTEXT_TOO_LONG else None

    def _some_could_hold(self, demand: Demand) -> bool:
        last = self._holders.get(demand.model)
        if last is not None and never(last, demand) is None:
            return True
        holder = next((node for node in self.serving(demand.model) if never(node, demand) is None), None)
        if holder is not None:
            self._holders[demand.model] = holder
        return holder is not None

    def refusal(self, demand: Demand) -> FleetError:
        """The error for a demand that no node can take now."""
        limit = self._settings.queue_limit_per_node
        return refusal(self.serving(demand.model), self._without_models, demand, self._clock(), limit)

    def explain(self, demand: Demand) -> list[Verdict]:
        """A verdict on every node; O(nodes)."""
        # Those that serve the model in the order that `choose` sees them in: turns are taken by it.
        known = self.serving(demand.model)
        others = [node for node in self._nodes.values() if demand.model not in node.models]
        return self._verdicts([*known, *others], demand)

    def explain_choice(self, node: Node, demand: Demand) -> list[Verdict]:
        """A verdict on the node just chosen and on others: all, or the best where there are very many."""
        if len(self._nodes) <= self._settings.compare_all_nodes:
            return self.explain(demand)
        others = [each for each in self.pool.compared(demand) if each is not node]
        return self._verdicts([node, *others], demand)

    def _verdicts(self, nodes: Sequence[Node], demand: Demand) -> list[Verdict]:
        return explain(nodes, demand, self._policy, self._clock(), self._settings.queue_limit_per_node)

    def unknown_node(self, ref: str) -> FleetError:
        return FleetError(
            Reason.NODE_NOT_FOUND,
            f"no node {ref}; ListNodes shows their names and addresses",
            metadata={"node": ref},
            resource=("fleet.v1.Node", f"nodes/{ref}"),
        )
