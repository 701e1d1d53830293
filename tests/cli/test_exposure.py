"""What a head says at its start of listeners that other machines reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from fleet_service.config import FleetConfig
from fleet_service.config_sources import ConfigError, load
from fleet_service.exposure import warn_of_clear_tokens


def failure(**settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load({name.replace("__", "."): ("--set", value) for name, value in settings.items()}, None, {})
    return str(caught.value)


def test_every_listener_that_lacks_something_is_told_at_once_and_none_twice() -> None:
    names = ("callers", "admin", "join", "page")
    listen = {f"listen__{name}": f"0.0.0.0:{8455 + n}" for n, name in enumerate(names)}
    text = failure(**listen)
    lines = text.splitlines()
    assert [line.partition(" is ")[0] for line in lines[:-1]] == [
        "listen.callers",
        "listen.admin",
        "listen.page",
        "listen.page",
        "listen.join",
    ]
    assert "insecure_no_auth" in lines[-1]
    assert all(
        text.count(f"{address}, which") == 1 + (name == "listen__page") for name, address in listen.items()
    )
    assert "(default)" not in text


@pytest.mark.parametrize(
    "given,told",
    [
        ({"callers_tls__cert_file": "c"}, "callers_tls: cert_file given without key_file"),
        ({"admin_tls__key_file": "k"}, "admin_tls: key_file given without cert_file"),
        (
            {"join_tls__client_ca_file": "a"},
            "join_tls: client_ca_file given without cert_file and key_file",
        ),
        (
            {"node_tls__enabled": "true", "node_tls__key_file": "k"},
            "node_tls: key_file given without cert_file",
        ),
        ({"node_tls__ca_file": "a"}, "node_tls.enabled must be true for node_tls.ca_file to count"),
    ],
)
def test_a_half_given_certificate_is_told_by_the_half_that_is_missing(
    given: dict[str, str], told: str
) -> None:
    assert told in failure(**given)


TLS = {"cert_file": "c", "key_file": "k"}


@pytest.mark.parametrize(
    "settings,listeners",
    [
        ({"listen": {"callers": "0.0.0.0:1"}}, "listen.callers 0.0.0.0:1"),
        ({"listen": {"callers": "0.0.0.0:1"}, "callers_tls": TLS}, ""),
        ({"listen": {"callers": "0.0.0.0:1", "admin": "[::]:2"}, "callers_tls": TLS}, "listen.admin [::]:2"),
        ({}, ""),
    ],
)
def test_access_tokens_that_would_cross_the_network_in_clear_are_warned_of_at_the_start(
    settings: dict[str, dict[str, str]], listeners: str, tmp_path: Path
) -> None:
    config = FleetConfig.model_validate({"access_file": str(tmp_path / "access.toml"), **settings})
    with structlog.testing.capture_logs() as logs:
        warn_of_clear_tokens(config)
    assert [each["listeners"] for each in logs] == ([listeners] if listeners else [])
    assert all(each["log_level"] == "warning" for each in logs)
