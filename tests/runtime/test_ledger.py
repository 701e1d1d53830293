"""The same request_id gets the first answer, however the requests meet."""

from __future__ import annotations

import asyncio

import pytest

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.runtime.ledger import RequestLedger
from fleet_service.runtime.views import RequestKey


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Work:
    """Counts how often it is done, and can be held up or fail."""

    def __init__(self) -> None:
        self.done = 0
        self.go = asyncio.Event()
        self.fails = False

    async def __call__(self) -> int:
        await self.go.wait()
        self.done += 1
        if self.fails:
            raise FleetError(Reason.NO_ELIGIBLE_NODE, "not now")
        return self.done


KEY = RequestKey("r-1", b"body")


async def test_concurrent_duplicates_share_one_answer() -> None:
    ledger, work = RequestLedger(_Clock(), 10.0, 100), _Work()
    calls = [asyncio.ensure_future(ledger.once(KEY, work)) for _ in range(3)]
    work.go.set()
    assert await asyncio.gather(*calls) == [1, 1, 1]
    assert await ledger.once(KEY, work) == 1


async def test_a_caller_that_leaves_does_not_undo_the_work() -> None:
    ledger, work = RequestLedger(_Clock(), 10.0, 100), _Work()
    first = asyncio.ensure_future(ledger.once(KEY, work))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    work.go.set()
    assert await ledger.once(KEY, work) == 1


async def test_a_refused_request_may_be_tried_again() -> None:
    ledger, work = RequestLedger(_Clock(), 10.0, 100), _Work()
    work.go.set()
    work.fails = True
    with pytest.raises(FleetError, match="not now"):
        await ledger.once(KEY, work)
    work.fails = False
    assert await ledger.once(KEY, work) == 2


async def test_another_body_under_the_same_id_is_refused() -> None:
    ledger, work = RequestLedger(_Clock(), 10.0, 100), _Work()
    work.go.set()
    await ledger.once(KEY, work)
    with pytest.raises(FleetError) as refused:
        await ledger.once(RequestKey("r-1", b"other"), work)
    assert refused.value.reason is Reason.REQUEST_ID_REUSED


async def test_without_a_key_every_request_is_done() -> None:
    ledger, work = RequestLedger(_Clock(), 10.0, 100), _Work()
    work.go.set()
    assert [await ledger.once(None, work), await ledger.once(None, work)] == [1, 2]


async def test_answers_are_kept_for_their_time_and_within_their_number() -> None:
    clock = _Clock()
    ledger, work = RequestLedger(clock, 10.0, 2), _Work()
    work.go.set()
    for name in ("a", "b", "c"):
        await ledger.once(RequestKey(name, b""), work)
    assert len(ledger) == 2
    clock.now_s = 11.0
    ledger.expire(10)
    assert len(ledger) == 0


class _Elsewhere:
    """Answers of before, by request id; counts how often it is asked."""

    def __init__(self, **answers: tuple[bytes, int]) -> None:
        self.answers = answers
        self.asked = 0

    async def __call__(self, key: RequestKey) -> tuple[bytes, int] | None:
        self.asked += 1
        await asyncio.sleep(0)
        return self.answers.get(key.request_id)


async def test_a_request_of_an_earlier_run_gets_its_answer_and_another_body_is_refused() -> None:
    elsewhere, work = _Elsewhere(old=(b"body", 7)), _Work()
    work.go.set()
    ledger = RequestLedger(_Clock(), 10.0, 100, elsewhere, earlier=True)
    both = (ledger.once(RequestKey("old", b"body"), work) for _ in range(2))
    assert await asyncio.gather(*both) == [7, 7]
    assert await ledger.once(RequestKey("new", b"body"), work) == 1
    other = RequestLedger(_Clock(), 10.0, 100, elsewhere, earlier=True)
    with pytest.raises(FleetError) as refusal:
        await other.once(RequestKey("old", b"other"), work)
    assert refusal.value.reason is Reason.REQUEST_ID_REUSED
    assert await other.once(RequestKey("old", b"body"), work) == 7


async def test_one_that_had_to_go_is_asked_for_as_long_as_it_counts() -> None:
    clock, elsewhere, work = _Clock(), _Elsewhere(), _Work()
    work.go.set()
    ledger = RequestLedger(clock, 10.0, 1, elsewhere)
    assert await ledger.once(RequestKey("a", b""), work) == 1
    assert await ledger.once(RequestKey("b", b""), work) == 2
    assert elsewhere.asked == 0
    elsewhere.answers["a"] = (b"", 1)
    assert await ledger.once(RequestKey("a", b""), work) == 1
    assert elsewhere.asked == 1
    clock.now_s = 30.0
    assert await ledger.once(RequestKey("c", b""), work) == 3
    assert elsewhere.asked == 1
