"""Rules of sessions, epochs and command ids."""

from __future__ import annotations

from fleet.v1 import node_service_pb2 as pb
from fleet_service.conformance.head import TERM, Head, Session
from fleet_service.conformance.requests import code_name, epoch_of, refusal_text
from fleet_service.conformance.verdicts import Broken, Rule, expect

STALE = pb.REFUSAL_CODE_STALE_EPOCH
UNKNOWN = pb.REFUSAL_CODE_UNKNOWN_SESSION
REPLAYED = pb.REFUSAL_CODE_REPLAYED
CONSTRAINT = pb.REFUSAL_CODE_CONSTRAINT
DONE = pb.REFUSAL_CODE_UNSPECIFIED
_LONGEST_ID_CHARS = 128


def refused(what: str, refusal: pb.Refusal, code: pb.RefusalCode) -> None:
    """Raise Broken unless it is that refusal."""
    expect(refusal.code == code, f"{what}: {refusal_text(refusal)}, not {code_name(code)}")


def stale(what: str, refusal: pb.Refusal, current: int) -> None:
    """Raise Broken unless it is STALE_EPOCH with the current epoch."""
    refused(what, refusal, STALE)
    told = refusal.current_epoch
    expect(told == current, f"{what}: STALE_EPOCH names epoch {told}, the node's is {current}")


async def assign(head: Head) -> None:
    session = head.session()
    refused("Assign of a new session", await session.assign(), DONE)
    expect(await session.is_empty(), "the context of a new session is not empty")
    with head.preparing():
        await session.append(head.connection.tokens(5))
    session.move(2)
    refused("Assign under a higher epoch", await session.assign(), DONE)
    session.context = []
    expect(await session.is_empty(), "after an Assign under a higher epoch the old context is still there")


async def equal_epoch(head: Head) -> None:
    session = await head.bound()
    context = list(session.context)
    stale("Assign under the same epoch, as a new command", await session.assign(), session.epoch)
    expect(await session.holds(context), "an Assign that was refused changed the context")


async def old_epoch(head: Head) -> None:
    session = head.session()
    session.move(5)
    with head.preparing():
        await session.bind(head.connection.tokens(5))
    older = epoch_of(TERM, 4)
    answer = await session.assign(epoch=older, command_id=100)
    stale("Assign under an older epoch", answer, session.epoch)
    expect(await session.holds(session.context), "an Assign that was refused changed the context")


async def assign_stops(head: Head) -> None:
    session = await head.bound()
    stream = await head.running(session)
    session.move(2)
    with head.preparing():
        if (refusal := await session.assign()).code:
            raise Broken(refusal_text(refusal))
    head.doing = "waiting for the end of a generation whose session was assigned anew"
    await stream.stops("what ran under the old epoch")
    expect(stream.refusal == STALE, f"what ran under the old epoch: {stream.end}, not STALE_EPOCH")


async def exact_epoch(head: Head) -> None:
    session = head.session()
    session.move(5)
    with head.preparing():
        await session.bind(head.connection.tokens(5))
    for n, which in ((4, "an older"), (6, "a newer")):
        other = epoch_of(TERM, n)
        answer = await session.append([], epoch=other, command_id=100)
        stale(f"Append under {which} epoch", answer.refusal, session.epoch)
        stream = await session.generate(1, epoch=other, command_id=101).to_end()
        refusal = stream.messages[0].refusal if stream.messages else pb.Refusal()
        expect(not stream.tokens, f"Generate under {which} epoch gave {stream.count}")
        stale(f"Generate under {which} epoch", refusal, session.epoch)
    expect(await session.holds(session.context), "a command that was refused changed the context")


async def unknown_session(head: Head) -> None:
    session = head.session()
    refused("Append", (await session.append([])).refusal, UNKNOWN)
    stream = await session.generate(1).to_end()
    expect(stream.refusal == UNKNOWN, f"Generate: {stream.end}, not UNKNOWN_SESSION")
    refused("Cancel", (await session.cancel("g")).refusal, UNKNOWN)


async def other_model(head: Head) -> None:
    session = head.session()
    wrong = {"model": "conformance-no-such-model"}, {"model_revision": "conformance-no-such-revision"}
    for n, fields in enumerate(wrong, start=1):
        session.move(n)
        refused(f"Assign with {next(iter(fields))} {next(iter(fields.values()))!r}",
                await session.assign(**fields), CONSTRAINT)  # fmt: skip
    refused("Append after such an Assign", (await session.append([])).refusal, UNKNOWN)


async def odd_ids(head: Head) -> None:
    for session_id, what in (("", "no id"), ("x" * (_LONGEST_ID_CHARS + 1), "an id of 129 characters")):
        session = head.session()
        own_id, session.session_id = session.session_id, session_id
        refusal = await session.assign()
        if refusal.code:
            session.session_id = own_id  # a Revoke would leave a tombstone to whoever asks next
        refused(f"Assign of a session with {what}", refusal, CONSTRAINT)
    session = await head.bound()
    stream = await session.generate(1, generation_id="").to_end()
    expect(stream.refusal == CONSTRAINT, f"Generate without a generation id: {stream.end}, not CONSTRAINT")


async def other_connection(head: Head) -> None:
    async with head.again() as other:
        session = await other.bound()
    here = Session(head, session.session_id, TERM)
    here.context = session.context
    while here.last_id <= session.last_id:
        here.next_id()
    answer = await here.append(head.connection.tokens(3, start=1))
    refused("Append on a second connection, the first closed", answer.refusal, DONE)
    expect(await here.holds(here.context), "the context did not outlive its connection")
    await here.revoke()


async def same_command(head: Head) -> None:
    session = head.session()
    request = session.assign_request()
    for time in ("first", "second"):
        answer = await head.call("Assign", request)
        refused(f"the same Assign for the {time} time", answer.refusal, DONE)
    tokens = head.connection.tokens(5)
    for count, base in ((5, 0), (3, 9)):
        append = session.append_request(tokens[:count], base_length=base)
        answers = [await head.call("Append", append) for _ in range(2)]
        told = [(a.refusal.code, a.refusal.context_length, a.context_length) for a in answers]
        kind = "an Append" if base == 0 else "an Append that is refused"
        expect(told[0] == told[1], f"the same command again, {kind}: another reply, "
               f"{refusal_text(answers[1].refusal)} after {refusal_text(answers[0].refusal)}")  # fmt: skip
    expect(await session.holds(tokens), "a command sent twice was executed twice, or not at all")


async def lower_id(head: Head) -> None:
    session = await head.bound()
    context = list(session.context)
    answer = await session.append([], base_length=0, command_id=1)
    session.context = context
    refused("Append under a lower id", answer.refusal, REPLAYED)
    refused("the Assign sent again after an Append", await session.assign(command_id=1), REPLAYED)
    stream = await session.generate(1, command_id=1).to_end()
    expect(stream.refusal == REPLAYED, f"Generate under a lower id: {stream.end}, not REPLAYED")
    expect(await session.holds(context), "a command under a lower id was executed")


async def same_id_other_command(head: Head) -> None:
    session = await head.bound()
    context = list(session.context)
    answer = await session.append([], base_length=0, command_id=session.last_id)
    session.context = context
    refused("another Append under the id of the last command", answer.refusal, REPLAYED)
    expect(await session.holds(context), "another command under the id of the last one was executed")


RULES = (
    Rule("N8", "takes an Assign under a higher epoch, and starts it with an empty context", assign),
    Rule("N9", "refuses another Assign under the same epoch: STALE_EPOCH", equal_epoch),
    Rule("N10", "refuses an Assign under an older epoch: STALE_EPOCH", old_epoch),
    Rule("N11", "stops what runs when its session is assigned anew: STALE_EPOCH", assign_stops),
    Rule("N12", "takes Append and Generate under the exact epoch only: STALE_EPOCH", exact_epoch),
    Rule("N13", "refuses commands for a session it does not know: UNKNOWN_SESSION", unknown_session),
    Rule("N14", "refuses a model or revision that it does not serve: CONSTRAINT", other_model),
    Rule("N15", "refuses empty and too long ids with a reply: CONSTRAINT", odd_ids),
    Rule("N16", "keeps sessions when their connection is gone", other_connection),
    Rule("N17", "gives a command sent again the same reply", same_command),
    Rule("N18", "refuses a lower command id and executes nothing: REPLAYED", lower_id),
    Rule("N19", "refuses another command under the same id: REPLAYED", same_id_other_command),
)
