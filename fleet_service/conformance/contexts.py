"""Rules of a session's context."""

from __future__ import annotations

from fleet.v1 import node_service_pb2 as pb
from fleet_service.conformance.head import DEFAULT_MESSAGE_BYTES, Head
from fleet_service.conformance.requests import crc32, refusal_text
from fleet_service.conformance.sessions import CONSTRAINT, DONE, refused
from fleet_service.conformance.verdicts import Rule, Skipped, expect

MISMATCH = pb.REFUSAL_CODE_CONTEXT_MISMATCH
TOO_LONG = pb.REFUSAL_CODE_CONTEXT_TOO_LONG
# A token id takes at most so much of a message.
_ID_BYTES = 5


async def append(head: Head) -> None:
    session = head.session()
    with head.preparing():
        refused("Assign of a new session", await session.assign(), DONE)
    first, second, third = (head.connection.tokens(6, start=n) for n in range(3))
    for tokens, base in ((first, 0), (second, 6), (third, 3), ([], 5)):
        what = f"Append of {len(tokens)} tokens to the first {base} of {len(session.context)}"
        answer = await session.append(tokens, base_length=base)
        refused(what, answer.refusal, DONE)
        length = len(session.context)
        expect(answer.context_length == length, f"{what}: context_length is {answer.context_length}")
        expect(await session.holds(session.context), f"{what}: the context is another, or of another length")


async def beyond(head: Head) -> None:
    session = await head.bound()
    context = list(session.context)
    answer = await session.append([], base_length=len(context) + 1)
    refused("Append that keeps one token more than there are", answer.refusal, MISMATCH)
    told = answer.refusal.context_length
    expect(told == len(context), f"CONTEXT_MISMATCH names length {told}, there are {len(context)} tokens")
    expect(await session.holds(context), "an Append that was refused changed the context")


async def vocabulary(head: Head) -> None:
    size = head.connection.model.vocab_size
    if not size:
        raise Skipped("the model tells no vocabulary")
    session = await head.bound()
    context = list(session.context)
    for token in (size, 2**32 - 1):
        answer = await session.append([token])
        refused(f"Append of token {token}; there are {size}", answer.refusal, CONSTRAINT)
    expect(await session.holds(context), "an Append that was refused changed the context")


async def window(head: Head) -> None:
    window = head.connection.window
    limit = head.connection.hello.max_message_bytes or DEFAULT_MESSAGE_BYTES
    if not window:
        raise Skipped("the model tells no window")
    if (window + 1) * _ID_BYTES > limit:
        raise Skipped("its window does not fit into one message")
    session = await head.bound()
    context = list(session.context)
    answer = await session.append(head.connection.tokens(window + 1), base_length=0)
    refused(f"Append of {window + 1} tokens", answer.refusal, TOO_LONG)
    told = answer.refusal.max_context_tokens
    expect(told == window, f"CONTEXT_TOO_LONG names {told}, the model's window is {window}")
    expect(await session.holds(context), "an Append that was refused changed the context")


async def exact_context(head: Head) -> None:
    session = await head.bound()
    context = session.context
    other = [*context[:-1], head.connection.tokens(40)[-1]]
    shorter = context[:-1]
    # An equal length with another checksum, and the right checksum with another length, are enough alone.
    wrong = (
        ("of another checksum", len(context), crc32(other) ^ 1),
        ("that is shorter", len(shorter), crc32(shorter)),
        ("of another length", len(context) + 1, crc32(context)),
    )
    for what, length, checksum in wrong:
        stream = await session.generate(2, context_length=length, context_crc32=checksum).to_end()
        mismatch = stream.refusal == MISMATCH and not stream.tokens
        expect(mismatch, f"Generate on a context {what}: {stream.end}, not CONTEXT_MISMATCH")
        refusal = stream.messages[0].refusal
        told = refusal.context_length == len(context)
        expect(told, f"{refusal_text(refusal)} of a context of {len(context)} tokens")
    expect(await session.holds(context), "a Generate that was refused changed the context")


RULES = (
    Rule("N20", "sets the context to context[:base_length] + tokens, and tells its length", append),
    Rule("N21", "refuses to keep more than there is: CONTEXT_MISMATCH with the length", beyond),
    Rule("N22", "refuses token ids outside of the vocabulary: CONSTRAINT", vocabulary),
    Rule("N23", "refuses more than the model's window: CONTEXT_TOO_LONG with the window", window),
    Rule("N24", "generates on exactly the context named: CONTEXT_MISMATCH with the length", exact_context),
)
