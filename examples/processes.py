"""Child processes for the demonstrations: started, awaited until ready, hurt on purpose, always cleaned up.

Every signal goes to one process by its id. The children's output goes to files, shown when something fails.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleet_service.client import CallError

READY_TIMEOUT_S = 30.0
INTERRUPTED = 130
_POLL_S = 0.05
_END_TIMEOUT_S = 2.0
_TAIL_LINES = 15


class DemoFailedError(Exception):
    """The demonstration cannot go on; the text says what to do."""


class ChildFailedError(Exception):
    """A child did not start, or ended by itself; the text has the end of what it printed."""


def command_of(name: str) -> str:
    """The path of a command that is installed beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


@dataclass(slots=True, eq=False)
class Child:
    """One process."""

    name: str
    command: Sequence[str]
    process: asyncio.subprocess.Process
    log: Path
    frozen: bool = False
    killed: bool = False

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say goodbye."""
        self.process.send_signal(signal.SIGKILL)
        self.killed = True

    def freeze(self) -> None:
        """SIGSTOP: it stays connected and says nothing."""
        self.process.send_signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)
        self.frozen = False

    def tail(self) -> str:
        """The last lines it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])


class Children:
    """Children that end with the block: `async with Children(folder) as children`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where their logs are."""
        self._started: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(_end(child) for child in self._started))

    async def start(self, name: str, command: Sequence[str], ready: str) -> tuple[Child, str]:
        """Start a command and wait for the line that begins with `ready`; gives that line as well.

        A head keeps what it has in a folder of its own, among these logs, unless the command names one.

        Raises ChildFailedError when it ends first, or is not ready within READY_TIMEOUT_S.
        """
        log = self.folder / f"{name}-{len(self._started)}.log"
        kept = {"FLEET_STORE__FOLDER": str(log.with_suffix(".kept"))}
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Out of the terminal's group: Ctrl-C reaches the demonstration alone, which ends them.
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | kept,
            )
        child = Child(name, command, process, log)
        self._started.append(child)
        return child, await _ready_line(child, ready)


async def _ready_line(child: Child, ready: str) -> str:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while True:
        for line in child.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(ready):
                return line
        if not child.alive:
            raise ChildFailedError(f"{child.name} ended with {child.process.returncode}:\n{child.tail()}")
        if time.monotonic() >= give_up_at:
            raise ChildFailedError(f"{child.name} was not ready in {READY_TIMEOUT_S:.0f} s:\n{child.tail()}")
        await asyncio.sleep(_POLL_S)


async def _end(child: Child) -> None:
    if child.frozen and child.alive:
        child.thaw()
    # The second SIGTERM cuts short what the first one lets end in peace.
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if not child.alive:
            return
        child.process.send_signal(number)
        try:
            await asyncio.wait_for(child.process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            continue


def run_to_exit_code(name: str, work: Callable[[Path], Coroutine[Any, Any, int]]) -> int:
    """Run a demonstration with a folder for its children's logs, kept when it fails; gives its exit code.

    SIGTERM ends it as Ctrl-C does: with its children cleaned up. What it raises as DemoFailedError,
    ChildFailedError, CallError or TimeoutError is told in a line.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"fleet-{name}-"))

    async def until_signal() -> int:
        task = asyncio.ensure_future(work(folder))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    code = 1
    try:
        code = asyncio.run(until_signal())
    except (DemoFailedError, ChildFailedError, CallError) as error:
        print(f"{name}: failed: {error}", file=sys.stderr)
    except TimeoutError:
        print(f"{name}: failed: it took too long", file=sys.stderr)
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = INTERRUPTED
    if code == 1:
        print(f"{name}: the logs of its processes are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return code
