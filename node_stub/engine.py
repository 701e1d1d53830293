"""The seam between a node and what generates its tokens.

An engine takes jobs and tells each job's sink what becomes of it; how it schedules and batches them is its
own affair. The stub's engine (`stub_engine.py`) and a real model's (`llama.py`) stand behind this same
Protocol.

Everything here runs on the node's one event loop; an engine with threads of its own calls its sinks through
`loop.call_soon_threadsafe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from node_stub.rules import Admission, Model, Owner


class Phase(Enum):
    """Where a job stands; the names are those of fleet.v1.GenerationPhase without their prefix."""

    QUEUED = "QUEUED"
    PREFILL = "PREFILL"
    DECODE = "DECODE"


class Finish(Enum):
    """Why a job ended; the names are those of fleet.v1.FinishReason without their prefix."""

    EOS = "EOS"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    WALL_CLOCK = "WALL_CLOCK"
    ERROR = "ERROR"


class JobSink(Protocol):
    """Who is told about a job. Called synchronously, in order; must not block or raise."""

    def on_phase(self, phase: Phase) -> None:
        """QUEUED where it waits at all, PREFILL, then DECODE before the first token."""

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        """Further tokens, an EOS included."""

    def on_end(self, finish: Finish, detail: str = "") -> None:
        """The job has left the engine; exactly once, and nothing after it.

        Called in the same step as the last `on_tokens`, so that both travel in one message. ERROR is the
        engine's failure on this job and `detail` says what happened, for logs.
        """


@dataclass(eq=False, slots=True)
class Job:
    """One run handed to the engine: what is to be generated, for whom, and who is told."""

    admission: Admission
    owner: Owner
    sink: JobSink
    held: bool = False
    """Set from outside: keep the job in its lane without advancing it. Engines that cannot, ignore it."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do now. Rates are node totals over busy time, in tokens/s; 0 = not measured."""

    max_lanes: int
    lanes_active: int = 0
    queue_depth: int = 0
    peak_lanes_active: int = 0
    run_blocks: int = 0
    """KV blocks that running jobs take beyond their sessions' contexts."""
    kv_blocks_total: int = 0
    decode_tokens_per_s: int = 0
    prefill_tokens_per_s: int = 0
    own_lanes_active: int = 0
    own_queue_depth: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """Changes to an engine's timing at run time: a factor on every duration (1 = as configured)."""

    slow_down: float = 1.0


class Engine(Protocol):
    """Generates tokens for jobs."""

    @property
    def models(self) -> Sequence[Model]:
        """What it serves, with each model's window."""

    async def run(self, held_blocks: Callable[[], int]) -> None:
        """Work until cancelled. `held_blocks` tells how many KV blocks the sessions' contexts take.

        Raises only when the engine as a whole has failed; the node then stops.
        """

    def submit(self, job: Job) -> None:
        """Take a job. Never refuses: what cannot be done ends with ERROR."""

    def cancel(self, job: Job) -> None:
        """End a job, wherever it is, with CANCELLED, at once or soon. One that has ended is left alone."""

    def set_pace(self, pace: Pace) -> None:
        """Change the timing. An engine with a time of its own ignores it."""

    def load(self, owner: Owner | None = None) -> Load:
        """The load now; the own part is that of `owner`."""


@dataclass(slots=True)
class BusyRate:
    """Tokens per second over busy time: a moving mean over samples of at least `min_sample_s` each.

    rate = (3·rate + sample) / 4, the first sample taken as it is.
    """

    min_sample_s: float = 0.2
    rate: float = 0.0
    _tokens: int = field(default=0)
    _busy_s: float = field(default=0.0)

    def add(self, tokens: int, busy_s: float) -> None:
        self._tokens += tokens
        self._busy_s += busy_s
        if self._busy_s < self.min_sample_s:
            return
        sample = self._tokens / self._busy_s
        self.rate = (3 * self.rate + sample) / 4 if self.rate else sample
        self._tokens, self._busy_s = 0, 0.0
