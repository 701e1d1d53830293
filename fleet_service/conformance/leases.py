"""Rules of leases, revokes and tombstones."""

from __future__ import annotations

import asyncio

from fleet.v1 import node_service_pb2 as pb
from fleet_service.conformance.head import LEASE_MS, NEXT_TERM, TERM, Head, Session
from fleet_service.conformance.requests import epoch_of, refusal_text
from fleet_service.conformance.sessions import DONE, STALE, UNKNOWN, refused, stale
from fleet_service.conformance.stream import BY_ITSELF
from fleet_service.conformance.verdicts import Broken, Rule, Skipped, Untried, expect

FENCED = pb.REFUSAL_CODE_FENCED
_TOMBSTONE_LEASES = 2
_ON_ITS_WAY_S = 1.0
_TRIES = 3


async def renew(head: Head) -> None:
    answer = await head.renew(LEASE_MS, NEXT_TERM)
    expect(not answer.renewed, "a lease that no Assign has started was renewed")
    session, lease_s = await head.short_lease()
    answer = await head.renew(LEASE_MS)
    if not answer.renewed:
        raise Broken("a lease that an Assign had just started was not renewed")
    expect(answer.live_sessions == 1, f"live_sessions is {answer.live_sessions}, one was assigned")
    await head.past(lease_s)
    refused("Append under a lease that was renewed", (await session.append([])).refusal, DONE)


async def expiry(head: Head) -> None:
    session, lease_s = await head.short_lease()
    await head.past(lease_s)
    refused("Append after the lease", (await session.append([])).refusal, FENCED)
    stream = await session.generate(1).to_end()
    expect(stream.refusal == FENCED, f"Generate after the lease: {stream.end}, not FENCED")
    refused("Cancel after the lease", (await session.cancel("g")).refusal, FENCED)


async def expiry_stops(head: Head) -> None:
    session, lease_s = await head.short_lease()
    stream = session.generate(head.long_run(session), generation_id="long")
    head.doing = f"waiting for the end of a generation whose lease was {lease_s:g} s"
    loop = asyncio.get_running_loop()
    due_s = loop.time() + lease_s
    await stream.to_end()
    if stream.finish in BY_ITSELF and not stream.refusal:
        late = loop.time() > due_s + _ON_ITS_WAY_S
        expect(not late, f"a generation whose lease ran out ran on: {stream.end}")
        raise Skipped(f"its generations are over before the lease: {stream.end}")
    expect(stream.refusal == FENCED, f"a generation whose lease ran out: {stream.end}, not FENCED")


async def no_second_life(head: Head) -> None:
    session, lease_s = await head.short_lease()
    await head.past(lease_s)
    answer = await head.renew(LEASE_MS)
    expect(not answer.renewed, "a lease that had run out was renewed")
    expect(not answer.live_sessions, f"live_sessions is {answer.live_sessions} after the lease")
    refused("Append after such a renewal", (await session.append([])).refusal, FENCED)


async def ended(head: Head) -> None:
    session = await head.bound()
    stream = await head.running(session)
    answer = await head.renew(0)
    expect(not answer.renewed, "RenewLease with lease_ms 0: renewed is true")
    refused("Append after a lease was ended", (await session.append([])).refusal, FENCED)
    head.doing = "waiting for the end of a generation whose lease was ended"
    await stream.stops("a generation whose lease was ended")
    expect(stream.refusal == FENCED, f"a generation whose lease was ended: {stream.end}, not FENCED")
    expect(not (await head.renew(LEASE_MS)).renewed, "a lease that was ended was renewed")


async def apart(head: Head) -> None:
    session = await head.bound()
    other = await head.bound(term=NEXT_TERM)
    await head.renew(0)
    refused("Append under the lease of another term", (await other.append([])).refusal, DONE)
    refused("Append under the lease that was ended", (await session.append([])).refusal, FENCED)


async def anew(head: Head) -> None:
    session, lease_s = await head.short_lease()
    await head.past(lease_s)
    answer = await session.assign()
    expect(answer.code, "an Assign under the old epoch freed a session that was fenced")
    session.move(2)
    refused("Assign of a fenced session under a higher epoch", await session.assign(), DONE)
    expect(await session.is_empty(), "the context of a fenced session is still there")
    session.context = []
    refused("Append to it", (await session.append(head.connection.tokens(3))).refusal, DONE)


# ---------------------------------------------------------------------------------------------------- revokes


async def revoke(head: Head) -> None:
    session = await head.bound()
    stream = await head.running(session)
    refused("Revoke", await session.revoke(), DONE)
    refused("Append after Revoke", (await session.append([])).refusal, UNKNOWN)
    head.doing = "waiting for the end of a generation whose session was revoked"
    await stream.stops("a generation whose session was revoked")
    expect(stream.refusal == STALE, f"a generation whose session was revoked: {stream.end}, not STALE_EPOCH")


async def revoke_old(head: Head) -> None:
    session = head.session()
    session.move(5)
    with head.preparing():
        await session.bind(head.connection.tokens(5))
    stale("Revoke of an older epoch", await session.revoke(epoch_of(TERM, 4)), session.epoch)
    refused("Append after it", (await session.append([])).refusal, DONE)


async def tombstone(head: Head) -> None:
    session = head.session()
    session.move(5)
    with head.preparing():
        await session.bind(head.connection.tokens(5))
        if (refusal := await session.revoke()).code:
            raise Untried(f"Revoke: {refusal_text(refusal)}")
    await _barred(session, (5, 4))
    session.move(6)
    refused("Assign above the epoch revoked", await session.assign(), DONE)


async def revoke_unknown(head: Head) -> None:
    session = head.session()
    session.move(5)
    refused("Revoke of a session never heard of", await session.revoke(), UNKNOWN)
    await _barred(session, (5, 4))
    session.move(6)
    refused("Assign above the epoch revoked", await session.assign(), DONE)


async def lasting(head: Head) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(_TRIES):
        session, lease_s = await head.short_lease()
        head.doing = "letting three quarters of a tombstone's time pass"
        sent_s = loop.time()
        with head.preparing():
            await session.revoke()
        await asyncio.sleep(lease_s * 1.5)
        answer = await session.assign()
        # Where the machine was slower than the tombstone lasts, nothing has been seen.
        if answer.code or loop.time() - sent_s < _TOMBSTONE_LEASES * lease_s:
            refused("Assign of a revoked epoch, one and a half leases later", answer, STALE)
            return
    raise Skipped("this machine is too slow to see it")


async def _barred(session: Session, numbers: tuple[int, ...]) -> None:
    barred = session.epoch
    for n in numbers:
        session.move(n)
        stale(f"Assign under epoch {n} of the term, 5 was revoked", await session.assign(), barred)


RULES = (
    Rule("N40", "renews a lease that runs, and no other; counts its live sessions", renew),
    Rule("N41", "fences the sessions of a lease that ran out: FENCED", expiry),
    Rule("N42", "stops what runs when its lease runs out: FENCED", expiry_stops),
    Rule("N43", "does not renew a lease that has run out", no_second_life),
    Rule("N44", "ends a lease, and all under it, on lease_ms 0", ended),
    Rule("N45", "keeps one lease for each term of a head", apart),
    Rule("N46", "takes a fenced session again under a higher epoch only, with an empty context", anew),
    Rule("N47", "frees a session on Revoke, and stops what runs: STALE_EPOCH", revoke),
    Rule("N48", "refuses a Revoke older than the session: STALE_EPOCH", revoke_old),
    Rule("N49", "takes no Assign of a revoked epoch or an older one: STALE_EPOCH", tombstone),
    Rule("N50", "bars the epoch of a Revoke for a session it does not know: UNKNOWN_SESSION", revoke_unknown),
    Rule("N51", "keeps a tombstone for two leases", lasting),
)
