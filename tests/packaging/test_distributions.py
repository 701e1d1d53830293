"""What a user installs: the wheel and the sdist carry the code, the generated stubs and the .proto files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_THE_WHEEL = (
    "fleet/v1/fleet_service_pb2.py",
    "fleet/v1/fleet_service_pb2.pyi",
    "fleet/v1/fleet_service_pb2_grpc.py",
    "fleet/v1/fleet_service.proto",
    "fleet/v1/errors.proto",
    "fleet/v1/service_config.json",
    "fleet/stub/v1/stub_service_pb2.py",
    "fleet_service/cli/__init__.py",
    "fleet_service/web/static/index.html",
    "fleet_service/web/static/page.js",
    "node_stub/cli.py",
    "node_stub/command.py",
    # With these, type checkers believe the annotations of whoever imports them.
    "fleet/py.typed",
    "fleet_service/py.typed",
    "node_stub/py.typed",
)
USE = (
    "from fleet.v1 import fleet_service_pb2 as pb, fleet_service_pb2_grpc as rpc\n"
    "import fleet, fleet_service.cli.root, node_stub.command\n"
    "assert rpc.FleetServiceStub and 'site' in fleet.__path__[0], fleet.__path__\n"
    "print(pb.CompleteRequest.DESCRIPTOR.full_name)\n"
)


def _build(kind: str, source: Path, into: Path) -> Path:
    """Build with the tools that are installed, so that no index is asked."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (built,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.mark.slow
def test_the_wheel_has_everything_a_user_needs(tmp_path: Path) -> None:
    wheel = _build("wheel", ROOT, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        assert set(IN_THE_WHEEL) <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    _use(tmp_path / "site")


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_is_the_same(tmp_path: Path) -> None:
    sdist = _build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    wheel = _build("wheel", source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert set(IN_THE_WHEEL) <= names
    assert not any("_gen" in name for name in names)


def _use(site: Path) -> None:
    """Import it with the dependencies of this interpreter, but none of this checkout."""
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    code = f"import sys; sys.path[:0] = [{str(site)!r}]; sys.path.append({dependencies!r})\n" + USE
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=site, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fleet.v1.CompleteRequest"
