"""JSON as a model writes it, read while it comes (RFC 8259): checked, given away as it is, never built up."""

from __future__ import annotations

import json
import re

from console.api.tools.source import Give, Malformed, Reading, Source

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
