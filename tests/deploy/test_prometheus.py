"""The scrape configuration, the alerts and the dashboard, checked by promtool and by docs/metrics.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet_service.addresses import METRICS_PORT
from tests.telemetry.catalogue import Family, documented, everything

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
CONFIG, ALERTS, ALERTS_TEST = (
    PROMETHEUS / name for name in ("prometheus.yml", "alerts.yml", "alerts_test.yml")
)
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "fleet-head.json").read_text(encoding="utf-8"))
ALERT_NAMES = re.findall(r"- alert: (\w+)", ALERTS.read_text(encoding="utf-8"))

FAMILIES = {family.name: family for family in documented()}
OF_PROMETHEUS = {"instance", "job"}
"""Labels that come with the scrape."""

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; it comes with Debian's package prometheus"
)


def promtool(*arguments: str | Path, stdin: str = "") -> tuple[int, str]:
    """Exit code, and all it printed."""
    assert PROMTOOL is not None
    ended = subprocess.run(
        [PROMTOOL, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


# ----------------------------------------------------------------------------------------- configuration


@needs_promtool
def test_the_scrape_configuration_is_one() -> None:
    code, said = promtool("check", "config", CONFIG)
    assert code == 0, said
    assert "1 rule files found" in said


def test_the_scrape_configuration_asks_where_a_head_answers() -> None:
    text = CONFIG.read_text(encoding="utf-8")
    assert re.findall(r'targets: \["(.*)"\]', text) == [f"127.0.0.1:{METRICS_PORT}"]
    assert re.findall(r"job_name: (.*)", text) == ["fleet-head"]


@needs_promtool
async def test_names_and_units_are_by_convention() -> None:
    code, said = promtool("check", "metrics", stdin=await everything())
    assert (code, said) == (0, "")


# ------------------------------------------------------------------------------------------------ alerts


@needs_promtool
def test_the_alerts_are_rules() -> None:
    code, said = promtool("check", "rules", ALERTS)
    assert code == 0, said
    assert f"{len(ALERT_NAMES)} rules found" in said


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    code, said = promtool("test", "rules", ALERTS_TEST)
    assert code == 0, said


@needs_promtool
def test_no_alert_can_go_missing_unnoticed(tmp_path: Path) -> None:
    shutil.copy(ALERTS_TEST, tmp_path)
    text = re.sub(r"alert: Fleet(\w+)", r"alert: Renamed\1", ALERTS.read_text(encoding="utf-8"))
    (tmp_path / ALERTS.name).write_text(text, encoding="utf-8")
    code, said = promtool("test", "rules", tmp_path / ALERTS_TEST.name)
    assert code == 1
    assert len(ALERT_NAMES) > 10
    assert [name for name in ALERT_NAMES if name not in said] == []


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    rules = re.split(r"- alert: ", ALERTS.read_text(encoding="utf-8"))[1:]
    for rule in rules:
        assert re.search(r"labels: \{severity: (critical|warning)\}", rule), rule
        assert re.search(r"summary: .{10}", rule), rule
        assert re.search(r"description: .+", rule), rule


# --------------------------------------------------------------------------------------------- dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Title and expression, with what Grafana fills in."""
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            yield panel["title"], expression


def alert_expressions() -> Iterator[tuple[str, str]]:
    for rule in re.split(r"- alert: ", ALERTS.read_text(encoding="utf-8"))[1:]:
        name, _, rest = rule.partition("\n")
        yield name, re.split(r"\n        (?:for|labels):", rest)[0].partition("expr:")[2]


EXPRESSIONS = [*queries(), *alert_expressions()]


def family_of(name: str) -> Family | None:
    """The family that a series of that name belongs to."""
    found = FAMILIES.get(name)
    if found is not None:
        return found if found.type != "histogram" else None
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    found = FAMILIES.get(base)
    return found if found is not None and found.type == "histogram" else None


def wrong_with(expression: str) -> list[str]:
    """The names of series and labels in it that there are not, and what is not fit for its type."""
    wrong = []
    without_texts = re.sub(r'"[^"]*"', '""', expression)
    for name, _, matchers in re.findall(r"\b((?:fleet|process)_\w+)(\{([^}]*)\})?", without_texts):
        family = family_of(name)
        if family is None:
            wrong.append(name)
            continue
        known = set(family.labels) | OF_PROMETHEUS | ({"le"} if name.endswith("_bucket") else set())
        wrong += [f"{name} {label}" for label in re.findall(r"(\w+)\s*[=!]", matchers) if label not in known]
    used = {
        label
        for labels in re.findall(r"(?:by|on) \(([^)]*)\)", without_texts)
        for label in labels.split(", ")
    }
    names = re.findall(r"\b(?:fleet|process)_\w+", without_texts)
    known = {"le"} | OF_PROMETHEUS | {label for name in names if (f := family_of(name)) for label in f.labels}
    wrong += sorted(used - known)
    for name in re.findall(r"(?:rate|increase)\(((?:fleet|process)_\w+)", without_texts):
        family = family_of(name)
        if family is not None and family.type == "gauge":
            wrong.append(f"rate of the gauge {name}")
    return wrong


@pytest.mark.parametrize("where, expression", EXPRESSIONS, ids=lambda text: text[:40])
def test_every_expression_names_what_there_is(where: str, expression: str) -> None:
    assert re.search(r"\b(fleet|process)_\w+|\bup\b", expression)
    assert wrong_with(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "fleet_nothing",
        "fleet_attempts",
        "fleet_failover_gap_seconds",
        "fleet_nodes_bucket",
        'fleet_nodes{node="a"}',
        "sum by (node) (fleet_sessions)",
        "rate(fleet_nodes[5m])",
    ],
)
def test_what_there_is_not_is_noticed(expression: str) -> None:
    assert len(wrong_with(expression)) == 1


def test_the_choices_above_the_dashboard_name_what_there_is() -> None:
    asked = [each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert asked == ["label_values(fleet_head_info, instance)"]
    assert "fleet_head_info" in FAMILIES


@needs_promtool
def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [{"record": "query", "expr": expression} for _, expression in queries()]
    file = tmp_path / "queries.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    code, said = promtool("check", "rules", "--lint=none", file)
    assert code == 0, said
    file.write_text(json.dumps({"groups": [{"name": "x", "rules": [{"record": "q", "expr": "sum("}]}]}))
    assert promtool("check", "rules", "--lint=none", file)[0] == 1


def test_every_panel_has_a_place_of_its_own_and_a_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels())
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())
