"""What the load driver and the sources read and write themselves, however it is cut on the way."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http2 import Messages, message
from benchmarks.mock_worker import Requests, chunk, token_event
from benchmarks.source import token_message, varint
from benchmarks.sse_way import Body, request_of
from benchmarks.stamps import VOCAB_SIZE, age_us, is_stamp, stamp
from fleet.v1 import fleet_service_pb2 as pb

CUTS = st.lists(st.integers(0, 400), max_size=6)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(at)]


@given(st.lists(st.binary(max_size=60), max_size=5), CUTS)
def test_messages_come_out_whole(payloads: list[bytes], cuts: list[int]) -> None:
    messages = Messages()
    data = b"".join(map(message, payloads))
    assert [found for piece in pieces(data, cuts) for found in messages.feed(piece)] == payloads


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), CUTS)
def test_a_chunked_body_comes_out_whole_and_its_end_is_seen(parts: list[bytes], cuts: list[int]) -> None:
    body = Body()
    data = b"".join(map(chunk, parts)) + b"0\r\n\r\n"
    assert b"".join(body.feed(piece) for piece in pieces(data, cuts)) == b"".join(parts)
    assert body.ended


@given(CUTS)
def test_requests_come_out_whole(cuts: list[int]) -> None:
    requests = Requests()
    data = request_of(7, 1) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + request_of(8, 2)
    found = [each for piece in pieces(data, cuts) for each in requests.feed(piece)]
    assert [head.split()[1] for head, _ in found] == [
        b"/v1/chat/completions",
        b"/health",
        b"/v1/chat/completions",
    ]
    assert [json.loads(body)["max_tokens"] for _, body in (found[0], found[2])] == [7, 8]


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_source_writes_what_the_contract_reads(index: int, token_id: int) -> None:
    [payload] = Messages().feed(token_message(index, varint(token_id)))
    tokens = pb.CompleteResponse.FromString(payload).event.tokens
    assert (tokens.first_index, list(tokens.token_ids)) == (index, [token_id])


def test_a_workers_event_is_a_chunk_of_a_chat_completion() -> None:
    event = json.loads(token_event(b"1234567890", first=True).removeprefix(b"data: "))
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": "1234567890"}


@given(st.integers(0, 2**50), st.integers(0, 800_000_000))
def test_a_token_tells_how_old_it_is(made_us: int, later_us: int) -> None:
    token_id = stamp(made_us)
    assert is_stamp(token_id)
    assert token_id < VOCAB_SIZE
    assert age_us(token_id, made_us + later_us) == later_us
