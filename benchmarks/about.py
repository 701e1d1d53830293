"""What a run was made with: versions, the machine, and how busy it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, runtime_checkable

from benchmarks.targets import SkippedError, Target


@dataclass(slots=True)
class About:
    """What a run was made with."""

    runs: int
    cores: int
    processor: str
    system: str
    versions: dict[str, str]
    load_average_before: float
    load_average_after: float = 0.0


@runtime_checkable
class Versioned(Protocol):
    """A target that knows its version."""

    async def version(self) -> str:
        """Raises SkippedError where it cannot be had."""


async def about(targets: Sequence[Target], runs: int) -> About:
    """Also installs what is to be installed, so that nothing is while it is measured."""
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("fleet-head", "grpcio", "protobuf", "uvloop")}
    for target in targets:
        if isinstance(target, Versioned):
            try:
                versions[target.name] = await target.version()
            except SkippedError as error:
                versions[target.name] = f"skipped: {error}"
    return About(runs, os.cpu_count() or 0, _processor(), platform.platform(), versions, os.getloadavg()[0])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
