"""Rules of queueing, and of ending a generation before its time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.conformance.head import TERM, Head, Session
from fleet_service.conformance.requests import epoch_of, phase_name
from fleet_service.conformance.sessions import DONE, REPLAYED, refused, stale
from fleet_service.conformance.stream import BY_ITSELF, Stream
from fleet_service.conformance.verdicts import Rule, Skipped, expect

QUEUED = pb.GENERATION_PHASE_QUEUED
CANCELLED = types_pb2.FINISH_REASON_CANCELLED
_MOST_LANES = 32
_SILENCE_S = 3.0
_REPORT_PERIOD_MS = 50


async def queued(head: Head) -> None:
    full = await fill(head)
    first = await full.first_word()
    if first is not None and first.refusal.code == pb.REFUSAL_CODE_BUSY:
        raise Skipped("it lets no generation wait: BUSY")
    await _still_run(full.sessions, full.streams)
    said = phase_name(first.phase) if first else "nothing"
    waits = first is not None and first.phase == QUEUED
    expect(waits, f"with all {len(full.streams)} lanes taken a generation said {said}, not QUEUED")


@dataclass(frozen=True, slots=True)
class Full:
    """A node all of whose lanes are taken by generations of ours, and one more."""

    sessions: list[Session]
    streams: list[Stream]
    waiting: Stream

    async def first_word(self) -> pb.NodeServiceGenerateResponse | None:
        """The first message of the one more; None when it says nothing for a while."""
        try:
            async with asyncio.timeout(_SILENCE_S):
                return await self.waiting.read()
        except TimeoutError:
            return None


async def fill(head: Head) -> Full:
    """Take all lanes of a node that has nothing else to do. Raises Skipped, Untried."""
    report = (await head.report(head.reports(_REPORT_PERIOD_MS))).report
    if not 0 < report.max_lanes <= _MOST_LANES:
        raise Skipped(f"this is tried up to {_MOST_LANES} lanes; it tells {report.max_lanes}")
    if report.lanes_active or report.queue_depth:
        raise Skipped("it has other work, which this would hold up")
    sessions = [await head.bound() for _ in range(report.max_lanes + 1)]
    streams = [await head.running(session) for session in sessions[:-1]]
    waiting = sessions[-1].generate(head.long_run(sessions[-1]), generation_id="waits")
    return Full(sessions[:-1], streams, waiting)


async def _still_run(sessions: list[Session], streams: list[Stream]) -> None:
    """Cancel them. Raises Skipped when one had ended by itself: a lane may have been free."""
    for session in sessions:
        await session.cancel("long")
    for stream in streams:
        await stream.to_end()
        if stream.finish in BY_ITSELF:
            raise Skipped("its generations are over before all lanes can be taken")


async def cancel_running(head: Head) -> None:
    session = await head.bound()
    stream = await head.running(session)
    answer = await session.cancel("long")
    refused("Cancel", answer.refusal, DONE)
    head.doing = "waiting for the end of a generation that was cancelled"
    await stream.stops("a generation that was cancelled")
    expect(stream.finish == CANCELLED, f"a generation that was cancelled: {stream.end}, not CANCELLED")
    expect(answer.was_running, "Cancel of a generation that ran: was_running is false")


async def cancel_first(head: Head) -> None:
    session = await head.bound()
    answer = await session.cancel("late")
    refused("Cancel that came before its Generate", answer.refusal, DONE)
    expect(not answer.was_running, "Cancel of a generation never heard of: was_running is true")
    stream = await session.generate(2, generation_id="late").to_end()
    never = stream.refusal == REPLAYED
    expect(never, f"the Generate that came after its Cancel: {stream.end}, not REPLAYED")


async def cancel_epoch(head: Head) -> None:
    session = head.session()
    session.move(5)
    with head.preparing():
        await session.bind(head.connection.tokens(6))
    stream = await head.running(session)
    for n in (4, 6):
        answer = await session.cancel("long", epoch=epoch_of(TERM, n))
        stale(f"Cancel under epoch {n} of the term, the session's is 5", answer.refusal, session.epoch)
    expect(not stream.finish, f"a Cancel that was refused ended the generation: {stream.end}")


async def lost_call(head: Head) -> None:
    session = await head.bound()
    stream = await head.running(session)
    watch = head.reports(_REPORT_PERIOD_MS)
    own = (await head.report(watch)).report.own_lanes_active
    if not own:
        raise Skipped("its reports do not count the generation")
    stream.cancel()
    head.doing = "waiting until a generation whose call was ended is no longer in the reports"
    while own:
        own = (await head.report(watch)).report.own_lanes_active


RULES = (
    Rule("N34", "says QUEUED of a generation that waits for a lane", queued),
    Rule("N36", "ends a generation on Cancel: CANCELLED, was_running", cancel_running),
    Rule("N37", "does not start a generation whose Cancel came first: REPLAYED", cancel_first),
    Rule("N38", "takes Cancel under the exact epoch only: STALE_EPOCH", cancel_epoch),
    Rule("N39", "cancels a generation when its call is ended", lost_call),
)
