"""What a caller asks of a generation, drawn by seed: limits, stop sequences that come, sampling, poison."""

from __future__ import annotations

import random
from typing import Protocol

from fleet_service.domain.errors import FleetError
from fleet_service.domain.specs import (
    GenerationSpec,
    OnDisconnect,
    Qos,
    Replay,
    Sampling,
    SamplingOverride,
    SessionSpec,
)
from fleet_service.runtime.head import Head
from fleet_service.runtime.settings import HeadSettings
from node_stub.reference import StubModel, effective_seed
from tests.sim.heads import Heads
from tests.sim.oracle import Oracle
from tests.sim.records import Plan
from tests.sim.reference import expected_output


class Surroundings(Protocol):
    """What a caller needs of the world."""

    heads: Heads
    oracle: Oracle
    settings: HeadSettings
    models: tuple[StubModel, ...]
    zones: tuple[str, ...]

    @property
    def head(self) -> Head:
        """The head that lives."""

    def windows(self, model: StubModel) -> frozenset[int]:
        """Of the nodes that serve it, in tokens."""

    def check_refusal(self, error: FleetError, spec: SessionSpec, context_tokens: int) -> None:
        """Whether the nodes, as they are, explain the refusal."""


def plan_generation(
    rng: random.Random,
    world: Surroundings,
    label: str,
    model: StubModel,
    spec: SessionSpec,
    context: list[int],
) -> Plan:
    """A generation on `context`, of a session of `spec`, and what must come of it."""
    settings = world.settings
    asked = SamplingOverride()
    if rng.random() < 0.2:
        asked = SamplingOverride(temperature=rng.choice([0.0, 0.7]), seed=rng.choice([None, 77]))
    merged = asked.over(spec.sampling.over(Sampling(), 0), 0)
    drawn = merged.temperature > 0 and merged.seed == 0
    seed = None if drawn else effective_seed(merged.temperature, merged.seed)
    limit = rng.choice([0, 1, 2, *([rng.randint(3, 80)] * 12)])
    stop: tuple[tuple[int, ...], ...] = ()
    if seed is not None and rng.random() < 0.4:
        stop = _stops(rng, list(expected_output(model, seed, context, limit, ()).token_ids))
    tight = rng.random() < 0.12
    wall_s = rng.uniform(0.05, 3.0) if tight else rng.choice([60.0, 120.0, settings.default_wall_s])
    grace_s = rng.choice([0.0, 0.0, 2.0])
    strange = rng.random()
    return Plan(
        session_label=label,
        model=model,
        context=tuple(context),
        spec=GenerationSpec(
            max_new_tokens=limit,
            max_wall_s=None if wall_s == settings.default_wall_s else wall_s,
            sampling=asked,
            stop=stop,
            extend_context=rng.random() < 0.6,
            on_disconnect=rng.choice(list(OnDisconnect)),
            disconnect_grace_s=grace_s or None,
            qos=rng.choice([None, None, *Qos]),
        ),
        seed=seed,
        revision_open=not spec.model_revision,
        wall_s=wall_s,
        grace_s=grace_s,
        selector=bool(spec.node_selector),
        windows=world.windows(model),
        replay_never=spec.replay is Replay.NEVER,
        engine_fails_at=rng.randint(0, 10) if strange < 0.03 else None,
        kills_at=rng.randint(0, 10) if strange > 0.98 else None,
    )


def _stops(rng: random.Random, tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    """Stop sequences, some that come and some that do not."""
    stops: list[tuple[int, ...]] = [(1, 1, 1, 1)]
    for _ in range(rng.randint(1, 3)):
        length = rng.choice([1, 2, 3, 4, 8, 16])
        if len(tokens) > length:
            start = rng.randint(0, len(tokens) - length)
            stops.append(tuple(tokens[start : start + length]))
    rng.shuffle(stops)
    return tuple(stops)
