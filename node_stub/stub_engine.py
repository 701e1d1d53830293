"""The stub's engine: tokens that can be foretold, at the pace and within the space of a real one.

One loop serves all jobs. Each turn is a decode step, which advances every decoding job by one token, and a
share of prefill, given to prefilling jobs in the order of their start. Jobs wait in a FIFO queue per QoS
class; a lower class always goes first. A job starts when a lane and KV blocks for its prompt are free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node_stub.engine import BusyRate, Finish, Job, Load, Pace, Phase
from node_stub.reference import StubModel, absorb, effective_seed, initial_state, next_token
from node_stub.rules import Model, Owner, blocks_of

_PREFILL_TURN_S = 0.02
# A process that was stopped did no work meanwhile, so no turn makes up for more than this.
_LONGEST_TURN_S = 0.1
# Tokens whose state is computed between two returns to the event loop.
_ABSORB_CHUNK_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Rates in tokens per second, 0 = as fast as it goes; decode is that of each running session.

    `kv_blocks_total` 0 = no limit. Prefill is shared by all jobs of the node.
    """

    lanes: int = 8
    decode_tokens_per_s: float = 200.0
    prefill_tokens_per_s: float = 20_000.0
    kv_blocks_total: int = 16_384


@dataclass(eq=False, slots=True)
class _Lane:
    job: Job
    model: StubModel
    state: int
    absorbed: int = 0
    generated: int = 0

    @property
    def decoding(self) -> bool:
        return self.absorbed == len(self.job.admission.prompt_token_ids)

    def run_blocks(self) -> int:
        held = blocks_of(self.job.admission.context_length)
        return blocks_of(len(self.job.admission.prompt_token_ids) + self.generated) - held


class StubEngine:
    """See the module. `windows` gives each model's window in tokens, 0 = none; `clock` is in seconds."""

    def __init__(
        self,
        models: Sequence[tuple[StubModel, int]],
        settings: EngineSettings,
        clock: Callable[[], float],
    ) -> None:
        self._stub_models = {stub.name: stub for stub, _ in models}
        self._models = tuple(
            Model(stub.name, stub.revision, stub.vocab_size, frozenset({stub.eos_token_id}), window)
            for stub, window in models
        )
        self._settings = settings
        self._clock = clock
        self._pace = Pace()
        self._queues: dict[int, deque[Job]] = {}
        self._lanes: dict[Job, _Lane] = {}
        self._peak_lanes = 0
        self._held_blocks: Callable[[], int] = lambda: 0
        self._wake = asyncio.Event()
        self._decode_rate = BusyRate()
        self._prefill_rate = BusyRate()
        self._prefill_credit = 0.0

    # ------------------------------------------------------------------------------------------ the seam

    @property
    def models(self) -> Sequence[Model]:
        return self._models

    def submit(self, job: Job) -> None:
        if job.admission.max_new_tokens == 0:
            job.sink.on_end(Finish.LENGTH)
            return
        self._queues.setdefault(job.admission.qos, deque()).append(job)
        self._fill_lanes()
        if job not in self._lanes:
            job.sink.on_phase(Phase.QUEUED)

    def cancel(self, job: Job) -> None:
        queue = self._queues.get(job.admission.qos)
        if job in self._lanes:
            del self._lanes[job]
        elif queue and job in queue:
            queue.remove(job)
        else:
            return
        job.sink.on_end(Finish.CANCELLED)
        self._fill_lanes()

    def set_pace(self, pace: Pace) -> None:
        self._pace = pace

    def load(self, owner: Owner | None = None) -> Load:
        queued = [job for queue in self._queues.values() for job in queue]
        return Load(
            max_lanes=self._settings.lanes,
            lanes_active=len(self._lanes),
            queue_depth=len(queued),
            peak_lanes_active=self._peak_lanes,
            run_blocks=self._run_blocks(),
            kv_blocks_total=self._settings.kv_blocks_total,
            decode_tokens_per_s=round(self._decode_rate.rate),
            prefill_tokens_per_s=round(self._prefill_rate.rate),
            own_lanes_active=sum(job.owner == owner for job in self._lanes),
            own_queue_depth=sum(job.owner == owner for job in queued),
        )

    async def run(self, held_blocks: Callable[[], int]) -> None:
        self._held_blocks = held_blocks
        last_s = due_s = self._clock()
        while True:
            self._fill_lanes()
            if not self._lanes:
                self._wake.clear()
                await self._wake.wait()
                last_s = due_s = self._clock()
                continue
            turn_s = self._turn_s()
            due_s = max(due_s + turn_s, self._clock() - _LONGEST_TURN_S)
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            now_s = self._clock()
            elapsed_s, last_s = min(now_s - last_s, _LONGEST_TURN_S + turn_s), now_s
            self._decode_step(elapsed_s)
            await self._prefill(elapsed_s)

    # --------------------------------------------------------------------------------------------- lanes

    def _fill_lanes(self) -> None:
        """Start waiting jobs, the lowest class first, while lanes and blocks last."""
        for qos in sorted(self._queues):
            queue = self._queues[qos]
            while queue:
                if len(self._lanes) >= self._settings.lanes or not self._has_blocks(queue[0]):
                    return
                self._start(queue.popleft())

    def _has_blocks(self, job: Job) -> bool:
        total = self._settings.kv_blocks_total
        if not total or not self._lanes:
            return True
        admission = job.admission
        wanted = blocks_of(len(admission.prompt_token_ids)) - blocks_of(admission.context_length)
        return self._held_blocks() + self._run_blocks() + wanted <= total

    def _start(self, job: Job) -> None:
        model = self._stub_models[job.admission.model.name]
        sampling = job.admission.sampling
        seed = effective_seed(sampling.temperature, sampling.seed)
        self._lanes[job] = _Lane(job, model, initial_state(model, seed))
        self._peak_lanes = max(self._peak_lanes, len(self._lanes))
        job.sink.on_phase(Phase.PREFILL)
        self._wake.set()

    def _run_blocks(self) -> int:
        return sum(lane.run_blocks() for lane in self._lanes.values())

    # ---------------------------------------------------------------------------------------------- time

    def _turn_s(self) -> float:
        """How long a turn takes: a decode step where anything decodes, else a slice of prefill."""
        if all(job.held for job in self._lanes):
            return _PREFILL_TURN_S
        if any(lane.decoding for lane in self._lanes.values()):
            rate = self._settings.decode_tokens_per_s
            return self._pace.slow_down / rate if rate else 0.0
        rate = self._settings.prefill_tokens_per_s
        if not rate:
            return 0.0
        left = sum(len(job.admission.prompt_token_ids) - lane.absorbed for job, lane in self._lanes.items())
        return min(left / rate * self._pace.slow_down, _PREFILL_TURN_S)

    def _decode_step(self, elapsed_s: float) -> None:
        decoding = [lane for lane in self._lanes.values() if lane.decoding and not lane.job.held]
        for lane in decoding:
            self._advance(lane)
        if decoding:
            self._decode_rate.add(len(decoding), elapsed_s)

    def _advance(self, lane: _Lane) -> None:
        job = lane.job
        token = next_token(lane.model, lane.state)
        lane.state = absorb(lane.state, (token,))
        lane.generated += 1
        finish = None
        if token == lane.model.eos_token_id:
            finish = Finish.EOS
        elif lane.generated >= job.admission.max_new_tokens:
            finish = Finish.LENGTH
        if lane.generated == 1:
            job.sink.on_phase(Phase.DECODE)
        if finish:
            del self._lanes[job]
        job.sink.on_tokens((token,))
        if finish:
            job.sink.on_end(finish)

    async def _prefill(self, elapsed_s: float) -> None:
        """Give the turn's share of prefill to the jobs that need it, in the order they started."""
        waiting = [lane for lane in self._lanes.values() if not lane.decoding and not lane.job.held]
        if not waiting:
            self._prefill_credit = 0.0
            return
        rate = self._settings.prefill_tokens_per_s
        self._prefill_credit += rate * elapsed_s / self._pace.slow_down
        done = 0
        for lane in waiting:
            left = len(lane.job.admission.prompt_token_ids) - lane.absorbed
            share = min(left, int(self._prefill_credit) - done) if rate else left
            done += share
            await self._absorb(lane, share)
        self._prefill_credit -= done if rate else 0.0
        self._prefill_rate.add(done, elapsed_s)

    async def _absorb(self, lane: _Lane, tokens: int) -> None:
        prompt, end = lane.job.admission.prompt_token_ids, lane.absorbed + tokens
        while lane.absorbed < end:
            upto = min(lane.absorbed + _ABSORB_CHUNK_TOKENS, end)
            lane.state = absorb(lane.state, prompt[lane.absorbed : upto])
            lane.absorbed = upto
            if upto < end:
                await asyncio.sleep(0)
