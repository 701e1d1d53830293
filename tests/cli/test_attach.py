"""Answers that were broken off: what `fleet generate` says then, and `fleet attach`, which has the rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest
from google.rpc import code_pb2

from tests.cli.conftest import Fleet, start_fleet
from tests.cli.ended import Ended
from tests.cli.scripted_head import (
    CONNECTION_LOST,
    DATA_LOSS,
    HEAD_DRAINING,
    Hang,
    Refuse,
    ScriptedHead,
    Step,
    accepted,
    finished,
    on_branch,
    tokens,
)

ASK = ("generate", "--model", "demo", "--tokens", "1")
CUT_OFF: list[Step] = [accepted(), tokens(0, 10, 11, 12), CONNECTION_LOST]
NO_LONGER_THERE = Refuse(code_pb2.NOT_FOUND, "no generation g1", reason="GENERATION_NOT_FOUND")

# The command, but that it tries for so long only to come back.
IMPATIENT = (
    "from fleet_service.client import FleetClient\n"
    "FleetClient.__init__.__kwdefaults__['reattach_s'] = 0.3\n"
    "from fleet_service.cli import main\n"
    "main()\n"
)


async def impatient(address: str, *arguments: str) -> Ended:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IMPATIENT, *arguments, "--address", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


# ---------------------------------------------------------------------------------------- broken off


@pytest.mark.parametrize("away", [CONNECTION_LOST, HEAD_DRAINING])
async def test_generate_whose_head_stays_away_says_how_to_get_the_rest(
    head: ScriptedHead, away: Refuse
) -> None:
    head.streams = [[accepted("g7"), tokens(0, 10, 11), away], *[[away]] * 50]
    ended = await impatient(head.address, *ASK)
    assert (ended.code, ended.out) == (1, "10 11\n")
    lines = ended.err.splitlines()
    assert lines[-2] == (
        "  generation g7 has reached index 2; once it can be called, the head may have the rest:"
    )
    assert lines[-1] == f"  fleet attach g7 --from-index 2 --address {head.address}"


async def test_the_branch_is_part_of_how_to_get_the_rest(head: ScriptedHead, fleet: Fleet) -> None:
    full = Refuse(code_pb2.UNAVAILABLE, "the disk is full", reason="STORE_UNAVAILABLE")
    head.streams = [[*on_branch(3, accepted("two words"), tokens(0, 10)), full]]
    ended = await fleet(*ASK)
    assert (ended.code, ended.out) == (1, "10\n")
    # Where the variable says which head it is, the command need not.
    assert ended.err.splitlines()[-1] == "  fleet attach 'two words' --from-index 1 --branch 3"


async def test_generate_as_json_says_where_to_attach_before_the_error(head: ScriptedHead) -> None:
    head.streams = [
        [*on_branch(3, accepted("g7"), tokens(0, 10)), CONNECTION_LOST],
        *[[CONNECTION_LOST]] * 50,
    ]
    ended = await impatient(head.address, *ASK, "--json")
    place, error = map(json.loads, ended.err.splitlines()[-2:])
    assert place == {"attach": {"generation_id": "g7", "from_index": 1, "branch": 3}}
    assert error["error"]["reason"] == "UNREACHABLE"


async def test_nothing_is_promised_of_a_generation_that_is_gone_or_was_never_taken(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.streams = [CUT_OFF, [NO_LONGER_THERE], [CONNECTION_LOST]]
    for _ in range(2):
        ended = await fleet(*ASK)
        assert (ended.code, "fleet attach" in ended.err) == (1, False)


@pytest.mark.parametrize("command", [ASK, ("attach", "g1")], ids=["generate", "attach"])
async def test_a_loss_of_tokens_is_told_with_what_to_do(
    head: ScriptedHead, fleet: Fleet, command: tuple[str, ...]
) -> None:
    head.streams = [CUT_OFF, [DATA_LOSS], CUT_OFF, [DATA_LOSS]]
    ended = await fleet(*command)
    assert (ended.code, ended.out) == (1, "10 11 12\n")
    told = "those before index 2 are right, those from index 2 on may not be [DATA_LOSS]"
    assert ended.err.splitlines()[1:] == [
        f"fleet: the head lost tokens that it gave: {told}",
        "  what to do: drop those, and take up what the answer is now:",
        "  fleet attach g1 --from-index 2",
    ]
    ended = await fleet(*command, "--json")
    assert ended.code == 1
    place, told_error = map(json.loads, ended.err.splitlines()[-2:])
    assert place["attach"] == {"generation_id": "g1", "from_index": 2, "branch": 0}
    error = told_error["error"]
    assert (error["reason"], error["metadata"]["nextIndex"]) == ("DATA_LOSS", "2")


async def test_attaching_beyond_what_is_sure_names_the_index_to_attach_at(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.streams = [[DATA_LOSS]]
    ended = await fleet("attach", "g1", "--from-index", "3", "--branch", "1")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == "  fleet attach g1 --from-index 2 --branch 1"


# ---------------------------------------------------------------------------------------- taken up


async def test_attach_prints_an_answer_from_an_index_on_to_its_end(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [[accepted(), tokens(5, 15, 16), tokens(7, 17), finished(output_tokens=8)]]
    ended = await fleet("attach", "g1", "--from-index", "5", "--branch", "2")
    assert (ended.code, ended.out) == (0, "15 16 17\n")
    assert ended.err.startswith("finished: LENGTH, 8 tokens")
    (asked,) = head.requests("AttachGeneration")
    assert (asked.generation_id, asked.from_index, asked.branch) == ("g1", 5, 2)


async def test_attach_reads_all_of_it_where_no_index_is_given(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [on_branch(1, accepted(), tokens(0, 10), finished())]
    ended = await fleet("attach", "g1", "--json")
    assert ended.code == 0
    events = [json.loads(line) for line in ended.out.splitlines()]
    assert [(event["event"], event["branch"]) for event in events] == [
        ("accepted", 1),
        ("tokens", 1),
        ("finished", 1),
    ]


async def test_attach_takes_a_lost_connection_up_again(head: ScriptedHead, fleet: Fleet) -> None:
    head.streams = [
        [CONNECTION_LOST],
        [accepted(), tokens(5, 15), CONNECTION_LOST],
        [accepted(), tokens(6, 16), finished()],
    ]
    ended = await fleet("attach", "g1", "--from-index", "5")
    assert (ended.code, ended.out.split()) == (0, ["15", "16"])
    assert "no answer yet (Socket closed); trying for 10 s" in ended.err
    assert "connection lost (Socket closed); going on at index 6" in ended.err
    assert [call.from_index for call in head.requests("AttachGeneration")] == [5, 5, 6]


async def test_attach_exits_with_1_when_the_answer_is_not_whole_or_not_there(
    head: ScriptedHead, fleet: Fleet
) -> None:
    head.streams = [[accepted(), tokens(0, 10), finished("CANCELLED")], [NO_LONGER_THERE]]
    ended = await fleet("attach", "g1")
    assert (ended.code, ended.out) == (1, "10\n")
    ended = await fleet("attach", "g1")
    assert (ended.code, ended.out) == (1, "")
    assert "fleet: no generation g1 [GENERATION_NOT_FOUND]" in ended.err


async def test_attach_with_nothing_that_listens_says_so(head: ScriptedHead) -> None:
    ended = await impatient("127.0.0.1:1", "attach", "g1")
    assert (ended.code, ended.out) == (1, "")
    assert "fleet: no head listens at 127.0.0.1:1" in ended.err
    assert not head.calls


async def test_ctrl_c_leaves_an_answer_that_was_attached_to(head: ScriptedHead) -> None:
    head.streams = [[accepted(), tokens(5, 10), Hang()]]
    process = await start_fleet(head, "attach", "g1", "--from-index", "5")
    assert process.stdout is not None
    assert await process.stdout.readexactly(2) == b"10"
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert b"left at index 6;" in err
    assert b"  fleet attach g1 --from-index 6\n" in err
    assert not head.requests("CancelGeneration")
