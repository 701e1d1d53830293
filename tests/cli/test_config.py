"""Settings: which source wins, what is refused and how it is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from fleet_service import config_sources
from fleet_service.addresses import split_address
from fleet_service.app import link_settings
from fleet_service.config import FleetConfig, HeadConfig
from fleet_service.config_sources import (
    ConfigError,
    Loaded,
    UnusedVariable,
    leaf_fields,
    load,
    variable_of,
)
from fleet_service.links.settings import LinkSettings
from fleet_service.runtime.settings import HeadSettings

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "fleet.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def failure(
    flags: Mapping[str, tuple[str, Any]] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, file, environ or {})
    return str(caught.value)


def source_of(loaded: Loaded, name: str) -> str:
    return str(loaded.sources[name])


# ---------------------------------------------------------------------------------------------- who wins


def test_without_any_source_the_defaults_hold() -> None:
    loaded = load(environ={})
    assert loaded.config == FleetConfig()
    assert loaded.config.listen.callers == "127.0.0.1:8455"
    assert loaded.config.listen.admin == "127.0.0.1:8456"
    assert {str(source) for source in loaded.sources.values()} == {"default"}


def test_the_file_wins_over_defaults_the_environment_over_it_and_flags_over_all(write: Write) -> None:
    file = write('shutdown_grace_s = 1\n[head]\nsilence_s = 7\ntick_s = 2\npolicy = "round-robin"\n')
    environ = {"FLEET_HEAD__SILENCE_S": "8", "FLEET_HEAD__TICK_S": "3"}
    loaded = load({"head.silence_s": ("--set", "9")}, file, environ)
    assert loaded.config.head.silence_s == 9
    assert loaded.config.head.tick_s == 3
    assert loaded.config.head.policy == "round-robin"
    assert loaded.config.shutdown_grace_s == 1
    assert source_of(loaded, "head.silence_s") == "flag --set"
    assert source_of(loaded, "head.tick_s") == "environment FLEET_HEAD__TICK_S"
    assert source_of(loaded, "head.policy") == f"file {file}"
    assert source_of(loaded, "head.lease_s") == "default"


def test_a_section_can_be_given_as_json_in_one_variable() -> None:
    loaded = load(environ={"FLEET_HEAD": '{"tick_s": 2}', "FLEET_HEAD__SILENCE_S": "5"})
    assert (loaded.config.head.tick_s, loaded.config.head.silence_s) == (2, 5)
    assert source_of(loaded, "head.tick_s") == "environment FLEET_HEAD"


def test_the_environment_names_the_file(write: Write) -> None:
    file = write('nodes = ["10.0.0.7"]\n')
    assert load(environ={"FLEET_CONFIG": str(file)}).config.nodes == ("10.0.0.7:8454",)


@pytest.mark.parametrize("text", ["10.0.0.7,10.0.0.8:9000", " 10.0.0.7 , 10.0.0.8:9000 "])
def test_nodes_in_a_variable_are_separated_by_commas_and_get_the_node_port(text: str) -> None:
    assert load(environ={"FLEET_NODES": text}).config.nodes == ("10.0.0.7:8454", "10.0.0.8:9000")


def test_nothing_can_be_changed_afterwards() -> None:
    loaded = load(environ={})
    for section, name in ((loaded.config, "shutdown_grace_s"), (loaded.config.head, "tick_s")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, name, 3)


def test_variables_that_name_no_setting_are_told_and_those_of_the_command_line_are_not() -> None:
    environ = {"FLEET_HEED__TICK_S": "1", "FLEET_ADDRESS": "a:1", "FLEET_CONFIG": "", "FLEET_NODES": ""}
    environ |= {"FLEET_HEAD__SILENSE_S": "2", "FLEET_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    loaded = load(environ=environ)
    assert loaded.unused_variables == (
        UnusedVariable("FLEET_HEAD__SILENSE_S", meant="FLEET_HEAD__SILENCE_S"),
        UnusedVariable("FLEET_HEED__TICK_S", meant="FLEET_HEAD__TICK_S"),
        UnusedVariable("FLEET_SERVICE_HOST", meant=""),
    )
    assert loaded.config == FleetConfig()


# ------------------------------------------------------------------------------------------ what is wrong


def test_a_wrong_value_is_told_with_its_name_source_rule_and_meaning() -> None:
    text = failure(environ={"FLEET_HEAD__SILENCE_S": "-3"})
    assert text == (
        'head.silence_s = "-3" (environment FLEET_HEAD__SILENCE_S): must be greater than 0.\n'
        "    Silence of a node after which it gets no new work and its generations move."
    )


def test_everything_wrong_is_told_at_once_with_where_it_came_from(write: Write) -> None:
    file = write('[listen]\ncallers = "x"\n[head]\npolicy = "best"\n')
    text = failure(
        flags={"shutdown_grace_s": ("--shutdown-grace", -1.0)},
        file=file,
        environ={"FLEET_LOG__LEVEL": "loud"},
    )
    assert "shutdown_grace_s = -1.0 (flag --shutdown-grace): must be greater than or equal to 0." in text
    assert f'listen.callers = "x" (file {file}): must name a port, for example x:8455.' in text
    assert f"(file {file}): must be 'load-aware', 'least-loaded' or 'round-robin'." in text
    assert 'log.level = "loud" (environment FLEET_LOG__LEVEL): must be' in text


def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(write: Write) -> None:
    file = write("[head]\nsilense_s = 2\n")
    assert failure(file=file) == (
        f"head.silense_s (file {file}): there is no such setting. Did you mean head.silence_s?"
    )
    assert "Did you mean head.silence_s?" in failure(environ={"FLEET_HEAD": '{"silense_s": 2}'})
    assert "Did you mean head.silence_s?" in failure(flags={"head.silense_s": ("--set", "2")})


def test_settings_that_contradict_each_other_are_both_told() -> None:
    assert failure(environ={"FLEET_HEAD__LEASE_S": "30"}) == (
        "head.lease_renew_s must be less than head.lease_s: head.lease_renew_s = 40.0 (default), "
        'head.lease_s = "30" (environment FLEET_HEAD__LEASE_S).'
    )
    assert "links.report_period_s must be less than head.silence_s" in failure(
        environ={"FLEET_LINKS__REPORT_PERIOD_S": "7"}
    )
    assert "listen.callers and listen.admin must differ" in failure(
        environ={"FLEET_LISTEN__CALLERS": "127.0.0.1:8456"}
    )


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({"FLEET_NODES": "a,b,a"}, "must name each node once, unlike a:8454"),
        ({"FLEET_NODES": "a:0"}, "must have a port of at least 1"),
        ({"FLEET_NODES": "a:70000"}, "must have a port of at most 65535"),
        ({"FLEET_NODES": "a b"}, "must be host:port"),
        ({"FLEET_NODES": "9000"}, "must be host:port, for example 127.0.0.1:9000"),
        ({"FLEET_LISTEN__CALLERS": "9000"}, "must be host:port, for example 127.0.0.1:9000"),
        ({"FLEET_LISTEN__ADMIN": "h"}, "must name a port, for example h:8456"),
        ({"FLEET_LINKS": "5"}, "links (environment FLEET_LINKS): must be a section"),
        ({"FLEET_HEAD": "{x"}, "environment FLEET_HEAD: a section as a whole must be a JSON object"),
        ({"FLEET_HEAD__TICK_S": "nan"}, "must be a finite number"),
        ({"FLEET_HEAD__MAX_NODES": "1.5"}, "must be a valid integer"),
        ({"FLEET_TELEMETRY__OTLP_ENDPOINT": "collector"}, "telemetry.otlp_endpoint"),
        ({"FLEET_CONFIG": "/no/such/file"}, "configuration file /no/such/file: no such file or directory"),
    ],
)
def test_what_cannot_be_used_is_refused(environ: dict[str, str], expected: str) -> None:
    assert expected in failure(environ=environ)


def test_a_file_that_is_not_toml_is_told_with_the_line(write: Write) -> None:
    assert "is not TOML: " in failure(file=write("[head\n"))
    assert "line 2" in failure(file=write("a = 1\nb\n"))


@pytest.mark.parametrize(
    "text,parts", [("h:1", ("h", 1)), ("[::1]:8455", ("[::1]", 8455)), ("0.0.0.0:0", ("0.0.0.0", 0))]
)
def test_addresses_are_taken_apart(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", ":1", "h", "h:", "h:x", "::1:5", "h:-1", "http://h:1", "8455", "8455:8455"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        split_address(text)


# ------------------------------------------------------------------------------- nothing is left unreached


def test_every_number_of_the_runtime_is_a_setting_with_its_default() -> None:
    config = HeadConfig()
    assert {field.name for field in dataclasses.fields(HeadSettings)} == set(HeadConfig.model_fields)
    assert config.runtime_settings() == HeadSettings()


def test_every_number_of_links_is_a_setting_with_its_default() -> None:
    assert link_settings(FleetConfig()) == LinkSettings()


def test_every_setting_says_what_it_is_and_can_be_set_by_a_variable() -> None:
    for name, info in leaf_fields().items():
        assert info.description, name
        default = info.get_default()
        value = ",".join(default) if isinstance(default, tuple) else str(default)
        loaded = load(environ={variable_of(name): value})
        assert loaded.config == FleetConfig()
        assert source_of(loaded, name) == f"environment {variable_of(name)}"


def test_a_secret_is_masked_wherever_settings_are_shown() -> None:
    assert config_sources._plain(SecretStr("hunter2")) == config_sources.MASK
    assert config_sources._plain(SecretStr("")) == ""
