"""`fleet access` and a head that asks who calls, as commands and processes."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from examples.processes import Children, command_of
from node_stub.reference import StubModel, reference_tokens
from tests.certificates import Authority
from tests.cli.test_token import run, said


async def test_those_who_may_call_are_added_shown_and_removed_and_their_tokens_never_kept(
    tmp_path: Path,
) -> None:
    file, kept = tmp_path / "etc" / "access.toml", tmp_path / "dash.token"
    where = ["--file", str(file)]
    added = await run("fleet", "access", "add", "frontend", "--may", "call", "--model", "demo", *where)
    assert added.code == 0
    token = added.out.strip()
    assert re.fullmatch(r"fleet_[A-Za-z0-9_-]{43}", token)
    both = ["--may", "read", "--may", "operate"]
    assert (await run("fleet", "access", "add", "ops.eu", *both, "--token-file", str(kept), *where)).out == ""
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    gateway = ["--may", "call", "--certificate", "gateway.example"]
    assert (await run("fleet", "access", "add", "gateway", *gateway, *where)).out == ""
    listed = json.loads((await run("fleet", "access", "list", "--json", FLEET_ACCESS_FILE=str(file))).out)
    assert listed["access"] == [
        {"name": "frontend", "known_by": "token", "may": ["call"], "models": ["demo"]},
        {"name": "gateway", "known_by": "certificate gateway.example", "may": ["call"], "models": []},
        {"name": "ops.eu", "known_by": "token", "may": ["operate", "read"], "models": []},
    ]
    shown = await run("fleet", "access", "list", *where)
    assert "frontend" in shown.out
    for secret in (token, kept.read_text().strip()):
        assert secret not in file.read_text() + shown.out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    assert (await run("fleet", "access", "remove", "frontend", *where)).code == 0
    assert "frontend" not in (await run("fleet", "access", "list", *where)).out
    gone = await run("fleet", "access", "remove", "frontend", *where)
    assert (gone.code, "has no frontend; it has gateway, ops.eu" in said(gone)) == (2, True)
    twice = await run("fleet", "access", "add", "gateway", *gateway, *where)
    assert (twice.code, "has gateway already" in said(twice)) == (2, True)
    taken = await run("fleet", "access", "add", "new", *both, "--token-file", str(kept), *where)
    assert (taken.code, "choose another --token-file" in said(taken)) == (2, True)
    odd = await run("fleet", "access", "add", "a b", "--may", "call", *where)
    assert odd.code == 2


@pytest.mark.parametrize(
    "content,told",
    [
        ("[a", "is no TOML"),
        ('[a]\nmay = ["call"]', "must have either sha256 or certificate"),
        ('[a]\nsha256 = "x"\nmay = ["call"]', "sha256 must be 64 hexadecimal characters"),
        ('[a]\ncertificate = "c"\nmay = ["fly"]', "may must name some of call, read, operate"),
        ('[a]\ncertificate = "c"\nmay = "call"', "must be lists of texts"),
        ('[a]\ncertificate = "c"\nmay = ["call"]\ntoken = "t"', "not token"),
        (
            '[a]\ncertificate = "c"\nmay = ["call"]\n[b]\ncertificate = "c"\nmay = ["call"]',
            "same certificate",
        ),
        ("a = 1", "[a]: must be a table"),
    ],
)
async def test_a_file_that_makes_no_sense_stops_the_start_and_is_told(
    tmp_path: Path, content: str, told: str
) -> None:
    file = tmp_path / "access.toml"
    file.write_text(content)
    ended = await run("fleet", "serve", "--listen", "127.0.0.1:0", "--set", f"access_file={file}")
    assert ended.code == 2
    assert told in said(ended)


async def test_a_guarded_head_serves_beyond_this_machine_and_the_commands_work_with_token_and_tls(
    tmp_path: Path,
) -> None:
    authority, access = Authority(tmp_path), tmp_path / "access.toml"
    pair = authority.issue("head")
    tokens = {name: tmp_path / f"{name}.token" for name in ("caller", "reader")}
    for name, may in (("caller", "call"), ("reader", "read")):
        flags = ["--may", may, "--token-file", str(tokens[name]), "--file", str(access)]
        assert (await run("fleet", "access", "add", name, *flags)).code == 0
    async with Children(tmp_path) as children:
        command = [command_of("fleet-node"), "--model", "demo", "--listen", "127.0.0.1:0", "--grace", "0"]
        _, line = await children.start("node", command, "fleet-node: ")
        command = [command_of("fleet"), "serve", "--node", line.rpartition(" ")[2], "--log-level", "debug"]
        command += ["--listen", "0.0.0.0:0", "--admin-listen", "0.0.0.0:0"]
        for name in ("callers_tls", "admin_tls"):
            command += ["--set", f"{name}.cert_file={pair.cert}", "--set", f"{name}.key_file={pair.key}"]
        head, line = await children.start(
            "head", [*command, "--set", f"access_file={access}"], "fleet: serving"
        )
        found = re.search(r"callers on 0.0.0.0:(\d+), admin on 0.0.0.0:(\d+)", line)
        assert found
        places = {
            "FLEET_ADDRESS": f"localhost:{found[1]}",
            "FLEET_ADMIN_ADDRESS": f"localhost:{found[2]}",
            "FLEET_TLS_CA": str(authority.ca),
        }
        asked = ["generate", "--model", "demo", "--tokens", "1,2,3", "--max-new", "9"]
        answer = await run("fleet", *asked, **places, FLEET_ACCESS_TOKEN_FILE=str(tokens["caller"]))
        expected = reference_tokens(StubModel("demo"), 0, [1, 2, 3], 9)
        assert [int(token) for token in answer.out.split()] == expected
        flagged = await run("fleet", "--access-token-file", str(tokens["reader"]), "nodes", **places)
        assert flagged.code == 0
        assert "UP" in flagged.out.upper()
        without = await run("fleet", "nodes", **places)
        assert (without.code, "CREDENTIALS_REFUSED" in said(without)) == (1, True)
        assert "--access-token-file" in said(without)
        denied = await run("fleet", "--access-token-file", str(tokens["reader"]), *asked, **places)
        assert (denied.code, "PERMISSION_DENIED" in said(denied)) == (1, True)
        absent = await run("fleet", "--access-token-file", str(tmp_path / "absent"), "nodes", **places)
        assert (absent.code, "cannot be read" in said(absent)) == (2, True)
        log = head.log.read_text()
        assert "caller=caller" in log
        assert not any(token.read_text().strip() in log for token in tokens.values())
