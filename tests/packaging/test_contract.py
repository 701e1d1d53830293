"""The contract as one file, and the check that it breaks no program that is built on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
BUF = ROOT / ".venv" / "bin" / "buf"
TYPES = Path("proto/fleet/v1/types.proto")


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        command,
        cwd=folder,
        env=environ | {"BUF": str(BUF)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def git(folder: Path, *words: str) -> None:
    done = run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@example.com", *words)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that holds the contract and nothing else, without a release."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "proto", folder / "proto", ignore=shutil.ignore_patterns("_gen"))
    shutil.copy(ROOT / "buf.yaml", folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "The contract")
    return folder


def breaking(checkout: Path) -> tuple[int, str]:
    done = run(checkout, "proto/breaking")
    return done.returncode, done.stdout + done.stderr


def test_without_a_release_there_is_nothing_to_break(checkout: Path) -> None:
    git(checkout, "tag", "v0.1.0-rc1")
    assert breaking(checkout) == (
        0,
        "breaking: no release to compare with: there is no tag like v0.1.0 here\n",
    )


def test_the_newest_release_is_what_counts(checkout: Path) -> None:
    for tag in ("v0.9.0", "v0.10.0", "v0.2.0", "v0.11.0-rc1", "other"):
        git(checkout, "tag", tag)
    assert breaking(checkout) == (0, "breaking: compared with v0.10.0\n")


def test_a_field_that_is_gone_breaks_programs_and_one_that_is_new_does_not(checkout: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    text = (checkout / TYPES).read_text(encoding="utf-8")
    more = text + "\n// More.\nmessage More {\n  // One.\n  string one = 1;\n}\n"
    (checkout / TYPES).write_text(more, encoding="utf-8")
    assert breaking(checkout)[0] == 0
    (checkout / TYPES).write_text(text.replace("uint32 top_k = ", "uint32 top_n = "), encoding="utf-8")
    code, said = breaking(checkout)
    assert code != 0
    assert "top_k" in said


def test_the_contract_as_one_file_has_every_service(tmp_path: Path) -> None:
    image = tmp_path / "fleet.binpb"
    assert run(ROOT, BUF, "build", "-o", image).returncode == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    services = {f"{file.package}.{service.name}" for file in files for service in file.service}
    assert {f"fleet.v1.{name}Service" for name in ("Fleet", "Admin", "Node", "Join", "Link")} <= services
