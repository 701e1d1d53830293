"""Rules of the features that plain calls know: INLINE_BIND and RECONCILE; and how a node is left."""

from __future__ import annotations

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import node_service_pb2 as pb
from fleet_service.conformance.contexts import MISMATCH
from fleet_service.conformance.head import TERM, Head
from fleet_service.conformance.requests import crc32, epoch_of
from fleet_service.conformance.sessions import DONE, REPLAYED, STALE, refused
from fleet_service.conformance.stream import BY_ITSELF
from fleet_service.conformance.verdicts import Rule, expect

_PERIOD_MS = 50


async def inline(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_INLINE_BIND)
    session = head.session()
    tokens = head.connection.tokens(6)
    assign, append = session.assign_request(), session.append_request(tokens)
    request = session.generate_request(
        3, context_length=6, context_crc32=crc32(tokens), assign=assign, append=append
    )
    stream = await head.generate(request).to_end()
    expect(stream.finish and stream.tokens, f"Generate with its Assign and Append: {stream.end}")
    again = await head.generate(request).to_end()
    expect(again.refusal == REPLAYED, f"the same again: {again.end}, not REPLAYED")
    expect(await session.holds(tokens), "the context is not that of the Append that came along")


async def inline_refused(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_INLINE_BIND)
    session = head.session()
    session.move(5)
    tokens = head.connection.tokens(6)
    bad = session.generate_request(
        3,
        context_length=6,
        context_crc32=crc32(tokens),
        assign=session.assign_request(),
        append=session.append_request(tokens, base_length=1),
    )
    stream = await head.generate(bad).to_end()
    expect(stream.refusal == MISMATCH, f"with an Append that must be refused: {stream.end}, not its refusal")
    expect(not stream.tokens, f"a part was refused, and it generated: {stream.end}")
    older = epoch_of(TERM, 4)
    stream = await session.generate(
        3, epoch=older, command_id=103, assign=session.assign_request(epoch=older, command_id=101)
    ).to_end()
    expect(stream.refusal == STALE, f"with an Assign that must be refused: {stream.end}, not STALE_EPOCH")
    refused("Append after both", (await session.append(tokens, base_length=0)).refusal, DONE)


async def reconcile(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_RECONCILE)
    session = await head.bound()
    fenced, lease_s = await head.short_lease(TERM + 2)
    stream = await head.running(session)
    await head.past(lease_s)
    held = {each.session_id: each for each in await _held(head, head.connection.fleet_id)}
    expect(session.session_id in held, "a session is missing")
    seen = held[session.session_id]
    told = f"epoch {seen.epoch}, head {seen.head_id}, {seen.context_length} tokens, fenced {seen.fenced}"
    right = (seen.epoch, seen.head_id, seen.context_length, seen.fenced)
    true = (session.epoch, head.name, len(session.context), False)
    expect(right == true, f"a session is told with {told}")
    if "long" not in seen.generation_ids:
        await session.cancel("long")
        await stream.to_end()
        ran = stream.finish not in BY_ITSELF
        expect(not ran, "a generation that runs is missing")
    late = held.get(fenced.session_id)
    expect(late is None or late.fenced, "a session whose lease ran out is told as not fenced")
    others = await _held(head, f"{head.connection.fleet_id}-other")
    expect(not others, "sessions of one fleet are told to another")


async def _held(head: Head, fleet_id: str) -> list[pb.HeldSession]:
    request = pb.ReconcileRequest(fleet_id=fleet_id, head_id=head.name)
    answer: pb.ReconcileResponse = await head.call("Reconcile", request)
    return list(answer.sessions)


async def left_clean(head: Head) -> None:
    """The last of all: what all others did has been revoked."""
    run, _, number = head.name.rpartition("-")
    for n in range(int(number)):
        watch = head.reports(_PERIOD_MS, f"{run}-{n}")
        head.doing = "waiting until the reports count none of the generations that were ended"
        report = (await head.report(watch)).report
        while report.own_lanes_active or report.own_queue_depth:
            report = (await head.report(watch)).report
        watch.cancel()
    if head.connection.has(admin_pb.NODE_FEATURE_RECONCILE):
        held = await _held(head, head.connection.fleet_id)
        left = [each for each in held if each.session_id.startswith(f"{run}-") and not each.fenced]
        expect(not left, f"{len(left)} sessions are still held that were revoked")
    before = head.connection.hello.incarnation
    async with head.again() as other:
        now = other.connection.hello.incarnation
    expect(now == before, "its process is another than at the start: it died of these checks")


RULES = (
    Rule("N55", "INLINE_BIND: executes Assign, Append and Generate of one call in this order", inline),
    Rule("N56", "INLINE_BIND: answers with a part's refusal, and does nothing after it", inline_refused),
    Rule("N57", "RECONCILE: tells what it holds for the fleet, as it is, and no other fleet's", reconcile),
)
LAST = (Rule("N63", "holds nothing that was revoked, and has lived through it all", left_clean),)
