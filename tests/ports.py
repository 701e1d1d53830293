"""Ports for servers that are stopped and started again on the same one.

The system lends the ports of its ephemeral range to any connection, so one of those may be taken meanwhile.
"""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)


def quiet_port() -> int:
    """A port of 127.0.0.1 that is free now and that the system gives to nobody unasked."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
