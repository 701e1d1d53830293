"""What was ordered of an answer holds over the head's death: its end, its time, its cancel, its readers."""

from __future__ import annotations

import time

import pytest

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.client import FleetClient
from node_stub.reference import reference_tokens
from tests.e2e.restarts import (
    MODEL,
    Durable,
    Stream,
    expected,
    generation_spec,
    model_of,
    open_session,
    session,
    until_so,
)

CANCELLED = types_pb2.FINISH_REASON_CANCELLED
Outcome = pb.CancelGenerationResponse


async def cancel(client: FleetClient, generation_id: str) -> pb.CancelGenerationResponse:
    request = pb.CancelGenerationRequest(generation_id=generation_id)
    return await client.ask(client.fleet.CancelGeneration(request))


async def begin(client: FleetClient, name: str, n: int, read: int, **more: object) -> Stream:
    """A session `name` of context [1, 2] and its answer of the same name, of which `read` tokens came."""
    await open_session(client, name, [1, 2])
    stream = Stream(client, name, name, generation_spec(n, **more))
    await stream.until_tokens(read)
    return stream


async def test_answers_that_ended_can_be_read_and_others_be_cancelled(durable: Durable) -> None:
    await durable.node("a", rate=40)
    await durable.start()
    client = await durable.client()
    _tokens, told = await _ended(client, durable, "ended")
    await begin(client, "runs", 1000, 5)
    early = await cancel(client, "early")
    assert early.outcome == Outcome.OUTCOME_HELD
    await durable.crash()
    client = await durable.client()
    tokens, others = await durable.rest("ended", 2)
    assert tokens == expected([1, 2], 6)[2:]
    assert others[-1] == told[-1]
    assert (await cancel(client, "ended")).outcome == Outcome.OUTCOME_ALREADY_FINISHED
    assert (await cancel(client, "runs")).outcome == Outcome.OUTCOME_CANCELLED
    tokens, others = await durable.rest("runs", 0)
    assert tokens == expected([1, 2], len(tokens))
    assert others[-1].finished.reason == CANCELLED
    await open_session(client, "late", [4])
    request = pb.GenerateRequest(session_id="late", generation_id="early", spec=generation_spec(5))
    events = [event async for event in client.generate(request)]
    assert events[-1].finished.reason == CANCELLED
    assert not [event for event in events if event.HasField("tokens")]
    await durable.crash()
    assert (await durable.rest("runs", 0))[1][-1].finished.reason == CANCELLED
    await durable.ends_quiet()


async def _ended(
    client: FleetClient, durable: Durable, name: str
) -> tuple[list[int], list[pb.GenerationEvent]]:
    await open_session(client, name, [1, 2])
    await Stream(client, name, name, generation_spec(6)).until_tokens(6)
    return await durable.rest(name)


@pytest.mark.slow
async def test_the_deadline_of_an_answer_counts_while_the_head_is_away(durable: Durable) -> None:
    """One deadline passes while the head is dead, another after it is back."""
    await durable.node("a", rate=40)
    await durable.start()
    client = await durable.client()
    began_s = time.monotonic()
    away = await begin(client, "away", 2000, 5, max_wall_ms=1500, extend_context=True)
    back = await begin(client, "back", 2000, 5, max_wall_ms=5000)
    await durable.kill()

    async def passed() -> bool:
        return time.monotonic() - began_s > 1.6

    await until_so(passed, "the first deadline has passed")
    await durable.start()
    for name, read in (("away", away), ("back", back)):
        tokens, others = await durable.rest(name, len(read.tokens))
        read.tokens += tokens
        assert read.tokens == expected([1, 2], len(read.tokens))
        finished = others[-1].finished
        assert finished.reason == types_pb2.FINISH_REASON_WALL_CLOCK
        assert finished.timings.total_ms >= (4900 if name == "back" else 1400)
    client = await durable.client()
    assert (await session(client, "away"))[1] == [1, 2, *away.tokens]
    await durable.ends_quiet()


@pytest.mark.slow
async def test_stop_sequences_and_eos_end_an_answer_after_the_restart(durable: Durable) -> None:
    """A stop sequence too of which one part came before it and one after."""
    model = model_of(20)
    context = next(
        c for c in ([k, 2] for k in range(500)) if 30 < _eos_at(reference_tokens(model, 0, c, 200)) < 120
    )
    await durable.node("a", rate=25, eos_per_mille=20)
    await durable.start()
    client = await durable.client()
    answer = reference_tokens(model, 0, context, 200)
    end = _eos_at(answer)
    sequences = [types_pb2.TokenSequence(token_ids=answer[5:14])]
    reads = {}
    for name, stop in (("eos", []), ("stop", sequences)):
        await open_session(client, name, context)
        reads[name] = Stream(client, name, name, generation_spec(200, stop=stop))
    for stream in reads.values():
        await stream.until_tokens(8)
    await durable.crash()
    tokens, others = await durable.rest("eos", len(reads["eos"].tokens))
    assert reads["eos"].tokens + tokens == answer[: end + 1]
    assert others[-1].finished.reason == types_pb2.FINISH_REASON_EOS
    tokens, others = await durable.rest("stop", len(reads["stop"].tokens))
    assert reads["stop"].tokens + tokens == answer[:14]
    assert (others[-1].finished.reason, others[-1].finished.stop_index) == (types_pb2.FINISH_REASON_STOP, 0)
    await durable.ends_quiet()


def _eos_at(tokens: list[int]) -> int:
    return tokens.index(MODEL.eos_token_id) if MODEL.eos_token_id in tokens else -1


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])
async def test_an_answer_without_replay_goes_on_only_if_its_run_was_kept(
    durable: Durable, kept: bool
) -> None:
    await durable.node("a", rate=40, link=kept)
    await durable.node("b", rate=40, link=kept)
    await durable.start()
    client = await durable.client()
    spec = pb.SessionSpec(model=MODEL.name, replay=types_pb2.REPLAY_MODE_NEVER)
    await open_session(client, "s", [1, 2], spec)
    stream = Stream(client, "s", "s", generation_spec(100))
    got = await stream.until_tokens(5)
    await durable.crash()
    tokens, others = await durable.rest("s", len(got))
    finished = others[-1].finished
    if kept:
        assert got + tokens == expected([1, 2], 100)
    else:
        assert (finished.reason, finished.error.reason) == (types_pb2.FINISH_REASON_ERROR, "NODE_LOST")
        assert got + tokens == expected([1, 2], len(got + tokens))
        assert finished.error.metadata["nextIndex"] == str(len(got + tokens))
    await durable.ends_quiet()


@pytest.mark.slow
async def test_the_lease_of_what_was_taken_up_is_renewed_at_once(durable: Durable) -> None:
    durable.flags += ["--set", "head.lease_s=6", "--set", "head.lease_renew_s=4"]
    await durable.node("a", rate=20)
    await durable.start()
    client = await durable.client()
    stream = await begin(client, "s", 140, 40)  # the lease has run for two seconds
    await durable.crash()
    tokens, others = await durable.rest("s", len(stream.tokens))
    assert stream.tokens + tokens == expected([1, 2], 140)
    assert not [event for event in others if event.HasField("moved")]
    await durable.ends_quiet()


async def test_an_orderly_stop_leaves_answers_to_the_next_run_and_readers_come_back(durable: Durable) -> None:
    await durable.node("a", rate=40)
    await durable.node("b", rate=40, link=False)
    await durable.start()
    client = await durable.client()
    streams = {name: await begin(client, name, 90, 5) for name in ("one", "two", "three", "four")}
    await open_session(client, "idle", [3, 4])
    await Stream(client, "idle", "idle", generation_spec(2)).until_tokens(2)
    idle, _ = await session(client, "idle")
    await durable.stop()
    for stream in streams.values():
        assert await stream.end_reason() == "HEAD_DRAINING"
    await durable.start()
    await durable.met_all()
    client = await durable.client()
    again, _ = await session(client, "idle")
    assert (again.node, again.epoch) == (idle.node, idle.epoch)
    for name, stream in streams.items():
        tokens, others = await durable.rest(name, len(stream.tokens))
        assert stream.tokens + tokens == expected([1, 2], 90)
        assert others[-1].finished.reason == types_pb2.FINISH_REASON_LENGTH
    await durable.ends_quiet()


@pytest.mark.slow
async def test_readers_have_ten_seconds_to_come_back_unless_it_goes_on_without_them(durable: Durable) -> None:
    await durable.node("a", rate=20)
    await durable.start()
    client = await durable.client()
    for name, on_disconnect in (
        ("cancel", pb.ON_DISCONNECT_CANCEL),
        ("returns", pb.ON_DISCONNECT_CANCEL),
        ("goes-on", pb.ON_DISCONNECT_CONTINUE),
    ):
        await open_session(client, name, [1, 2])
        spec = pb.GenerationSpec(max_new_tokens=300, on_disconnect=on_disconnect)
        await Stream(client, name, name, spec).until_tokens(5)
    await durable.crash()
    back_s = time.monotonic()
    client = await durable.client()
    returned = client.fleet.AttachGeneration(pb.AttachGenerationRequest(generation_id="returns"))
    assert (await returned.read()) is not None

    async def ended() -> bool:
        return not (await session(client, "cancel"))[0].generation_id

    await until_so(ended, "the answer that nobody reads is cancelled")
    assert time.monotonic() - back_s > 9.0
    tokens, others = await durable.rest("cancel")
    assert others[-1].finished.reason == CANCELLED
    assert 5 < len(tokens) < 300
    for name in ("returns", "goes-on"):
        tokens, others = await durable.rest(name)
        assert tokens == expected([1, 2], 300)
        assert others[-1].finished.reason == types_pb2.FINISH_REASON_LENGTH
    await durable.ends_quiet()
