"""Builds the example clients, each with its language's own tools, once for as long as nothing changes.

What they download and build stays in the tools' own caches, in folders of the examples that git ignores, and
in build/clients.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lacking import lacking

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONTRACT = ROOT / "proto" / "fleet" / "v1"
BUILD = ROOT / "build" / "clients"
BUILT_FOLDERS = {"gen", "target", "node_modules", "dist"}


@dataclass(frozen=True)
class Toolchain:
    """How one example is built and run."""

    folder: str
    tools: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    run: tuple[str, ...]
    makes: Path


TOOLCHAINS = {
    "go": Toolchain(
        folder="go",
        tools=("go", "gofmt"),
        steps=(
            ("go", "generate"),
            ("go", "vet", "./..."),
            ("go", "build", "-o", str(BUILD / "fleet-client-go"), "."),
        ),
        run=(str(BUILD / "fleet-client-go"),),
        makes=BUILD / "fleet-client-go",
    ),
    "java": Toolchain(
        folder="java",
        tools=("java", "javac", "mvn"),
        steps=(("mvn", "--quiet", "--batch-mode", "--no-transfer-progress", "package"),),
        # The flags are for programs that live for seconds.
        run=(
            "java",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-jar",
            str(EXAMPLES / "java" / "target" / "fleet-client.jar"),
        ),
        makes=EXAMPLES / "java" / "target" / "fleet-client.jar",
    ),
    "typescript": Toolchain(
        folder="typescript",
        tools=("node", "npm"),
        steps=(("npm", "ci", "--no-audit", "--no-fund"), ("npm", "run", "build")),
        run=("node", str(EXAMPLES / "typescript" / "dist" / "src" / "main.js")),
        makes=EXAMPLES / "typescript" / "dist" / "src" / "main.js",
    ),
}
PYTHON = (sys.executable, "-m", "examples.python_client")
LANGUAGES = (*TOOLCHAINS, "python")


def command_for(language: str) -> tuple[str, ...]:
    """The command that runs a client, built where need be. Skips, or fails, where a tool is missing."""
    if language == "python":
        return PYTHON
    toolchain = TOOLCHAINS[language]
    for tool in toolchain.tools:
        require_tool(tool)
    BUILD.mkdir(parents=True, exist_ok=True)
    stamp = BUILD / f"{language}.stamp"
    # Several test processes may want it at once.
    with (BUILD / f"{language}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inputs = _digest(toolchain)
        if not (toolchain.makes.exists() and stamp.exists() and stamp.read_text() == inputs):
            stamp.unlink(missing_ok=True)
            for step in toolchain.steps:
                _run(step, EXAMPLES / toolchain.folder)
            stamp.write_text(inputs)
    return toolchain.run


def sources(folder: Path) -> Iterator[Path]:
    """The files of an example that were not built."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.name not in BUILT_FOLDERS:
            yield from sources(path)


def require_tool(tool: str) -> None:
    """Skip the test where the tool is missing; with REQUIRE_TOOLCHAINS=1 let it fail."""
    if shutil.which(tool) is not None:
        return
    lacking(f"{tool} is not installed; examples/README.md says what the clients are built with")


def _digest(toolchain: Toolchain) -> str:
    """Changes whenever what the client is made from does."""
    digest = hashlib.sha256(repr(toolchain).encode())
    for path in (*sources(EXAMPLES / toolchain.folder), *sources(CONTRACT)):
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _run(step: tuple[str, ...], folder: Path) -> None:
    # buf comes with this interpreter's environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        step, cwd=folder, env=os.environ | {"PATH": path}, check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.fail(f"{' '.join(step)} in {folder}:\n{done.stdout}{done.stderr}", pytrace=False)
