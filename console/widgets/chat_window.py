"""Which turns of a long conversation are mounted: a bounded number, by turns and by length. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPARE_TURNS = 2
MIN_TURNS = 24
MIN_CHARACTERS = 6_000
SCREENS = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a window may hold: turns, and characters of all of them; of one turn alone any number."""

    turns: int = MIN_TURNS
    characters: int = MIN_CHARACTERS


@dataclass(frozen=True, slots=True)
class Window:
    """Turns first .. last - 1 of a conversation."""

    first: int = 0
    last: int = 0


def limits_for(columns: int, rows: int) -> Limits:
    """A few times what a panel of that size can show, so that it can always be scrolled in."""
    return Limits(max(MIN_TURNS, rows), max(MIN_CHARACTERS, SCREENS * columns * rows))


def ending(lengths: Sequence[int], last: int, limits: Limits) -> Window:
    """The window whose turns end before `last`: as many as may be, one at least. lengths: characters of each turn."""
    last = max(0, min(last, len(lengths)))
    return _up(lengths, Window(max(0, last - 1), last), limits, at_least=0)


def beginning(lengths: Sequence[int], first: int, limits: Limits) -> Window:
    """The window that begins with turn `first`: as many as may be, one at least."""
    first = max(0, min(first, len(lengths) - 1))
    return _down(lengths, Window(first, min(first + 1, len(lengths))), limits, at_least=0)


def earlier(lengths: Sequence[int], seen: Window, limits: Limits) -> Window:
    """The window of the turns that are seen and as many before them as may be; a few always, and a few after them."""
    window = _up(lengths, seen, limits, at_least=SPARE_TURNS)
    return Window(window.first, min(len(lengths), seen.last + SPARE_TURNS))


def later(lengths: Sequence[int], seen: Window, limits: Limits) -> Window:
    """The window of the turns that are seen and as many after them as may be; a few always, and a few before them."""
    window = _down(lengths, seen, limits, at_least=SPARE_TURNS)
    return Window(max(0, seen.first - SPARE_TURNS), window.last)


def _up(lengths: Sequence[int], window: Window, limits: Limits, *, at_least: int) -> Window:
    first, last = window.first, window.last
    characters = sum(lengths[first:last])
    while first and (
        window.first - first < at_least
        or (last - first < limits.turns and characters + lengths[first - 1] <= limits.characters)
    ):
        first -= 1
        characters += lengths[first]
    return Window(first, last)


def _down(lengths: Sequence[int], window: Window, limits: Limits, *, at_least: int) -> Window:
    mirrored = Window(len(lengths) - window.last, len(lengths) - window.first)
    found = _up(lengths[::-1], mirrored, limits, at_least=at_least)
    return Window(len(lengths) - found.last, len(lengths) - found.first)
