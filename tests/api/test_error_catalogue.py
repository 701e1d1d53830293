"""docs/errors.md, errors.proto and the table in the code say the same."""

import random
import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from fleet.v1.errors_pb2 import ErrorReason
from fleet_service.api.errors import GROWN_RULES, RULES, ErrorTranslator, Rule
from fleet_service.domain.errors import FleetError, Reason

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
PROTO = (ROOT / "proto" / "fleet" / "v1" / "errors.proto").read_text(encoding="utf-8")
PREFIX = "ERROR_REASON_"
CODES = {code.name for code in grpc.StatusCode}


def proto_comments() -> dict[str, str]:
    """Reason -> its comment in errors.proto."""
    found = re.findall(rf"((?:  //.*\n)+)  {PREFIX}([A-Z_]+) = \d+;", PROTO)
    return {
        name: " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
        for comment, name in found
        if name != "UNSPECIFIED"
    }


def tables() -> list[list[dict[str, str]]]:
    """Every table of the page, a row as column -> cell."""
    found: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", DOCS, flags=re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        header, _rule, *rows = lines
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def codes_in(text: str) -> set[str]:
    return {word for word in re.findall(r"[A-Z_]+", text) if word in CODES}


def details_of(reason: Reason, *, grown: bool) -> set[str]:
    error = FleetError(reason, "x", state_dependent=grown)
    status = ErrorTranslator(random.Random(0)).translate(error, "req-1").status
    return {detail.type_url.rpartition(".")[2] for detail in status.details}


CALL_ERRORS, CAUSES, NODE_ERRORS = tables()
DOCUMENTED = {row["Reason"]: row for row in CALL_ERRORS}


def test_every_reason_of_the_contract_is_documented_once_and_no_other() -> None:
    documented = [row["Reason"] for row in (*CALL_ERRORS, *CAUSES, *NODE_ERRORS)]
    in_proto = [name.removeprefix(PREFIX) for name, number in ErrorReason.items() if number]
    assert sorted(documented) == sorted(in_proto)
    assert set(proto_comments()) == set(in_proto)


def test_every_reason_the_head_raises_is_in_the_contract_and_the_other_way_round() -> None:
    node_to_head = {row["Reason"] for row in NODE_ERRORS}
    assert {reason.value for reason in Reason} | node_to_head == set(proto_comments())


def test_reasons_that_end_a_call_are_those_with_a_rule() -> None:
    assert {reason.value for reason in RULES} == set(DOCUMENTED)
    causes = {
        name for name, comment in proto_comments().items() if comment.startswith("Cause of finish ERROR")
    }
    assert {row["Reason"] for row in CAUSES} == causes
    assert not causes & set(DOCUMENTED)


@pytest.mark.parametrize("reason", list(RULES))
def test_code_details_and_retry_are_as_documented(reason: Reason) -> None:
    row = DOCUMENTED[reason.value]
    rules: list[tuple[Rule, bool]] = [(RULES[reason], False)]
    if reason in GROWN_RULES:
        rules.append((GROWN_RULES[reason], True))
    assert codes_in(row["Code"]) == {rule.code.name for rule, _ in rules}
    comment = proto_comments()[reason.value]
    assert codes_in(comment.partition(":")[0]) == {rule.code.name for rule, _ in rules}
    sent = set[str]().union(*(details_of(reason, grown=grown) for _, grown in rules))
    documented = {name for name in row["Details"].replace(" ", "").split(",") if name}
    assert sent - {"ErrorInfo", "RetryInfo"} == documented
    assert ("RetryInfo" in sent) == (row["Retry"] == "yes")
    assert row["What to do"]


@pytest.mark.parametrize("row", NODE_ERRORS, ids=lambda row: row["Reason"])
def test_node_errors_have_the_code_of_the_contract(row: dict[str, str]) -> None:
    assert codes_in(row["Code"]) == codes_in(proto_comments()[row["Reason"]].partition(" ")[0])


def test_details_named_in_the_docs_exist() -> None:
    named = {name for row in CALL_ERRORS for name in row["Details"].replace(" ", "").split(",") if name}
    assert all(hasattr(error_details_pb2, name) for name in named)
