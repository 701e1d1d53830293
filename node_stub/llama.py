"""A real model behind the node's engine seam: llama.cpp, one evaluation at a time.

The engine keeps the schedule and llama.cpp computes. Each lane is a slot of the server with a cache of its
own; a job is a series of calls, each of which evaluates some tokens of the prompt or draws one token. So a
cancel waits for one call at most, prompts of one lane do not hold up the others for long, and the draw at a
position depends on nothing but the seed and the position. Calls run on threads; all else on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from node_stub.engine import BusyRate, Finish, Job, Load, Pace, Phase
from node_stub.llama_server import (
    LlamaCallError,
    LlamaGoneError,
    LlamaServer,
    ServerSettings,
    find_model_file,
    revision_of,
)
from node_stub.llama_slot import Poster, Slot, draw_params, prefill_stops
from node_stub.rules import Model, Owner

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Meter:
    """A rate over the time in which at least one call was under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted_until_s = 0.0
        self._rate = BusyRate()

    def add(self, tokens: int, began_s: float) -> None:
        """A call that began then has just ended; time that another call covered counts once."""
        now_s = self._clock()
        self._rate.add(tokens, now_s - max(began_s, self._counted_until_s))
        self._counted_until_s = now_s

    @property
    def tokens_per_s(self) -> int:
        return round(self._rate.rate)


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """`model_file` None = that of the installed small model; `name` "" = the file's."""

    model_file: Path | None = None
    name: str = ""
    lanes: int = 2
    window_tokens: int = 2048
    """Of each lane; 0 = the longest the model was trained for."""
    threads: int = 0
    """Processors to use; 0 = half of those there are."""
    exact: bool = True
    """See LlamaEngine."""


def create_engine(settings: LlamaSettings, clock: Callable[[], float]) -> LlamaEngine:
    """Load the model, which blocks. Raises LlamaUnavailableError."""
    model_file = find_model_file(settings.model_file)
    server = LlamaServer(ServerSettings(model_file, settings.lanes, settings.window_tokens, settings.threads))
    name = settings.name or model_file.stem
    return LlamaEngine(server, name, revision_of(model_file), settings.lanes, clock, exact=settings.exact)


class ModelServer(Protocol):
    """A loaded model and its slots; LlamaServer is one."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    window_tokens: int

    def caller(self) -> Poster: ...


class LlamaEngine:
    """See the module. `clock` is in seconds.

    `exact`: compute every token the same way, to the last bit, on whichever node and beside whatever else:
    one call at a time, and prompts in the steps that `prefill_stops` names. Otherwise the calls of different
    lanes run together and prompts in the fewest steps, which is faster; then an answer that fails over may
    go on in other words than it would have.
    """

    def __init__(
        self,
        server: ModelServer,
        name: str,
        revision: str,
        lanes: int,
        clock: Callable[[], float],
        *,
        exact: bool = True,
    ) -> None:
        # Unloaded with the engine, not before.
        self._server = server
        self._model = Model(name, revision, server.vocab_size, server.eos_token_ids, server.window_tokens)
        self._exact = exact
        self._clock = clock
        self._lanes = lanes
        self._pool = ThreadPoolExecutor(1 if exact else lanes, thread_name_prefix="llama")
        self._slots = [Slot(number, server.caller(), server.vocab_size) for number in range(lanes)]
        self._free = list(self._slots)
        self._queues: dict[int, deque[Job]] = {}
        self._running: dict[Job, Slot] = {}
        self._cancelled: set[Job] = set()
        self._peak_lanes = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._decode = _Meter(clock)
        self._prefill = _Meter(clock)

    # ------------------------------------------------------------------------------------------ the seam

    @property
    def models(self) -> Sequence[Model]:
        return (self._model,)

    def submit(self, job: Job) -> None:
        if job.admission.max_new_tokens == 0:
            job.sink.on_end(Finish.LENGTH)
            return
        self._queues.setdefault(job.admission.qos, deque()).append(job)
        self._fill_lanes()
        if job not in self._running:
            job.sink.on_phase(Phase.QUEUED)

    def cancel(self, job: Job) -> None:
        """A job that runs ends when the call under way does: at most one chunk of its prompt later."""
        queue = self._queues.get(job.admission.qos)
        if job in self._running:
            self._cancelled.add(job)
        elif queue and job in queue:
            queue.remove(job)
            job.sink.on_end(Finish.CANCELLED)

    def set_pace(self, pace: Pace) -> None:
        """A real engine takes the time it takes."""

    def load(self, owner: Owner | None = None) -> Load:
        """The cache of a lane is there whether used or not, so no KV blocks are counted."""
        queued = [job for queue in self._queues.values() for job in queue]
        return Load(
            max_lanes=self._lanes,
            lanes_active=len(self._running),
            queue_depth=len(queued),
            peak_lanes_active=self._peak_lanes,
            decode_tokens_per_s=self._decode.tokens_per_s,
            prefill_tokens_per_s=self._prefill.tokens_per_s,
            own_lanes_active=sum(job.owner == owner for job in self._running),
            own_queue_depth=sum(job.owner == owner for job in queued),
        )

    async def run(self, held_blocks: Callable[[], int]) -> None:
        """Raises LlamaGoneError when the server has stopped answering."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._fill_lanes()
                await asyncio.Event().wait()
        except* LlamaGoneError as gone:
            raise gone.exceptions[0] from None
        finally:
            self._tasks = None
            # The server must outlive the calls on it.
            await asyncio.to_thread(self._pool.shutdown)
            for slot in self._slots:
                slot.close()

    # --------------------------------------------------------------------------------------------- lanes

    def _fill_lanes(self) -> None:
        """Start waiting jobs, the lowest class first, while lanes last."""
        if self._tasks is None:
            return
        for qos in sorted(self._queues):
            queue = self._queues[qos]
            while queue and self._free:
                job = queue.popleft()
                prompt = job.admission.prompt_token_ids
                slot = max(self._free, key=lambda slot: slot.held_of(prompt))
                self._free.remove(slot)
                self._running[job] = slot
                self._peak_lanes = max(self._peak_lanes, len(self._running))
                self._tasks.create_task(self._work(job, slot), name=f"llama slot {slot.number}")

    async def _work(self, job: Job, slot: Slot) -> None:
        finish, detail = Finish.ERROR, "the node is stopping"
        last: tuple[int, ...] = ()
        try:
            finish, last = await self._generate(job, slot)
        except LlamaCallError as error:
            detail = str(error)
            log.warning("slot %d: %s", slot.number, error)
        except LlamaGoneError as error:
            detail = str(error)
            self._tasks = None
            raise
        finally:
            del self._running[job]
            self._cancelled.discard(job)
            # Longest unused first, for jobs that have nothing in common with any.
            self._free.append(slot)
            if last:
                job.sink.on_tokens(last)
            job.sink.on_end(finish, detail if finish is Finish.ERROR else "")
        self._fill_lanes()

    async def _generate(self, job: Job, slot: Slot) -> tuple[Finish, tuple[int, ...]]:
        """Run the job; how it ended, and its last token, which is to travel with the finish."""
        job.sink.on_phase(Phase.PREFILL)
        admission = job.admission
        tokens = admission.prompt_token_ids[:]
        if not tokens:
            raise LlamaCallError("there is nothing to continue: the prompt is empty")
        done = await self._call(slot.rewind, tokens, self._exact)
        for stop in prefill_stops(done, admission.context_length, len(tokens), exact=self._exact):
            if job in self._cancelled:
                return Finish.CANCELLED, ()
            began_s = self._clock()
            self._prefill.add(await self._call(slot.extend, tokens[:stop]), began_s)
        for generated in range(1, admission.max_new_tokens + 1):
            if job in self._cancelled:
                return Finish.CANCELLED, ()
            began_s = self._clock()
            how = draw_params(admission.sampling, len(tokens), self._model.vocab_size)
            token_id, is_end, evaluated = await self._call(slot.draw, tokens[:], how)
            # The first draw had the last part of the prompt to evaluate.
            (self._decode if generated > 1 else self._prefill).add(evaluated, began_s)
            if job in self._cancelled:
                return Finish.CANCELLED, ()
            if generated == 1:
                job.sink.on_phase(Phase.DECODE)
            tokens.append(token_id)
            if is_end or token_id in self._model.eos_token_ids:
                return Finish.EOS, (token_id,)
            if generated < admission.max_new_tokens:
                job.sink.on_tokens((token_id,))
        return Finish.LENGTH, (tokens[-1],)

    async def _call(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Have a thread do a slot's work."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(work, *args, **kwargs))
