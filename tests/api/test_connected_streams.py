"""The streams of a connection, by themselves: whatever happens in any order, each reader gets its log."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.api import convert_sessions
from fleet_service.api.connected_streams import ConnectedStream, Outbound
from fleet_service.api.facade import StreamStart
from fleet_service.domain.events import Accepted, MoveCause, Moved
from fleet_service.runtime.tokenlog import TokenLog
from tests.api.fakes import FINISHED
from tests.api.logged import LogGeneration

MOVED = Moved("node-a", "node-b", MoveCause.LINK_LOST, 0, 0.1, 9)
STREAMS = 3
ROOM_TOKENS = 50
"""Of a message, so that many do not hold all there is."""

steps = st.one_of(
    st.tuples(st.just("append"), st.integers(0, STREAMS - 1), st.integers(1, 2 * ROOM_TOKENS)),
    st.tuples(st.just("grant"), st.integers(0, STREAMS - 1), st.integers(0, 60)),
    st.tuples(st.sampled_from(["move", "finish"]), st.integers(0, STREAMS - 1), st.just(0)),
    st.tuples(st.just("send"), st.just(0), st.just(0)),
)


@dataclass
class Seen:
    """A stream as its caller sees it."""

    credit_tokens: int | None
    tokens: list[int] = field(default_factory=list)
    moves_at: list[int] = field(default_factory=list)
    finished: bool = False


class Caller:
    """Takes messages in, and checks what it may rely on in each."""

    def __init__(self, credits_tokens: list[int | None]) -> None:
        self.seen = [Seen(credit) for credit in credits_tokens]

    def take(self, response: pb.ConnectResponse) -> None:
        assert len(response.tokens.token_ids) <= ROOM_TOKENS
        for event in response.events:
            stream = self.seen[event.call_id]
            if event.event.HasField("moved"):
                stream.moves_at.append(len(stream.tokens))
        columns, start = response.tokens, 0
        assert len(set(columns.call_ids)) == len(columns.call_ids)
        for call_id, count, first in zip(
            columns.call_ids, columns.counts, columns.first_indexes, strict=True
        ):
            stream = self.seen[call_id]
            assert not stream.finished
            assert first == len(stream.tokens)
            stream.tokens += columns.token_ids[start : start + count]
            start += count
            if stream.credit_tokens is not None:
                assert len(stream.tokens) <= stream.credit_tokens
        for reply in response.replies:
            assert not self.seen[reply.call_id].finished
            self.seen[reply.call_id].finished = True


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=STREAMS, max_size=STREAMS),
    st.lists(steps, max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_each_reader_gets_its_log_in_order_within_its_credit_and_never_more(
    credits_tokens: list[int | None], done: list[tuple[str, int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_sessions, "MAX_TOKENS_PER_MESSAGE", ROOM_TOKENS)
        caller, logs, moves, over = _run(credits_tokens, done)
    for n, (log, seen) in enumerate(zip(logs, caller.seen, strict=True)):
        may = log.received if seen.credit_tokens is None else min(log.received, seen.credit_tokens)
        assert seen.tokens == list(range(may))
        assert seen.moves_at == [at for at in moves[n] if at <= may]
        assert seen.finished == (log.finished is not None and may == log.received) == (n in over)


def _run(
    credits_tokens: list[int | None], done: list[tuple[str, int, int]]
) -> tuple[Caller, list[TokenLog], list[list[int]], list[int]]:
    """What each caller saw, the logs, where they moved, and the streams that were said to be over."""
    caller = Caller(credits_tokens)
    over: list[int] = []
    out = Outbound(pb.ConnectLimits(), lambda stream, error: over.append(stream.call_id), lambda: False)
    logs = [TokenLog(Accepted(f"g{n}", "s")) for n in range(STREAMS)]
    streams = [ConnectedStream(n, credits_tokens[n], out) for n in range(STREAMS)]
    moves: list[list[int]] = [[] for _ in logs]
    for log, stream in zip(logs, streams, strict=True):
        stream.follow(StreamStart(LogGeneration(log)))
        out.mark(stream)

    def send_all() -> None:
        while (response := out.ready_message()) is not None:
            caller.take(response)

    for what, n, number in done:
        log, stream = logs[n], streams[n]
        if what == "append" and log.finished is None:
            log.append(array("I", range(log.received, log.received + number)))
        elif what == "move" and log.finished is None:
            moves[n].append(log.received)
            log.mark(MOVED)
        elif what == "finish" and log.finished is None:
            log.finish(FINISHED)
        elif what == "grant" and caller.seen[n].credit_tokens is not None:
            caller.seen[n].credit_tokens += number  # type: ignore[operator]
            stream.grant(number)
        elif what == "send":
            send_all()
    send_all()
    return caller, logs, moves, over


def test_a_long_stream_takes_turns_with_others() -> None:
    out = Outbound(pb.ConnectLimits(), lambda *_: None, lambda: False)
    logs = [TokenLog(Accepted(f"g{n}", "s")) for n in range(2)]
    logs[0].append(array("I", range(200_000)))
    logs[1].append(array("I", range(200_000)))
    for n, log in enumerate(logs):
        stream = ConnectedStream(n, None, out)
        stream.follow(StreamStart(LogGeneration(log)))
        out.mark(stream)
    order: list[int] = []
    while (response := out.ready_message()) is not None:
        order += response.tokens.call_ids
    most = -(-200_000 // convert_sessions.MAX_TOKENS_PER_MESSAGE)
    assert order[: 2 * (most - 1)] == [0, 1] * (most - 1)


def test_what_fails_in_one_stream_ends_that_one_alone() -> None:
    ended: dict[int, Exception | None] = {}
    out = Outbound(
        pb.ConnectLimits(), lambda stream, error: ended.update({stream.call_id: error}), lambda: False
    )
    broken, sound = TokenLog(Accepted("g0", "s")), TokenLog(Accepted("g1", "s"))
    sound.append([7])
    for n, log in enumerate((broken, sound)):
        stream = ConnectedStream(n, None, out)
        stream.follow(StreamStart(LogGeneration(log)))
        out.mark(stream)
    broken.mark("no event")  # type: ignore[arg-type]
    response = out.ready_message()
    assert response is not None
    assert list(response.tokens.call_ids) == [1]
    assert ended.keys() == {0}
    assert isinstance(ended[0], KeyError)


def test_replies_come_though_tokens_are_always_ready() -> None:
    out = Outbound(pb.ConnectLimits(), lambda *_: None, lambda: False)
    log = TokenLog(Accepted("g", "s"))
    log.append(array("I", range(10 * convert_sessions.MAX_TOKENS_PER_MESSAGE)))
    stream = ConnectedStream(1, None, out)
    stream.follow(StreamStart(LogGeneration(log)))
    out.mark(stream)
    out.reply(2, "park_session", pb.ParkSessionResponse())
    response = out.ready_message()
    assert response is not None
    assert [reply.call_id for reply in response.replies] == [2]
    assert list(response.tokens.call_ids) == [1]


def test_tokens_come_though_long_replies_are_always_in_line() -> None:
    out = Outbound(pb.ConnectLimits(), lambda *_: None, lambda: False)
    log = TokenLog(Accepted("g", "s"))
    log.append(array("I", [7]))
    stream = ConnectedStream(1, None, out)
    stream.follow(StreamStart(LogGeneration(log)))
    out.mark(stream)
    for call_id in (2, 3):
        out.reply(call_id, "get_session", pb.GetSessionResponse(token_ids=[2**31] * 200_000))
    response = out.ready_message()
    assert response is not None
    assert [reply.call_id for reply in response.replies] == [2]
    assert list(response.tokens.call_ids) == [1]
