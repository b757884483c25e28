"""The sentences of a Markdown page, and how many words each has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

MAX_WORDS = 25
_ABBREVIATION = r"(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)(?<!cf\.)"
_END = re.compile(rf"([.!?…]{_ABBREVIATION}[)\"'”]*)\s+(?=[^a-z]|ray-slo)")
_SKIPPED = ("table_open", "heading_open")
_GENERATED = re.compile(r"<!-- composes: (\w+): begin -->.*?<!-- composes: \1: end -->", re.DOTALL)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Line and plain text of each paragraph and list item; no code, no table, no heading.

    What a program writes into a page is left out. Inline code counts as one word, and a link as
    its text.
    """
    inside = ""
    text = _GENERATED.sub(lambda found: "\n" * found[0].count("\n"), text)
    for token in MarkdownIt().enable("table").parse(text):
        if token.type in _SKIPPED:
            inside = token.type.replace("open", "close")
        elif token.type == inside:
            inside = ""
        elif token.type == "inline" and not inside:
            yield token.map[0] + 1, "".join(_plain(token.children or []))


def _plain(tokens: list[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type == "code_inline":
            yield "Code"  # one word, whatever it holds
        elif token.type in ("softbreak", "hardbreak"):
            yield " "
        elif token.type == "text":
            yield token.content


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Line of the paragraph, and sentence. Only `.`, `!` and `?` end one: `;` and `:` do not."""
    for line, paragraph in paragraphs(text):
        for sentence in _END.sub(r"\1\n", paragraph.strip()).split("\n"):
            yield line, sentence


def words(sentence: str) -> int:
    """Words with a letter or a digit; "2 %" and "100 ms" are two."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def long_sentences(page: Path, limit: int = MAX_WORDS) -> list[str]:
    """Where each sentence of more than `limit` words is, how long it is, and what it says."""
    found = []
    for line, sentence in sentences(page.read_text(encoding="utf-8")):
        if (count := words(sentence)) > limit:
            found.append(f"{page.name}:{line}: {count} words: {sentence}")
    return found
