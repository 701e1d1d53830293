"""The same job by a client in each language: built by its own tools, against real processes that fail."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from fleet_service.client import FleetClient
from tests.certificates import Authority
from tests.cli.scripted_head import (
    CONNECTION_LOST,
    DATA_LOSS,
    HEAD_DRAINING,
    ScriptedHead,
    accepted,
    finished,
    on_branch,
    tokens,
)
from tests.clients.conftest import Guard, Start
from tests.clients.support import DECODE_RATE, Fleet, Wire, expected, until
from tests.clients.toolchains import LANGUAGES
from tests.ports import quiet_port

WHOLE, REFUSED, WRONG_USE, NOT_REACHED, ENDED_TOO_EARLY = range(5)
LONG = 120
ENDLESS = 100_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first use of a client builds it
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("language", LANGUAGES),
]

FleetAndEye = tuple[Fleet, FleetClient]


async def test_a_client_prints_the_exact_answer_and_leaves_nothing_behind(
    language: str, fleet_and_eye: FleetAndEye, start: Start
) -> None:
    ended = await (await start(language, fleet_and_eye[0].callers, "--max-tokens", "20")).end()
    assert (ended.code, ended.tokens) == (WHOLE, expected(20))
    assert "finished: LENGTH, 20 tokens" in ended.notes


async def test_a_node_that_is_killed_costs_the_client_no_token(
    language: str, fleet_and_eye: FleetAndEye, start: Start
) -> None:
    fleet, _ = fleet_and_eye
    run = await start(language, fleet.callers, "--max-tokens", str(LONG))
    await run.until_tokens(20)
    victim = run.node
    fleet.nodes[victim].kill()
    ended = await run.end()
    await fleet.start_node(victim)
    assert (ended.code, ended.tokens) == (WHOLE, expected(LONG))
    assert f"moved from {victim} to " in ended.notes


async def test_a_connection_that_is_cut_is_taken_up_at_the_next_token(
    language: str, fleet_and_eye: FleetAndEye, wire: Wire, start: Start
) -> None:
    run = await start(language, wire.address, "--max-tokens", str(LONG))
    await run.until_tokens(20)
    wire.cut()
    await run.until_tokens(60)
    wire.cut()
    ended = await run.end()
    assert (ended.code, ended.tokens) == (WHOLE, expected(LONG))
    assert wire.connections >= 3
    # It may try more than once, but never from before what it has.
    assert sorted(ended.went_on_at) == ended.went_on_at
    assert ended.went_on_at[0] >= 20
    assert ended.went_on_at[-1] >= 60


async def test_a_node_and_the_connection_may_go_at_once(
    language: str, fleet_and_eye: FleetAndEye, wire: Wire, start: Start
) -> None:
    fleet, _ = fleet_and_eye
    run = await start(language, wire.address, "--max-tokens", str(LONG))
    await run.until_tokens(20)
    victim = run.node
    fleet.nodes[victim].kill()
    wire.cut()
    ended = await run.end()
    await fleet.start_node(victim)
    assert (ended.code, ended.tokens) == (WHOLE, expected(LONG))
    assert ended.went_on_at


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_head_that_ends_and_is_started_again_costs_the_client_no_token(
    language: str, fleet_and_eye: FleetAndEye, start: Start, how: signal.Signals
) -> None:
    fleet, _ = fleet_and_eye
    run = await start(language, fleet.callers, "--max-tokens", str(LONG))
    await run.until_tokens(20)
    await fleet.end_head(how)
    await fleet.start_head()
    ended = await run.end()
    assert (ended.code, ended.tokens) == (WHOLE, expected(LONG))
    assert sorted(ended.went_on_at) == ended.went_on_at
    assert ended.went_on_at[0] >= 20


async def test_the_branch_of_the_newest_event_is_sent_when_a_stream_is_taken_up(
    language: str, scripted: ScriptedHead, start: Start
) -> None:
    scripted.streams = [
        [accepted(), tokens(0, 10), HEAD_DRAINING],
        [*on_branch(1, accepted(), tokens(1, 11)), CONNECTION_LOST],
        on_branch(1, accepted(), tokens(2, 12), finished(output_tokens=3)),
    ]
    ended = await (await start(language, scripted.address)).end()
    assert (ended.code, ended.tokens) == (WHOLE, [10, 11, 12])
    attached = scripted.requests("AttachGeneration")
    assert [(each.from_index, each.branch) for each in attached] == [(1, 0), (2, 1)]


async def test_a_loss_of_tokens_is_told_with_the_index_up_to_which_they_are_right(
    language: str, scripted: ScriptedHead, start: Start
) -> None:
    scripted.streams = [[accepted(), tokens(0, 10, 11, 12), CONNECTION_LOST], [DATA_LOSS]]
    ended = await (await start(language, scripted.address)).end()
    assert (ended.code, ended.tokens) == (REFUSED, [10, 11, 12])
    assert "refused: DATA_LOSS: " in ended.notes
    assert "\n  nextIndex = 2\n" in ended.notes
    assert len(scripted.requests("AttachGeneration")) == 1


@pytest.mark.parametrize(
    "model,notes",
    [
        ("nope", ("refused: MODEL_NOT_FOUND: ", "  model = nope")),
        ("", ("refused: INVALID_FIELD: ", "  spec.model ")),
    ],
)
async def test_a_refusal_is_told_by_its_reason_and_details(
    language: str, fleet_and_eye: FleetAndEye, start: Start, model: str, notes: tuple[str, ...]
) -> None:
    ended = await (await start(language, fleet_and_eye[0].callers, "--model", model)).end()
    assert (ended.code, ended.tokens) == (REFUSED, [])
    for note in notes:
        assert note in ended.notes


async def test_a_refusal_that_passes_is_retried_by_the_published_policy(
    language: str, fleet_and_eye: FleetAndEye, start: Start
) -> None:
    fleet, eye = fleet_and_eye
    await fleet.cordon(eye)
    before = fleet.log().count("NO_ELIGIBLE_NODE")
    run = await start(language, fleet.callers, "--max-tokens", "5")

    async def refused() -> bool:
        return fleet.log().count("NO_ELIGIBLE_NODE") > before

    await until(refused, "the client is refused")
    await fleet.uncordon(eye)
    ended = await run.end()
    assert (ended.code, ended.tokens) == (WHOLE, expected(5))


async def test_a_refusal_that_stays_says_when_to_try_again(
    language: str, fleet_and_eye: FleetAndEye, start: Start
) -> None:
    fleet, eye = fleet_and_eye
    await fleet.cordon(eye)
    before = fleet.log().count("NO_ELIGIBLE_NODE")
    ended = await (await start(language, fleet.callers)).end()
    assert (ended.code, ended.tokens) == (REFUSED, [])
    assert "refused: NO_ELIGIBLE_NODE: " in ended.notes
    assert "\n  cordoned = 2\n" in ended.notes
    assert re.search(r"^  try again in [12]\.\d s$", ended.notes, re.MULTILINE)
    assert fleet.log().count("NO_ELIGIBLE_NODE") - before >= 4


async def test_a_cancelled_answer_ends_at_once_and_what_came_stands(
    language: str, fleet_and_eye: FleetAndEye, start: Start
) -> None:
    address = fleet_and_eye[0].callers
    ended = await (await start(language, address, "--max-tokens", str(ENDLESS), "--cancel-after", "10")).end()
    assert ended.code == ENDED_TOO_EARLY
    assert "finished: CANCELLED, " in ended.notes
    assert 10 <= len(ended.tokens) < ENDLESS
    assert ended.tokens == expected(len(ended.tokens))


async def test_a_deadline_ends_the_answer_and_what_came_stands(
    language: str, fleet_and_eye: FleetAndEye, start: Start
) -> None:
    address = fleet_and_eye[0].callers
    ended = await (await start(language, address, "--max-tokens", str(ENDLESS), "--deadline", "1")).end()
    assert ended.code == ENDED_TOO_EARLY
    assert "finished: WALL_CLOCK, " in ended.notes
    assert 0 < len(ended.tokens) <= 2 * DECODE_RATE
    assert ended.tokens == expected(len(ended.tokens))


async def test_a_token_over_tls_opens_a_guarded_head(language: str, guard: Guard, start: Start) -> None:
    flags = ("--ca", str(guard.ca), "--token-file", str(guard.token_file), "--max-tokens", "5")
    ended = await (await start(language, guard.fleet.callers, *flags)).end()
    assert (ended.code, ended.tokens) == (WHOLE, expected(5))


async def test_without_the_token_or_the_authority_a_guarded_head_stays_shut(
    language: str, guard: Guard, tmp_path: Path, start: Start
) -> None:
    bare = await (await start(language, guard.fleet.callers, "--ca", str(guard.ca))).end()
    assert (bare.code, bare.tokens) == (REFUSED, [])
    assert "refused: CREDENTIALS_REFUSED: " in bare.notes
    another = Authority(tmp_path, "another").ca
    flags = ("--ca", str(another), "--token-file", str(guard.token_file))
    deceived = await (await start(language, guard.fleet.callers, *flags)).end()
    assert (deceived.code, deceived.tokens) == (NOT_REACHED, [])


async def test_a_token_is_not_shown_without_tls(
    language: str, fleet_and_eye: FleetAndEye, tmp_path: Path, start: Start
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    ended = await (await start(language, fleet_and_eye[0].callers, "--token-file", str(token))).end()
    assert (ended.code, ended.tokens) == (WRONG_USE, [])
    assert "secret" not in ended.notes


async def test_where_nobody_listens_it_says_so(language: str, start: Start) -> None:
    ended = await (await start(language, f"127.0.0.1:{quiet_port()}")).end()
    assert (ended.code, ended.tokens) == (NOT_REACHED, [])
    assert "failed: unavailable: " in ended.notes.lower()
