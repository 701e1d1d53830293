"""The outermost layer: sizes, broken bytes, request ids, log lines, and streams whose caller leaves."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from fleet.v1 import fleet_service_pb2 as fleet
from fleet_service.api.interceptors import NullRpcObserver, ServedCall
from fleet_service.domain.access import ANYBODY
from tests.api.conftest import Edge
from tests.api.fakes import STORY, BrokenReader, EndlessReader, FakeReader, not_found, refusal_of

MIB = 1024 * 1024
GENERATE = fleet.GenerateRequest(session_id="s1")


def raw(edge: Edge, method: str) -> Any:
    """A call of a method with bytes as they are."""
    return edge.channel.unary_unary(f"/fleet.v1.FleetService/{method}")


async def test_a_20_mib_request_gets_a_typed_error_and_the_next_one_works(edge: Edge) -> None:
    request = fleet.CreateSessionRequest(
        spec=fleet.SessionSpec(model="toy", engine_options=b"x" * (20 * MIB))
    )
    caught = await refusal_of(edge.fleet.CreateSession(request))
    assert (caught.code, caught.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE")
    assert caught.details["ErrorInfo"].metadata["sizeBytes"] == str(request.ByteSize())
    assert caught.details["ErrorInfo"].metadata["maxBytes"] == str(16 * MIB)
    assert caught.details["QuotaFailure"].violations[0].subject == "request:bytes"
    assert caught.trailers["grpc-retry-pushback-ms"] == "-1"
    assert not edge.head.calls
    await edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1"))


async def test_beyond_32_mib_the_library_refuses_and_the_next_one_works(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw(edge, "GetSession")(b"x" * (33 * MIB))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1"))


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"], ids=["garbage", "not-utf-8"])
async def test_bytes_that_are_no_request_get_a_typed_error(edge: Edge, data: bytes) -> None:
    caught = await refusal_of(raw(edge, "GetSession")(data))
    assert (caught.code, caught.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert caught.details["BadRequest"].field_violations[0].field == "request"


async def test_a_call_keeps_its_caller_s_request_id(edge: Edge) -> None:
    call = edge.fleet.GetSession(
        fleet.GetSessionRequest(session_id="s1"), metadata=(("x-request-id", "mine-7"),)
    )
    await call
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine-7"
    edge.head.errors["get_session"] = ValueError("boom")
    caught = await refusal_of(
        edge.fleet.GetSession(
            fleet.GetSessionRequest(session_id="s1"), metadata=(("x-request-id", "mine-8"),)
        )
    )
    assert caught.details["RequestInfo"].request_id == "mine-8"


@pytest.mark.parametrize("odd", ["a b", "x" * 129, '"}\\'])
async def test_an_odd_request_id_is_replaced(edge: Edge, odd: str) -> None:
    call = edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1"), metadata=(("x-request-id", odd),))
    await call
    assert dict(await call.trailing_metadata())["x-request-id"] == "req-1"


async def test_each_call_leaves_one_line_in_the_log(edge: Edge) -> None:
    await edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1"))
    edge.head.errors["get_session"] = not_found()
    await refusal_of(edge.fleet.GetSession(fleet.GetSessionRequest(session_id="s1")))
    async for _ in edge.fleet.Generate(GENERATE):
        pass
    assert [(call.method_name, call.kwargs["event"]) for call in edge.log.calls] == [
        ("debug", "call answered"),
        ("info", "call refused"),
        ("debug", "call answered"),
    ]
    line = edge.log.calls[1].kwargs
    assert line["method"] == "fleet.v1.FleetService/GetSession"
    assert (line["code"], line["reason"], line["request_id"]) == ("NOT_FOUND", "SESSION_NOT_FOUND", "req-2")
    assert len(line["trace_id"]) == 32


async def test_an_unknown_method_is_unimplemented(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw(edge, "Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# Streams whose caller leaves


async def test_a_reader_is_closed_when_its_caller_cancels_while_nothing_comes(edge: Edge) -> None:
    reader = edge.head.generation.reader = FakeReader([STORY[:3]])
    call = edge.fleet.Generate(GENERATE)
    for _ in range(3):
        await call.read()
    call.cancel()
    await asyncio.wait_for(reader.closed.wait(), 10)
    assert reader.closed_times == 1


async def test_a_reader_is_closed_when_its_caller_cancels_a_write_that_waits(edge: Edge) -> None:
    reader = edge.head.generation.reader = EndlessReader()
    call = edge.fleet.Generate(GENERATE)
    await call.read()
    await _stops_growing(reader)
    call.cancel()
    await asyncio.wait_for(reader.closed.wait(), 10)
    assert [(c.method_name, c.kwargs["code"]) for c in await _lines(edge)] == [("info", "CANCELLED")]


async def test_a_slow_caller_is_not_read_ahead_of_without_bound(edge: Edge) -> None:
    reader = edge.head.generation.reader = EndlessReader()
    call = edge.fleet.Generate(GENERATE)
    await call.read()
    assert await _stops_growing(reader) < 50_000_000
    call.cancel()


async def test_a_reader_is_closed_when_its_caller_s_deadline_passes(edge: Edge) -> None:
    reader = edge.head.generation.reader = FakeReader([STORY[:3]])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in edge.fleet.Generate(GENERATE, timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(reader.closed.wait(), 10)
    (line,) = await _lines(edge)
    # Which of the two it was cannot be told when the call was long on its way, as on a busy machine.
    assert line.kwargs["code"] in {"DEADLINE_EXCEEDED", "CANCELLED"}


@pytest.mark.parametrize(
    "remaining_s,code",
    [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.03, "DEADLINE_EXCEEDED"), (0.0, "DEADLINE_EXCEEDED")],
)
async def test_a_caller_that_hangs_up_at_its_deadline_did_not_cancel(
    edge: Edge, remaining_s: float | None, code: str
) -> None:
    class Context:
        def time_remaining(self) -> float | None:
            return remaining_s

    trace = NullRpcObserver().rpc_started("m", ())
    ServedCall(cast("Any", Context()), trace, cast("Any", edge.log), "req-1", lambda: ANYBODY).gone()
    assert [(c.args, c.kwargs["code"]) for c in edge.log.calls] == [(("caller gone",), code)]


async def test_a_reader_is_closed_when_its_caller_s_connection_breaks(edge: Edge) -> None:
    reader = edge.head.generation.reader = FakeReader([STORY[:3]])
    call = edge.fleet.Generate(GENERATE)
    await call.read()
    await edge.channel.close()
    assert await asyncio.wait_for(reader.closed.wait(), 10)


async def test_a_reader_is_closed_when_the_caller_of_generate_all_leaves(edge: Edge) -> None:
    reader = edge.head.generation.reader = FakeReader([STORY[:3]])
    call = edge.fleet.GenerateAll(fleet.GenerateAllRequest(session_id="s1"))
    while "generate" not in edge.head.calls:
        await asyncio.sleep(0)
    call.cancel()
    assert await asyncio.wait_for(reader.closed.wait(), 10)


async def test_a_reader_is_closed_when_it_breaks_and_the_caller_learns_an_id(edge: Edge) -> None:
    reader = edge.head.generation.reader = BrokenReader([])
    caught = await refusal_of(edge.fleet.Generate(GENERATE))
    assert caught.reason == "INTERNAL"
    assert "secret" not in str(caught.status)
    assert reader.closed_times == 1


async def test_an_index_beyond_the_end_is_out_of_range(edge: Edge) -> None:
    edge.head.generation.length = 4
    request = fleet.AttachGenerationRequest(generation_id="gen-1", from_index=5)
    caught = await refusal_of(edge.fleet.AttachGeneration(request))
    assert (caught.code, caught.reason) == (grpc.StatusCode.OUT_OF_RANGE, "INDEX_OUT_OF_RANGE")
    assert caught.details["BadRequest"].field_violations[0].field == "from_index"


async def _stops_growing(reader: EndlessReader) -> int:
    """Wait until the server reads no further ahead, and give the index it got to."""
    while True:
        before = reader._next_index
        await asyncio.sleep(0.2)
        if reader._next_index == before:
            return before


async def _lines(edge: Edge) -> list[Any]:
    """The log's lines, once there is one."""
    while not edge.log.calls:
        await asyncio.sleep(0.01)
    return list(edge.log.calls)
