"""What is published for clients of every language beside the contract, and what their examples promise."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files

from fleet.v1 import fleet_service_pb2
from tests.clients.toolchains import EXAMPLES, require_tool, sources

SERVICE = fleet_service_pb2.DESCRIPTOR.services_by_name["FleetService"]
CONFIG = json.loads(files("fleet.v1").joinpath("service_config.json").read_text(encoding="utf-8"))
GENERATING = {"Generate", "GenerateAll", "Complete", "AttachGeneration"}


def test_the_service_config_names_every_method_of_callers_once() -> None:
    named = [name for each in CONFIG["methodConfig"] for name in each["name"]]
    assert {name["service"] for name in named} == {SERVICE.full_name}
    assert sorted(name["method"] for name in named) == sorted(SERVICE.methods_by_name)


def test_every_call_has_a_timeout_but_those_whose_length_the_caller_chooses() -> None:
    unlimited = {
        name["method"] for each in CONFIG["methodConfig"] if "timeout" not in each for name in each["name"]
    }
    assert unlimited == GENERATING | {"Connect"}


def test_a_connection_is_never_repeated_with_the_calls_that_were_sent_on_it() -> None:
    (of_connect,) = [
        each for each in CONFIG["methodConfig"] if any(name["method"] == "Connect" for name in each["name"])
    ]
    assert of_connect.keys() == {"name"}


def test_an_append_is_never_repeated_because_its_connection_broke() -> None:
    (policy,) = [
        each["retryPolicy"]
        for each in CONFIG["methodConfig"]
        if any(name["method"] == "AppendTokens" for name in each["name"])
    ]
    assert policy["retryableStatusCodes"] == ["RESOURCE_EXHAUSTED"]


def test_the_go_client_is_formatted() -> None:
    require_tool("gofmt")
    code = [str(path) for path in sources(EXAMPLES / "go") if path.suffix == ".go"]
    assert code
    done = subprocess.run(["gofmt", "-l", *code], check=True, capture_output=True, text=True)
    assert done.stdout == ""
