"""Code in the colours of its language, at a cost that is bounded: a model says what the code is, and what language.

A lexer is regular expressions, whose time may grow with the square of what they read, and of a rare language faster;
nothing interrupts them, and no other thread runs meanwhile. So code is coloured in parts, each by itself: a string that
goes on in the next part loses its colour there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from textual.content import Content
from textual.highlight import HighlightTheme, highlight

MAX_PART = 2000
"""Characters of one part. The worst that is known takes 0.2 s."""

MAX_PARTS = 5
"""Coloured of one block of code; the rest is plain."""

_LANGUAGES = """
bash c c# c++ clojure cmake console cpp cs csharp css dart diff docker dockerfile elixir erlang fortran go
graphql groovy haskell hcl html http ini java javascript js json jsx julia kotlin latex less lua make makefile
markdown matlab md nasm nginx nim objective-c ocaml perl php powershell protobuf ps1 py pycon python python3 r
rb rs ruby rust sass scala scss sh shell sql swift terraform tex toml ts tsx typescript vim vue xml yaml yml zig
zsh
"""
LANGUAGES = frozenset(_LANGUAGES.split())
"""Those whose lexers were tried with what they are slowest at."""


def coloured(code: str, language: str, theme: type[HighlightTheme]) -> Content:
    """Return `code`, its lines as they were, as far as it is coloured."""
    if language.lower() not in LANGUAGES:
        return Content(code)
    parts = [
        _coloured(part, language.lower(), theme)  # type: ignore[arg-type]  # a class can be hashed
        if number < MAX_PARTS and len(part) <= MAX_PART
        else Content(part)
        for number, part in enumerate(_parts(code))
    ]
    return Content("\n").join(parts)


@lru_cache(maxsize=64)
def _coloured(part: str, language: str, theme: type[HighlightTheme]) -> Content:
    """Remembered: of an answer that grows, only the last part is new."""
    return highlight(f"{part}\n", language=language, theme=theme)


def _parts(code: str) -> Iterator[str]:
    """Whole lines of up to MAX_PART characters together, or one that is longer."""
    part: list[str] = []
    length = 0
    for line in code.split("\n"):
        if part and length + len(line) >= MAX_PART:
            yield "\n".join(part)
            part, length = [], 0
        part.append(line)
        length += len(line) + 1
    yield "\n".join(part)
