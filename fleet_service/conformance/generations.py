"""Rules of a generation's stream: its indexes, its end, its budgets."""

from __future__ import annotations

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.conformance.head import Head
from fleet_service.conformance.requests import finish_name, phase_name
from fleet_service.conformance.sessions import CONSTRAINT, REPLAYED
from fleet_service.conformance.stream import BY_ITSELF, Stream, has_tokens
from fleet_service.conformance.verdicts import Broken, Rule, Skipped, Untried, expect

LENGTH = types_pb2.FINISH_REASON_LENGTH
EOS = types_pb2.FINISH_REASON_EOS
WALL_CLOCK = types_pb2.FINISH_REASON_WALL_CLOCK
OUTPUT_TOKENS = 12
_FROM_NODE = {LENGTH, EOS, WALL_CLOCK, types_pb2.FINISH_REASON_CANCELLED}
# Prefill of a longer prompt would keep a node in service busy.
_SHORT_WINDOW_TOKENS = 4_096
_WALL_MS = 50


async def indexes(head: Head) -> None:
    session = await head.bound()
    prefix = head.connection.tokens(3, start=1)
    for before in ([], prefix):
        stream = await session.generate(
            OUTPUT_TOKENS, prefix_token_ids=before, first_index=len(before)
        ).to_end()
        _has_tokens(stream)
        due = len(before)
        for message in stream.messages:
            if message.token_ids:
                expect(message.first_index == due, f"index {message.first_index} came, {due} was due")
                due += len(message.token_ids)


async def epochs(head: Head) -> None:
    session = await head.bound()
    stream = await session.generate(OUTPUT_TOKENS).to_end()
    _has_tokens(stream)
    for message in stream.messages:
        if message.token_ids or message.finish:
            right = message.epoch == session.epoch
            expect(right, f"a message names epoch {message.epoch}, the binding's is {session.epoch}")


async def end(head: Head) -> None:
    session = await head.bound()
    stream = session.generate(OUTPUT_TOKENS)
    head.doing = "waiting for the finish of a generation"
    await stream.to_end()
    expect(stream.finish and not stream.refusal, f"a generation of {OUTPUT_TOKENS} tokens: {stream.end}")
    expect(stream.finish in _FROM_NODE, f"the finish is {finish_name(stream.finish)}")
    ends = [n for n, message in enumerate(stream.messages) if message.finish]
    expect(ends == [len(stream.messages) - 1], "the finish is not the last message")
    expect(stream.status is grpc.StatusCode.OK, f"after its finish the call ended with {stream.status}")
    last = stream.messages[-1]
    expect(last.token_ids, "the finish came after the last tokens, not along with them")


async def budget(head: Head) -> None:
    session = await head.bound()
    for wanted in (1, OUTPUT_TOKENS):
        stream = await session.generate(wanted).to_end()
        _ended_by_itself(stream)
        got = len(stream.tokens)
        expect(got <= wanted, f"max_new_tokens {wanted} gave {stream.count}")
        if stream.finish == LENGTH:
            expect(got == wanted, f"max_new_tokens {wanted}: LENGTH after {stream.count}")
        else:
            known = head.connection.model.eos_token_ids
            expect(stream.tokens and stream.tokens[-1] in known, "EOS, but the last token is no EOS")
    stream = await session.generate(0).to_end()
    expect(stream.finish == LENGTH and not stream.tokens, f"max_new_tokens 0: {stream.end}, not LENGTH")


async def window_end(head: Head) -> None:
    window = head.connection.window
    if not window or window > _SHORT_WINDOW_TOKENS:
        told = f"{window} tokens" if window else "unknown"
        raise Skipped(f"its window is {told}; this is tried up to {_SHORT_WINDOW_TOKENS} tokens")
    session = await head.bound(head.connection.tokens(window - 3))
    stream = await session.generate(OUTPUT_TOKENS).to_end()
    _ended_by_itself(stream)
    right = len(stream.tokens) == 3 if stream.finish == LENGTH else len(stream.tokens) <= 3
    expect(right, f"with room for 3 tokens in the window: {stream.end}")


async def prefix_apart(head: Head) -> None:
    session = await head.bound()
    context = list(session.context)
    prefix = head.connection.tokens(4, start=2)
    stream = await session.generate(4, prefix_token_ids=prefix, first_index=len(prefix)).to_end()
    _has_tokens(stream)
    first = next(message.first_index for message in stream.messages if message.token_ids)
    expect(first == len(prefix), f"after a prefix of 4 tokens the first index is {first}")
    expect(await session.holds(context), "prefix or output became part of the context")


async def first_index(head: Head) -> None:
    session = await head.bound()
    for index, prefix in ((3, []), (0, head.connection.tokens(2))):
        stream = await session.generate(2, prefix_token_ids=prefix, first_index=index).to_end()
        what = f"first_index {index} with {len(prefix)} prefix tokens"
        expect(stream.refusal == CONSTRAINT, f"{what}: {stream.end}, not CONSTRAINT")


async def known_generation(head: Head) -> None:
    session = await head.bound()
    request = session.generate_request(3, generation_id="once")
    stream = await head.generate(request).to_end()
    _has_tokens(stream)
    again = await head.generate(request).to_end()
    expect(again.refusal == REPLAYED, f"the same Generate again: {again.end}, not REPLAYED")
    again = await session.generate(3, generation_id="once").to_end()
    expect(again.refusal == REPLAYED, f"a generation id that has finished: {again.end}, not REPLAYED")
    await head.running(session, "long")
    again = await session.generate(3, generation_id="long").to_end()
    expect(again.refusal == REPLAYED, f"a generation id that may still run: {again.end}, not REPLAYED")


async def phases(head: Head) -> None:
    session = await head.bound()
    stream = await session.generate(OUTPUT_TOKENS).to_end()
    _has_tokens(stream)
    said: list[int] = []
    for message in stream.messages:
        if message.phase:
            said.append(message.phase)
        if message.token_ids:
            told = "no phase" if not said else phase_name(said[-1])
            decodes = bool(said) and said[-1] == pb.GENERATION_PHASE_DECODE
            expect(decodes, f"tokens came in {told}, not in DECODE")
    names = ", ".join(map(phase_name, said))
    expect(pb.GENERATION_PHASE_PREFILL in said, f"PREFILL was not said: {names}")
    expect(said == sorted(set(said)), f"phases came out of order: {names}")


async def wall_clock(head: Head) -> None:
    session = await head.bound()
    stream = session.generate(head.long_run(session), max_wall_ms=_WALL_MS)
    head.doing = f"waiting for a generation of max_wall_ms {_WALL_MS} to end"
    await stream.to_end()
    if stream.finish in BY_ITSELF:
        raise Skipped(f"its generations are over before {_WALL_MS} ms: {stream.end}")
    expect(stream.finish == WALL_CLOCK, f"max_wall_ms {_WALL_MS}: {stream.end}, not WALL_CLOCK")


def _has_tokens(stream: Stream) -> None:
    """Raise Untried without any."""
    if not any(map(has_tokens, stream.messages)):
        raise Untried(stream.end)


def _ended_by_itself(stream: Stream) -> None:
    """Raise Untried where the finish is none of the engine's."""
    if stream.finish == WALL_CLOCK:
        raise Broken(f"max_wall_ms of ten minutes: {stream.end}")
    if stream.finish not in BY_ITSELF:
        raise Untried(stream.end)


RULES = (
    Rule("N25", "numbers tokens from first_index on, without gap or repeat", indexes),
    Rule("N26", "names the binding's epoch with all it sends", epochs),
    Rule("N27", "ends with one finish, along with the last tokens, as the last message", end),
    Rule("N28", "keeps to max_new_tokens: LENGTH, or EOS where that came first", budget),
    Rule("N29", "keeps to the model's window: LENGTH", window_end),
    Rule("N30", "generates after the prefix; neither prefix nor output joins the context", prefix_apart),
    Rule("N31", "refuses a first_index that is not the number of prefix tokens: CONSTRAINT", first_index),
    Rule("N32", "never starts a second run of a generation it knows: REPLAYED", known_generation),
    Rule("N33", "says PREFILL, then DECODE no later than the first tokens", phases),
    Rule("N35", "ends a generation whose max_wall_ms has passed: WALL_CLOCK", wall_clock),
)
