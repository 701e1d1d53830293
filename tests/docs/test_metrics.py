"""docs/metrics.md lists every family that the endpoint has, with type and labels, and no other."""

from __future__ import annotations

import re
import sys

import pytest

from fleet_service.domain.events import FinishReason, MoveCause
from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import NodeState
from fleet_service.domain.placement import POLICY_NAMES
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import Qos
from tests.telemetry.catalogue import Family, documented, everything, rows
from tests.telemetry.scraping import Scrape, parsed


def families(scrape: Scrape) -> list[Family]:
    found = []
    for name, family in scrape.families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        found.append(Family(name + suffix, family.type, frozenset(labels)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the process_ families are there on Linux only")
async def test_the_document_and_the_endpoint_have_the_same_families() -> None:
    told, real = documented(), families(parsed(await everything()))
    assert sorted((*each[:2], *sorted(each.labels)) for each in told) == sorted(
        (*each[:2], *sorted(each.labels)) for each in real
    )


async def test_every_family_says_in_its_help_what_it_is() -> None:
    scrape = parsed(await everything())
    assert [name for name, family in scrape.families.items() if not family.documentation] == []


async def test_every_label_is_explained_and_none_that_is_not_there() -> None:
    told = {name.strip("`") for name, _values in rows(2)}
    used = {label for family in documented() for label in family.labels}
    assert told == used - {"version", "fleet_id", "head_id"}


def values_of(label: str) -> str:
    (told,) = [text for name, text in rows(2) if name == f"`{label}`"]
    return told


@pytest.mark.parametrize(
    "label, values",
    [
        ("finish", [reason.value for reason in FinishReason]),
        ("qos", [qos.name for qos in Qos]),
        ("policy", POLICY_NAMES),
        ("state", [state.value for state in (*SessionState, *NodeState)]),
    ],
)
def test_the_values_of_a_label_are_those_there_are(label: str, values: list[str]) -> None:
    assert re.findall(r"`([\w-]+)`", values_of(label)) == list(values)


@pytest.mark.parametrize("label, kind", [("failure", FailureClass), ("cause", MoveCause)])
def test_the_examples_of_a_label_s_values_are_real(label: str, kind: type[FailureClass | MoveCause]) -> None:
    like = values_of(label).partition(", like ")[2]
    examples = set(re.findall(r"`(\w+)`", like))
    assert examples
    assert examples <= {each.value for each in kind}


def test_nothing_is_listed_twice() -> None:
    names = [family.name for family in documented()]
    assert len(names) == len(set(names)) > 40
