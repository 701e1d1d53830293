"""The commands, and the examples in documents, with a real head and stub nodes as processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import grpc
import pytest

from fleet.v1 import fleet_service_pb2_grpc
from fleet.v1.fleet_service_pb2 import (
    CreateSessionRequest,
    SessionSpec,
)
from tests.cli.ended import Ended
from tests.cli.real_fleet import MODEL, RealFleet, expected

ROOT = Path(__file__).parents[2]


# -------------------------------------------------------------------------------------------- commands


async def test_generate_gives_exactly_the_models_answer(real: RealFleet) -> None:
    ended = await real.fleet("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "20")
    assert ended.code == 0
    assert [int(token) for token in ended.out.split()] == expected([1, 2, 3], 20)


async def test_a_session_goes_on_over_several_commands(real: RealFleet) -> None:
    arguments = ("generate", "--session", "s1", "--model", "demo", "--max-new", "5", "--extend")
    first = await real.fleet(*arguments, "--tokens", "1,2,3")
    second = await real.fleet(*arguments, "--tokens", "4")
    answer = expected([1, 2, 3], 5)
    assert [int(token) for token in first.out.split()] == answer
    assert [int(token) for token in second.out.split()] == expected([1, 2, 3, *answer, 4], 5)
    (session,) = json.loads((await real.fleet("sessions", "--json")).out)["sessions"]
    assert (session["session_id"], session["state"], session["context_length"]) == ("s1", "BOUND", 14)
    assert "s1" in (await real.fleet("sessions")).out
    explained = json.loads((await real.fleet("explain", "--session", "s1", "--json")).out)
    assert explained["chosen"] in {"a", "b"}
    assert [verdict["eligible"] for verdict in explained["verdicts"]] == [True, True]


async def test_generate_survives_the_death_of_its_node(real: RealFleet) -> None:
    process = await real.start_fleet(
        *("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "80", "--json")
    )
    assert process.stdout is not None
    events = []
    first_node = ""
    async for line in process.stdout:
        events.append(json.loads(line))
        if len(events) == 5:
            (first_node,) = [event["node"] for event in events if event["event"] == "started"]
            real.nodes[first_node].kill()
    assert await process.wait() == 0
    received = [token for event in events if event["event"] == "tokens" for token in event["token_ids"]]
    assert received == expected([1, 2, 3], 80)
    (moved,) = [event for event in events if event["event"] == "moved"]
    assert (moved["from_node"], moved["cause"]) == (first_node, "LINK_LOST")
    assert events[-1]["reason"] == "LENGTH"


async def test_ctrl_c_frees_the_node(real: RealFleet) -> None:
    process = await real.start_fleet("generate", "--model", "demo", "--tokens", "1", "--max-new", "4000")
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert b"cancelled after" in err
    await real.until_idle()


async def test_a_drained_node_gives_its_answer_away_while_watchers_look_on(real: RealFleet) -> None:
    await real.fleet("cordon", "b")
    asking = await real.start_fleet(
        *("generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "240", "--json")
    )
    assert asking.stdout is not None
    while b'"tokens"' not in await asking.stdout.readline():
        pass
    await real.fleet("uncordon", "b")
    watching = await real.start_fleet("nodes", "--watch", "--json")
    assert watching.stdout is not None
    assert json.loads(await watching.stdout.readline())["snapshot"]
    drained = await real.fleet("drain", "a", "--note", "new driver", "--by", "olga", "--wait", "--json")
    last = json.loads(drained.out.splitlines()[-1])["drain"]
    assert (drained.code, last["state"], last["moved"], last["by"]) == (0, "DRAINED", 1, "olga")
    out, _ = await asking.communicate()
    events = [json.loads(line) for line in out.splitlines()]
    moves = [event for event in events if event["event"] == "moved"]
    assert [(move["from_node"], move["to_node"], move["cause"]) for move in moves] == [("a", "b", "DRAIN")]
    assert events[-1]["reason"] == "LENGTH"
    seen: list[dict[str, Any]] = []
    while not any("moved" in event for event in seen):
        seen += json.loads(await watching.stdout.readline())["events"]
    watching.send_signal(signal.SIGINT)
    await watching.communicate()
    assert watching.returncode == 0
    shown = (await real.nodes_as_json())["a"]
    assert (shown["cordoned_by"], shown["cordon_note"]) == ("olga", "new driver")
    assert "drained by olga" in (await real.fleet("doctor")).out


async def test_a_cordoned_node_is_explained_and_gets_no_work(real: RealFleet) -> None:
    cordoned = await real.fleet("cordon", "a", "--note", "new driver", "--json")
    assert json.loads(cordoned.out)["cordon_note"] == "new driver"
    explained = await real.fleet("explain", "--model", "demo", "--prompt-tokens", "3")
    assert "it would go to b" in explained.out
    assert "left out: cordoned" in explained.out
    await real.fleet("cordon", "b")
    refused = await real.fleet("generate", "--model", "demo", "--tokens", "1")
    assert (refused.code, refused.out) == (1, "")
    assert "[NO_ELIGIBLE_NODE]" in refused.err
    assert "try again in" in refused.err
    assert (await real.fleet("uncordon", "b")).code == 0
    assert (await real.fleet("generate", "--model", "demo", "--tokens", "1", "--max-new", "2")).code == 0


async def test_nodes_are_removed_added_and_probed(real: RealFleet) -> None:
    address = str((await real.nodes_as_json())["a"]["address"])
    assert (await real.fleet("nodes", "remove", "a")).code == 0
    assert set(await real.nodes_as_json()) == {"b"}
    again = await real.fleet("nodes", "add", address, "--json")
    assert json.loads(again.out)["state"] == "UP"
    twice = await real.fleet("nodes", "add", address)
    assert (twice.code, "[NODE_ALREADY_EXISTS]" in twice.err) == (1, True)
    assert (await real.fleet("nodes", "probe")).code == 0
    real.nodes["a"].kill()
    assert (await real.fleet("nodes", "probe", "a")).code == 1
    assert (await real.fleet("nodes", "remove", "c")).code == 1


async def run_python(*arguments: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def python_of(document: str) -> str:
    """The one block of Python in a document."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def printed_tokens(ended: Ended) -> list[int]:
    assert ended.code == 0, ended.err
    return [int(line.rpartition(" ")[2]) for line in ended.out.splitlines() if "token_ids:" in line]


async def test_the_first_session_of_the_readme_runs_and_is_the_example(real: RealFleet) -> None:
    block = python_of("README.md")
    ended = await run_python("-c", block.replace("127.0.0.1:8455", real.callers))
    assert printed_tokens(ended) == expected([1, 2, 3], 16)
    as_example = block.replace('"127.0.0.1:8455"', "address").replace('"demo"', "model")
    body = as_example.partition("as rpc\n\n")[2]
    assert textwrap.indent(body, "    ") in (ROOT / "examples/first_session.py").read_text(encoding="utf-8")
    ended = await run_python("-m", "examples.first_session", real.callers)
    assert printed_tokens(ended) == expected([1, 2, 3], 16)


async def test_the_first_session_says_what_is_wrong_when_no_node_is_up(real: RealFleet) -> None:
    for name, node in real.nodes.items():
        node.kill()
        assert (await real.fleet("nodes", "remove", name)).code == 0
    ended = await run_python("-m", "examples.first_session", real.callers)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("NOT_FOUND: no node serves model demo")
    ended = await run_python("-m", "examples.first_session", "127.0.0.1:1")
    assert (ended.code, ended.err.startswith("UNAVAILABLE: ")) == (1, True)


async def test_errors_are_read_as_the_document_says(real: RealFleet) -> None:
    found: dict[str, Any] = {}
    exec(python_of("docs/errors.md"), found)
    refusals = []
    with grpc.insecure_channel(real.callers) as channel, grpc.insecure_channel("127.0.0.1:1") as nowhere:
        request = CreateSessionRequest(spec=SessionSpec(model="other"))
        for each in (channel, nowhere):
            create: Any = fleet_service_pb2_grpc.FleetServiceStub(each).CreateSession
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(create, request)
            refusals.append(found["read_error"](caught.value))
        await real.fleet("cordon", "a")
        await real.fleet("cordon", "b")
        create = fleet_service_pb2_grpc.FleetServiceStub(channel).CreateSession
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(create, CreateSessionRequest(spec=SessionSpec(model=MODEL.name)))
    assert refusals == [("MODEL_NOT_FOUND", {"model": "other"}, None), ("", {}, None)]
    reason, metadata, retry_after_s = found["read_error"](caught.value)
    assert (reason, metadata) == ("NO_ELIGIBLE_NODE", {"model": MODEL.name, "cordoned": "2"})
    assert retry_after_s >= 1
