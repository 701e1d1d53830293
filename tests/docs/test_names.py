"""What the documents name exists: settings, commands, flags, variables and files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fleet.v1.errors_pb2 import ErrorReason
from fleet_service.config_sources import leaf_fields, variable_of
from tests.commandlines import every_option, every_variable, unknown_words
from tests.docs.documents import ROOT, Document, commands, documents

DOCUMENTS = documents()
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in leaf_fields() if "." in name}))
A_SETTING = re.compile(rf"(?:--set[ =])?((?:{SECTIONS})\.[a-z_]+|(?:{SECTIONS})\.\*)(?:=.*)?")
A_VARIABLE = re.compile(r"\bFLEET_[A-Z_]*[A-Z]\b")
A_FLAG = re.compile(r"(--[a-z][a-z-]+)\b")
A_COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:fleet|fleet-node)( |$)")
A_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|proto|ya?ml|json|toml|sh)")

SHELL = {"sh", ""}
"""Languages of blocks that hold commands, among other things."""
NOT_A_SETTING = frozenset({"FLEET_SERVICE_HOST"})
"""Named as an example of a variable that means nothing."""
HOMES = ("", "fleet_service", "proto", "proto/fleet/v1", "examples")
"""What a path in a document is relative to."""
MADE = ("build/", "gen/", "target/", "proto/_gen/")
"""Made by commands, and not there before."""


def setting_names(document: Document) -> set[str]:
    return {found[1] for span in document.spans() if (found := A_SETTING.fullmatch(span))}


def unknown_settings(document: Document) -> list[str]:
    known = leaf_fields()
    return sorted(
        name for name in setting_names(document) if not (name.endswith((".*", ".py", ".db")) or name in known)
    )


def command_lines(document: Document) -> Iterator[list[str]]:
    """Every call of ours, in blocks and in code spans, without the variables before it."""
    texts = [text for block in document.blocks() if block.language in SHELL for text in commands(block)]
    for text in [*texts, *document.spans()]:
        if A_COMMAND.match(text):
            words = shlex.split(text.replace("...", ""))
            yield words[next(i for i, word in enumerate(words) if "=" not in word) :]


def unknown_commands(document: Document) -> list[str]:
    return sorted(name for words in command_lines(document) for name in unknown_words(words))


def unknown_flags(document: Document) -> list[str]:
    """Flags in code spans of their own, like `--token-file FILE`."""
    named = {flag for span in document.spans() if span.startswith("--") for flag in A_FLAG.findall(span)}
    return sorted(named - every_option() - flags_of_examples())


@cache
def flags_of_examples() -> frozenset[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    return frozenset(flag for text in texts for flag in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))


def unknown_variables(document: Document) -> list[str]:
    named = set(A_VARIABLE.findall(document.path.read_text(encoding="utf-8")))
    settings = {variable_of(name) for name in leaf_fields()}
    reasons = {name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()}  # noqa: SIM118 - an enum's
    return sorted(named - settings - every_variable() - NOT_A_SETTING - reasons - variables_of_tests())


@cache
def variables_of_tests() -> frozenset[str]:
    files = [ROOT / "Makefile", *(ROOT / "tests").rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files if path != Path(__file__)]
    return frozenset(name for text in texts for name in re.findall(r"\bFLEET_(?:SIM|E2E)_[A-Z_]+\b", text))


def unknown_paths(document: Document) -> list[str]:
    return sorted(
        span
        for span in document.spans()
        if A_PATH.fullmatch(span)
        and not span.startswith(MADE)
        and not any(
            (base / span).exists() for base in (*(ROOT / home for home in HOMES), document.path.parent)
        )
    )


CHECKS = [unknown_settings, unknown_commands, unknown_flags, unknown_variables, unknown_paths]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_document_names_only_what_there_is(document: Document, check: object) -> None:
    assert callable(check)
    assert check(document) == []


def test_much_is_named() -> None:
    assert len(set().union(*map(setting_names, DOCUMENTS))) > 5
    assert len([words for document in DOCUMENTS for words in command_lines(document)]) > 50


@pytest.mark.parametrize(
    "text, unknown",
    [
        ("`head.silence`", "head.silence"),
        ("`listen.nobody = 1`", ""),
        ("`fleet node add X`", "fleet node"),
        ("`.venv/bin/fleet serve --nodes X`", "fleet serve --nodes"),
        ("`fleet nodes ad X`", "fleet nodes ad"),
        ("    FLEET_NODES=x fleet serve --nod X", "fleet serve --nod"),
        ("```sh\nfleet-node --models x\n```", "fleet-node --models"),
        ("`--no-such-flag`", "--no-such-flag"),
        ("FLEET_HEAD__SILENCE", "FLEET_HEAD__SILENCE"),
        ("`runtime/nowhere.py`", "runtime/nowhere.py"),
    ],
)
def test_what_there_is_not_is_noticed(text: str, unknown: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n", encoding="utf-8")
    assert [name for check in CHECKS for name in check(Document(page))] == ([unknown] if unknown else [])


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for text in [*document.spans(), *(c for block in document.blocks() for c in commands(block))]
        if text.startswith("make ")
        for target in re.findall(r" ([a-z][a-z-]*)\b(?!=)", text)
    }
    assert {"demo", "test", "lint"} <= named
    assert named - targets == set()
