"""Help, wrong use and `fleet config`: what the command line says before it speaks to any head."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet_service import __version__
from fleet_service.cli.root import app
from fleet_service.config_sources import leaf_fields

COMMANDS = [
    ["serve"],
    ["config"],
    ["nodes"],
    ["nodes", "add"],
    ["nodes", "remove"],
    ["nodes", "probe"],
    ["cordon"],
    ["uncordon"],
    ["sessions"],
    ["sessions", "finish"],
    ["sessions", "cancel"],
    ["token"],
    ["access", "add"],
    ["store", "check"],
    ["store", "stats"],
    ["store", "copy"],
    ["generate"],
    ["attach"],
    ["explain"],
    ["doctor"],
    ["conformance"],
]


Run = Callable[..., Any]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Run:
    # Those of the tests themselves name no setting, and the head would tell of them.
    for name in [name for name in os.environ if name.startswith("FLEET_")]:
        monkeypatch.delenv(name)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return lambda *args: runner.invoke(app, list(args))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_examples_that_call_the_command(fleet: Run, command: list[str]) -> None:
    result = fleet(*command, "--help")
    assert result.exit_code == 0
    _, _, shown = result.output.partition("Examples:")
    assert f"fleet {' '.join(command)}" in shown


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_names_the_model_as_the_readme_does(fleet: Run, command: list[str]) -> None:
    models = re.findall(r"--model (?!TEXT)(\S+)", fleet(*command, "--help").output.partition("Examples:")[2])
    assert set(models) <= {"demo"}


@pytest.mark.parametrize("command", [[], ["access"], *COMMANDS], ids=" ".join)
def test_help_at_100_columns_says_no_type_of_a_flag_and_breaks_no_line_early(
    fleet: Run, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [*command, "--help"]).output
    assert "<bool>" not in shown
    about = shown.partition("╭")[0].splitlines()
    for line, below in itertools.pairwise(about):
        if line.strip() and below.strip():
            assert len(f"{line.rstrip()} {below.split()[0]}") >= 99, line


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_examples_in_help_name_no_address_that_may_be_somebodys(fleet: Run, command: list[str]) -> None:
    numbers = set(re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", fleet(*command, "--help").output))
    assert numbers <= {"127.0.0.1", "0.0.0.0"}


def test_the_help_of_a_head_without_authentication_names_all_it_gives_up(fleet: Run) -> None:
    shown = " ".join(fleet("serve", "--help").output.replace("│", " ").split())
    assert "neither nodes for a fleet token, nor callers and operators for access tokens" in shown


def test_help_lists_every_command(fleet: Run) -> None:
    output = fleet("--help").output
    for command in COMMANDS:
        assert command[0] in output


def test_the_version_is_shown(fleet: Run) -> None:
    assert fleet("--version").output == f"fleet {__version__}\n"


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["bogus"], "No such command 'bogus'"),
        (["nodes", "add"], "Missing argument 'HOST:PORT'"),
        (["generate", "--tokens", "1"], "say --model NAME"),
        (["generate", "--model", "m"], "say --tokens IDS"),
        (["generate", "--model", "m", "--tokens", "1,x"], "'x' is no token id"),
        (["generate", "--model", "m", "--tokens", str(1 << 32)], "is no token id"),
        (["generate", "--model", "m", "--tokens", "1", "--max-new", "-1"], "--max-new"),
        (["generate", "--model", "m", "--tokens", "1", "--label", "zone"], "write KEY=VALUE"),
        (["generate", "--session", "s", "--label", "zone=a"], "--label is for a new session"),
        (["explain"], "say either --session ID or --model NAME"),
        (["explain", "--session", "s", "--model", "m"], "say either --session ID or --model NAME"),
        (["config", "--set", "head.tick_s"], "write NAME=VALUE"),
        (["sessions", "--state", "asleep"], "asleep"),
        (["sessions", "--address", "8455"], "'8455' must be host:port, for example 127.0.0.1:8455"),
        (["nodes", "--admin-address", "a b"], "'a b' must be host:port, for example 127.0.0.1:8456"),
        (["nodes", "add", "8454"], "'8454' must be host:port, for example 127.0.0.1:8454"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(
    fleet: Run, arguments: list[str], expected: str
) -> None:
    result = fleet(*arguments)
    assert result.exit_code == 2
    assert expected in result.output


def test_wrong_settings_exit_with_2_and_are_explained(fleet: Run) -> None:
    result = fleet("config", "--set", "head.tick_s=-1")
    assert result.exit_code == 2
    assert 'head.tick_s = "-1" (flag --set): must be greater than 0.' in result.output


def test_serve_refuses_wrong_settings_before_it_listens(fleet: Run) -> None:
    result = fleet("serve", "--node", "a:1", "--node", "a:1", "--log-level", "loud")
    assert result.exit_code == 2
    assert "nodes = " in result.output
    assert "(flag --node): must name each node once" in result.output
    assert "(flag --log-level): must be" in result.output
    lone_ports = fleet("serve", "--listen", "9000", "--node", "9001").output
    assert "(flag --listen): must be host:port, for example 127.0.0.1:9000." in lone_ports
    assert "(flag --node): must be host:port, for example 127.0.0.1:9001." in lone_ports


def test_config_prints_a_file_that_gives_the_same_settings_again(fleet: Run, tmp_path: Path) -> None:
    printed = fleet("config", "--set", "head.silence_s=3.5", "--set", "nodes=10.0.0.7,10.0.0.8:1").output
    values = tomllib.loads(printed)
    assert values["head"]["silence_s"] == 3.5
    assert values["nodes"] == ["10.0.0.7:8454", "10.0.0.8:1"]
    file = tmp_path / "fleet.toml"
    file.write_text(printed, encoding="utf-8")
    again = fleet("config", "--config", str(file)).output
    assert tomllib.loads(again) == values


def test_config_says_where_each_value_came_from(
    fleet: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would go on in a second line
    file = Path("fleet.toml")
    file.write_text("[head]\ntick_s = 2\n", encoding="utf-8")
    monkeypatch.setenv("FLEET_HEAD__SILENCE_S", "5")
    lines: list[str] = fleet("config", "--config", str(file), "--set", "head.lease_s=90").output.splitlines()

    def comment(name: str) -> str:
        return next(line.partition("  # ")[2] for line in lines if line.startswith(f"{name} = "))

    assert comment("silence_s").startswith("environment FLEET_HEAD__SILENCE_S: Silence of a node")
    assert comment("tick_s").startswith(f"file {file}: Period")
    assert comment("lease_s").startswith("flag --set: How long")
    assert comment("lease_renew_s").startswith("default: Age")


def test_config_as_json_has_value_source_and_meaning_of_every_setting(
    fleet: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_HEAD__SILENCE_S", "5")
    settings = json.loads(fleet("config", "--json").stdout)
    assert set(settings) == set(leaf_fields())
    assert settings["head.silence_s"] == {
        "value": 5.0,
        "source": "environment",
        "from": "FLEET_HEAD__SILENCE_S",
        "description": leaf_fields()["head.silence_s"].description,
    }
    assert settings["nodes"]["value"] == []


def test_config_lines_are_short_enough_to_read(fleet: Run) -> None:
    lines = fleet("config").output.splitlines()
    assert max(map(len, lines)) <= 120
    assert all(line.partition("  # ")[2] for line in lines if line and not line.startswith("["))


@pytest.mark.parametrize(
    "variable,hint",
    [
        ("FLEET_HAED__SILENCE_S", "did you mean FLEET_HEAD__SILENCE_S?"),
        ("FLEET_HEAD__SILENSE_S", "did you mean FLEET_HEAD__SILENCE_S?"),
        ("FLEET_SERVICE_HOST", "`fleet config` lists them"),
    ],
)
def test_config_warns_of_variables_that_name_no_setting(
    fleet: Run, monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
) -> None:
    monkeypatch.setenv(variable, "5")
    result = fleet("config")
    assert result.exit_code == 0
    assert f"fleet: {variable} is set, but names no setting and is ignored; {hint}\n" in result.stderr
