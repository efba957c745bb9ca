"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and lets nothing of it through.

    The match that is complete first wins (of several ending there, the longest), for that is where an answer ends;
    how the text is split into pieces changes nothing. Held back is only the longest end of the text that a stop
    string may begin with. include_stop: whether the stop string itself is visible.

    found: the one that was found, "" while none was.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text: what is visible now, and whether a stop string was found (all later text is dropped)."""
        if not self._stops:
            return text, False
        if self.found:
            return "", True
        text = self._held + text
        match = min(self._matches(text), default=None)
        if match is not None:
            end, start = match
            self._held, self.found = "", text[start:end]
            return text[: end if self._include_stop else start], True
        visible = len(text) - self._possible_start(text)
        self._held = text[visible:]
        return text[:visible], False

    def flush(self) -> str:
        """The held text, when no more comes and it is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """(end, start) of each stop string's first occurrence."""
        return [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]

    def _possible_start(self, text: str) -> int:
        """How many characters at the end of `text` may begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
