"""The styles of the console: CSS is parsed once for each theme; a screen is styled again only where its look changed.

Measured in CPU time: the first opening of a screen 50 to 160 ms with Textual's own stylesheet and 22 to 65 ms with this
one, the chat coming back 33 ms against 14. Textual has no hook for either, hence its private names here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from textual.app import App
from textual.cache import LRUCache
from textual.css import stylesheet
from textual.css.model import RuleSet
from textual.events import ScreenSuspend
from textual.filter import LineFilter, Monochrome, NoColor
from textual.screen import Screen

from console.tui.clipboard import pasteable
from console.tui.printable_filter import PrintableFilter

_SOURCES = 1024
"""Pieces of CSS that are kept parsed: more than there are widgets, of Textual's and of ours."""
_COLOURLESS = NoColor()
_PRINTABLE = PrintableFilter()
_TRANSITION_S = 0.01
"""How long nothing is drawn once another screen was asked for. Textual takes five times as long, for screens that it
makes meanwhile; ours are there."""

Parsed = dict[tuple[tuple[str, str], ...], LRUCache[tuple[object, ...], list[RuleSet]]]
"""What was parsed, by the variables that it was parsed with: those of a theme."""


class Stylesheet(stylesheet.Stylesheet):
    """Textual parses all CSS again, twice, whenever a screen comes up for the first time, and keeps fewer pieces than a
    console has: most of the time that a key took to open a screen.

    parsed: what other stylesheets have parsed, and take over from this one.
    """

    def __init__(self, *, variables: dict[str, str], parsed: Parsed | None = None) -> None:
        super().__init__(variables=variables)
        self._parsed: Parsed = {} if parsed is None else parsed
        self._parse_cache = self._parsed_with(variables)
        self.changes = 0

    def set_variables(self, variables: dict[str, str]) -> None:
        """Another theme is parsed for; the same one again changes nothing. changes: how often there was another."""
        if variables != self._variables:
            self._parse_cache = LRUCache(1)  # the one that is cleared
            super().set_variables(variables)
            self._parse_cache = self._parsed_with(variables)
            self._require_parse = True
            self.changes += 1

    def _parsed_with(self, variables: dict[str, str]) -> LRUCache[tuple[object, ...], list[RuleSet]]:
        return self._parsed.setdefault(tuple(sorted(variables.items())), LRUCache(_SOURCES))

    def reparse(self) -> None:
        """Parse what was not yet, as after another theme. Raises StylesheetError, with the rules as they were."""
        if self._require_parse:
            self.parse()


class StyledApp(App[None]):
    """An app that styles a screen where there is need, and paints as the terminal wants it."""

    stylesheet: Stylesheet

    def __init__(self) -> None:
        super().__init__()
        self._styled: WeakKeyDictionary[Screen[Any], tuple[object, ...]] = WeakKeyDictionary()

    @property
    def look(self) -> tuple[object, ...]:
        """All that styles depend on besides a widget itself and what its own CSS is about, its children."""
        return self.stylesheet.changes, self.theme, self.classes, self.app_focus

    def refresh_css(self, animate: bool = True) -> None:
        """Style the screen in view again, if needed: Textual asks whenever a screen first comes up."""
        self.stylesheet.set_variables(self.get_css_variables())
        seen = self.screen_stack[-1] if self.screen_stack else None
        if seen is None or self._styled.get(seen) != self.look:
            super().refresh_css(animate)
        if seen is not None:
            self._styled[seen] = self.look

    def make_screen(self, mode: str) -> None:
        """Make the screen of a mode that was not opened yet, and show nothing of it. Textual makes one when its mode is
        switched to; so does this, and then sends it away, styled."""
        if mode in self._screen_stacks:
            return
        self._init_mode(mode)
        screen = self._screen_stacks[mode][0]
        screen._css_update_count = self._css_update_count
        self._styled[screen] = self.look
        screen.post_message(ScreenSuspend())

    def delay_update(self, delay: float = _TRANSITION_S) -> None:
        """Show nothing for a moment, which hides how a screen is put together."""
        super().delay_update(delay)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy nothing that a terminal would obey when it is pasted."""
        super().copy_to_clipboard(pasteable(text))

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Nothing that a terminal obeys; with NO_COLOR no colour at all, where Textual paints in shades of grey."""
        filters = super().get_line_filters()
        return [*(_COLOURLESS if isinstance(each, Monochrome) else each for each in filters), _PRINTABLE]
