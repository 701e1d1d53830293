"""`fleet conformance` as its user sees it: a table, JSON, exit codes, what to do about wrong use."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet_service.conformance.runner import all_rules
from node_stub.faults import parse_fault
from node_stub.tls import TlsFiles
from node_stub.token import FleetToken
from tests.certificates import Authority
from tests.conformance.support import stub
from tests.node_stub.support import process
from tests.ports import quiet_port

KEY = b"k" * 32
ALL_HOLD, SOME_BROKEN, WRONG_USE = 0, 1, 2


class Ended:
    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()

    @property
    def rows(self) -> dict[str, list[str]]:
        """The words of each rule's row, by its number."""
        rows = (line.split() for line in self.out.splitlines())
        return {words[0]: words[1:] for words in rows if words and words[0][1:].isdecimal()}


async def conformance(*arguments: str) -> Ended:
    command = (sys.executable, "-m", "fleet_service", "conformance", *arguments)
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await running.communicate()
    assert running.returncode is not None
    return Ended(running.returncode, out, err)


async def test_a_table_says_which_rules_hold() -> None:
    async with stub(link=False) as node:
        ended = await conformance(node.address)
    assert ended.code == ALL_HOLD, ended.out
    assert list(ended.rows) == [rule.number for rule in all_rules()]
    assert ended.rows["N25"][0] == "ok"
    assert ended.rows["N58"][0] == "skipped"
    assert "it does not announce LINK" in ended.out
    assert "engine: deterministic: yes" in ended.out
    assert ended.out.splitlines()[-1] == "tried, model stub: 56 ok, 7 skipped"
    assert not ended.err


async def test_a_broken_rule_is_told_with_what_was_seen() -> None:
    async with stub(faults=[parse_fault("after-tokens=3:skip-index")]) as node:
        ended = await conformance(node.address, "--rule", "N25", "--rule", "N26")
    assert ended.code == SOME_BROKEN
    assert ended.rows["N25"][0] == "broken"
    assert "seen: index 4 came, 3 was due" in ended.out
    assert ended.rows["N26"][0] == "ok"


async def test_rules_that_could_not_be_tried_are_not_taken_for_well() -> None:
    async with stub(faults=[parse_fault("before-assign:refuse=BUSY")]) as node:
        ended = await conformance(node.address, "--rule", "N25")
    assert ended.code == SOME_BROKEN
    assert ended.rows["N25"][0] == "skipped"
    assert "could not be tried: Assign of a new session: BUSY" in ended.out
    assert "not tried, as something before them did not work: N25" in ended.out


async def test_json_has_every_rule_and_what_was_seen() -> None:
    async with stub(faults=[parse_fault("after-generate:wrong-epoch")]) as node:
        ended = await conformance(node.address, "--json", "--rule", "N25", "--rule", "N26", "--rule", "N5")
    told = json.loads(ended.out)
    assert (ended.code, told["holds"]) == (SOME_BROKEN, False)
    assert (told["identity"], told["model"]) == ("tried", "stub")
    rules = {each["number"]: each for each in told["rules"]}
    assert {number: each["outcome"] for number, each in rules.items()} == {
        "N5": "skipped",
        "N25": "ok",
        "N26": "broken",
    }
    assert "a message names epoch 4294967298, the binding's is 4294967297" in rules["N26"]["seen"]


async def test_token_and_certificates_are_read_from_files(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(KEY.hex())
    authority = Authority(tmp_path)
    pair = authority.issue("node")
    tls = TlsFiles(cert=pair.cert, key=pair.key, ca=None)
    flags = ("--rule", "N5", "--rule", "N6", "--rule", "N27", "--node-ca", str(authority.ca))
    async with stub(token=FleetToken(KEY), tls=tls) as node:
        known = await conformance(node.address, *flags, "--token-file", str(token_file))
        unknown = await conformance(node.address, *flags)
    assert (known.code, [row[0] for row in known.rows.values()]) == (ALL_HOLD, ["ok"] * 3)
    assert unknown.code == WRONG_USE
    assert unknown.err == "fleet: it has a fleet token; give its file with --token-file\n"


async def test_a_node_whose_tls_differs_is_told_with_the_option_that_helps(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    pair = authority.issue("node")
    async with stub(tls=TlsFiles(cert=pair.cert, key=pair.key, ca=None)) as node:
        plain = await conformance(node.address, "--rule", "N1")
        unknown = await conformance(node.address, "--rule", "N1", "--node-ca", str(stranger.ca))
    for ended, advice in (
        (plain, "it may speak TLS (give --node-ca FILE)"),
        (unknown, "with --node-ca FILE"),
    ):
        assert ended.code == 1
        assert f"something listens at {node.address}, but" in ended.err
        assert advice in ended.err


async def test_a_node_of_another_fleet_says_so_and_is_tried_under_its_own() -> None:
    async with stub(fleet_id="blue") as node:
        refused = await conformance(node.address, "--rule", "N8")
        taken = await conformance(node.address, "--rule", "N8", "--fleet-id", "blue")
    assert refused.code == WRONG_USE
    assert refused.err == "fleet: give --fleet-id blue: the node serves that fleet and no other\n"
    assert taken.code == ALL_HOLD


@pytest.mark.parametrize(
    "arguments,expected",
    [
        ((), "Missing argument 'HOST:PORT'"),
        (("not an address",), "must be host:port"),
        (("127.0.0.1:1", "--rule", "N99"), "N99 is no rule: N1 to N63"),
        (("127.0.0.1:1", "--token-file", "/no/such/file"), "the fleet token cannot be read"),
        (("127.0.0.1:1", "--node-ca", "/no/such/file"), "/no/such/file cannot be read"),
        (("127.0.0.1:1", "--timeout", "0"), "--timeout"),
    ],
)
async def test_wrong_use_exits_with_2(arguments: tuple[str, ...], expected: str) -> None:
    ended = await conformance(*arguments)
    assert ended.code == WRONG_USE
    assert expected in " ".join(ended.err.split())


async def test_a_model_that_is_not_served_is_wrong_use() -> None:
    async with stub() as node:
        ended = await conformance(node.address, "--model", "other")
    assert (ended.code, ended.err) == (WRONG_USE, "fleet: it serves no model 'other', but stub\n")


async def test_where_no_node_is_nothing_holds() -> None:
    ended = await conformance(f"127.0.0.1:{quiet_port()}")
    assert ended.code == SOME_BROKEN
    assert "no node answers at 127.0.0.1:" in ended.err
    assert "connection refused" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault,seen",
    [
        ("after-tokens=3:freeze", "2 s were over while waiting for the finish of a generation"),
        ("after-tokens=3:die", "the call ended with UNAVAILABLE"),
    ],
)
async def test_a_process_that_freezes_or_dies_is_told_in_time(fault: str, seen: str) -> None:
    async with process("--fault", fault) as (node, address):
        ended = await conformance(address, "--rule", "N27", "--rule", "N28", "--timeout", "2")
        if node.returncode is None:
            node.kill()
    assert ended.code == SOME_BROKEN
    assert ended.rows["N27"][0] == "broken"
    assert seen in ended.out
    assert ended.rows["N28"][0] == "skipped"


async def test_it_leaves_a_node_as_it_was() -> None:
    async with stub() as node:
        ended = await conformance(node.address, "--rule", "N20", "--rule", "N25", "--rule", "N36")
        assert ended.code == ALL_HOLD
        assert node.node.rules.holdings() == []
        report: Any = node.node.report()
    assert (report.active_sessions, report.lanes_active, report.queue_depth) == (0, 0, 0)
