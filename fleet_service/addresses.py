"""Addresses, host:port: the ports of head and node by default, and how such a text is taken apart."""

from __future__ import annotations

import re

NODE_PORT = 8454
CALLERS_PORT = 8455
ADMIN_PORT = 8456
JOIN_PORT = 8457

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_HIGHEST_PORT = 65_535


def split_address(
    text: str, default_port: int | None = None, *, example_port: int = CALLERS_PORT
) -> tuple[str, int]:
    """Take `host:port` apart; an IPv6 host keeps its brackets.

    Without `default_port` the port must be there; `example_port` is what the text of an error suggests.
    Raises ValueError, whose text continues the name of what was given.
    """
    found = _ADDRESS.fullmatch(text.strip())
    suggested = default_port or example_port
    if found is None:
        raise ValueError(f"must be host:port, for example 127.0.0.1:{suggested}")
    host, port = found["host"], found["port"] or default_port
    if host.isdecimal():
        # A number alone is the port that somebody meant; no host is named like that.
        number = int(host)
        meant = number if not found["port"] and 0 < number <= _HIGHEST_PORT else suggested
        raise ValueError(f"must be host:port, for example 127.0.0.1:{meant}")
    if port is None:
        raise ValueError(f"must name a port, for example {host}:{suggested}")
    if int(port) > _HIGHEST_PORT:
        raise ValueError(f"must have a port of at most {_HIGHEST_PORT}")
    return host, int(port)
