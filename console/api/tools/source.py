"""An answer's text as it comes, for parsers that are generators: they yield where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser: it yields to wait for text, and what it decides depends on the text alone, never on how that is split."""

Give = Callable[[str], None]
"""Takes text that was read."""


class Malformed(Exception):
    """The text is no call after all, or ends within one; the message says where it went wrong."""


class Source:
    """Text in pieces, read from its front. `taken` is what was read since `mark`, to be given back if need be.

    ended: no more text comes. A parser that finds the text malformed after that was waiting for more: all of it could
    have begun what was looked for.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._taken: list[str] = []

    def push(self, text: str) -> None:
        """More text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self.ended = True

    def mark(self) -> None:
        """Forget what was read so far."""
        self._taken.clear()

    @property
    def taken(self) -> str:
        """What was read since the last mark."""
        return "".join(self._taken)

    def more(self) -> Reading[bool]:
        """Whether any text is left, waiting for it."""
        while self._at >= len(self._text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, which stays; raises Malformed at the end."""
        if not (yield from self.more()):
            raise Malformed("the answer ends within it")
        return self._text[self._at]

    def take(self, count: int = 1) -> str:
        """That many characters which are there already."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self._taken.append(text)
        return text

    def take_all(self, pattern: re.Pattern[str]) -> str:
        """What `pattern` matches of the text that is there already, "" for nothing."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def skip_space(self) -> Reading[bool]:
        """Take white space; whether any text is left after it."""
        while (yield from self.more()):
            if not self._text[self._at].isspace():
                return True
            self.take()
        return False

    def tries(self, *literals: str) -> Reading[str]:
        """Take the first of `literals` that the text goes on with, and return it; "" where it is none."""
        for literal in literals:
            while True:
                ahead = self._text[self._at : self._at + len(literal)]
                if ahead == literal:
                    return self.take(len(literal))
                if self.ended or not literal.startswith(ahead):
                    break
                yield
        return ""

    def closes(self, literal: str) -> Reading[bool]:
        """Take `literal` where the text goes on with it, or ends within it; whether all of it was there."""
        found = yield from self.tries(literal)
        if not found and self.ended and literal.startswith(self._text[self._at :]):
            self.drop()
        return bool(found)

    def drop(self) -> None:
        """Take all text that is there."""
        self.take(len(self._text) - self._at)

    def expect(self, literal: str) -> Reading[None]:
        """Take `literal`; raises Malformed where the text goes on with something else."""
        if not (yield from self.tries(literal)):
            raise Malformed(f"{literal!r} is missing")

    def until(self, markers: Sequence[str], give: Give, *, partial: bool = False) -> Reading[str]:
        """Give text away up to the first marker, which is taken and returned; "" at the end of the text.

        Of several markers, the one that begins first counts. Held back is only what may begin one.
        partial: one that the text ends within is one as well, and no text.
        """
        while True:
            text = self._text[self._at :]
            found = min(((at, -len(m), m) for m in markers if (at := text.find(m)) >= 0), default=None)
            if found is not None:
                at, _, marker = found
                if at:
                    give(self.take(at))
                return self.take(len(marker))
            sure = len(text) if self.ended and not partial else len(text) - _possible_start(text, markers)
            if sure:
                give(self.take(sure))
            if self.ended:
                self.drop()
                return ""
            yield


def _possible_start(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin a marker."""
    longest = max(map(len, markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
