"""Every link between the documents leads somewhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.documents import ROOT, Document, documents

DOCUMENTS = documents()
INDEX = ROOT / "docs" / "README.md"


def broken(document: Document) -> list[str]:
    """Its links to files or headings that there are not. Links to other sites are not followed."""
    return [link for link in document.links() if "://" not in link and not leads(document, link)]


def leads(document: Document, link: str) -> bool:
    file, _, anchor = unquote(link).partition("#")
    target = (document.path.parent / file).resolve() if file else document.path
    if not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and anchor in Document(target).anchors())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_leads_to_a_file_and_a_heading(document: Document) -> None:
    assert broken(document) == []


def test_there_are_documents_and_links() -> None:
    assert {"README.md", "docs/README.md", "docs/operating.md"} <= {each.name for each in DOCUMENTS}
    assert sum(len(each.links()) for each in DOCUMENTS) > 50


def test_every_document_of_the_folder_is_in_its_index() -> None:
    there = {path.name for path in INDEX.parent.glob("*.md")} - {INDEX.name}
    assert there - set(Document(INDEX).links()) == set()


@pytest.mark.parametrize(
    "link",
    [
        "nowhere.md",
        "other.md#no-such-heading",
        "#no-such-heading",
        "other.md#said-twice-2",
        "picture.png#a-heading",
        "../no/such/folder",
    ],
)
def test_a_link_to_nowhere_is_noticed(link: str, tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# A `heading`, with\n\n## Said twice\n\n## Said twice\n", encoding="utf-8")
    (tmp_path / "picture.png").touch()
    page = tmp_path / "page.md"
    good = (
        "[a](other.md#a-heading-with) [b](other.md#said-twice-1) ![c](picture.png) [d](https://example.com)"
    )
    page.write_text(f"{good} [e]({link})", encoding="utf-8")
    assert broken(Document(page)) == [link]
