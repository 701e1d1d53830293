"""The command line.

Exit codes: 0 done; 1 refused, failed or unreachable; 2 wrong use or wrong settings; 130 interrupted.
"""

from __future__ import annotations

import os


def main() -> None:
    """Run the command `fleet`; never returns."""
    # gRPC's core writes notes of its own to standard error, between our lines; it reads this once, on import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from fleet_service.cli.root import app

    app()
