"""A tiny phrase grammar: `(a|b|)` picks one alternative, `<name>` picks a phrase of a named class.

A backslash takes the next character literally. Facts are written in it, so one line of text stands for
dozens of ways to ask the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

_TOKEN = re.compile(r"\\.|[(|)]|<[a-z_]+>|[^(|)<\\]+|<")
_SPACES = re.compile(r"\s+")
_SPACE_BEFORE_MARK = re.compile(r"\s+([,.?!;:])")


class GrammarError(ValueError):
    """A phrase is malformed or names an unknown class."""


@dataclass(frozen=True)
class Choice:
    """One of several alternatives; each alternative is a sequence of literals and choices."""

    options: tuple[tuple[str | Choice, ...], ...]


class Grammar:
    """Samples phrases; `classes` maps a class name to its alternative phrases."""

    def __init__(self, classes: Mapping[str, Sequence[str]]) -> None:
        self._classes = classes
        self._parsed: dict[str, Choice] = {}

    def sample(self, phrase: str, rng: Random) -> str:
        """Return one expansion of `phrase` with tidy spacing; raises `GrammarError` on a malformed phrase."""
        text = _SPACES.sub(" ", self._expand(self._parse(phrase), rng)).strip()
        return _SPACE_BEFORE_MARK.sub(r"\1", text)

    def _expand(self, choice: Choice, rng: Random) -> str:
        parts = choice.options[rng.randrange(len(choice.options))]
        return "".join(self._part(part, rng) for part in parts)

    def _part(self, part: str | Choice, rng: Random) -> str:
        if isinstance(part, Choice):
            return self._expand(part, rng)
        if not (part.startswith("<") and part.endswith(">")):
            return part
        options = self._classes.get(part[1:-1])
        if options is None:
            raise GrammarError(f"unknown class {part}")
        return self._expand(self._parse(options[rng.randrange(len(options))]), rng)

    def _parse(self, phrase: str) -> Choice:
        found = self._parsed.get(phrase)
        if found is None:
            tokens = _TOKEN.findall(phrase)
            found, used = _alternatives(tokens, 0)
            if used != len(tokens):
                raise GrammarError(f"unbalanced ')' in {phrase!r}")
            self._parsed[phrase] = found
        return found


def _alternatives(tokens: Sequence[str], start: int) -> tuple[Choice, int]:
    """Parse `a|b|...` from `start` to a closing parenthesis or the end; return it and where it stopped."""
    options: list[tuple[str | Choice, ...]] = []
    parts: list[str | Choice] = []
    at = start
    while at < len(tokens) and tokens[at] != ")":
        token = tokens[at]
        at += 1
        if token == "|":
            options.append(tuple(parts))
            parts = []
        elif token == "(":
            inner, at = _alternatives(tokens, at)
            if at >= len(tokens):
                raise GrammarError(f"missing ')' in {''.join(tokens)!r}")
            parts.append(inner)
            at += 1
        else:
            parts.append(token[1:] if token.startswith("\\") else token)
    options.append(tuple(parts))
    return Choice(tuple(options)), at
