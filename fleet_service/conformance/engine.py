"""Properties of a node's engine. No rule asks for them; they decide how alike a continued answer is."""

from __future__ import annotations

from enum import StrEnum

from fleet.v1 import types_pb2
from fleet_service.conformance.head import Head, Session
from fleet_service.conformance.requests import greedy, sampled
from fleet_service.conformance.verdicts import Broken, Skipped, Untried

_TOKENS = 12
_SEED = 7


class Answer(StrEnum):
    """Whether the engine has a property."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


PROPERTIES = {
    "deterministic": "the same seed and context give the same tokens",
    "continues": "an answer that is continued from its first tokens goes on as it would have",
}


async def properties(head: Head) -> dict[str, Answer]:
    """Each of PROPERTIES. Raises Broken, Skipped or Untried where nothing can be found out."""
    session = await head.bound()
    same, going_on = [], []
    for sampling in (greedy(), sampled(1.0, _SEED)):
        first, second = [await _tokens(session, sampling) for _ in range(2)]
        same.append(first == second)
        half = len(first) // 2
        rest = await _tokens(session, sampling, first[:half])
        going_on.append(first[half:] == rest)
    return {
        "deterministic": Answer.YES if all(same) else Answer.NO,
        "continues": Answer.YES if all(going_on) else Answer.NO,
    }


async def found(head: Head) -> dict[str, Answer]:
    """As `properties`; UNKNOWN where nothing can be found out."""
    try:
        return await properties(head)
    except (Broken, Skipped, Untried, TimeoutError):
        return dict.fromkeys(PROPERTIES, Answer.UNKNOWN)


async def _tokens(
    session: Session, sampling: types_pb2.SamplingParams, prefix: list[int] | None = None
) -> list[int]:
    before = prefix or []
    stream = await session.generate(
        _TOKENS - len(before), sampling=sampling, prefix_token_ids=before, first_index=len(before)
    ).to_end()
    if not stream.finish:
        raise Untried(stream.end)
    return stream.tokens
