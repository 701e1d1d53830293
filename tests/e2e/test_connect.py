"""Many sessions over one stream of a caller: what fails, and who is slow, costs the others nothing.

The other tests here run over Connect as well: FLEET_E2E_KIND=connect.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from examples import python_gateway
from examples.python_gateway import CallRefusedError, FleetConnection, Gateway, Stream
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from tests.e2e.callers import Answer
from tests.e2e.harness import MODEL, PATIENCE_S, HeadServer, World, expected, prompt, until
from tests.e2e.restarts import SPEC, Durable
from tests.e2e.restarts import expected as expected_of_demo

pytestmark = pytest.mark.parametrize("world", ["connect"], indirect=True)


def asking(n: int, salt: int = 0, **spec: Any) -> pb.CompleteRequest:
    """For n tokens after prompt(10, salt)."""
    generation = pb.GenerationSpec(max_new_tokens=n, **spec)
    return pb.CompleteRequest(
        session=pb.SessionSpec(model=MODEL.name), token_ids=prompt(10, salt), spec=generation
    )


async def read(stream: Stream | AsyncIterator[pb.GenerationEvent]) -> Answer:
    """The whole answer, its order checked event by event."""
    answer = Answer()
    async with asyncio.timeout(2 * PATIENCE_S):
        async for event in stream:
            answer.take(event)
    return answer


async def opened(server: HeadServer) -> FleetConnection:
    return FleetConnection(FleetServiceStub(server.new_channel()))


async def test_sixty_answers_on_one_connection_outlive_the_death_of_their_node(world: World) -> None:
    nodes = await world.start_nodes(3, "--lanes", "32", "--decode-rate", "100")
    server = await world.head(*nodes)
    async with await opened(server) as connection:
        streams = [connection.stream(complete=asking(150, salt)) for salt in range(60)]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        while server.head.generations.running_count < 60:
            await asyncio.sleep(0.01)
        victim = Counter(generation.node for generation in server.head.generations.running).most_common(1)
        await next(node for node in nodes if node.identity == victim[0][0]).kill()
        answers = await asyncio.gather(*reading)
    assert [answer.tokens for answer in answers] == [expected(prompt(10, salt), 150) for salt in range(60)]
    assert {answer.reason for answer in answers} == {"LENGTH"}
    assert sum(len(answer.moves) for answer in answers) >= victim[0][1]


async def test_a_session_is_opened_fed_and_generated_on_without_waiting_for_answers(world: World) -> None:
    server = await world.head(await world.node("node-1"))
    async with await opened(server) as connection:
        create = pb.CreateSessionRequest(session_id="s", spec=pb.SessionSpec(model=MODEL.name))
        created = asyncio.create_task(connection.ask(create_session=create))
        await asyncio.sleep(0)
        append = pb.AppendTokensRequest(session_id="s", token_ids=prompt(10))
        appended = asyncio.create_task(connection.ask(append_tokens=append))
        await asyncio.sleep(0)
        spec = pb.GenerationSpec(max_new_tokens=20, extend_context=True)
        stream = connection.stream(generate=pb.GenerateRequest(session_id="s", spec=spec))
        assert (await read(stream)).tokens == expected(prompt(10), 20)
        assert (await created).session.session_id == "s"
        assert (await appended).session.context_length == 10
        got = await connection.ask(get_session=pb.GetSessionRequest(session_id="s", include_token_ids=True))
        assert list(got.token_ids) == prompt(10) + expected(prompt(10), 20)
        finished = await connection.ask(finish_session=pb.FinishSessionRequest(session_id="s"))
        assert finished.session.context_length == 30


async def test_a_reader_that_takes_nothing_holds_up_no_other_and_misses_nothing(world: World) -> None:
    server = await world.head(await world.node("node-1", "--decode-rate", "0"))
    async with await opened(server) as connection:
        slow = connection.stream(16, complete=asking(3000))
        for salt in range(1, 9):
            answer = await read(connection.stream(16, complete=asking(500, salt)))
            assert answer.tokens == expected(prompt(10, salt), 500)
        assert (await read(slow)).tokens == expected(prompt(10), 3000)


async def test_a_connection_that_nobody_reads_holds_up_no_other(world: World) -> None:
    server = await world.head(await world.node("node-1", "--lanes", "16", "--decode-rate", "0"))
    deaf: Any = FleetServiceStub(server.new_channel()).Connect()
    calls = [pb.ConnectCall(call_id=n, complete=asking(20_000, n)) for n in range(4)]
    await deaf.write(pb.ConnectRequest(calls=calls))
    async with await opened(server) as connection:
        for salt in range(4):
            answer = await read(connection.stream(complete=asking(300, salt)))
            assert answer.tokens == expected(prompt(10, salt), 300)
    deaf.cancel()


async def test_answers_of_a_connection_that_is_gone_are_cancelled_at_their_nodes(world: World) -> None:
    node = await world.node("node-1", "--decode-rate", "50")
    server = await world.head(node)
    connection = await opened(server)
    streams = [connection.stream(complete=asking(3000, salt)) for salt in range(4)]
    for stream in streams:
        while not (await anext(stream)).HasField("tokens"):
            pass
    await connection.close()
    await until(lambda: server.head.generations.running_count == 0, "the head ended them")
    give_up_s = asyncio.get_running_loop().time() + PATIENCE_S
    runs = await node.journal(kind="generate")
    while not all(run.HasField("ended_ms") for run in runs) and asyncio.get_running_loop().time() < give_up_s:
        await asyncio.sleep(0.01)
        runs = await node.journal(kind="generate")
    assert [run.HasField("ended_ms") for run in runs] == [True] * 4
    assert all(run.tokens_sent < 3000 for run in runs)


async def test_a_gateway_whose_connection_is_cut_goes_on_where_it_was(world: World) -> None:
    server = await world.head(await world.node("node-1", "--lanes", "16", "--decode-rate", "50"))
    gateway = Gateway(FleetServiceStub(server.new_channel()))
    reading = [asyncio.create_task(read_once(gateway.answer(asking(120, salt)))) for salt in range(8)]
    for _ in range(3):
        seen = sum(generation.log.visible for generation in server.head.generations.running)
        async with asyncio.timeout(PATIENCE_S):
            while sum(g.log.visible for g in server.head.generations.running) < seen + 40:
                await asyncio.sleep(0.01)
        await gateway.drop(gateway.connection())
    tokens = await asyncio.gather(*reading)
    await gateway.close()
    assert tokens == [expected(prompt(10, salt), 120) for salt in range(8)]


async def test_a_gateway_sends_a_burst_of_long_prompts_in_messages_that_the_head_takes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_gateway, "FIRST_MAX_REQUEST_BYTES", 5_000)
    sent: list[int] = []
    right = FleetConnection._next_request

    def noted(self: FleetConnection) -> pb.ConnectRequest:
        request = right(self)
        sent.append(request.ByteSize())
        return request

    monkeypatch.setattr(FleetConnection, "_next_request", noted)
    server = await world.head(await world.node("node-1", "--lanes", "16"))
    gateway = Gateway(FleetServiceStub(server.new_channel()))
    spec = pb.GenerationSpec(max_new_tokens=5)
    session = pb.SessionSpec(model=MODEL.name)
    answers = [
        read_once(gateway.answer(pb.CompleteRequest(session=session, token_ids=prompt(600, salt), spec=spec)))
        for salt in range(16)
    ]
    tokens = await asyncio.gather(*answers)
    await gateway.close()
    assert tokens == [expected(prompt(600, salt), 5) for salt in range(16)]
    assert len(sent) > 1  # the head's own limit may have come before the last
    assert sent[0] <= 5_000


async def test_a_gateway_s_answer_that_waited_long_is_not_given_up_when_the_connection_breaks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_gateway, "GRACE_S", 1.0)
    server = await world.head(await world.node("node-1", "--lanes", "1", "--decode-rate", "20"))
    gateway = Gateway(FleetServiceStub(server.new_channel()))
    reading = [asyncio.create_task(read_once(gateway.answer(asking(50, salt)))) for salt in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        while max((g.log.visible for g in server.head.generations.running), default=0) < 40:
            await asyncio.sleep(0.01)
    await gateway.drop(gateway.connection())
    tokens = await asyncio.gather(*reading)
    await gateway.close()
    assert tokens == [expected(prompt(10, salt), 50) for salt in range(2)]


async def test_a_head_that_drains_is_asked_again_without_hanging_up_on_what_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_gateway, "GRACE_S", 1.0)
    server = await world.head(await world.node("node-1", "--decode-rate", "50"))
    gateway = Gateway(FleetServiceStub(server.new_channel()))
    running = asyncio.create_task(read_once(gateway.answer(asking(150))))
    async with asyncio.timeout(PATIENCE_S):
        while max((g.log.visible for g in server.head.generations.running), default=0) < 5:
            await asyncio.sleep(0.01)
    connection = gateway.connection()
    server.head.drain()
    with pytest.raises(CallRefusedError, match="HEAD_DRAINING"):
        await read_once(gateway.answer(asking(5, 1)))
    assert gateway.connection() is connection
    assert await running == expected(prompt(10), 150)
    await gateway.close()


async def read_once(events: AsyncIterator[pb.GenerationEvent]) -> list[int]:
    """The tokens of an answer that may be taken up anew; each once and in order."""
    tokens: list[int] = []
    async for event in events:
        if event.HasField("tokens"):
            assert event.tokens.first_index == len(tokens)
            tokens += event.tokens.token_ids
    return tokens


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_gateway_goes_on_after_the_death_and_after_the_end_of_the_head(
    world: World, durable: Durable, how: str
) -> None:
    await durable.node("node-1", rate=50.0)
    await durable.start()
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{durable.callers}",
        options=[("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)],
    )
    async with channel:
        gateway = Gateway(FleetServiceStub(channel))
        requests = [
            pb.CompleteRequest(
                session=SPEC, token_ids=prompt(10, salt), spec=pb.GenerationSpec(max_new_tokens=150)
            )
            for salt in range(8)
        ]
        some = asyncio.Event()

        async def answer(request: pb.CompleteRequest) -> list[int]:
            async def noted() -> AsyncIterator[pb.GenerationEvent]:
                async for event in gateway.answer(request):
                    if event.tokens.first_index > 10:
                        some.set()
                    yield event

            return await read_once(noted())

        reading = [asyncio.create_task(answer(request)) for request in requests]
        await asyncio.wait_for(some.wait(), PATIENCE_S)
        await (durable.kill() if how == "kill" else durable.stop())
        await durable.start()
        tokens = await asyncio.gather(*reading)
        await gateway.close()
    assert tokens == [expected_of_demo(prompt(10, salt), 150) for salt in range(8)]


async def test_calls_beyond_what_may_wait_are_answered_all_the_same(world: World) -> None:
    """More than the head takes up at once, in one message."""
    server = await world.head(await world.node("node-1"))
    async with await opened(server) as connection:
        asked = [
            connection.ask(get_session=pb.GetSessionRequest(session_id=f"none-{n}")) for n in range(3000)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert Counter(map(str, map(type, answers))) == {str(CallRefusedError): 3000}
    assert {error.reason for error in answers if isinstance(error, CallRefusedError)} == {"SESSION_NOT_FOUND"}


async def test_the_example_runs_answers_over_one_connection(world: World) -> None:
    server = await world.head(await world.node("node-1", "--lanes", "8"))
    command = ("-m", "examples.python_gateway", "--address", server.address, "--model", MODEL.name)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--answers", "5", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    lines = sorted(out.decode().splitlines())
    assert process.returncode == 0
    for number, line in enumerate(lines):
        first = ", ".join(map(str, expected([1, 2, 3, number], 32)[:6]))
        assert line == f"answer {number}: LENGTH, 32 tokens from node-1: [{first}]..."
