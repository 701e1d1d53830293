"""Addresses, host:port, and names, dns:///name:port: the ports by default, and how a text is taken apart."""

from __future__ import annotations

import errno
import ipaddress
import os
import re

NODE_PORT = 8454
CALLERS_PORT = 8455
ADMIN_PORT = 8456
JOIN_PORT = 8457
METRICS_PORT = 8458
PAGE_PORT = 8459

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_HIGHEST_PORT = 65_535

_BIND_ERRORS = {
    errno.EADDRINUSE: "the port is in use",
    errno.EADDRNOTAVAIL: "the address is none of this machine's",
    errno.EACCES: "the system does not allow that port",
}

NAME_SCHEME = "dns:///"
"""How an entry begins that stands for all the addresses of a name."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<name>{_LABEL}(?:\.{_LABEL})*\.?)(:(?P<port>[0-9]{{1,5}}))?")
_NAME_CHARS = 253
_NAME_RULE = f"must be dns:///NAME:PORT, for example dns:///nodes.example:{NODE_PORT}"


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


def why_not_bound(code: int) -> str:
    """What an error number says of an address that could not be listened on."""
    return _BIND_ERRORS.get(code) or os.strerror(code).lower()


def is_name(entry: str) -> bool:
    """Whether it is meant as a name, and not as the address of one node."""
    return entry.startswith("dns:")


def split_name(text: str) -> tuple[str, int]:
    """Take `dns:///NAME:PORT` apart: the name in lower case, the port a node's usual one where none is given.

    Raises ValueError, whose text continues the name of what was given.
    """
    if not text.startswith(NAME_SCHEME):
        advice = "; the system's DNS is asked, no other server can be named" if "://" in text else ""
        raise ValueError(f"{_NAME_RULE}, unlike {text}{advice}")
    rest = text.removeprefix(NAME_SCHEME)
    if _is_numeric(rest):
        raise ValueError(f"{_NAME_RULE}, unlike {text}: write an address in numbers without {NAME_SCHEME}")
    found = _NAME.fullmatch(rest)
    if found is None or len(found["name"].rstrip(".")) > _NAME_CHARS:
        raise ValueError(f"{_NAME_RULE}, unlike {text}")
    port = int(found["port"] or NODE_PORT)
    if not 1 <= port <= _HIGHEST_PORT:
        raise ValueError(f"must have a port from 1 to {_HIGHEST_PORT}, unlike {text}")
    return found["name"].lower(), port


def node_entry(text: str) -> str:
    """A node's address or a name, whole: with a node's usual port where none is given. Raises ValueError."""
    if is_name(text.strip()):
        name, port = split_name(text.strip())
        return f"{NAME_SCHEME}{name}:{port}"
    host, port = split_address(text, NODE_PORT)
    if port == 0:
        raise ValueError(f"must have a port of at least 1, unlike {text}")
    return f"{host}:{port}"


def _is_numeric(rest: str) -> bool:
    """An IPv4 or IPv6 address, or a number alone, with or without a port."""
    if rest.startswith("["):
        return True
    try:
        ipaddress.ip_address(rest)
    except ValueError:
        last_label = rest.partition(":")[0].rstrip(".").rpartition(".")[2]
        return last_label.isdecimal()
    return True
