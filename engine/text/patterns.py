"""Regular expressions of a tokenizer.json, which anybody may have written: which of them are surely quick.

The library matches them by backtracking. One of twenty characters can take the fourth power of a text's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_ATOM = r"(?:\\[pP]\{\^?\w+\}|\\u[\da-fA-F]{4}|\\[sSdDwWhHrntfv]|\\\W|\[\^?(?:\\.|[^\[\]\\])+\]|[^\\\[\](){}|*+?^$])"
_MAYBE = rf"(?:{_ATOM}(?:(?:\?|\{{\d(?:,\d)?\}})\+?)?)?"
_ENDLESS = rf"{_ATOM}(?:[*+]|\{{\d,\}})\+?"
_WORDS = rf"\(\?i:(?:{_ATOM}|\|)+\)"
_QUICK = re.compile(
    rf"{_ATOM}{{1,40}}|{_WORDS}"
    rf"|{_MAYBE}(?:{_ENDLESS}){{0,2}}(?:{_WORDS}\?)?"
    rf"|{_MAYBE}{_ENDLESS}(?:{_ATOM}|\(\?[!=]{_ATOM}\))"
)
"""An alternative that is tried in about as many ways as a text is long: it has two repetitions without an end at most,
and one alone where something comes behind it that may fail."""


def is_quick(pattern: str) -> bool:
    """Whether a search for it takes no more than the square of a text's length; False where that is not seen at once.
    Those of published models are quick."""
    return all(_QUICK.fullmatch(each) for each in _alternatives(pattern))


def regexes(step: object) -> Iterator[str]:
    """The regular expressions in a step of a tokenizer.json, and in all steps within it."""
    if isinstance(step, list):
        for each in step:
            yield from regexes(each)
    elif isinstance(step, Mapping):
        for key, value in step.items():
            if key == "Regex":
                yield str(value)
            else:
                yield from regexes(value)


def _alternatives(pattern: str) -> list[str]:
    """The parts between those bars that are in no group and no class."""
    parts, depth, in_class, escaped = [""], 0, False, False
    for character in pattern:
        if not escaped and not in_class:
            depth += (character == "(") - (character == ")")
        if not escaped and character in "[]":
            in_class = character == "["
        if character == "|" and not (escaped or in_class or depth):
            parts.append("")
        else:
            parts[-1] += character
        escaped = character == "\\" and not escaped
    return parts
