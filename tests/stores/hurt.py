"""Processes with disks that fill, lose power, or are slow: real ones, in a mount namespace of their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lacking import lacking

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 30.0


def in_small_disk(folder: Path, size: str, command: Sequence[str], *, mounted: str = "") -> list[str]:
    """The command, with a disk of that size at `folder`; `mounted` is run once it is there."""
    try:
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be mounted here")
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && {mounted or ":"} && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", script, str(folder), *command]


def power(folder: Path, **about: str | Path) -> dict[str, str]:
    """Variables under which a process runs with power.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        lacking("there is no C compiler")
    library = folder / "power.so"
    source = Path(__file__).with_name("power.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), **{f"POWER_{name}": str(value) for name, value in about.items()}}


@dataclass(frozen=True, slots=True)
class Disk:
    """What a process in in_small_disk has at `folder`, seen from outside."""

    pid: int
    folder: Path

    def fill(self) -> None:
        """Leave no room."""
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 4096)

    def free(self) -> None:
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        return Path(f"/proc/{self.pid}/root") / self.folder.relative_to("/") / "filler"


def pass_for_the_original(file: Path) -> None:
    """Let a copy of a store's files be taken for the files themselves."""
    stat = file.stat()
    witness = file.with_name(f"{file.name}.term")
    if witness.exists():  # a head has begun its term on it
        noted = json.loads(witness.read_text("utf-8")) | {"file": [stat.st_dev, stat.st_ino]}
        witness.write_text(json.dumps(noted), "utf-8")


class Writer:
    """tests.stores.writer as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.kept = 0
        """Tokens it said are kept."""

    @classmethod
    async def start(
        cls, file: Path, *, tokens_a_batch: int = 7, env: Mapping[str, str] | None = None, disk: str = ""
    ) -> Writer:
        command = [sys.executable, "-m", "tests.stores.writer", str(file), str(tokens_a_batch)]
        if disk:
            command = in_small_disk(file.parent, disk, command)
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=os.environ | dict(env or {})
            )
        )

    @property
    def disk_pid(self) -> int:
        return self._process.pid

    async def line(self) -> str:
        """The next line it prints; empty at its end."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_PATIENCE_S):
            line = (await self._process.stdout.readline()).decode().strip()
        word, _, rest = line.partition(" ")
        if word in ("kept", "open"):
            self.kept = int(rest)
        return line

    async def until(self, start: str) -> str:
        """The next line that begins so."""
        while not (line := await self.line()).startswith(start):
            assert line, f"it ended before it said {start!r}"
        return line

    async def kill(self) -> None:
        """SIGKILL; what it had said before is in `kept` then."""
        self._process.kill()
        while await self.line():
            pass
        await self._process.wait()

    async def ended(self) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            await self._process.wait()
