"""What placement sees: a node as a candidate, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Protocol

from fleet_service.domain.node_types import ModelInfo, NodeState, Report
from fleet_service.domain.value import value


class Candidate(Protocol):
    """A node, read only. Times (`_s`) are on the head's one clock, the one that `now_s` arguments are on."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> NodeState: ...

    @property
    def state_detail(self) -> str: ...

    @property
    def cordoned(self) -> bool: ...

    @property
    def unlisted(self) -> bool:
        """The name it was found by lists it no more."""

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """By name; empty before the node was first heard from."""

    @property
    def report(self) -> Report | None: ...

    @property
    def report_at_s(self) -> float | None:
        """When `report` came; None with it."""

    @property
    def was_hot(self) -> bool:
        """The last fresh report said hot."""

    @property
    def sessions(self) -> int:
        """Sessions bound to it, counted from the choice on; whatever holds a reservation is one of them."""

    @property
    def reservations(self) -> int:
        """Reservations that this head holds on it."""

    @property
    def busy_until_s(self) -> float:
        """It said BUSY and is passed over until then."""

    @property
    def lanes(self) -> int: ...

    @property
    def waiting(self) -> int:
        """Attempts queued at the head for one of its lanes."""


@value
class Demand:
    """What is to be placed.

    `model_revision` "" takes any. `prompt_tokens` is what the node must hold at once (context and earlier
    output), `expected_output_tokens` what is still to come. `avoid` names nodes already tried.
    `min_window_tokens`: a node with that window refused the length, so only a strictly wider one helps; 0 =
    none did. `state_dependent`: the length is that of a session which has grown, not of a prompt just sent.
    """

    model: str
    model_revision: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    expected_output_tokens: int = 256
    avoid: frozenset[str] = frozenset()
    min_window_tokens: int = 0
    state_dependent: bool = False


def is_unlearned(candidate: Candidate) -> bool:
    """Never heard from: what it serves and how wide is unknown."""
    return not candidate.models and candidate.state in (NodeState.CONNECTING, NodeState.DOWN)
