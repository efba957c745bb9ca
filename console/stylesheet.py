"""The stylesheet of the console: what was parsed once is not parsed again as long as the theme is the same."""

from __future__ import annotations

from textual.cache import LRUCache
from textual.css import stylesheet

_SOURCES = 1024
"""Pieces of CSS that are kept parsed: more than there are widgets, of Textual's and of ours."""


class Stylesheet(stylesheet.Stylesheet):
    """Textual parses all CSS anew, twice, whenever a screen comes up for the first time, and keeps fewer pieces than a
    console has: most of the time that a key took to open a screen."""

    def __init__(self, *, variables: dict[str, str]) -> None:
        super().__init__(variables=variables)
        self._parse_cache = LRUCache(_SOURCES)
        self.changes = 0

    def set_variables(self, variables: dict[str, str]) -> None:
        """Another theme is parsed for; the same one again changes nothing. changes: how often there was another."""
        if variables != self._variables:
            super().set_variables(variables)
            self._require_parse = True
            self.changes += 1

    def reparse(self) -> None:
        """Parse what was not yet, as after another theme. Raises StylesheetError, with the rules as they were."""
        if self._require_parse:
            self.parse()
