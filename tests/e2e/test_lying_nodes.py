"""A node that lies or errs beside a healthy one: answers are exact, and the head is quiet afterwards."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc
import pytest

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import types_pb2
from fleet_service.domain.epochs import make_epoch
from fleet_service.domain.node_types import NodeState
from tests.e2e.callers import Answer, complete, read_all
from tests.e2e.harness import MODEL, HeadServer, World, expected, prompt, until
from tests.e2e.lying_node import (
    WINDOW_TOKENS,
    Context,
    again_and_again,
    beside_a_healthy_node,
    liar,
    liar_hello,
    once,
)
from tests.links.scripted_node import serving

N = 20
REQUESTS = 8
STALL_S = 0.5

Request = pb.NodeServiceGenerateRequest


def step(request: Request, **fields: Any) -> pb.NodeServiceGenerateResponse:
    """One message of a run, at the index that is due unless `fields` say otherwise."""
    return pb.NodeServiceGenerateResponse(
        **({"epoch": request.epoch, "first_index": request.first_index} | fields)
    )


def refusal(request: Request, code: pb.RefusalCode, **fields: Any) -> pb.NodeServiceGenerateResponse:
    return pb.NodeServiceGenerateResponse(epoch=request.epoch, refusal=pb.Refusal(code=code, **fields))


EOS, LENGTH = types_pb2.FINISH_REASON_EOS, types_pb2.FINISH_REASON_LENGTH
TOO_LONG, STALE = pb.REFUSAL_CODE_CONTEXT_TOO_LONG, pb.REFUSAL_CODE_STALE_EPOCH
PREFILL, QUEUED = pb.GENERATION_PHASE_PREFILL, pb.GENERATION_PHASE_QUEUED

ENDING_LIES = {
    "EOS without any token": once(lambda r: step(r, finish=EOS)),
    "the limit without any token": once(lambda r: step(r, finish=LENGTH)),
    "a cancel that nobody asked for": once(lambda r: step(r, finish=types_pb2.FINISH_REASON_CANCELLED)),
    "out of time at once": once(lambda r: step(r, finish=types_pb2.FINISH_REASON_WALL_CLOCK)),
    "a finish that is none": once(lambda r: step(r, finish=types_pb2.FINISH_REASON_STOP)),
    "an end without a finish": once(step),
    "a token just out of the vocabulary": once(lambda r: step(r, token_ids=[MODEL.vocab_size])),
    "nothing but the largest token": once(lambda r: step(r, token_ids=[2**32 - 1] * N, finish=LENGTH)),
    "a token that leaves one out": once(lambda r: step(r, first_index=r.first_index + 1, token_ids=[5])),
    "too long for its own wide window": once(
        lambda r: refusal(r, TOO_LONG, max_context_tokens=WINDOW_TOKENS)
    ),
    "too long for an endless window": once(lambda r: refusal(r, TOO_LONG, max_context_tokens=2**64 - 1)),
    "stale beside an absurd epoch": once(lambda r: refusal(r, STALE, current_epoch=2**64 - 1)),
    "stale beside no epoch": once(lambda r: refusal(r, STALE)),
    "a refusal without a code": once(lambda r: refusal(r, pb.REFUSAL_CODE_UNSPECIFIED)),
    "tokens of an epoch never issued": once(lambda r: step(r, epoch=r.epoch + 1000, token_ids=[5])),
}

ENDLESS_LIES = {
    "the same phase": again_and_again(lambda r: step(r, phase=PREFILL)),
    "phases in turn": again_and_again(lambda r: step(r, phase=PREFILL), lambda r: step(r, phase=QUEUED)),
    "its first token": again_and_again(lambda r: step(r, first_index=0, token_ids=expected_first(r))),
    "tokens of an old epoch": again_and_again(lambda r: step(r, epoch=r.epoch - 1, token_ids=[5])),
    "empty messages": again_and_again(step),
}


def expected_first(request: Request) -> list[int]:
    return expected(list(request.append.token_ids), 1)


async def ask(server: HeadServer, count: int = REQUESTS) -> list[Answer]:
    """So many answers at once."""
    return await asyncio.gather(*(read_all(complete(server, prompt(12, salt), N)) for salt in range(count)))


def all_exact(answers: list[Answer]) -> None:
    for salt, answer in enumerate(answers):
        assert answer.reason == "LENGTH", answer.finished
        assert answer.tokens == expected(prompt(12, salt), N)


async def state_of(server: HeadServer, ref: str) -> admin_pb.Node:
    return (await server.admin.GetNode(admin_pb.GetNodeRequest(node=ref))).node


@pytest.mark.parametrize("lie", ENDING_LIES)
async def test_an_answer_that_a_node_ends_with_a_lie_is_exact_by_another(world: World, lie: str) -> None:
    node = liar(ENDING_LIES[lie])
    async with beside_a_healthy_node(world, node) as server:
        answers = await ask(server)
        all_exact(answers)
        assert node.received["Generate"], "nobody was lied to"
        assert {answer.moves[-1].to_node for answer in answers if answer.moves} == {"healthy"}


@pytest.mark.parametrize("lie", ENDLESS_LIES)
async def test_a_node_that_says_the_same_for_ever_is_left_for_another(world: World, lie: str) -> None:
    node = liar(ENDLESS_LIES[lie])
    async with beside_a_healthy_node(world, node, generation_stall_s=STALL_S) as server:
        answers = await ask(server)
        all_exact(answers)
        assert node.received["Generate"], "nobody was lied to"
        assert {answer.moves[-1].to_node for answer in answers if answer.moves} == {"healthy"}


@pytest.mark.parametrize(
    "lie",
    ["EOS without any token", "nothing but the largest token", "too long for an endless window"],
)
async def test_where_no_other_node_is_left_the_answer_ends_with_a_reason(world: World, lie: str) -> None:
    async with serving(liar(ENDING_LIES[lie]).handler()) as address:
        server = await world.head(address)
        for answer in await ask(server, 2):
            assert (answer.reason, answer.finished.error.reason) == ("ERROR", "ATTEMPTS_EXHAUSTED")
            assert answer.tokens == []
            assert answer.finished.attempts == 3
        await world.close()


async def ends_at_once(request: object, context: Context) -> None:
    return


async def is_not_implemented(request: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


@pytest.mark.parametrize("watch", [ends_at_once, is_not_implemented])
async def test_a_node_without_reports_costs_no_answer(world: World, watch: Any) -> None:
    node = liar()
    node.streams["WatchStatus"] = watch
    async with beside_a_healthy_node(world, node, taken_in=False) as server:
        answers = await ask(server, 16)
        all_exact(answers)
        assert len(answers) == 16


async def test_a_node_that_is_another_run_at_each_handshake_costs_no_answer(world: World) -> None:
    node, runs = liar(), itertools.count()

    async def shake_hands(request: object, context: Context) -> pb.HandshakeResponse:
        return liar_hello(incarnation=f"run-{next(runs)}")

    node.answers["Handshake"] = shake_hands
    node.streams["WatchStatus"] = ends_at_once
    async with beside_a_healthy_node(world, node, taken_in=False) as server:
        answers = await ask(server, 16)
        all_exact(answers)
        assert len(answers) == 16


async def test_a_node_that_has_seen_a_later_term_at_each_handshake_costs_no_answer(world: World) -> None:
    node = liar()

    async def shake_hands(request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        return liar_hello(highest_epoch=make_epoch(request.term + 10, 1))

    node.answers["Handshake"] = shake_hands
    node.streams["WatchStatus"] = ends_at_once
    async with beside_a_healthy_node(world, node, taken_in=False) as server:
        all_exact(await ask(server, 16))
        assert server.head.fleet.nodes[1].failures == {}


UNACCEPTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "an unprintable identity": ({"identity": "liar\x1b[31m\n"}, "identity must be"),
    "an identity of a megabyte": ({"identity": "x" * 1_000_000}, "identity must be"),
    "ten thousand models": (
        {"models": [types_pb2.Model(name=f"m{i}", revision="r" * 200) for i in range(10_000)]},
        "at most",
    ),
    "two thousand labels": ({"labels": {f"label-{i}": "x" * 200 for i in range(2000)}}, "at most"),
    "an epoch at the end of all": ({"highest_epoch": 2**64 - 1}, "far in the future"),
}


@pytest.mark.parametrize("what", UNACCEPTABLE)
async def test_a_node_that_says_what_nobody_can_use_is_refused_with_what_to_change(
    world: World, what: str
) -> None:
    said, why = UNACCEPTABLE[what]
    async with beside_a_healthy_node(world, liar(**said), taken_in=False) as server:
        known = server.head.fleet.nodes[0]
        await until(lambda: known.state is NodeState.DOWN, "it is refused")
        shown = await state_of(server, known.address)
        assert shown.state == admin_pb.NODE_STATE_DOWN
        assert why in shown.state_detail
        assert len(shown.state_detail) < 500
        assert shown.name == known.address
        all_exact(await ask(server))


async def test_a_node_whose_identity_is_another_s_address_does_not_push_it_out(world: World) -> None:
    node = liar()

    async def shake_hands(request: object, context: Context) -> pb.HandshakeResponse:
        return liar_hello(identity=world.nodes[0].address)

    node.answers["Handshake"] = shake_hands
    async with beside_a_healthy_node(world, node, taken_in=False) as server:
        known = server.head.fleet.nodes[0]
        await until(lambda: "the address of another node" in known.state_detail, "it is refused")
        assert (await state_of(server, world.nodes[0].address)).name == "healthy"
        all_exact(await ask(server))
