"""The project's documents, read as Markdown: their links, headings, code blocks and code spans."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
NOT_OURS = {".venv", ".git", "build", "dist", "node_modules", "target", "gen", ".pytest_cache", ".hypothesis"}

_PARSER = MarkdownIt("commonmark").enable("table")
_ID = re.compile(r'<\w+ [^>]*\b(?:id|name)="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A block of code: its language, empty where it has none, and the line it starts at."""

    language: str
    text: str
    line: int


class Document:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        self._tokens = _PARSER.parse(path.read_text(encoding="utf-8"))

    def links(self) -> list[str]:
        """Where its links and pictures lead, as they are written."""
        found = []
        for token in self._inline():
            target = token.attrGet("href") if token.type == "link_open" else token.attrGet("src")
            if token.type in {"link_open", "image"}:
                found.append(str(target))
        return found

    def anchors(self) -> frozenset[str]:
        """What can stand behind # in a link to it: its headings, as GitHub names them."""
        names: list[str] = []
        for opening, inline in zip(self._tokens, self._tokens[1:], strict=False):
            if opening.type == "heading_open":
                text = "".join(each.content for each in inline.children or ())
                slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
                before = names.count(slug)
                names.append(slug)
                if before:
                    names.append(f"{slug}-{before}")
        return frozenset([*names, *_ID.findall(self.path.read_text(encoding="utf-8"))])

    def blocks(self) -> list[Block]:
        return [
            Block(token.info.strip(), token.content, token.map[0] + 1 if token.map else 0)
            for token in self._tokens
            if token.type in {"fence", "code_block"}
        ]

    def spans(self) -> list[str]:
        """The text of every code span, on one line."""
        return [token.content.replace("\n", " ") for token in self._inline() if token.type == "code_inline"]

    def _inline(self) -> Iterator[Token]:
        for token in self._tokens:
            waiting = list(token.children or ())
            while waiting:
                inner = waiting.pop(0)
                yield inner
                waiting = [*(inner.children or ()), *waiting]


@cache
def documents() -> tuple[Document, ...]:
    """Every Markdown file of the project."""
    paths: list[Path] = []
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in NOT_OURS]
        paths += [Path(folder, name) for name in files if name.endswith(".md")]
    return tuple(Document(path) for path in sorted(paths))


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block: continued lines joined, comments left out."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        command = re.sub(r"(^|\s+)#( .*)?$", "", line).strip()
        if command:
            yield command
