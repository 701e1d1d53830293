"""The command `fleet-node`, by its entry point."""

from __future__ import annotations

import os


def main() -> None:
    """Run the command; never returns."""
    # gRPC's core writes notes of its own to standard error, between our lines; it reads this once, on import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from node_stub.command import app

    app(prog_name="fleet-node")
