"""What callers ask for, as plain values: sessions, generations, sampling (design: The contract, Sampling)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum, IntEnum

from fleet_service.domain.value import value


class Qos(IntEnum):
    """Class of work: lower goes first. Values are those of fleet.v1.QosClass."""

    INTERACTIVE = 1
    COMPLETION = 2
    AGENT = 3
    BACKGROUND = 4


class Replay(Enum):
    """Whether another node may continue a generation whose node is lost."""

    ALLOWED = "allowed"
    NEVER = "never"


class OnDisconnect(Enum):
    """What becomes of a generation whose readers have all gone."""

    CANCEL = "cancel"
    CONTINUE = "continue"


@value
class Sampling:
    """How tokens are drawn, resolved: every field has its value. temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = Sampling()
"""As it is unless asked otherwise."""


@value
class SamplingOverride:
    """Sampling as asked for: None where the request is silent."""

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def over(self, base: Sampling, fresh_seed: int) -> Sampling:
        """`base` with what is asked for here. Sampled and without any seed: `fresh_seed` (non-zero)."""
        if self is AS_BEFORE and (base.greedy or base.seed):
            return base
        merged = Sampling(
            temperature=base.temperature if self.temperature is None else self.temperature,
            top_p=base.top_p if self.top_p is None else self.top_p,
            min_p=base.min_p if self.min_p is None else self.min_p,
            top_k=base.top_k if self.top_k is None else self.top_k,
            seed=base.seed if self.seed is None else self.seed,
        )
        if not merged.greedy and self.seed is None and base.seed == 0:
            merged = replace(merged, seed=fresh_seed)
        return merged


AS_BEFORE = SamplingOverride()
"""Asks for nothing."""


@value
class SessionSpec:
    """What a session is. `model_revision` "" = that of the node chosen first."""

    model: str
    model_revision: str = ""
    sampling: SamplingOverride = AS_BEFORE
    qos: Qos = Qos.INTERACTIVE
    node_selector: Mapping[str, str] = field(default_factory=dict)
    expected_output_tokens: int = 0
    replay: Replay = Replay.ALLOWED
    engine_options: bytes = b""

    def of_revision(self, revision: str) -> SessionSpec:
        """The same of that revision; a fifth of what `replace` costs, once for each session."""
        return SessionSpec(
            model=self.model,
            model_revision=revision,
            sampling=self.sampling,
            qos=self.qos,
            node_selector=self.node_selector,
            expected_output_tokens=self.expected_output_tokens,
            replay=self.replay,
            engine_options=self.engine_options,
        )


@value
class GenerationSpec:
    """What one generation may produce. None and 0 stand for the head's or the session's default."""

    max_new_tokens: int | None = None
    max_wall_s: float | None = None
    sampling: SamplingOverride = AS_BEFORE
    stop: tuple[tuple[int, ...], ...] = ()
    extend_context: bool = False
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    disconnect_grace_s: float | None = None
    orphan_timeout_s: float | None = None
    qos: Qos | None = None
    expected_output_tokens: int = 0
