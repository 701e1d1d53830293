"""A head as a process, on free ports, that logs only errors."""

from __future__ import annotations

from examples.processes import Child, Children, command_of

QUIET = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--log-level", "error")


async def start_head(children: Children, *more: str) -> tuple[Child, str]:
    """The process, and the line that says where it serves."""
    return await children.start("head", [command_of("fleet"), "serve", *QUIET, *more], "fleet: serving")
