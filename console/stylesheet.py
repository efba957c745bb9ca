"""The stylesheet of the console: what was parsed once is not parsed again as long as the theme is the same."""

from __future__ import annotations

from textual.cache import LRUCache
from textual.css import stylesheet
from textual.css.model import RuleSet

_SOURCES = 1024
"""Pieces of CSS that are kept parsed: more than there are widgets, of Textual's and of ours."""


Parsed = dict[tuple[tuple[str, str], ...], LRUCache[tuple[object, ...], list[RuleSet]]]
"""What was parsed, by the variables that it was parsed with: those of a theme."""


class Stylesheet(stylesheet.Stylesheet):
    """Textual parses all CSS anew, twice, whenever a screen comes up for the first time, and keeps fewer pieces than a
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
