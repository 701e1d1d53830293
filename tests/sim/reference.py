"""What a generation must give: the stub model's answer, cut where EOS, a stop sequence or the limit ends it.

Written apart from the head's own output rules, the plain way, to check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet_service.domain.events import FinishReason
from node_stub.reference import StubModel, reference_tokens


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole output when nothing cuts it short, and how it ends."""

    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_index: int | None


def expected_output(
    model: StubModel, seed: int, context: Sequence[int], max_new_tokens: int, stop: Sequence[Sequence[int]]
) -> Expected:
    """`seed` is the one that counts (0 for greedy sampling)."""
    tokens = reference_tokens(model, seed, context, max_new_tokens)
    for end in range(1, len(tokens) + 1):
        if tokens[end - 1] == model.eos_token_id:
            return Expected(tuple(tokens[:end]), FinishReason.EOS, None)
        for index, sequence in enumerate(stop):
            if tokens[max(0, end - len(sequence)) : end] == list(sequence):
                return Expected(tuple(tokens[:end]), FinishReason.STOP, index)
    return Expected(tuple(tokens), FinishReason.LENGTH, None)
