"""What is said of a word that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, words: Iterable[str]) -> str:
    """ "; did you mean ...?" where one of the words is like it, else nothing."""
    near = difflib.get_close_matches(word, sorted(words), n=1)
    return f"; did you mean {near[0]}?" if near else ""
