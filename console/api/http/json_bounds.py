"""JsonBounds: limits of a JSON text, checked before a parser builds objects.

A parser holds the interpreter lock until it is done; 8 MiB of brackets take it most of a second and 200 MB. So brackets
are counted first, a slice at a time, which takes 10 ms and no memory.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pydantic_core import from_json

from engine.errors import InvalidRequest

MAX_ITEMS = 32_768
"""Strings (keys included), arrays and objects in a text: max 13 ms of parsing and 8 MB."""

MAX_VALUES = 131_072
"""Values separated by commas, besides the token ids of the longest context: max 8 ms and 5 MB."""

MAX_DEPTH = 64
"""Default limit of nested arrays and objects, as their readers recurse."""

_SLICE = 65_536
"""Bytes checked before other threads get their turn: 1 to 2 ms of work."""

_QUOTE = b'"'
_OTHERS = bytes(set(range(256)) - set(b"[]{}," + _QUOTE))
_STEPS = bytes.maketrans(b"[{]}", array("b", (1, 1, -1, -1)).tobytes())
"""Change of depth by each bracket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBounds:
    """Limits of a JSON text. max_depth: levels of arrays and objects.  max_items: strings, arrays and objects."""

    max_depth: int = MAX_DEPTH
    max_items: int = MAX_ITEMS
    max_values: int = MAX_VALUES

    def check(self, raw: bytes, where: str = "") -> None:
        """Raise InvalidRequest where JSON exceeds a limit; its `param` is the member that does.

        where: name of the text, for errors; "" for the body.
        """
        if len(raw) <= min(self.max_items, self.max_values) and raw.count(b"[") + raw.count(b"{") <= self.max_depth:
            return
        at = items = quotes = 0
        values, depth = 1, 0
        while at < len(raw):
            piece = _slice(raw, at)
            at += len(piece)
            # Remove escapes, then all but quotes and marks: every second part then lies outside of strings.
            parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS).split(_QUOTE)
            marks = b"".join(parts[quotes % 2 :: 2])
            quotes += len(parts) - 1
            brackets = marks.translate(_STEPS, b",")
            items += marks.count(b"[") + marks.count(b"{")
            values += len(marks) - len(brackets)
            if values > self.max_values:
                raise self._refusal(raw[:at], where, f"max {self.max_values} values")
            if items + quotes // 2 > self.max_items:
                raise self._refusal(raw[:at], where, f"max {self.max_items} strings, arrays and objects")
            depths = list(accumulate(array("b", brackets), initial=depth))
            depth = depths[-1]
            if max(depths) > self.max_depth:
                named = where or "The body"
                raise InvalidRequest(f"{named} nests deeper than {self.max_depth} levels")

    def _refusal(self, start: bytes, where: str, limit: str) -> InvalidRequest:
        if where:
            return InvalidRequest(f"{where} is too large: {limit}", param=where)
        if member := _last_member(start):
            return InvalidRequest(f"{member} is too large: {limit}", param=member)
        return InvalidRequest(f"The body is too large: {limit}")


def _slice(raw: bytes, at: int) -> bytes:
    """Return the next bytes, without splitting an escape."""
    piece = raw[at : at + _SLICE]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return piece if backslashes % 2 == 0 else raw[at : at + _SLICE + 1]


def _last_member(start: bytes) -> str:
    """Return the member of the outermost object that a truncated JSON text ends in, if an array or object; else ""."""
    try:
        document: Any = from_json(start, allow_partial="trailing-strings")
    except ValueError:
        return ""
    name = next(reversed(document), "") if isinstance(document, dict) else ""
    return name if name and isinstance(document[name], dict | list) else ""
