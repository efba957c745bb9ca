"""Which turns of a long conversation are on the screen's books: a bounded number, by turns and by length. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TURNS = 40
MAX_CHARACTERS = 24_000


@dataclass(frozen=True, slots=True)
class Window:
    """Turns first .. last - 1 of a conversation."""

    first: int = 0
    last: int = 0


def ending(lengths: Sequence[int], last: int) -> Window:
    """The window whose turns end before `last`: as many as may be, one at least. lengths: characters of each turn."""
    last = max(0, min(last, len(lengths)))
    first = max(0, last - 1)
    characters = lengths[first] if last else 0
    while first and last - first < MAX_TURNS and characters + lengths[first - 1] <= MAX_CHARACTERS:
        first -= 1
        characters += lengths[first]
    return Window(first, last)


def beginning(lengths: Sequence[int], first: int) -> Window:
    """The window that begins with turn `first`; it moves up where it would reach beyond the end."""
    first = max(0, min(first, len(lengths) - 1))
    last, characters = first, 0
    while last < len(lengths) and last - first < MAX_TURNS:
        characters += lengths[last]
        if characters > MAX_CHARACTERS and last > first:
            break
        last += 1
    return ending(lengths, last) if last == len(lengths) else Window(first, last)
