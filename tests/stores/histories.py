"""Records as a head writes them, and histories of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from fleet_service.domain.context import Context
from fleet_service.domain.errors import Reason
from fleet_service.domain.events import (
    ErrorCause,
    Finished,
    FinishReason,
    MoveCause,
    Moved,
    Timings,
)
from fleet_service.domain.specs import (
    GenerationSpec,
    OnDisconnect,
    Qos,
    Replay,
    Sampling,
    SamplingOverride,
    SessionSpec,
)
from fleet_service.runtime.records import (
    BranchCut,
    ContextExtended,
    GenerationEnded,
    GenerationGone,
    GenerationStarted,
    Record,
    SessionGone,
    SessionKept,
    TermRaised,
    TokensDelivered,
)

SPEC = SessionSpec(
    "demo",
    "r1",
    SamplingOverride(temperature=0.5, seed=7),
    Qos.AGENT,
    {"zone": "eu"},
    64,
    Replay.NEVER,
    b"\x00\xff{",
)
GENERATION = GenerationSpec(
    40, 1.5, SamplingOverride(top_k=3), ((1, 2), (3,)), True, OnDisconnect.CONTINUE, None, 3.0, Qos.AGENT, 9
)
FAILED = Finished(
    FinishReason.ERROR,
    3,
    4,
    2,
    Timings(0.1, None, 1.0, 0.2),
    error=ErrorCause(Reason.ENGINE_ERROR, "no", {"nextIndex": "4"}),
)
MOVED = Moved("a", "b", MoveCause.LINK_LOST, 2, 0.25, 9)


def session(name: str, number: int, **changes: Any) -> SessionKept:
    kept = SessionKept(name, number, "owner", SPEC, Sampling(0.5, 0.9, 0.0, 3, 7), 1.5, 2.5)
    return replace(kept, **changes)


def generation(name: str, session_id: str) -> GenerationStarted:
    return GenerationStarted(
        name, session_id, "owner", GENERATION, Sampling(seed=5), 40, (2, 7), 3, 100.5, 102.0, 1
    )


def extended(name: str, base: int, ids: list[int], whole: list[int]) -> ContextExtended:
    return ContextExtended(name, base, ids, Context(whole).crc32)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Record]]:
    """Batches as a head writes them: sessions that come, grow and go; generations that run and end."""
    lengths: dict[str, list[int]] = {}
    running: dict[str, int] = {}
    kept: list[str] = []
    made = 0
    batches: list[list[Record]] = []
    ids = st.lists(st.integers(0, 2**32 - 1), max_size=4)
    for _ in range(draw(st.integers(1, 8))):
        batch: list[Record] = []
        for _ in range(draw(st.integers(0, 5))):
            what = draw(
                st.sampled_from(
                    ["session", "extend", "start", "tokens", "tokens", "cut", "end", "gone", "over"]
                )
            )
            if what == "session":
                made += 1
                lengths[f"s{made}"] = []
                batch.append(session(f"s{made}", made))
            elif what == "extend" and lengths:
                name = draw(st.sampled_from(sorted(lengths)))
                base = draw(st.integers(0, len(lengths[name])))
                new = draw(ids)
                lengths[name] = [*lengths[name][:base], *new]
                batch.append(extended(name, base, new, lengths[name]))
            elif what == "start" and lengths:
                made += 1
                running[f"g{made}"] = 0
                batch.append(generation(f"g{made}", draw(st.sampled_from(sorted(lengths)))))
            elif what == "tokens" and running:
                name = draw(st.sampled_from(sorted(running)))
                new = draw(ids)
                batch.append(TokensDelivered(name, running[name], new))
                running[name] += len(new)
            elif what == "cut" and running:
                made += 1
                name = draw(st.sampled_from(sorted(running)))
                batch += [BranchCut(name, made, running[name]), TermRaised(made)]
            elif what == "end" and running:
                name = draw(st.sampled_from(sorted(running)))
                del running[name]
                kept.append(name)
                batch.append(GenerationEnded(name, FAILED, 1.0))
            elif what == "gone" and kept:
                batch.append(GenerationGone(kept.pop(0)))
            elif what == "over" and lengths:
                name = draw(st.sampled_from(sorted(lengths)))
                del lengths[name]
                batch.append(SessionGone(name))
        batches.append(batch)
    return batches
