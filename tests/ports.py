"""Ports for servers that are stopped and started again on the same one.

The system lends the ports of its ephemeral range to any connection, so one of those may be taken meanwhile.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator

_BELOW_EPHEMERAL = range(20_000, 32_000)


def _own_ports() -> Iterator[int]:
    """Of this process among those of a test run: a free one may be somebody's before it is listened on."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = _BELOW_EPHEMERAL[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    start = random.randrange(len(own))
    return itertools.cycle([*own[start:], *own[:start]])


_PORTS = _own_ports()


def quiet_port() -> int:
    """A port of 127.0.0.1 that is free now and that the system gives to nobody unasked."""
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("ports never end")
