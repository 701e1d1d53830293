"""docs/node-contract.md and the check speak of the same rules."""

from __future__ import annotations

import re
from pathlib import Path

from fleet_service.conformance.runner import all_rules

TEXT = (Path(__file__).parents[2] / "docs" / "node-contract.md").read_text(encoding="utf-8")
RULE = re.compile(r"^\* \*\*N(\d+)\.\*\* ", re.MULTILINE)


def test_each_rule_stands_in_the_document_once_and_in_order() -> None:
    documented = [f"N{number}" for number in RULE.findall(TEXT)]
    assert sorted(documented, key=lambda number: int(number[1:])) == [rule.number for rule in all_rules()]
    assert len(documented) == len(set(documented))


def test_rule_numbers_have_no_gap() -> None:
    assert [rule.number for rule in all_rules()] == [f"N{n}" for n in range(1, len(all_rules()) + 1)]
