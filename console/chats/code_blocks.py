"""The code blocks of an answer, from its source: no border, no wrapped line, no blank that a screen added. Pure."""

from __future__ import annotations

from markdown_it import MarkdownIt


def code_blocks(markdown: str) -> list[str]:
    """The text of each block, in order; one that has not ended yet is among them."""
    return [token.content for token in MarkdownIt().parse(markdown) if token.type in ("fence", "code_block")]
