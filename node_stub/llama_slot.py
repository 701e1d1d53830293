"""One slot of the llama.cpp server: what its cache holds, and the calls that extend it. Blocking.

How a prompt is cut into calls decides how it is rounded: the same tokens evaluated together or one by one
differ in the last bits, and a close choice between two words may fall the other way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from node_stub.llama_server import LlamaCallError
from node_stub.rules import Sampling

CHUNK_TOKENS = 64
_MASK_64 = (1 << 64) - 1
# llama.cpp takes this one for "draw a seed".
_SEEDS = (1 << 32) - 1
# The order in which they apply; any other sampler of the server stays out.
_SAMPLERS = ("temperature", "top_k", "top_p", "min_p")
_NOTHING = array("I")


class Poster(Protocol):
    """A connection to the server."""

    def post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        """Raises LlamaCallError and LlamaGoneError."""

    def close(self) -> None: ...


class Slot:
    """Use by one thread at a time. Calls raise LlamaCallError and LlamaGoneError."""

    def __init__(self, number: int, caller: Poster, vocab_size: int) -> None:
        self.number = number
        self._caller = caller
        self._vocab_size = vocab_size
        self._held = _NOTHING
        # So many of the held tokens were evaluated in whole chunks.
        self._in_chunks = 0

    def close(self) -> None:
        self._caller.close()

    def held_of(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the start, the cache holds."""
        return common_length(self._held, token_ids)

    def rewind(self, token_ids: array[int], exact: bool) -> int:  # noqa: FBT001 - called through an executor
        """Keep of the cache what is of use for these; how many tokens that is.

        `exact`: only whole chunks that were evaluated as such. The server itself would keep all that is
        equal, so the token after them is evaluated as another one first.
        """
        held = self.held_of(token_ids)
        if not exact:
            return held
        keep = min(held, self._in_chunks, len(token_ids) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        if held > keep:
            other = (token_ids[keep] + 1) % self._vocab_size
            self._complete(array("I", [*token_ids[:keep], other]), {"temperature": 0.0, "n_predict": 0})
        return keep

    def extend(self, token_ids: array[int]) -> int:
        """Have the cache hold these; how many were evaluated for it."""
        evaluated, _ = self._complete(token_ids, {"temperature": 0.0, "n_predict": 0})
        return evaluated

    def draw(self, token_ids: array[int], how: Mapping[str, object]) -> tuple[int, bool, int]:
        """The token after these, whether the model ends there, and how many were evaluated for it.

        One call per token: in a stream, the server leaves out ids where a character takes several tokens.
        """
        evaluated, reply = self._complete(token_ids, {**how, "n_predict": 1})
        match reply["tokens"]:
            case [int(token_id)]:
                return token_id, reply["stop_type"] == "eos", evaluated
            case drawn:
                raise LlamaCallError(f"one token was asked for, {drawn!r} came")

    def _complete(self, token_ids: array[int], params: Mapping[str, object]) -> tuple[int, Mapping[str, Any]]:
        before = self.held_of(token_ids)
        held, self._held = self._held, _NOTHING
        reply = self._caller.post(
            "/completion",
            {
                **params,
                "prompt": token_ids.tolist(),
                "id_slot": self.number,
                # What a failed call has left in the cache is not known.
                "cache_prompt": len(held) > 0,
                "return_tokens": True,
            },
        )
        # A whole prompt that is held already has its last token evaluated again, alone.
        before = min(before, len(token_ids) - 1)
        self._in_chunks = min(self._in_chunks, before // CHUNK_TOKENS * CHUNK_TOKENS)
        if before == self._in_chunks and len(token_ids) - before == CHUNK_TOKENS:
            self._in_chunks = len(token_ids)
        self._held = token_ids
        return len(token_ids) - before, reply


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens the two have in common from their start."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])


def prefill_stops(done: int, context_length: int, prompt_length: int, *, exact: bool) -> Iterator[int]:
    """Up to where a prompt is evaluated, call by call; its last part is left to the draw of the first token.

    The prompt is a context and then this generation's earlier output, which another node drew one by one.
    `exact` goes through it in the same steps as that node: the context in chunks from its start, the output
    one by one. Otherwise all of it goes in chunks.
    """
    in_chunks = context_length if exact else prompt_length
    yield from range(done // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS, in_chunks, CHUNK_TOKENS)
    yield from range(max(in_chunks, done + 1), prompt_length)


def draw_params(sampling: Sampling, position: int, vocab_size: int) -> dict[str, object]:
    """How the server is to draw the token at `position` of the whole sequence, as its parameters."""
    return {
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_k": min(sampling.top_k, vocab_size),
        "top_p": sampling.top_p or 1.0,
        "min_p": sampling.min_p,
        "seed": seed_at(sampling.seed, position),
    }


def seed_at(seed: int, position: int) -> int:
    """A seed for one draw, below 2^32 - 1, from a session's (64 bits) and the position: SplitMix64's output.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) % _SEEDS
