"""A real model behind the node's engine seam: llama.cpp, one evaluation at a time.

The engine keeps the schedule and llama.cpp computes. Each lane is a slot of the server with a cache of its
own; a job is a series of calls, each of which evaluates some tokens of the prompt or draws one token. So a
cancel waits for one call at most, prompts of one lane do not hold up the others for long, and the draw at a
position depends on nothing but the seed and the position. Calls run on threads; all else on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from node_stub.engine import BusyRate, Finish, Job, Load, Pace, Phase
from node_stub.llama_server import (
    Caller,
    Evaluated,
    LlamaCallError,
    LlamaGoneError,
    LlamaServer,
    evaluate,
)
from node_stub.rules import Model, Owner, Sampling

log = logging.getLogger(__name__)

PREFILL_CHUNK_TOKENS = 64
_MASK_64 = (1 << 64) - 1


@dataclass(eq=False, slots=True)
class _Slot:
    """A lane: one slot of the server. `cached` is what its cache holds by now."""

    number: int
    caller: Caller
    cached: array[int] = field(default_factory=lambda: array("I"))


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


class LlamaEngine:
    """See the module. `exact_replay`: see `prefill_stops`. `clock` is in seconds."""

    def __init__(
        self,
        server: LlamaServer,
        name: str,
        revision: str,
        lanes: int,
        clock: Callable[[], float],
        *,
        exact_replay: bool = True,
    ) -> None:
        self._model = Model(name, revision, server.vocab_size, server.eos_token_ids, server.window_tokens)
        self._exact_replay = exact_replay
        self._clock = clock
        self._lanes = lanes
        self._pool = ThreadPoolExecutor(lanes, thread_name_prefix="llama")
        self._free = [_Slot(number, server.caller()) for number in range(lanes)]
        self._queues: dict[int, deque[Job]] = {}
        self._running: dict[Job, _Slot] = {}
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
                slot = max(self._free, key=lambda slot: common_length(slot.cached, prompt))
                self._free.remove(slot)
                self._running[job] = slot
                self._peak_lanes = max(self._peak_lanes, len(self._running))
                self._tasks.create_task(self._work(job, slot), name=f"llama slot {slot.number}")

    async def _work(self, job: Job, slot: _Slot) -> None:
        finish, detail = Finish.ERROR, "the node is stopping"
        last: tuple[int, ...] = ()
        try:
            finish, last = await self._generate(job, slot)
        except LlamaCallError as error:
            # What the slot's cache holds after a failed call is not known.
            slot.cached, detail = array("I"), str(error)
            log.warning("slot %d: %s", slot.number, error)
        except LlamaGoneError as error:
            detail = str(error)
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

    async def _generate(self, job: Job, slot: _Slot) -> tuple[Finish, tuple[int, ...]]:
        """Run the job; how it ended, and its last token, which is to travel with the finish."""
        job.sink.on_phase(Phase.PREFILL)
        admission = job.admission
        tokens = admission.prompt_token_ids[:]
        if not tokens:
            raise LlamaCallError("there is nothing to continue: the prompt is empty")
        done = reusable_length(slot.cached, tokens, admission.context_length)
        for stop in prefill_stops(done, admission.context_length, len(tokens), exact=self._exact_replay):
            if job in self._cancelled:
                return Finish.CANCELLED, ()
            await self._evaluate(slot, tokens[:stop], None, self._prefill)
        for generated in range(1, admission.max_new_tokens + 1):
            if job in self._cancelled:
                return Finish.CANCELLED, ()
            # The first draw still has the last part of the prompt to evaluate.
            meter = self._decode if generated > 1 else self._prefill
            drawn = await self._evaluate(slot, tokens, draw_params(admission.sampling, len(tokens)), meter)
            if job in self._cancelled or drawn.token_id is None:
                return Finish.CANCELLED, ()
            if generated == 1:
                job.sink.on_phase(Phase.DECODE)
            tokens.append(drawn.token_id)
            if drawn.is_end or drawn.token_id in self._model.eos_token_ids:
                return Finish.EOS, (drawn.token_id,)
            if generated == admission.max_new_tokens:
                return Finish.LENGTH, (drawn.token_id,)
            job.sink.on_tokens((drawn.token_id,))
        raise AssertionError("the last token ends the job")

    async def _evaluate(
        self, slot: _Slot, tokens: array[int], draw: dict[str, object] | None, meter: _Meter
    ) -> Evaluated:
        before = common_length(slot.cached, tokens)
        began_s = self._clock()
        loop = asyncio.get_running_loop()
        evaluated = await loop.run_in_executor(
            self._pool, evaluate, slot.caller, slot.number, tokens[:], draw
        )
        slot.cached = tokens[:]
        meter.add(max(1, len(tokens) - before), began_s)
        return evaluated
