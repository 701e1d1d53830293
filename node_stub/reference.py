"""The stub's model: the next token is a function of the model, the seed and all tokens before it.

A 64-bit state takes in one token per step; the token that follows is drawn from the state's finalised bits,
so continuing from any prefix gives what an undisturbed run would have given. Mixing constants: the
finaliser is that of SplitMix64 (Steele, Lea, Flood 2014), the multiplier L'Ecuyer's for 64-bit generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_MULTIPLIER = 0xD1342543DE82EF95
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class StubModel:
    """A model that can be foretold. `eos_per_mille` of all draws are the EOS token; 0 = it never comes."""

    name: str
    revision: str = "stub-1"
    vocab_size: int = 32_000
    eos_token_id: int = 2
    eos_per_mille: int = 0


def effective_seed(temperature: float, seed: int) -> int:
    """The seed that counts: a greedy draw (temperature 0) does not depend on it."""
    return 0 if temperature == 0 else seed


def initial_state(model: StubModel, seed: int) -> int:
    """State before any token."""
    name = f"{model.name}\0{model.revision}\0{seed & _MASK}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def absorb(state: int, token_ids: Iterable[int]) -> int:
    """State after further tokens, one O(1) step each."""
    for token in token_ids:
        state = ((state ^ (token + _GOLDEN)) * _MULTIPLIER + 1) & _MASK
    return state


def next_token(model: StubModel, state: int) -> int:
    """The token that follows `state`."""
    bits = _finalise(state)
    if (bits >> 32) % 1000 < model.eos_per_mille:
        return model.eos_token_id
    # One id less to draw from, stepping over EOS, so that EOS comes by its chance alone.
    token = (bits & 0xFFFFFFFF) % (model.vocab_size - 1)
    return token + 1 if token >= model.eos_token_id else token


def reference_tokens(model: StubModel, seed: int, prompt: Sequence[int], n: int) -> list[int]:
    """The exact answer to `prompt`: n tokens, or fewer when EOS comes, which is then the last.

    `seed` is the one that counts: 0 for greedy sampling (see `effective_seed`). For every k before EOS,
    `reference(p, n) == reference(p, k) + reference(p + reference(p, k), n - k)`.
    """
    state = absorb(initial_state(model, seed), prompt)
    output: list[int] = []
    while len(output) < n:
        token = next_token(model, state)
        output.append(token)
        if token == model.eos_token_id:
            break
        state = absorb(state, (token,))
    return output


def _finalise(state: int) -> int:
    bits = (state + _GOLDEN) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
