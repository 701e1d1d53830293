"""The commands and the Python of the documents work as they stand there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import Document, commands, documents
from tests.docs.stage import CommandError, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOT_RUN = {
    "make ": "runs for minutes, or renews the environment that the test runs in",
    ".venv/bin/python -m examples.traced": "wants a Jaeger; the tests of traces run it",
    "prometheus ": "serves until it is told to end; its file is checked by promtool",
    "docker ": "wants a Docker daemon",
    "kubectl ": "wants a cluster; the manifests have tests of their own",
    "fleet --access-token-file oncall.token nodes": "asks the head of that cluster",
    "fleet nodes --watch": "shows until Ctrl-C; the tests of the command line run it",
    "fleet conformance node.example:8454": "wants a node with TLS",
    "cd examples/go": "downloads and builds; the tests of the clients do it",
    "go ": "the same",
}
"""Beginnings of commands that are not run, and why."""

ELSEWHERE = ("examples/", "benchmarks/", "CONTRIBUTING.md")
"""Documents whose commands build, measure or test for minutes; other tests and checks run them."""

DOCUMENTS = [
    document
    for document in documents()
    if not document.name.startswith(ELSEWHERE)
    and any(block.language in {"sh", "python"} for block in document.blocks())
]


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.stop()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_a_document_tells_to_type_works(document: Document, stage: Stage) -> None:
    wrong = []
    for block in document.blocks():
        try:
            if block.language == "python":
                printed = stage.python(block.text)
                assert "channel" not in block.text or "FINISH_REASON_LENGTH" in printed
            elif block.language == "sh" and (runs := [c for c in commands(block) if is_run(c)]):
                stage.shell(runs)
        except CommandError as error:
            stage.stop()
            wrong.append(f"{document.name}:{block.line}: {error}")
    assert not wrong, "mend these, or list them in NOT_RUN with the reason:\n\n" + "\n\n".join(wrong)


def test_what_is_not_run_is_still_there() -> None:
    there = [
        command
        for document in DOCUMENTS
        for block in document.blocks()
        if block.language == "sh"
        for command in commands(block)
    ]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in there)] == []
    assert len([command for command in there if is_run(command)]) > 40


def test_a_node_that_is_killed_as_the_quickstart_says_costs_no_token(stage: Stage) -> None:
    (quickstart,) = [each for each in DOCUMENTS if each.name == "docs/quickstart.md"]
    (command,) = [c for block in quickstart.blocks() for c in commands(block) if c.endswith("--max-new 400")]
    stage.start_fleet(tokens_per_s=100)
    lines = []
    with subprocess.Popen(
        ["bash", "-c", f"exec {stage.placed(command)} --json"],
        env=stage.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as asked:
        assert asked.stdout is not None
        for line in asked.stdout:
            lines.append(line)
            if len(lines) == 20:
                (started,) = [event for event in map(json.loads, lines) if event["event"] == "started"]
                stage.node(started["node"]).process.kill()
    assert asked.returncode == 0
    events = [json.loads(line) for line in lines]
    assert [event for event in events if event["event"] == "moved"]
    tokens = [event for event in events if event["event"] == "tokens"]
    indexes = [event["first_index"] + i for event in tokens for i in range(len(event["token_ids"]))]
    assert indexes == list(range(400))


@pytest.mark.parametrize(
    "command", ["fleet nodes remove nobody", "false", "fleet serve --no-such-flag", "fleet-node"]
)
def test_a_command_that_does_not_work_is_noticed(command: str, stage: Stage) -> None:
    with pytest.raises(CommandError):
        stage.shell([command])
