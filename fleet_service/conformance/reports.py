"""Rules of reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleet.v1 import types_pb2
from fleet_service.conformance.cancels import QUEUED, fill
from fleet_service.conformance.head import Head
from fleet_service.conformance.verdicts import Rule, Skipped, expect

_PERIOD_MS = 50
_NEVER_MS = 3_600_000
_COUNT = 4


async def watch(head: Head) -> None:
    head.doing = "waiting for the first report, which comes at once"
    first = await head.report(head.reports(_NEVER_MS))
    expect(first.HasField("report"), "the first message has no report")
    named = {model.name for model in first.models}
    served = {model.name for model in head.connection.hello.models}
    expect(not named or named == served, f"a report names models {named}, the handshake {served}")
    watch = head.reports(_PERIOD_MS)
    for n in range(_COUNT):
        head.doing = f"waiting for report {n + 1}, every {_PERIOD_MS} ms"
        await head.report(watch)


async def numbers(head: Head) -> None:
    reports = [head.connection.hello.report]
    watch = head.reports(_PERIOD_MS)
    reports.append((await head.report(watch)).report)
    session = await head.bound()
    stream = session.generate(head.long_run(session), generation_id="long")
    await stream.read()
    for _ in range(_COUNT):
        head.doing = "waiting for a report"
        reports.append((await head.report(watch)).report)
    for report in reports:
        for wrong in _contradictions(report):
            expect(False, wrong)
    # The first is the handshake's, of the same clock.
    sampled = [report.sampled_at_ms for report in reports]
    expect(sampled == sorted(sampled), f"sampled_at_ms goes back: {sampled}")
    expect(sampled[-1] > sampled[1], f"sampled_at_ms stands still: {sampled}")


def _contradictions(report: types_pb2.CapacityReport) -> Iterator[str]:
    """What cannot be true at once. 0 of a limit is unknown."""
    limits = (
        ("lanes_active", "max_lanes"),
        ("kv_blocks_used", "kv_blocks_total"),
        ("active_sessions", "max_sessions"),
        ("gpu_memory_free_bytes", "gpu_memory_bytes"),
    )
    for name, limit in limits:
        value, most = getattr(report, name), getattr(report, limit)
        if most and value > most:
            yield f"{name} {value} is more than {limit} {most}"
    for own, whole in (("own_lanes_active", "lanes_active"), ("own_queue_depth", "queue_depth")):
        part, all_of_it = getattr(report, own), getattr(report, whole)
        if part > all_of_it:
            yield f"{own} {part} is more than {whole} {all_of_it}"


async def counted(head: Head) -> None:
    session = await head.bound()
    stream = await head.running(session)
    watch = head.reports(_PERIOD_MS)
    report = (await head.report(watch)).report
    told = (
        f"lanes_active {report.lanes_active}, own_lanes_active {report.own_lanes_active}, active_sessions "
        f"{report.active_sessions}"
    )
    holds = report.lanes_active and report.own_lanes_active and report.active_sessions
    if not holds:
        await session.cancel("long")
        await stream.to_end()
        if stream.finish == types_pb2.FINISH_REASON_LENGTH:
            raise Skipped("its generations are over before a report")
    expect(holds, f"while a generation of this head runs: {told}")
    await session.cancel("long")
    await stream.to_end()
    await _counted_in_the_queue(head, watch)


async def _counted_in_the_queue(head: Head, watch: Any) -> None:
    """Where a generation can be made to wait."""
    head.doing = "waiting for a report without lanes taken"
    while (await head.report(watch)).report.own_lanes_active:
        pass
    try:
        full = await fill(head)
    except Skipped:
        return
    first = await full.first_word()
    if first is None or first.phase != QUEUED:
        return  # that is another rule's business
    watch.cancel()
    report = (await head.report(head.reports(_PERIOD_MS))).report
    own, whole = report.own_queue_depth, report.queue_depth
    for session in full.sessions:
        if not (await session.cancel("long")).was_running:
            return  # it may have had a lane by then
    expect(
        own and whole, f"while a generation of this head waits: queue_depth {whole}, own_queue_depth {own}"
    )


RULES = (
    Rule("N52", "reports at once, and then at least as often as asked", watch),
    Rule("N53", "reports numbers that can be true together, of a clock that goes on", numbers),
    Rule("N54", "counts a generation that runs, and whose it is", counted),
)
