"""Suggestions for unknown words, and the names of classes as people write them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """ "; did you mean ...?" where one of the words is like it, else nothing."""
    near = difflib.get_close_matches(word, sorted(words), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def class_title(name: str) -> str:
    """ "ModelTable" -> "Model table"."""
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name.lstrip("_")).strip()
    return words[0].upper() + words[1:]
