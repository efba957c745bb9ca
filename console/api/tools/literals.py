"""Python literals as models write them in calls, parsed to JSON as they arrive."""

from __future__ import annotations

import json
import math
import re

from console.api.tools.json_stream import MAX_DEPTH, VALID_SCALAR, Emit, Malformed, Parser, Source

QUOTES = ("'", '"')

_SCALAR = re.compile(r"[-+.\w]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_PLAIN = re.compile(r"""[^'"\\\x00-\x1f]+""")
_AFTER_STRING = frozenset(",)]}:")
_ESCAPES = {"'": "'", '"': '"', "\\": "\\", "\n": "", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a"}
_ESCAPES |= {"v": "\v", "0": "\0"}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_CODE_POINT = 0x10FFFF
_MAX_NUMBER = 64
"""Characters of a number that JSON would not have so."""


def read_literal(source: Source, emit: Emit, depth: int = 0) -> Parser[None]:
    """Parse one literal and emit it as JSON. Tuples become arrays. Raises Malformed."""
    if depth > MAX_DEPTH:
        raise Malformed("it is nested too deeply")
    match (yield from source.peek()):
        case "'" | '"':
            yield from read_quoted(source, emit)
        case "{":
            yield from _read_dict(source, emit, depth)
        case "[" | "(":
            yield from _read_list(source, emit, depth)
        case _:
            emit(scalar_json((yield from collect_scalar(source, _SCALAR))))


def read_quoted(source: Source, emit: Emit) -> Parser[None]:
    """Parse a string and emit it as JSON.

    A quote ends it only where a comma, a colon or a closing bracket follows, as some models write quotes in strings
    without a backslash. One between three quotes ends at the next three.
    """
    quote = source.take()
    is_long = bool((yield from source.accept(quote * 2)))
    emit('"')
    while True:
        char = yield from source.peek()
        if is_long and (yield from source.accept(quote * 3)):
            break
        if not is_long and char == quote and (yield from _ends_string(source)):
            source.take()
            break
        if char == "\\":
            emit((yield from _read_escape(source)))
        else:
            emit(escaped(source.take_all(_PLAIN) or source.take()))
    emit('"')


def collect_scalar(source: Source, pattern: re.Pattern[str]) -> Parser[str]:
    """Collect a value up to the first character that `pattern` does not match. Raises Malformed at the end of the text,
    where it may be incomplete."""
    text = ""
    while (yield from source.more()):
        if not (more := source.take_all(pattern)):
            return text
        text += more
    raise Malformed("the answer ends within it")


def scalar_json(text: str) -> str:
    """Return a number or a constant, of JSON or Python, as JSON. Raises Malformed for anything else."""
    if (text := _CONSTANTS.get(text, text)) and VALID_SCALAR.fullmatch(text):
        return text
    try:
        number = _number(text) if len(text) <= _MAX_NUMBER else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Malformed("a value is missing")
    return json.dumps(number)


def literal_json(text: str) -> str | None:
    """Return a complete literal as JSON; None where it is none."""
    source = Source()
    source.push(text.strip() + ",")  # a scalar ends before it
    source.end()
    pieces: list[str] = []
    parser = read_literal(source, pieces.append)
    try:
        next(parser, None)
        is_whole = source.rest == ","
    except Malformed:
        return None
    return "".join(pieces) if is_whole else None


def escaped(text: str) -> str:
    """Return text as it is inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(text: str) -> int | float:
    """Return a number that is written as in Python, such as 1_000, 0x1f or .5. Raises ValueError."""
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


def _ends_string(source: Source) -> Parser[bool]:
    """Return whether the quote that comes next ends its string. Raises Malformed where the text ends after it."""
    at = 1
    while (char := (yield from source.look(at))).isspace():
        at += 1
    if not char:
        raise Malformed("the answer ends within it")
    return char in _AFTER_STRING


_HALVES = range(0xD800, 0xE000)
"""Code points that are no characters, and cannot be encoded alone."""


def _read_escape(source: Source) -> Parser[str]:
    source.take()
    char = yield from source.peek()
    source.take()
    if (length := _NUM_DIGITS.get(char)) is None:
        return escaped(_ESCAPES.get(char, f"\\{char}"))
    digits = ""
    for _ in range(length):
        yield from source.peek()
        digits += source.take()
    try:
        code = int(digits, 16)
    except ValueError:
        code = _MAX_CODE_POINT + 1
    is_half = char == "U" and code in _HALVES
    if code > _MAX_CODE_POINT or is_half or not digits.isalnum():
        raise Malformed(f"a string has a broken \\{char} escape")
    return f"\\u{code:04x}" if char == "u" else escaped(chr(code))


def _read_list(source: Source, emit: Emit, depth: int) -> Parser[None]:
    closing = "]" if source.take() == "[" else ")"
    emit("[")
    separator = ""
    while (yield from _next_item(source, closing, is_first=not separator)):
        emit(separator)
        yield from read_literal(source, emit, depth + 1)
        separator = ", "
    emit("]")


def _read_dict(source: Source, emit: Emit, depth: int) -> Parser[None]:
    source.take()
    emit("{")
    separator = ""
    while (yield from _next_item(source, "}", is_first=not separator)):
        if (yield from source.peek()) not in QUOTES:
            raise Malformed("a key is missing")
        emit(separator)
        yield from read_quoted(source, emit)
        yield from source.skip_space()
        yield from source.expect(":")
        emit(": ")
        yield from source.skip_space()
        yield from read_literal(source, emit, depth + 1)
        separator = ", "
    emit("}")


def _next_item(source: Source, closing: str, *, is_first: bool) -> Parser[bool]:
    """Consume what separates two items, or `closing`; return whether an item follows."""
    yield from source.skip_space()
    if not is_first and not (yield from source.accept(",")):
        yield from source.expect(closing)
        return False
    yield from source.skip_space()
    return not (yield from source.accept(closing))
