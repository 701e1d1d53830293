"""What a world is made of, drawn by seed: nodes of many kinds, and the settings of the head."""

from __future__ import annotations

import random
from typing import Any

from fleet_service.domain.node_types import Feature
from fleet_service.runtime.settings import HeadSettings
from node_stub import rules
from node_stub.reference import StubModel
from tests.sim.nodes import NodeProfile

MIN_NODES, MAX_NODES = 3, 5
ZONES = ("east", "west")
MODELS = (
    StubModel("model-a", "r1", vocab_size=100, eos_token_id=2, eos_per_mille=12),
    # The same model in another revision: what one began, the other must not go on with.
    StubModel("model-a", "r2", vocab_size=100, eos_token_id=2, eos_per_mille=12),
    StubModel("model-b", "r7", vocab_size=100, eos_token_id=1, eos_per_mille=0),
)


def make_settings(rng: random.Random) -> HeadSettings:
    return HeadSettings(
        policy=rng.choice(["load-aware", "load-aware", "least-loaded", "round-robin"]),
        queue_limit_per_node=rng.choice([3, 256, 256]),
        lanes_per_node=rng.choice([0, 0, 0, 8]),
        placement_wait_s=15.0,
        lease_s=20.0,
        lease_renew_s=13.0,
        generation_stall_s=8.0,
        idle_unbind_s=6.0,
        default_orphan_timeout_s=200.0,
    )


def make_profiles(rng: random.Random) -> list[NodeProfile]:
    count = rng.randint(MIN_NODES, MAX_NODES)
    profiles: list[NodeProfile] = []
    for number in range(count):
        model_a = MODELS[1] if number >= 2 and rng.random() < 0.25 else MODELS[0]
        wide = number < 2 or rng.random() < 0.7
        limits = rules.Limits(
            max_sessions=4096 if number < 2 else rng.choice([4096, 4096, 3]),
            kv_blocks_total=0 if number < 2 else rng.choice([0, 0, 24]),
            default_lease_ms=20_000,
        )
        profiles.append(
            NodeProfile(
                name=f"node-{number}",
                models=(model_a, MODELS[2]) if number < 2 or rng.random() < 0.5 else (model_a,),
                max_context_tokens=4096 if wide else rng.choice([48, 96, 160]),
                lanes=rng.randint(1, 4),
                step_s=rng.choice([0.01, 0.03, 0.08]),
                tokens_per_step=rng.choice([1, 1, 2, 5]),
                prefill_tokens_per_s=rng.choice([50.0, 400.0, 4000.0]),
                limits=limits,
                labels={"zone": ZONES[number] if number < 2 else rng.choice(ZONES)},
                tells_window=wide or rng.random() < 0.5,
                keep_s=rng.choice([10.0, 0.6]),
                buffer_tokens=rng.choice([4096, 4096, 4096, 24]),
                **_link_of(rng),
            )
        )
    return profiles


def _link_of(rng: random.Random) -> dict[str, Any]:
    """How the node is connected, and what it can do by that."""
    features = {Feature.INLINE_BIND} if rng.random() < 0.7 else set()
    joins = rng.random() < 0.25
    multiplexed = joins or rng.random() < 0.5
    if multiplexed:
        features |= {Feature.LINK, Feature.RESUME} if rng.random() < 0.85 else {Feature.LINK}
    if rng.random() < (0.85 if multiplexed else 0.5):
        features.add(Feature.RECONCILE)
    return {"features": frozenset(features), "joins": joins}
