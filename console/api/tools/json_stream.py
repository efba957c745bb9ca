"""JSON as a model writes it, read while it comes (RFC 8259): checked, given away as it is, never built up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

# An answer's text as it comes, for parsers that are generators: they yield where they need more of it.

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


MAX_DEPTH = 64
"""Arrays and objects within each other."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HALF = re.compile("[\ud800-\udfff]")
"""A surrogate by itself, which no text can have: it would fail where it is written."""

_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


def read_value(source: Source, give: Give, depth: int = 0) -> Reading[None]:
    """One value of any kind. Raises Malformed."""
    if depth > MAX_DEPTH:
        raise Malformed("it is nested too deeply")
    match (yield from source.peek()):
        case '"':
            yield from read_string(source, give)
        case "{":
            yield from _read_members(source, give, depth)
        case "[":
            yield from _read_items(source, give, depth)
        case _:
            yield from _read_scalar(source, give)


def read_string(source: Source, give: Give) -> Reading[None]:
    """A string with its quotes. A line break in it, which JSON forbids but models write, is given as its escape."""
    yield from source.expect('"')
    give('"')
    while (char := (yield from source.peek())) != '"':
        if char == "\\":
            give((yield from _read_escape(source)))
        elif char < " ":
            give(json.dumps(source.take())[1:-1])
        else:
            give(source.take_all(_PLAIN))
    give(source.take())


def collect_string(source: Source) -> Reading[str]:
    """What a string says. Raises Malformed."""
    if (yield from source.peek()) != '"':
        raise Malformed("a string is missing")
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    said = str(json.loads("".join(pieces)))
    if not said.isascii() and _HALF.search(said):
        raise Malformed("a string has half of a character")
    return said


def read_space(source: Source, give: Give) -> Reading[str]:
    """White space; the character after it, which stays. Raises Malformed at the end."""
    while (char := (yield from source.peek())) in " \t\r\n":
        give(source.take())
    return char


def no_constant(text: str) -> None:
    """For `json.loads`, which takes NaN and Infinity where nothing is said: JSON has none. Raises ValueError."""
    raise ValueError(text)


def _read_escape(source: Source) -> Reading[str]:
    text = source.take()
    char = yield from source.peek()
    text += source.take()
    if char == "u":
        for _ in range(4):
            digit = yield from source.peek()
            if digit not in _HEX:
                raise Malformed("a string has a broken \\u escape")
            text += source.take()
    elif char not in _ESCAPES:
        raise Malformed(f"a string has the escape \\{char}, which JSON does not know")
    return text


def _read_members(source: Source, give: Give, depth: int) -> Reading[None]:
    give(source.take())
    if (yield from read_space(source, give)) == "}":
        give(source.take())
        return
    while True:
        if (yield from read_space(source, give)) != '"':
            raise Malformed("a key is missing")
        yield from read_string(source, give)
        if (yield from read_space(source, give)) != ":":
            raise Malformed("a colon is missing")
        give(source.take())
        yield from read_space(source, give)
        yield from read_value(source, give, depth + 1)
        if (yield from _ends(source, give, "}")):
            return


def _read_items(source: Source, give: Give, depth: int) -> Reading[None]:
    give(source.take())
    if (yield from read_space(source, give)) == "]":
        give(source.take())
        return
    while True:
        yield from read_space(source, give)
        yield from read_value(source, give, depth + 1)
        if (yield from _ends(source, give, "]")):
            return


def _ends(source: Source, give: Give, closing: str) -> Reading[bool]:
    """Take what follows a member or an item: whether it is `closing`, else it must be a comma."""
    char = yield from read_space(source, give)
    if char not in (closing, ","):
        raise Malformed(f"a comma or {closing} is missing")
    give(source.take())
    return char == closing


def _read_scalar(source: Source, give: Give) -> Reading[None]:
    text = ""
    while (yield from source.more()):
        if not (more := source.take_all(_SCALAR)):
            break
        text += more
    else:
        raise Malformed("the answer ends within it")
    if _VALID_SCALAR.fullmatch(text) is None:
        raise Malformed("a value is missing")
    give(text)
