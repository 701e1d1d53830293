"""The making of generations: checked, given a node and the rules of their output, or as they were left."""

from __future__ import annotations

from collections.abc import Callable

from fleet_service.domain.errors import invalid
from fleet_service.domain.output_rules import OutputEnd, OutputRules
from fleet_service.domain.placement import window_tokens
from fleet_service.domain.specs import GenerationSpec
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generation import Generation
from fleet_service.runtime.ids import Ids
from fleet_service.runtime.journal import Journal
from fleet_service.runtime.node import Node
from fleet_service.runtime.observer import FleetObserver, GenerationInfo, NullGenerationTrace
from fleet_service.runtime.records import GenerationStarted, SavedGeneration
from fleet_service.runtime.session import Session
from fleet_service.runtime.settings import HeadSettings


class GenerationMaker:
    """Makes generations; who keeps and drives them is generations.py.

    `wall_clock` gives unix seconds. `on_decided` is told of each generation in the step that decides its end.
    `branch` is that of the head's run.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: HeadSettings,
        ids: Ids,
        journal: Journal,
        observer: FleetObserver,
        wall_clock: Callable[[], float],
        on_decided: Callable[[Generation], None],
        branch: int,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._ids = ids
        self._journal = journal
        self._observer = observer
        self._wall_clock = wall_clock
        self._on_decided = on_decided
        self._branch = branch

    def check(self, spec: GenerationSpec) -> None:
        """Raises INVALID_FIELD for what is more than the head gives."""
        settings = self._settings
        if (spec.max_new_tokens or 0) > settings.max_new_tokens_limit:
            raise invalid("spec.max_new_tokens", f"must be at most {settings.max_new_tokens_limit}")
        if (spec.max_wall_s or 0) > settings.max_wall_s:
            raise invalid("spec.max_wall_ms", f"must be at most {round(settings.max_wall_s * 1000)}")

    def place(self, session: Session) -> Node:
        """The node of the first attempt: the session's own while it can take it, else by placement.

        Raises FleetError when there is none.
        """
        binding = session.binding
        if binding is not None and binding.usable and binding.node.open_to_work:
            window = window_tokens(binding.node, session.spec.model)
            full = binding.node.waiting >= self._settings.queue_limit_per_node
            if not full and (not window or len(session.context) <= window):
                return binding.node
        grown = not session.ephemeral
        return self._fleet.bind(session, self._fleet.session_demand(session, grown=grown))

    def make(
        self,
        generation_id: str,
        session: Session,
        spec: GenerationSpec,
        node: Node | None,
        parent: object | None,
    ) -> Generation:
        """A new one; `node` None: it ends before it needs one. `parent` goes to the observer."""
        model = node.models.get(session.spec.model) if node is not None else None
        limit = self._settings.default_max_new_tokens if spec.max_new_tokens is None else spec.max_new_tokens
        window = window_tokens(node, session.spec.model) if node is not None else 0
        if window:
            # Fixed here, so that a failover to a wider node changes nothing about where the output ends.
            limit = min(limit, max(0, window - len(session.context)))
        info = self._info(session, generation_id, spec, limit)
        trace = self._observer.generation_started(info, parent)
        if node is not None:
            trace.placed(
                node.name, lambda: self._fleet.explain_choice(node, self._fleet.session_demand(session))
            )
        return Generation(
            generation_id,
            session,
            spec,
            self._settings,
            sampling=spec.sampling.over(session.sampling, self._ids.seed()),
            rules=OutputRules(model.eos_token_ids if model else frozenset(), spec.stop, limit),
            trace=trace,
            on_decided=self._on_decided,
            journal=self._journal,
            branch=self._branch,
        )

    def restore(self, saved: SavedGeneration, session: Session) -> tuple[Generation, OutputEnd | None]:
        """One as an earlier run of the head left it, and the end that its output has come to, if any."""
        started, now = saved.started, self._wall_clock()
        rules = OutputRules(frozenset(started.eos_token_ids), started.spec.stop, started.max_new_tokens)
        _taken, end = rules.accept(saved.token_ids)
        finished = saved.ended.finished if saved.ended is not None else None
        info = self._info(session, started.generation_id, started.spec, started.max_new_tokens)
        generation = Generation(
            started.generation_id,
            session,
            started.spec,
            self._settings,
            sampling=started.sampling,
            rules=rules,
            trace=NullGenerationTrace() if finished else self._observer.generation_started(info, None),
            on_decided=self._on_decided,
            journal=self._journal,
            branch=started.branch,
            age_s=max(0.0, now - started.accepted_at),
            # A clock that was set back gives it no more than its whole time.
            wall_s=started.deadline_at - max(now, started.accepted_at),
        )
        generation.log.restore(saved.token_ids, saved.marks, saved.cuts, finished)
        generation.context_tokens, generation.attempts = started.context_tokens, saved.attempts
        return generation, end

    def record(self, generation: Generation) -> GenerationStarted:
        """What a later run of the head needs to know of one that was just made."""
        now, left_s = self._wall_clock(), generation.remaining_wall_s()
        return GenerationStarted(
            generation_id=generation.generation_id,
            session_id=generation.session_id,
            owner=generation.session.owner,
            spec=generation.spec,
            sampling=generation.sampling,
            max_new_tokens=generation.rules.limit,
            eos_token_ids=tuple(sorted(generation.rules.eos_token_ids)),
            context_tokens=generation.context_tokens,
            accepted_at=now,
            deadline_at=now + left_s,
            branch=generation.log.branch,
        )

    def _info(self, session: Session, generation_id: str, spec: GenerationSpec, limit: int) -> GenerationInfo:
        return GenerationInfo(
            generation_id=generation_id,
            session_id=session.session_id,
            model=session.spec.model,
            qos=spec.qos or session.spec.qos,
            context_tokens=len(session.context),
            max_new_tokens=limit,
            max_wall_s=self._settings.default_wall_s if spec.max_wall_s is None else spec.max_wall_s,
            owner=session.owner,
        )
