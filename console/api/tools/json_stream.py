"""Streaming parser of JSON (RFC 8259): checks text as it arrives and passes it on, without building values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

# Text that arrives in pieces, for parsers that are generators: they yield where they need more.

T = TypeVar("T")
Parser = Generator[None, None, T]
"""A parser: yields to wait for text. Its result depends only on the text, not on how that is split."""

Emit = Callable[[str], None]
"""Receives parsed text."""


class Malformed(Exception):
    """The text is not a call, or ends within one; the message has the reason."""


class Source:
    """Text in pieces, consumed from its front. `consumed` is the text since `mark`.

    ended: True after the end. A parser that then finds the text malformed was waiting for more of a valid text.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._position = 0
        self._consumed: list[str] = []

    def push(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Mark the end of the text."""
        self.ended = True

    def mark(self) -> None:
        """Forget the consumed text."""
        self._consumed.clear()

    @property
    def consumed(self) -> str:
        """Text consumed since the last mark."""
        return "".join(self._consumed)

    def more(self) -> Parser[bool]:
        """Wait for text; return whether there is any."""
        while self._position >= len(self._text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Parser[str]:
        """Return the next character without consuming it. Raises Malformed at the end."""
        if not (yield from self.more()):
            raise Malformed("the answer ends within it")
        return self._text[self._position]

    def look(self, ahead: int) -> Parser[str]:
        """Return the character that many places ahead without consuming any; "" where the text ends before it."""
        while self._position + ahead >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position + ahead]

    @property
    def rest(self) -> str:
        """Available text that is not consumed."""
        return self._text[self._position :]

    def take(self, count: int = 1) -> str:
        """Consume that many available characters."""
        text = self._text[self._position : self._position + count]
        self._position += len(text)
        self._consumed.append(text)
        return text

    def take_all(self, pattern: re.Pattern[str]) -> str:
        """Consume what `pattern` matches in the available text, "" for nothing."""
        found = pattern.match(self._text, self._position)
        return self.take(found.end() - self._position) if found else ""

    def skip_space(self) -> Parser[bool]:
        """Consume white space; return whether text follows."""
        while (yield from self.more()):
            if not self._text[self._position].isspace():
                return True
            self.take()
        return False

    def accept(self, *literals: str) -> Parser[str]:
        """Consume and return the first of `literals` that comes next; "" for none."""
        for literal in literals:
            while True:
                ahead = self._text[self._position : self._position + len(literal)]
                if ahead == literal:
                    return self.take(len(literal))
                if self.ended or not literal.startswith(ahead):
                    break
                yield
        return ""

    def accept_closing(self, literal: str) -> Parser[bool]:
        """Consume `literal` if it comes next, or the text ends within it; return whether it is complete."""
        found = yield from self.accept(literal)
        if not found and self.ended and literal.startswith(self._text[self._position :]):
            self.discard_rest()
        return bool(found)

    def discard_rest(self) -> None:
        """Consume all available text."""
        self.take(len(self._text) - self._position)

    def expect(self, literal: str) -> Parser[None]:
        """Consume `literal`. Raises Malformed where something else comes next."""
        if not (yield from self.accept(literal)):
            raise Malformed(f"{literal!r} is missing")

    def until(
        self, markers: Sequence[str], emit: Emit, *, partial: bool = False, hidden: Sequence[str] = ()
    ) -> Parser[str]:
        """Emit text up to the first marker, which is consumed and returned; "" at the end of the text.

        Only text that may begin a marker is held back. partial: True to treat a marker that the end truncates as one.
        hidden: texts that make such a marker one in any case.
        """
        while True:
            text = self._text[self._position :]
            found = min(((at, -len(m), m) for m in markers if (at := text.find(m)) >= 0), default=None)
            if found is not None:
                at, _, marker = found
                if at:
                    emit(self.take(at))
                return self.take(len(marker))
            begun = _partial_marker_length(text, markers)
            is_text = self.ended and not partial and not any(part in text[len(text) - begun :] for part in hidden)
            safe = len(text) if is_text else len(text) - begun
            if safe:
                emit(self.take(safe))
            if self.ended:
                self.discard_rest()
                return ""
            yield


def _partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin a marker."""
    longest = max(map(len, markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


MAX_DEPTH = 64
"""Of nested arrays and objects."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
VALID_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
"""A number or a constant."""
_HALF = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which cannot be encoded."""

_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


def read_value(source: Source, emit: Emit, depth: int = 0) -> Parser[None]:
    """Parse one value of any kind. Raises Malformed."""
    if depth > MAX_DEPTH:
        raise Malformed("it is nested too deeply")
    match (yield from source.peek()):
        case '"':
            yield from read_string(source, emit)
        case "{":
            yield from _read_members(source, emit, depth)
        case "[":
            yield from _read_items(source, emit, depth)
        case _:
            yield from _read_scalar(source, emit)


def read_string(source: Source, emit: Emit) -> Parser[None]:
    """Parse a string with its quotes. Line breaks in it, which JSON forbids but models write, are emitted as
    escapes."""
    yield from source.expect('"')
    emit('"')
    while (char := (yield from source.peek())) != '"':
        if char == "\\":
            emit((yield from _read_escape(source)))
        elif char < " ":
            emit(json.dumps(source.take())[1:-1])
        else:
            emit(source.take_all(_PLAIN))
    emit(source.take())


def collect_string(source: Source) -> Parser[str]:
    """Parse a string and return its value. Raises Malformed."""
    if (yield from source.peek()) != '"':
        raise Malformed("a string is missing")
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    return text_of_json("".join(pieces))


def text_of_json(literal: str) -> str:
    """Return the text of a JSON string. Raises Malformed for one that cannot be encoded."""
    text = str(json.loads(literal))
    if not text.isascii() and _HALF.search(text):
        raise Malformed("a string has half of a character")
    return text


def read_space(source: Source, emit: Emit) -> Parser[str]:
    """Emit white space; return the next character, unconsumed. Raises Malformed at the end."""
    while (char := (yield from source.peek())) in " \t\r\n":
        emit(source.take())
    return char


def no_constant(text: str) -> None:
    """Raise ValueError: for `json.loads`, which accepts NaN and Infinity by default."""
    raise ValueError(text)


def _read_escape(source: Source) -> Parser[str]:
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


def _read_members(source: Source, emit: Emit, depth: int) -> Parser[None]:
    emit(source.take())
    if (yield from read_space(source, emit)) == "}":
        emit(source.take())
        return
    while True:
        if (yield from read_space(source, emit)) != '"':
            raise Malformed("a key is missing")
        yield from read_string(source, emit)
        if (yield from read_space(source, emit)) != ":":
            raise Malformed("a colon is missing")
        emit(source.take())
        yield from read_space(source, emit)
        yield from read_value(source, emit, depth + 1)
        if (yield from _at_end(source, emit, "}")):
            return


def _read_items(source: Source, emit: Emit, depth: int) -> Parser[None]:
    emit(source.take())
    if (yield from read_space(source, emit)) == "]":
        emit(source.take())
        return
    while True:
        yield from read_space(source, emit)
        yield from read_value(source, emit, depth + 1)
        if (yield from _at_end(source, emit, "]")):
            return


def _at_end(source: Source, emit: Emit, closing: str) -> Parser[bool]:
    """Consume `closing` or a comma; return whether it was `closing`."""
    char = yield from read_space(source, emit)
    if char not in (closing, ","):
        raise Malformed(f"a comma or {closing} is missing")
    emit(source.take())
    return char == closing


def _read_scalar(source: Source, emit: Emit) -> Parser[None]:
    text = ""
    while (yield from source.more()):
        if not (more := source.take_all(_SCALAR)):
            break
        text += more
    else:
        raise Malformed("the answer ends within it")
    if VALID_SCALAR.fullmatch(text) is None:
        raise Malformed("a value is missing")
    emit(text)
