"""Builds the Python package `fleet` out of `proto/fleet/**.proto`.

Hatchling runs it for wheels and editable installs; `python proto/build_hook.py` runs it by hand after a
change to the contract. The package goes to `proto/_gen/fleet`, which git ignores: messages, stubs and
servicers, the types of all of them, and the .proto files themselves with the service config beside them, so
that whoever installs the wheel can compile against them.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("proto")
GENERATED = Path("proto/_gen")
PACKAGE = "fleet"
INIT = '"""Generated from the .proto files beside it. Not to be edited."""\n'


class ProtoError(Exception):
    """The contract could not be compiled."""


class ProtoBuildHook(BuildHookInterface[Any]):
    """Generates the package, and puts it into the wheel as top-level `fleet`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        generate(root)
        # An editable install finds it in place, through dev-mode-dirs.
        if version != "editable":
            build_data["force_include"][str(root / GENERATED / PACKAGE)] = PACKAGE


def generate(root: Path) -> list[Path]:
    """Compile every .proto file and return the files whose content changed."""
    protos = sorted((root / SOURCES / PACKAGE).rglob("*.proto"))
    if not protos:
        raise ProtoError(f"no .proto files under {SOURCES / PACKAGE}")
    target = root / GENERATED
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".new-") as directory:
        fresh = Path(directory)
        _compile(root, protos, fresh)
        for file in [*protos, *(root / SOURCES / PACKAGE).rglob("*.json")]:
            shutil.copyfile(file, fresh / file.relative_to(root / SOURCES))
        for folder in [fresh / PACKAGE, *(f for f in (fresh / PACKAGE).rglob("*") if f.is_dir())]:
            (folder / "__init__.py").write_text(INIT, encoding="utf-8")
        (fresh / PACKAGE / "py.typed").touch()
        return _replace(fresh / PACKAGE, target / PACKAGE)


def _compile(root: Path, protos: list[Path], out: Path) -> None:
    well_known = files("grpc_tools") / "_proto"
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        *(f"--proto_path={root / SOURCES}", f"--proto_path={well_known}"),
        *(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"),
    ]
    if plugin := _tool("protoc-gen-mypy_grpc"):
        command += [f"--plugin=protoc-gen-mypy_grpc={plugin}", f"--mypy_grpc_out=quiet:{out}"]
    done = subprocess.run(  # noqa: S603 - every part of the command is ours
        [*command, *map(str, protos)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise ProtoError(f"protoc failed:\n{done.stderr or done.stdout}")


def _tool(name: str) -> str | None:
    # A build environment puts its scripts on PATH; a plain interpreter has them beside itself.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


def _replace(fresh: Path, target: Path) -> list[Path]:
    """Make `target` equal to `fresh` file by file, so that programs that are running never miss one."""
    wanted = {file.relative_to(fresh) for file in fresh.rglob("*") if file.is_file()}
    changed = []
    for name in sorted(wanted):
        new, old = fresh / name, target / name
        if old.is_file() and old.read_bytes() == new.read_bytes():
            continue
        old.parent.mkdir(parents=True, exist_ok=True)
        new.replace(old)
        changed.append(old)
    for file in sorted(target.rglob("*")):
        stale = file.is_file() and "__pycache__" not in file.parts and file.relative_to(target) not in wanted
        if stale:
            file.unlink()
            changed.append(file)
    return changed


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    try:
        changed = generate(root)
    except ProtoError as error:
        print(error, file=sys.stderr)
        return 1
    outcome = f"{len(changed)} files changed" if changed else "up to date"
    print(f"{GENERATED / PACKAGE}: {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
