"""What is read of processes while they are measured, and small helps for starting them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.loads import cpu_s
from examples.processes import Child, ChildFailedError, Children

_POLL_S = 0.05


def python(module: str, *flags: str) -> list[str]:
    """The command that runs one of the benchmarks' modules."""
    return [sys.executable, "-m", f"benchmarks.{module}", *flags]


def with_children(pids: Iterable[int]) -> list[int]:
    """Those processes, and all that come from them, as far as they live."""
    found: list[int] = []
    left = list(pids)
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            left += [int(child) for task in tasks for child in (task / "children").read_text("ascii").split()]
            found.append(pid)
    return found


def all_cpu_s(pids: Iterable[int]) -> float:
    """CPU time that those processes and their children have used."""
    return sum(cpu_s(pid) for pid in with_children(pids))


def all_rss_bytes(pids: Iterable[int]) -> int:
    """Memory of theirs that is resident."""
    return sum(_rss_bytes(pid) for pid in with_children(pids))


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def start_listening(
    children: Children, name: str, command: Sequence[str], port: int, timeout_s: float = 60.0
) -> Child:
    """Start a program that says nothing when it is ready, and wait until it takes connections on that port.

    Raises ChildFailedError when it ends first or takes too long.
    """
    child, _ = await children.start(
        name, ["sh", "-c", 'echo starting; exec "$@"', "sh", *command], "starting"
    )
    give_up_s = time.monotonic() + timeout_s
    while child.alive and time.monotonic() < give_up_s:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return child
        await asyncio.sleep(_POLL_S)
    raise ChildFailedError(f"{name} did not come to listen on {port}:\n{child.tail()}")
