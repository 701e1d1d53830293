"""docs/parity.md leaves nothing out, and the modules and tests it names exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")

FUNCTIONS = [
    "PlacementPolicy",
    "NodeSpec",
    "RequestShape",
    "NodeReport",
    "FleetManager",
    "new",
    "with_pool_high",
    "with_options",
    "adopt",
    "connections",
    "load",
    "node_of",
    "with_retry_every",
    "advertised_context",
    "place",
    "append",
    "generate",
    "generate_streaming",
    "cancel",
    "park",
    "resume",
    "finish",
    "probe",
    "keepalive",
    "retry_down",
    "tend",
    "spawn_keepalive",
    "DEFAULT_POOL_HIGH_PCT",
    "DEFAULT_CONNS_PER_NODE",
    "MAX_CONNS_PER_NODE",
    "RETRY_DOWN_AFTER",
    "KEEPALIVE_EVERY",
    "TTL",
    "NOMINAL_DECODE",
    "NOMINAL_PREFILL",
    "JOINED",
]
BEHAVIOURS = [str(number) for number in range(1, 78)]
DEFECTS = [f"{kind}{n}" for kind, last in (("A", 7), ("B", 20), ("C", 13)) for n in range(1, last + 1)]

A_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
A_MODULE = re.compile(r"`([\w/]+\.py)`")
A_REASON = re.compile(r"not (?:here|yet): \w")
HEADINGS = {"no", "there"}


def rows() -> list[list[str]]:
    """The cells of every line of every table, without headings."""
    lines = [line.strip().strip("|").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    return [cells for line in lines if (cells := [cell.strip() for cell in line])[0] not in HEADINGS]


ROWS = rows()


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests of a file; none when there is no such file."""
    if not (ROOT / path).is_file():
        return frozenset()
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in defined if name.startswith("test_"))


def missing(text: str) -> list[str]:
    """What `text` names that does not exist."""
    tests = [f"{path}::{name}" for path, name in A_TEST.findall(text) if name not in names_in(path)]
    # A test written in another way than A_TEST reads would not be looked up.
    odd = [each for each in re.findall(r"`([^`]*::[^`]*)`", text) if not A_TEST.fullmatch(f"`{each}`")]
    modules = [path for path in A_MODULE.findall(text) if not (ROOT / path).is_file()]
    return tests + odd + modules


def test_every_test_and_module_that_is_named_exists() -> None:
    assert missing(TEXT) == []


def test_every_function_and_constant_is_there() -> None:
    first_cells = " ".join(cells[0] for cells in ROWS if len(cells) == 3)
    assert sorted(re.findall(r"`(\w+)`", first_cells)) == sorted(FUNCTIONS)


def test_every_behaviour_and_defect_is_there_once_in_its_order() -> None:
    assert [cells[0] for cells in ROWS if len(cells) == 4] == BEHAVIOURS + DEFECTS


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: re.sub(r"\W+", " ", cells[0]).strip())
def test_each_line_names_a_test_or_says_why_there_is_none(cells: list[str]) -> None:
    assert len(cells) in (3, 4)
    assert all(cells)
    assert A_TEST.search(cells[-1]) or A_REASON.match(cells[-1])


@pytest.mark.parametrize(
    "text",
    [
        "`tests/docs/test_parity.py::test_that_is_not_there`",
        "`tests/docs/test_nowhere.py::test_missing`",
        "`tests/docs/test_parity::test_every_function_and_constant_is_there`",
        "`fleet_service/nowhere.py`",
    ],
)
def test_what_does_not_exist_is_noticed(text: str) -> None:
    assert len(missing(text)) == 1
